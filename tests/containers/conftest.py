"""One compose project of simulated workers for all tests, made from scratch and taken away again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers import stand_ins
from tests.containers.engine import running_engine
from tests.containers.project import Project

_FIGURES = pytest.StashKey[dict[str, str]]()


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> dict[str, str]:
    """What was measured, by name; printed at the end."""
    return pytestconfig.stash.setdefault(_FIGURES, {})


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Built, and not started: `up` it."""
    with running_engine():
        project = Project("tokenmill-test", "sim", tmp_path_factory.mktemp("project"), {})
        wanted = project.config("monitoring")["services"]
        bases = {service["build"]["args"]["PYTHON_IMAGE"] for service in wanted.values() if "build" in service}
        stand_ins.provide([*bases, *(service["image"] for service in wanted.values() if "build" not in service)])
        project.build()
        project.compose("down", "--volumes")
        yield project
        project.compose("down", "--volumes")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The figures."""
    if figures := config.stash.get(_FIGURES, {}):
        terminalreporter.section("figures")
        for name, value in figures.items():
            terminalreporter.line(f"{name:44}{value}")
