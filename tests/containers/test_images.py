"""What is in an image, and how it runs by itself."""

from __future__ import annotations

import tomllib

import pytest

from tests.containers.engine import ROOT, docker, inspect
from tests.containers.project import Project, until

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CONTROL = [f"tokenmill-{name}:{VERSION}" for name in ("router", "frontend")]
WORKERS = [f"tokenmill-{name}:{VERSION}-sim" for name in ("prefill", "decode")]


def _run(image: str, *command: str) -> str:
    return docker("run", "--rm", "--read-only", "--entrypoint", command[0], image, *command[1:])


def _has(image: str, *packages: str) -> list[str]:
    program = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if u.find_spec(name)])"
    return _run(image, "python3", "-c", program, *packages).split()


@pytest.mark.parametrize("image", CONTROL)
def test_router_and_frontend_are_small_and_carry_no_engine(
    project: Project, figures: dict[str, str], image: str
) -> None:
    size = int(str(inspect(image, "image")["Size"]))
    figures[f"size of {image}"] = f"{size / 1e6:.0f} MB"
    assert size < 300_000_000
    assert _has(image, "numpy", "nixl_cu12", "nixl", "torch", "vllm", "pip") == []


@pytest.mark.parametrize("image", WORKERS)
def test_a_worker_without_a_model_has_nixl_and_no_torch(project: Project, figures: dict[str, str], image: str) -> None:
    figures[f"size of {image}"] = f"{int(str(inspect(image, 'image')['Size'])) / 1e6:.0f} MB"
    assert _has(image, "numpy", "nixl_cu12", "torch", "vllm", "pip") == ["numpy", "nixl_cu12"]


@pytest.mark.parametrize("image", [*CONTROL, *WORKERS])
def test_an_image_runs_as_nobody_special_and_says_what_it_is(project: Project, image: str) -> None:
    config = inspect(image, "image")["Config"]
    assert isinstance(config, dict)
    assert config["User"] == "tokenmill"
    assert config["Labels"]["org.opencontainers.image.version"] == VERSION
    assert config["Healthcheck"]["Test"] == ["CMD", "tokenmill", "health"]
    assert _run(image, "tokenmill", "--version").strip() == f"tokenmill {VERSION}"
    assert _run(image, "sh", "-c", "id -u; command -v gcc cc g++ || echo no compiler").split() == [
        "10001", "no", "compiler",
    ]  # fmt: skip


def test_a_router_runs_alone_and_takes_flags(project: Project) -> None:
    project.up()
    router = docker(
        *("run", "--detach", "--read-only", "--network", f"{project.name}_default", CONTROL[0]),
        *("--etcd", "etcd:2379", "--nats", "nats://nats:4222", "--policy", "round_robin", "--instance-id", "alone"),
    ).strip()
    try:
        until(lambda: _is_healthy(router), "the router is healthy")
        until(lambda: "alone" in [one["instance_id"] for one in project.instances()], "it is registered")
        docker("stop", "--time", "5", router)
        assert inspect(router)["State"]["ExitCode"] == 0  # type: ignore[index]
        until(lambda: "alone" not in [one["instance_id"] for one in project.instances()], "it is gone")
    finally:
        docker("rm", "--force", router)


def _is_healthy(container: str) -> bool:
    return docker("inspect", "--format", "{{.State.Health.Status}}", container).strip() == "healthy"
