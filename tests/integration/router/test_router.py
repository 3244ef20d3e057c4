from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import grpc
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controlplane.discovery import Discovery
from controlplane.embedded import EmbeddedEtcd, EmbeddedNats
from controlplane.errors import NotFound, Unavailable
from controlplane.grpc_errors import from_rpc_error
from controlplane.instances import Instance, State
from engines.base import LoadSnapshot
from kvcache.events import Cleared, Removed, Stored, Tier
from tests.integration.router.cluster import CARD, FORMAT, Cluster, LightWorker, StartRouter, until
from tokenmill.router.v1 import router_pb2


def chain(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.getrandbits(64) for _ in range(length)]


def churn(workers: Sequence[LightWorker], chance: random.Random, *, unheard: bool = False) -> None:
    """Some stored and removed blocks on every worker."""
    for worker in workers:
        say = worker.say_unheard if unheard else worker.say
        held = worker.publisher.holdings.hashes()
        say(
            Stored(None, tuple(chance.getrandbits(64) for _ in range(chance.randrange(1, 40)))),
            Stored(None, tuple(chain(1, 20))),
            Removed(tuple(held[: len(held) // 3])),
        )


async def test_events_reach_the_index_and_the_holder_is_chosen(cluster: Cluster, start_router: StartRouter) -> None:
    router = await start_router(cluster)
    one, two = await cluster.start("p-1", "prefill"), await cluster.start("p-2", "prefill")
    decode = await cluster.start("d-1", "decode")
    hashes = chain(7, 32)
    two.say(Stored(None, tuple(hashes[:20])), Stored(hashes[19], tuple(hashes[20:]), Tier.HOST))
    await until(lambda: router.agrees_with(cluster), "the index has the events")
    for turn in range(4):
        placed = await router.schedule(hashes, request_id=f"r-{turn}", tokens=32 * 16)
        assert (placed.decode.instance_id, placed.decode.address) == ("d-1", decode.instance.address)
        if turn == 0:
            assert (placed.prefill.instance_id, placed.prefill.overlap_blocks) == ("p-2", 32)  # its host tier goes on
            assert "p-2 prefills (32 of 32 blocks held)" in placed.why
    assert one.publisher.holdings.count == 0


async def test_a_decision_is_explained_when_asked(cluster: Cluster, start_router: StartRouter) -> None:
    router = await start_router(cluster, "--policy", "round_robin")
    await cluster.start("p-1", "prefill")
    decode = await cluster.start("d-1", "decode")
    await cluster.start("d-2", "decode", state=State.DRAINING)
    decode.load = LoadSnapshot(running_requests=3, kv_used_blocks=40)
    await until(lambda: router.agrees_with(cluster), "the workers are known")

    async def explained() -> bool:
        placed = await router.schedule(explain=True, request_id="r")
        await router.stub.Report(router_pb2.ReportRequest(outcomes=[freed("r")]), timeout=60)
        seen = {one.instance_id: one for one in placed.candidates}
        assert placed.policy == "round_robin"
        assert seen["p-1"].terms["uncached_tokens"] == 100
        assert seen["d-2"].filtered == "draining"
        return seen["d-1"].terms["requests"] == 3 and seen["d-1"].terms["kv_blocks"] == 40

    await until(explained, "the load report is in the terms")
    assert not (await router.schedule()).candidates


def freed(request_id: str) -> router_pb2.Outcome:
    return router_pb2.Outcome(request_id=request_id, freed=router_pb2.Freed())


async def test_errors_are_typed(cluster: Cluster, start_router: StartRouter) -> None:
    router = await start_router(cluster)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await router.schedule(model="nobody's")
    error = from_rpc_error(failed.value)
    assert isinstance(error, NotFound)
    assert error.param == "model"
    async with cluster.running("d-1", "decode", state=State.DRAINING):
        await until(lambda: router.agrees_with(cluster), "the worker is known")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await router.schedule()
        error = from_rpc_error(failed.value)
        assert isinstance(error, Unavailable)
        assert error.retry_after_s > 0
        assert "d-1 is draining" in error.message
    await until(lambda: router.agrees_with(cluster), "the worker is gone")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await router.schedule()
    assert isinstance(from_rpc_error(failed.value), Unavailable)  # known, but nobody serves it now


async def test_workers_of_different_formats_are_never_paired_and_it_is_said_once(
    cluster: Cluster, start_router: StartRouter
) -> None:
    router = await start_router(cluster)
    await cluster.start("d-1", "decode")
    wide = msgspec.structs.replace(CARD, format=FORMAT.__class__("fingerprint", "float32", 32, "nhd", "x", "1", "tp1"))
    await cluster.start("p-wide", "prefill", card=wide)
    await until(lambda: router.agrees_with(cluster), "the workers are known")
    assert not (await router.schedule()).HasField("prefill")
    await cluster.start("p-fit", "prefill")
    await until(lambda: router.agrees_with(cluster), "the third is known")
    for turn in range(6):
        assert (await router.schedule(request_id=str(turn))).prefill.instance_id == "p-fit"
    said = [line for line in router.log.read_text().splitlines() if "never paired" in line]
    assert len(said) == 1
    assert "block_size 32 != 16" in said[0]


async def test_a_lost_message_is_mended_by_the_next_one_or_by_the_load_report(
    cluster: Cluster, start_router: StartRouter
) -> None:
    router = await start_router(cluster)
    worker = await cluster.start("d-1", "decode")
    await until(lambda: router.agrees_with(cluster), "the worker is known")
    worker.say_unheard(Stored(None, (1, 2)))
    worker.say(Stored(2, (3,)))
    await until(lambda: router.agrees_with(cluster), "a skipped number is mended", within_s=60)
    worker.say_unheard(Stored(3, (4,)), Removed((1,)))
    await until(lambda: router.agrees_with(cluster), "a lost last message is mended", within_s=60)
    worker.say_unheard(Cleared())
    await until(lambda: router.agrees_with(cluster), "a lost clear is mended", within_s=60)


async def test_a_snapshot_that_breaks_off_is_asked_for_again_and_the_last_picture_stands_meanwhile(
    cluster: Cluster, start_router: StartRouter
) -> None:
    router = await start_router(cluster)
    worker = await cluster.start("d-1", "decode")
    hashes = chain(1, 20)
    worker.say(Stored(None, tuple(hashes)))
    await until(lambda: router.agrees_with(cluster), "the worker is known")
    worker.kv_source.refusals_left = many = 10_000
    worker.say_unheard(Stored(None, (1,)))
    worker.say(Stored(1, (2,)))
    await until(lambda: worker.kv_source.refusals_left < many - 1, "a snapshot broke off twice")
    assert (await router.schedule(hashes, tokens=400)).decode.overlap_blocks == 20
    assert await router.metric("tokenmill_router_cold_decisions_total") == 1  # and it says so
    worker.kv_source.refusals_left = 0
    await until(lambda: router.agrees_with(cluster), "the index is true")
    await router.schedule(hashes, tokens=400)
    assert await router.metric("tokenmill_router_cold_decisions_total") == 1


async def test_a_worker_that_comes_goes_and_begins_anew_is_followed(
    cluster: Cluster, start_router: StartRouter
) -> None:
    router = await start_router(cluster)
    async with cluster.running("d-1", "decode") as first:
        first.say(Stored(None, (1, 2, 3)))
        await until(lambda: router.agrees_with(cluster), "the worker is known")
        first.say(Cleared(), Stored(None, (4,)))
        await until(lambda: router.agrees_with(cluster), "what it forgot is known")
    await until(lambda: router.agrees_with(cluster), "the worker is gone")
    async with cluster.running("d-1", "decode") as second:  # the same name: a restart
        second.say(Stored(None, (5,)))
        await until(lambda: router.agrees_with(cluster), "the restarted worker is known")
        assert list((await router.index())["d-1"].hashes) == [5]


async def test_a_restarted_router_knows_everything_when_it_is_ready(
    cluster: Cluster, start_router: StartRouter
) -> None:
    workers = [await cluster.start(f"d-{at}", "decode") for at in range(3)]
    first = await start_router(cluster)
    chance = random.Random(3)
    for _ in range(5):
        churn(workers, chance)
    await until(lambda: first.agrees_with(cluster), "the first router knows")
    await first.kill()
    churn(workers, chance)
    second = await start_router(cluster)
    assert await second.agrees_with(cluster)


async def test_a_restarted_nats_leaves_the_index_true_block_by_block(
    etcd: str, own_nats: EmbeddedNats, deployment: str, cluster: Cluster, start_router: StartRouter
) -> None:
    cluster.nats = own_nats.endpoint
    workers = [await cluster.start(f"{role[0]}-{at}", role) for role in ("prefill", "decode") for at in range(2)]
    router = await start_router(cluster)
    chance = random.Random(4)
    churn(workers, chance)
    await until(lambda: router.agrees_with(cluster), "the index is true before")
    own_nats.kill()
    churn(workers, chance)
    assert (await router.schedule(chain(1, 20), tokens=400)).decode.overlap_blocks == 20  # still serving
    own_nats.restart()
    churn(workers, chance)
    await until(lambda: router.agrees_with(cluster), "the index is true again", within_s=60)


async def test_a_restarted_etcd_changes_nothing(
    own_etcd: EmbeddedEtcd, nats: str, deployment: str, cluster: Cluster, start_router: StartRouter
) -> None:
    cluster.etcd = own_etcd.endpoint
    workers = [await cluster.start(f"d-{at}", "decode") for at in range(2)]
    router = await start_router(cluster)
    chance = random.Random(5)
    churn(workers, chance)
    await until(lambda: router.agrees_with(cluster), "the index is true before")
    own_etcd.kill()
    churn(workers, chance)
    await until(lambda: router.agrees_with(cluster), "events flow without etcd", within_s=60)
    assert (await router.schedule(chain(1, 20), tokens=400)).decode.overlap_blocks == 20
    own_etcd.restart()
    await until(lambda: router.agrees_with(cluster), "the index is still true", within_s=60)
    await cluster.start("d-late", "decode")
    await until(lambda: router.agrees_with(cluster), "a newcomer is seen", within_s=60)


async def test_many_events_under_constant_loss_end_in_a_true_index(cluster: Cluster, start_router: StartRouter) -> None:
    router = await start_router(cluster)
    workers = [await cluster.start(f"d-{at}", "decode") for at in range(3)]
    chance = random.Random(6)
    for _ in range(60):
        churn(workers, chance, unheard=chance.random() < 0.3)
        await asyncio.sleep(0.01)
    await until(lambda: router.agrees_with(cluster), "the index is true", within_s=60)


async def test_a_drain_is_confirmed_once_nothing_is_placed_there(cluster: Cluster, start_router: StartRouter) -> None:
    router = await start_router(cluster)
    worker, other = await cluster.start("d-1", "decode"), await cluster.start("d-2", "decode")
    await until(lambda: router.agrees_with(cluster), "the workers are known")

    async def confirmed(epoch: int, instance_id: str = "d-1") -> None:
        request = router_pb2.ConfirmDrainingRequest(instance_id=instance_id, epoch=epoch)
        await router.stub.ConfirmDraining(request, timeout=60)

    waiting = asyncio.ensure_future(confirmed(worker.instance.epoch))
    await asyncio.sleep(0.3)
    assert not waiting.done(), "it is ready, and chosen"
    await worker.publish(state=State.DRAINING)
    await waiting
    for turn in range(20):
        assert (await router.schedule(request_id=f"r-{turn}")).decode.instance_id == other.instance_id
    await confirmed(other.instance.epoch - 1, "d-2")  # of a life that is over
    await confirmed(1, "nobody")


async def test_what_a_frontend_asked_for_is_free_once_it_is_gone(cluster: Cluster, start_router: StartRouter) -> None:
    await cluster.start("d", "decode")
    discovery = await Discovery.connect(cluster.etcd, cluster.deployment, CollectorRegistry(), timeout_s=60)
    frontend = Instance(
        service="frontend", instance_id="f", state=State.READY, epoch=1, address="", pid=0, host="", version="0"
    )
    await discovery.register(frontend)
    router = await start_router(cluster)  # it has seen the frontend when it is ready

    async def placed(request_id: str, frontend_id: str) -> None:
        request = router_pb2.ScheduleRequest(
            request_id=request_id, model="model", prompt_tokens=9, frontend_id=frontend_id
        )
        await router.stub.Schedule(request, timeout=60)

    async def counted(placements: int) -> bool:
        return await router.metric("tokenmill_router_placements") == placements

    await placed("its", "f")
    await placed("another's", "g")
    await until(lambda: counted(2), "both count", 60)
    await discovery.deregister()
    await discovery.close()
    await until(lambda: counted(1), "only the one whose frontend was never seen counts", 60)
