from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from etcd3aio import Etcd3Client
from prometheus_client import CollectorRegistry

from controlplane.discovery import LEASE_S, Discovery
from controlplane.embedded import EmbeddedEtcd, free_port
from controlplane.errors import SettingsError, Unavailable
from controlplane.instances import Instance, State, decode_instance

Until = Callable[..., Awaitable[float]]


def instance(instance_id: str, service: str = "router", state: State = State.READY) -> Instance:
    return Instance(
        service=service, instance_id=instance_id, state=state, epoch=1, address="h:1", pid=1, host="h", version="0"
    )


@asynccontextmanager
async def connected(
    etcd: str, deployment: str = "test", registry: CollectorRegistry | None = None
) -> AsyncIterator[Discovery]:
    discovery = await Discovery.connect(etcd, deployment, registry or CollectorRegistry(), timeout_s=60)
    try:
        yield discovery
    finally:
        await discovery.close()


def states(discovery: Discovery) -> dict[str, State]:
    return {instance_id: one.state for instance_id, one in discovery.instances.items()}


async def test_everyone_sees_who_was_there_and_who_comes_changes_and_goes(
    etcd: str, deployment: str, until: Until
) -> None:
    async with connected(etcd, deployment) as one, connected(etcd, deployment) as early:
        changes: list[dict[str, State]] = []
        unsubscribe = early.subscribe(lambda: changes.append(states(early)))
        await one.register(instance("a", state=State.STARTING))
        async with connected(etcd, deployment) as late:
            assert states(late) == {"a": State.STARTING}
            await until(lambda: early.instances)  # each step is waited for: changes that come together are told as one
            for state in (State.READY, State.DRAINING):
                await one.update(instance("a", state=state))
                await until(lambda state=state: states(early) == {"a": state})
            await one.deregister()
            await until(lambda: not late.instances)
            await until(lambda: not early.instances)
        assert changes == [
            {"a": State.STARTING}, {"a": State.READY}, {"a": State.DRAINING}, {},
        ]  # fmt: skip
        unsubscribe()
        await one.register(instance("a"))
        await until(lambda: early.instances)
        assert len(changes) == 4


async def test_instances_are_found_by_service_and_deployments_never_meet(etcd: str, deployment: str) -> None:
    async with (
        connected(etcd, deployment) as one,
        connected(etcd, deployment) as two,
        connected(etcd, f"{deployment}-2") as foreign,
    ):
        await one.register(instance("a", "prefill"))
        await foreign.register(instance("c", "prefill"))
        await two.register(instance("b", "decode"))
        async with connected(etcd, deployment) as late:
            assert [found.instance_id for found in late.by_service("prefill")] == ["a"]
            assert [found.instance_id for found in late.by_service("decode")] == ["b"]


async def test_one_whose_lease_lapses_is_suspect_and_one_who_leaves_is_gone_at_once(
    etcd: str, deployment: str, until: Until
) -> None:
    async with connected(etcd, deployment) as watching:
        async with connected(etcd, deployment) as quiet, connected(etcd, deployment) as polite:
            await quiet.register(instance("quiet"))
            await polite.register(instance("polite"))
            await until(lambda: len(watching.instances) == 2)
            await polite.deregister()
            assert await until(lambda: "polite" not in watching.instances) < LEASE_S / 2
            await polite.close()
        await until(lambda: states(watching) == {"quiet": State.SUSPECT}, LEASE_S + 5)
        async with connected(etcd, deployment) as late:
            assert states(late) == {}
        async with connected(etcd, deployment) as again:
            await again.register(instance("quiet"))
            await until(lambda: states(watching) == {"quiet": State.READY})


async def test_the_lease_is_renewed_for_as_long_as_it_takes(etcd: str, deployment: str) -> None:
    async with connected(etcd, deployment) as one, connected(etcd, deployment) as watching:
        await one.register(instance("a"))
        seen: set[State] = set()
        watching.subscribe(lambda: seen.update(states(watching).values()))
        await asyncio.sleep(LEASE_S + 3)
        assert states(watching) == {"a": State.READY}
        assert State.SUSPECT not in seen


