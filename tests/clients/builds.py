"""Builds each client the way its README says, or with Debian's packages where that is the way to have its libraries."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_BUILD_TIMEOUT_S = 1200


@dataclass(frozen=True)
class Language:
    """How a client is built and run; paths are relative to its folder."""

    name: str
    run: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]
    tools: tuple[str, ...] = ()
    """Commands that must be on PATH."""
    files: tuple[str, ...] = ()
    """Libraries that must be there."""
    packages: str = ""
    """Debian's packages that have them all."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return ROOT / "clients" / self.name

    def build(self) -> Built:
        """Skips the test where the language's tools are missing."""
        missing = [tool for tool in self.tools if shutil.which(tool) is None]
        missing += [file for file in self.files if not Path(file).exists()]
        if missing:
            pytest.skip(f"no {', '.join(missing)} here; on Debian: apt-get install {self.packages}")
        with (self.folder / ".build-lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another pytest-xdist worker may be at it
            for step in self.steps:
                done = subprocess.run(
                    step, cwd=self.folder, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
                )
                assert done.returncode == 0, f"{' '.join(step)}: {done.stdout}{done.stderr}"
        return Built(self)


@dataclass(frozen=True)
class Built:
    """A client that can be run."""

    language: Language

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.language.run, *arguments],
            cwd=self.language.folder,
            env=os.environ | self.language.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


_PROTOS = ("tokenmill/common/v1/common.proto", "tokenmill/inference/v1/inference.proto")
_GRPC_TOOLS = (sys.executable, "-m", "grpc_tools.protoc", "-I", "../../protos")

LANGUAGES = (
    Language(
        "python",
        run=(sys.executable, "client.py"),
        steps=(
            ("mkdir", "-p", "build"),
            (*_GRPC_TOOLS, "--python_out=build", "--grpc_python_out=build", *_PROTOS),
        ),
        environment={"PYTHONPATH": "build"},
    ),
    Language(
        "node",
        run=("node", "client.js"),
        steps=(("npm", "install", "--no-package-lock", "--silent"),),
        tools=("node", "npm"),
        packages="nodejs npm",
    ),
    Language(
        "go",
        run=("build/client",),
        steps=(("make", "DEBIAN=1"),),
        tools=("go", "protoc"),
        files=("/usr/share/gocode/src/google.golang.org/grpc", "/usr/share/gocode/src/google.golang.org/protobuf"),
        packages="golang-go golang-google-grpc-dev golang-google-protobuf-dev protobuf-compiler",
    ),
    Language(
        "java",
        run=("build/client",),
        steps=(("make",),),
        tools=("java", "javac", "protoc", "grpc_java_plugin"),
        files=tuple(
            f"/usr/share/java/{jar}.jar"
            for jar in ("grpc-netty", "netty-tcnative", "perfmark-api", "geronimo-annotation-1.3-spec")
        ),
        packages="default-jdk-headless libgrpc-java libnetty-java libnetty-tcnative-java libnetty-tcnative-jni "
        "libperfmark-java libgeronimo-annotation-1.3-spec-java protobuf-compiler protobuf-compiler-grpc-java-plugin",
    ),
    Language(
        "cpp",
        run=("build/client",),
        steps=(("cmake", "-B", "build"), ("cmake", "--build", "build")),
        tools=("cmake", "c++", "protoc", "grpc_cpp_plugin"),
        files=("/usr/include/grpcpp/grpcpp.h",),
        packages="cmake g++ libgrpc++-dev libprotobuf-dev protobuf-compiler-grpc",
    ),
)
