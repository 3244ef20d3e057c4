from pathlib import Path

from cli.chaos.suite import MARK, lay_out
from cli.sections import ALL_SECTIONS
from cli.up.plan import make_plan
from controlplane.settings import load


def test_every_service_has_its_own_addresses_and_its_own_links_to_the_servers(tmp_path: Path) -> None:
    loaded = load(ALL_SECTIONS, ["--engine", "sim", "--prefill", "1", "--decode", "2"], {}, prog="chaos")
    plan = make_plan(loaded, "", tmp_path, {})
    children, parts, links = lay_out(plan, {"router": 2, "frontend": 2}, {"decode": "hang"}, "mark")
    names = ["router-1", "router-2", "prefill", "decode-1", "decode-2", "frontend-1", "frontend-2"]
    assert [part.name for part in parts] == names
    assert [child.name for child in children] == ["etcd", "nats", *names]
    assert set(links) == {f"{server} of {name}" for server in ("etcd", "nats") for name in names}

    ports = [port for part in parts for port in (part.grpc_port, part.metrics_port, part.http_port) if port]
    assert len({*ports, *links.values()}) == len(ports) + len(links)
    env = {child.name: child.env or {} for child in children}
    assert all(told[MARK] == "mark" for told in env.values())
    for part in parts:
        assert env[part.name]["TOKENMILL_GRPC_PORT"] == str(part.grpc_port)
        assert env[part.name]["TOKENMILL_ETCD"].endswith(f":{links[f'etcd of {part.name}']}")
    assert len({env[name]["TOKENMILL_INSTANCE_ID"] for name in names}) == len(names)
    assert [name for name in names if env[name].get("TOKENMILL_ENGINE_FAULT")] == ["decode-1", "decode-2"]