async def test_a_record_that_someone_deletes_or_whose_lease_is_revoked_is_written_again(
    etcd: str, deployment: str, until: Until
) -> None:
    key = f"/tokenmill/{deployment}/instances/router/a"
    async with connected(etcd, deployment) as one, connected(etcd, deployment) as watching, Etcd3Client([etcd]) as raw:
        assert raw.kv is not None
        assert raw.lease is not None
        await one.register(instance("a"))
        await until(lambda: watching.instances)
        seen: list[dict[str, State]] = []
        watching.subscribe(lambda: seen.append(states(watching)))
        gone_and_back = [{"a": State.SUSPECT}, {"a": State.READY}]
        await raw.kv.delete(key)
        await until(lambda: seen == gone_and_back)
        (found,) = (await raw.kv.get(key)).kvs
        await raw.lease.revoke(found.lease)
        await until(lambda: seen == gone_and_back * 2)
        assert decode_instance((await raw.kv.get(key)).kvs[0].value) == instance("a")


async def test_a_record_of_another_version_disturbs_nobody(etcd: str, deployment: str, until: Until) -> None:
    async with connected(etcd, deployment) as watching, Etcd3Client([etcd]) as raw:
        assert raw.kv is not None
        prefix = f"/tokenmill/{deployment}/instances/router/"
        await raw.kv.put(f"{prefix}broken", b"\xff not json")
        newer = msgspec.json.decode(msgspec.json.encode(instance("newer"))) | {"of_the_future": 1}
        await raw.kv.put(f"{prefix}newer", msgspec.json.encode(newer))
        await until(lambda: states(watching) == {"newer": State.READY})


@pytest.mark.parametrize("empty", [False, True], ids=["with its data", "empty"])
async def test_a_killed_etcd_comes_back_and_everyone_is_registered_within_two_seconds(
    empty: bool, own_etcd: EmbeddedEtcd, until: Until
) -> None:
    registry = CollectorRegistry()
    async with connected(own_etcd.endpoint, registry=registry) as one, connected(own_etcd.endpoint) as two:
        await one.register(instance("one"))
        await two.register(instance("two"))
        everyone = {"one": State.READY, "two": State.READY}
        await until(lambda: states(one) == states(two) == everyone)
        seed = await one.deployment_seed()
        tasks = len(asyncio.all_tasks())
        seen: set[State] = set()
        one.subscribe(lambda: seen.update(states(one).values()))

        own_etcd.kill()
        await until(lambda: one.stale and two.stale)
        assert registry.get_sample_value("tokenmill_discovery_stale") == 1
        with pytest.raises(StopIteration):  # done at its first step: no call to etcd is waited for
            one.update(instance("one", state=State.DRAINING)).send(None)
        tries = registry.get_sample_value("tokenmill_discovery_sessions_total") or 0.0
        await until(lambda: (registry.get_sample_value("tokenmill_discovery_sessions_total") or 0.0) >= tries + 3)
        assert states(one) == everyone
        assert len(asyncio.all_tasks()) <= tasks
        if empty:
            shutil.rmtree(own_etcd.data_dir)
        own_etcd.restart()
        await asyncio.to_thread(own_etcd.wait_ready)

        async with connected(own_etcd.endpoint) as late:
            await until(lambda: states(late) == everyone | {"one": State.DRAINING}, 20)
            assert await late.deployment_seed() == await one.deployment_seed() == await two.deployment_seed() == seed
        await until(lambda: not one.stale and states(one) == everyone | {"one": State.DRAINING})
        assert registry.get_sample_value("tokenmill_discovery_stale") == 0
        assert State.SUSPECT not in seen
        assert one.failed() is None
        assert two.failed() is None


async def test_of_two_seeds_the_older_wins_and_who_has_the_other_must_start_anew(
    etcd: str, deployment: str, until: Until
) -> None:
    key = f"/tokenmill/{deployment}/seed"
    async with connected(etcd, deployment) as old, Etcd3Client([etcd]) as raw:
        assert raw.kv is not None
        ours = (await raw.kv.get(key)).kvs[0].value
        await raw.kv.put(key, f"{time.time_ns()} {7:016x}")
        async with asyncio.timeout(60):
            while (await raw.kv.get(key)).kvs[0].value != ours:  # noqa: ASYNC110  nobody tells
                await asyncio.sleep(0.01)
        assert old.failed() is None
        await raw.kv.put(key, f"1 {7:016x}")
        await until(lambda: old.failed() is not None)
        async with connected(etcd, deployment) as later:
            assert await later.deployment_seed() == 7


