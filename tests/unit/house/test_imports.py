"""Imports point one way, and decisions stay pure."""

from __future__ import annotations

import fnmatch
import re

import pytest

from .source import PACKAGES, Module, modules

MAY_IMPORT = {
    "kvcache": set[str](),
    "controlplane": {"tokenmill", "kvcache"},
    "transfer": {"tokenmill", "kvcache"},
    "engines": {"tokenmill", "kvcache", "controlplane", "transfer"},
    "services": {"tokenmill", "kvcache", "controlplane", "transfer", "engines"},
    "simulator": {"kvcache", "controlplane", "engines", "services"},
    "cli": {"tokenmill", "kvcache", "controlplane", "transfer", "engines", "services", "simulator"},
}

PURE = (
    "kvcache.*",
    "engines.base",
    "engines.sim.pool",
    "engines.sim.profile",
    "engines.sim.scheduler",
    "engines.sim.sequence",
    "services.frontend.detokenizer",
    "services.frontend.openai_requests",
    "services.frontend.stops",
    "simulator.*",
)
"""What tests, a simulator and the services run alike. A module whose docstring says "pure" at its start is one too."""

PLAIN = {"controlplane.errors", "controlplane.instances", "services.router.settings"}
"""What knows nothing of services either, but for the names in it: errors, records, settings."""

ALL = modules()


def is_pure(module: Module) -> bool:
    first = module.docstring.split("\n\n")[0]
    return bool(re.search(r"\bpure\b", first, re.IGNORECASE)) or any(
        fnmatch.fnmatch(module.name, pattern) for pattern in PURE
    )


@pytest.mark.parametrize("module", ALL, ids=lambda module: module.name)
def test_a_module_imports_only_what_its_package_may(module: Module) -> None:
    package = module.name.split(".")[0]
    ours = {name.split(".")[0] for name in module.imports()} & {*PACKAGES, "tokenmill"}
    assert ours - {package} <= MAY_IMPORT[package]


@pytest.mark.parametrize("module", [m for m in ALL if m.name.startswith("services.")], ids=lambda module: module.name)
def test_a_service_never_imports_another_service(module: Module) -> None:
    own = ".".join(module.name.split(".")[:2])
    others = {".".join(name.split(".")[:2]) for name in module.imports() if name.startswith("services.")}
    assert others <= {own}


@pytest.mark.parametrize("module", [m for m in ALL if is_pure(m)], ids=lambda module: module.name)
def test_a_pure_module_knows_neither_grpc_nor_asyncio(module: Module) -> None:
    assert not {name.split(".")[0] for name in module.imports()} & {"grpc", "asyncio", "uvloop"}


@pytest.mark.parametrize("module", [m for m in ALL if m.name.startswith("simulator.")], ids=lambda module: module.name)
def test_the_simulator_uses_only_pure_modules_of_others(module: Module) -> None:
    pure = {m.name for m in ALL if is_pure(m)} | PLAIN
    used = {m.name for m in ALL if any(name == m.name or name.startswith(f"{m.name}.") for name in module.imports())}
    packages = {m.name for m in ALL if any(other.name.startswith(f"{m.name}.") for other in ALL)}
    assert used - packages <= pure


def test_every_pattern_of_pure_modules_still_names_one() -> None:
    assert [pattern for pattern in PURE if not fnmatch.filter([m.name for m in ALL], pattern)] == []
