"""docker-compose.yml, .env and the Dockerfile say the same as the code."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields

import pytest

from cli.sections import ALL_SECTIONS
from controlplane.settings import CommonSettings, load
from scripts import setup

from .source import ROOT

COMPOSE = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
ENV = (ROOT / ".env").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")

FIXED = {
    "engine",
    "model",
    "http_port",
    "instance_id",
    "bind",
    "advertise",
    "etcd",
    "nats",
    "grpc_port",
    "metrics_port",
}
"""Settings that the images or the project fix, or that .env has under another name."""
FILES = {"tls_cert", "tls_key", "tls_client_ca"}
"""Settings that name files, which must be mounted first."""


def _choices() -> list[str]:
    prefix = {section: "" if section == "common" else f"{section.upper()}_" for section in ALL_SECTIONS}
    return [
        f"TOKENMILL_{prefix[section]}{one.name.upper()}"
        for section, cls in ALL_SECTIONS.items()
        if section not in ("up", "fleet")
        for one in fields(cls)
        if one.name not in FIXED | FILES and not one.metadata["rules"].hidden
    ]


@pytest.mark.parametrize("name", _choices())
def test_every_setting_can_be_chosen_in_env_and_is_passed_on(name: str) -> None:
    assert re.search(rf"^  {name}:$", COMPOSE.replace("      ", "  "), re.MULTILINE), "add it to docker-compose.yml"
    assert re.search(rf"^#{name}=", ENV, re.MULTILINE), "add it to .env"


def test_env_names_only_settings_there_are() -> None:
    given = dict(re.findall(r"^#?(TOKENMILL_\w+)=(\S*)", ENV, re.MULTILINE))
    # Refuses unknown names and values; those left to the engines are empty.
    load(ALL_SECTIONS, [], {name: value for name, value in given.items() if value}, prog="test")
    assert set(given) == set(_choices())


def test_every_variable_of_the_compose_file_is_in_env() -> None:
    used = set(re.findall(r"\$\{(\w+)", COMPOSE))
    assert used <= set(re.findall(r"^(\w+)=", ENV, re.MULTILINE))


def test_the_images_have_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert re.search(rf"^IMAGE_TAG={re.escape(version)}$", ENV, re.MULTILINE)


def test_images_get_the_packages_that_setup_installs() -> None:
    assert set(re.findall(r"\bnixl==\S+", DOCKERFILE)) == {f"nixl=={setup.NIXL}"}
    assert set(re.findall(r"\btorch==\S+", DOCKERFILE)) == {setup.TORCH_CPU}


def test_docker_waits_for_a_drain_before_it_kills() -> None:
    (grace,) = re.findall(r"stop_grace_period: (\d+)s", COMPOSE)
    assert float(grace) > CommonSettings().drain_timeout_s