async def test_a_stopped_etcd_hangs_no_call_and_loses_nobody(own_etcd: EmbeddedEtcd, until: Until) -> None:
    async with connected(own_etcd.endpoint) as one:
        await one.register(instance("a"))
        own_etcd.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            await one.update(instance("a", state=State.DRAINING))
        await until(lambda: one.stale, 15)
        async with asyncio.timeout(60):
            await one.deregister()
        with pytest.raises(Unavailable, match="no etcd answers"):
            await Discovery.connect(own_etcd.endpoint, "test", CollectorRegistry(), timeout_s=0.5)
        await one.update(instance("a"))
        own_etcd.process.send_signal(signal.SIGCONT)
        await until(lambda: not one.stale)
        async with connected(own_etcd.endpoint) as other:
            await until(lambda: states(other) == {"a": State.READY})
        own_etcd.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            await one.close()


async def test_the_seed_is_made_once_whoever_comes_first(etcd: str, deployment: str) -> None:
    connections = [Discovery.connect(etcd, deployment, CollectorRegistry()) for _ in range(8)]
    discoveries = await asyncio.gather(*connections)
    seeds = {await discovery.deployment_seed() for discovery in discoveries}
    assert len(seeds) == 1
    assert 0 <= seeds.pop() < 2**64
    for discovery in discoveries:
        await discovery.close()


async def test_one_of_several_endpoints_is_enough(own_etcd: EmbeddedEtcd, until: Until) -> None:
    async with connected(f"127.0.0.1:{free_port()}, {own_etcd.endpoint}") as discovery:
        await discovery.register(instance("a"))
        await until(lambda: states(discovery) == {"a": State.READY})
    async with connected(f"localhost:{own_etcd.port}") as discovery:
        assert not discovery.stale


@pytest.mark.parametrize("endpoints", ["", "localhost", "http://localhost", "a:1,b"])
async def test_an_endpoint_that_is_none_is_refused(endpoints: str) -> None:
    with pytest.raises(SettingsError, match="host:port"):
        await Discovery.connect(endpoints, "test", CollectorRegistry())


async def test_waiting_for_etcd_can_be_cancelled() -> None:
    waiting = asyncio.create_task(Discovery.connect(f"127.0.0.1:{free_port()}", "test", CollectorRegistry()))
    await asyncio.sleep(0.5)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=60)
    assert waiting.cancelled()
    assert len(asyncio.all_tasks()) == 1


ABRUPT = """
import asyncio, sys
from prometheus_client import CollectorRegistry
from controlplane.discovery import Discovery
async def main():
    discovery = await Discovery.connect(sys.argv[1], sys.argv[2], CollectorRegistry())
    print(discovery.stale, flush=True)
asyncio.run(main())
"""


def test_a_process_that_ends_without_closing_complains_of_nothing(etcd: str, deployment: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", ABRUPT, etcd, deployment],
        capture_output=True, text=True, timeout=60, check=True, env=os.environ,
    )  # fmt: skip
    assert ended.stdout.endswith("False\n")
    assert "Traceback" not in ended.stderr
    assert "never" not in ended.stderr


async def test_of_two_processes_with_one_id_the_one_that_began_later_stays(
    etcd: str, deployment: str, until: Until
) -> None:
    async with (
        connected(etcd, deployment) as older,
        connected(etcd, deployment) as newer,
        connected(etcd, deployment) as observer,
    ):
        await older.register(instance("a"))
        await newer.register(msgspec.structs.replace(instance("a"), epoch=2))
        await until(older.failed)
        assert older.superseded
        await older.update(instance("a", state=State.FAILED))
        await older.deregister()
        await until(lambda: "a" in observer.instances and observer.instances["a"].epoch == 2)
        assert newer.failed() is None


async def test_a_process_that_comes_back_late_leaves_its_successors_record_alone(
    etcd: str, deployment: str, until: Until
) -> None:
    async with connected(etcd, deployment) as successor, connected(etcd, deployment) as late:
        await successor.register(msgspec.structs.replace(instance("a"), epoch=2))
        await late.register(instance("a"))
        await until(late.failed)
        assert successor.instances["a"].epoch == 2
        assert successor.failed() is None
