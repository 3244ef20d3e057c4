"""Epochs on a real etcd: whatever the clock does, the next is larger."""

from __future__ import annotations

import asyncio

from controlplane.embedded import EmbeddedEtcd
from controlplane.epochs import new_epoch


async def test_the_next_epoch_is_larger_though_the_clock_was_set_back(etcd: str, deployment: str) -> None:
    first = await new_epoch(etcd, deployment, lambda: 5_000)
    second = await new_epoch(etcd, deployment, lambda: 1_000)
    third = await new_epoch(etcd, deployment, lambda: 9_000)
    assert (first, second, third) == (5_000, 5_001, 9_000)
    assert await new_epoch(etcd, deployment) > 1_600_000_000_000_000_000


async def test_of_many_that_start_at_once_none_is_behind_what_was_there_before(etcd: str, deployment: str) -> None:
    before = await new_epoch(etcd, deployment, lambda: 7_000)
    given = await asyncio.gather(*(new_epoch(etcd, deployment, lambda now=now: now) for now in range(6_990, 7_010)))
    assert min(given) > before
    assert await new_epoch(etcd, deployment, lambda: 0) > max(given)


async def test_deployments_have_epochs_of_their_own(etcd: str, deployment: str) -> None:
    await new_epoch(etcd, deployment, lambda: 100)
    assert await new_epoch(etcd, f"{deployment}-b", lambda: 50) == 50


async def test_an_epoch_waits_for_etcd(own_etcd: EmbeddedEtcd, deployment: str) -> None:
    own_etcd.stop()
    waiting = asyncio.create_task(new_epoch(own_etcd.endpoint, deployment))
    await asyncio.sleep(0)
    own_etcd.restart()
    async with asyncio.timeout(60):
        assert await waiting > 0
