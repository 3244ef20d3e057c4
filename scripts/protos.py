"""Generates the Python code of protos/, or one file that describes them all to any language.

The same protos and the pinned tools give the same bytes everywhere.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["generate", "stale", "write_descriptors"]

PROTOS = Path(__file__).resolve().parent.parent / "protos"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def main() -> None:
    """Writes the generated code into protos/; with --check only says what is stale, and fails if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when something is stale")
    parser.add_argument("--descriptors", type=Path, metavar="FILE", help="only write the descriptor set of all protos")
    arguments = parser.parse_args()
    if arguments.descriptors:
        write_descriptors(arguments.descriptors)
        return
    check = arguments.check
    fresh = generate()
    names = stale(fresh)
    if check and names:
        sys.exit(f"stale, run `make protos`: {', '.join(names)}")
    for name in names:
        (PROTOS / name).unlink(missing_ok=True)
        if name in fresh:
            (PROTOS / name).write_bytes(fresh[name])
        print(f"{'wrote' if name in fresh else 'removed'} protos/{name}")


def stale(fresh: dict[str, bytes]) -> list[str]:
    """Generated files in protos/ that are missing, left over, or not what they should be, by name."""
    present = _generated(PROTOS)
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def generate() -> dict[str, bytes]:
    """The code of every proto, by its path under protos/."""
    with tempfile.TemporaryDirectory() as folder:
        _run_protoc(Path(folder))
        return _generated(Path(folder))


def write_descriptors(dest: Path) -> None:
    """Writes a FileDescriptorSet of every proto with its imports and comments."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"--descriptor_set_out={dest.resolve()}",
        "--include_imports", "--include_source_info", *_names(),
    ]  # fmt: skip
    subprocess.run(command, cwd=PROTOS, check=True, timeout=120)


def _run_protoc(dest: Path) -> None:
    scripts = Path(sys.executable).parent
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}",
        f"--python_out={dest}", f"--grpc_python_out={dest}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}", f"--mypy_out=quiet:{dest}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}", f"--mypy_grpc_out=quiet,only_async:{dest}",
        *_names(),
    ]  # fmt: skip
    subprocess.run(command, cwd=PROTOS, check=True, timeout=120)


def _names() -> list[str]:
    return sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))


def _generated(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for pattern in GENERATED for path in folder.rglob(pattern)}


if __name__ == "__main__":
    main()
