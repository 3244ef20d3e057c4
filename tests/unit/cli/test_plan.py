import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cli.sections import ALL_SECTIONS
from cli.up.plan import Plan, make_plan
from cli.up.ports import FrontendPorts
from controlplane.child_process import ChildSpec
from controlplane.settings import load


def _plan(folder: Path, argv: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Plan:
    loaded = load(ALL_SECTIONS, argv, env or {}, prog="up")
    own = folder / secrets.token_hex(2)
    own.mkdir()
    return make_plan(loaded, "/models/m", own, env or {})


def _env(plan: Plan, name: str) -> Mapping[str, str]:
    (child,) = (child for child in plan.children if child.name == name)
    assert child.env is not None
    return child.env


def _names(plan: Plan) -> list[str]:
    return [child.name for child in plan.children]


def test_a_deployment_is_its_servers_a_router_its_workers_and_a_frontend(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    assert _names(plan) == ["etcd", "nats", "router", "prefill", "decode", "frontend"]
    assert sorted(plan.services.values()) == ["decode", "frontend", "prefill", "router"]


def test_several_workers_of_a_role_are_numbered(tmp_path: Path) -> None:
    plan = _plan(tmp_path, ["--prefill", "2", "--decode", "3"])
    assert _names(plan)[3:8] == ["prefill-1", "prefill-2", "decode-1", "decode-2", "decode-3"]


def test_a_fleet_is_spread_over_processes_and_all_workers_are_of_one_format(tmp_path: Path) -> None:
    argv = ["--engine", "sim", "--prefill", "0", "--fleet", "500", "--workers-per-process", "200"]
    plan = _plan(tmp_path, argv)
    assert _names(plan)[3:7] == ["decode", "fleet-1", "fleet-2", "fleet-3"]
    counts = [_env(plan, f"fleet-{number}")["TOKENMILL_FLEET_WORKERS"] for number in (1, 2, 3)]
    assert counts == ["200", "200", "100"]
    assert {_env(plan, name)["TOKENMILL_ENGINE_SIM_KV_BYTES_PER_BLOCK"] for name in ("decode", "fleet-1")} == {"0"}


def test_external_servers_are_used_and_not_started(tmp_path: Path) -> None:
    plan = _plan(tmp_path, ["--etcd", "10.0.0.1:2379", "--nats", "nats://10.0.0.2:4222"])
    assert plan.servers == ()
    assert "etcd" not in _names(plan)
    assert _env(plan, "router")["TOKENMILL_ETCD"] == "10.0.0.1:2379"
    assert _env(plan, "decode")["TOKENMILL_NATS"] == "nats://10.0.0.2:4222"


def test_the_frontend_stops_first_and_the_servers_last(tmp_path: Path) -> None:
    stages = {child.name: child.stage for child in _plan(tmp_path).children}
    assert stages["frontend"] > stages["decode"] == stages["prefill"] == stages["router"] > stages["etcd"]
    assert stages["etcd"] == stages["nats"]


def test_services_are_told_what_was_read_here_wherever_it_came_from(tmp_path: Path) -> None:
    file = tmp_path / "tokenmill.toml"
    file.write_text("[engine]\nseed = 7\n[frontend]\nmax_body_mb = 3\n")
    env = {"TOKENMILL_CONFIG": str(file), "TOKENMILL_ENGINE_DTYPE": "float32", "PATH": "/bin"}
    plan = _plan(tmp_path, ["--max-model-len", "512"], env)
    told = _env(plan, "decode")
    assert told["PATH"] == "/bin"
    assert told["TOKENMILL_ENGINE_SEED"] == "7"
    assert told["TOKENMILL_ENGINE_DTYPE"] == "float32"
    assert told["TOKENMILL_ENGINE_MAX_MODEL_LEN"] == "512"
    assert told["TOKENMILL_ENGINE_MODEL"] == "/models/m"
    assert "TOKENMILL_CONFIG" not in told
    assert _env(plan, "frontend")["TOKENMILL_FRONTEND_MAX_BODY_MB"] == "3"


def test_services_keep_their_temporary_files_in_the_deployments_folder() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        plan = _plan(Path(folder))
        assert _env(plan, "decode")["TMPDIR"].startswith(folder)
        assert Path(_env(plan, "decode")["TMPDIR"]).is_dir()


def test_a_temporary_folder_too_deep_for_sockets_is_not_used(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 50)
    deep.mkdir()
    assert "TMPDIR" not in _env(_plan(deep), "decode")


def test_a_secret_goes_only_to_the_service_it_is_meant_for(tmp_path: Path) -> None:
    plan = _plan(tmp_path, ["--api-keys", "key"])
    assert [child.name for child in plan.children if child.env and "key" in child.env.values()] == ["frontend"]


def test_a_flag_that_sets_a_default_back_wins_over_the_environment(tmp_path: Path) -> None:
    plan = _plan(tmp_path, ["--seed", "0"], {"TOKENMILL_ENGINE_SEED": "7"})
    assert "TOKENMILL_ENGINE_SEED" not in _env(plan, "decode")


def test_ports_asked_for_are_the_frontends_alone_and_survive_its_restart(tmp_path: Path) -> None:
    plan = _plan(tmp_path, ["--port", "0", "--grpc-port", "5555", "--metrics-port", "6666"])
    frontend = _env(plan, "frontend")
    assert int(frontend["TOKENMILL_FRONTEND_HTTP_PORT"]) > 0
    assert (frontend["TOKENMILL_GRPC_PORT"], frontend["TOKENMILL_METRICS_PORT"]) == ("5555", "6666")
    assert "TOKENMILL_GRPC_PORT" not in _env(plan, "decode")
    assert "TOKENMILL_METRICS_PORT" not in _env(plan, "router")


def test_a_frontend_that_shares_its_ports_is_told_so_and_may_finish_its_answers(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with FrontendPorts("127.0.0.1", http=0, grpc=0, metrics=0) as ports:
        plan = make_plan(load(ALL_SECTIONS, [], {}, prog="up"), "/models/m", own, {}, ports)
        children = {child.name: child for child in plan.children}
        env = _env(plan, "frontend")
        assert (env["TOKENMILL_SHARE_PORTS"], env["TOKENMILL_GRPC_PORT"]) == ("true", str(ports.grpc))
        assert children["frontend"].sockets == ports.sockets
        assert children["frontend"].retire_signal is signal.SIGQUIT
        assert children["decode"].retire_signal is signal.SIGTERM
        assert children["decode"].sockets == ()


def test_a_successor_is_another_instance_of_the_same_child(tmp_path: Path) -> None:
    first = next(child for child in _plan(tmp_path).children if child.name == "decode")
    second = first.successor()
    third = second.successor()
    assert [second.instance_id, third.instance_id] == [f"{first.instance_id}-2", f"{first.instance_id}-3"]
    assert third.env is not None
    assert third.env["TOKENMILL_INSTANCE_ID"] == third.instance_id
    assert (third.name, third.command) == (first.name, first.command)


def test_instance_ids_tell_who_it_is_and_differ_between_runs(tmp_path: Path) -> None:
    one, two = _plan(tmp_path), _plan(tmp_path)
    assert not one.services.keys() & two.services.keys()
    assert all(instance_id.startswith(f"{name}-") for instance_id, name in one.services.items())


@pytest.mark.parametrize("service", ["router", "prefill", "decode", "frontend"])
def test_a_service_runs_as_a_module_and_never_from_the_current_folder(tmp_path: Path, service: str) -> None:
    (child,) = (child for child in _plan(tmp_path).children if child.name == service)
    assert isinstance(child, ChildSpec)
    assert child.command == (sys.executable, "-P", "-m", f"services.{service}")
