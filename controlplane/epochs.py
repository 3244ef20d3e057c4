"""Numbers of lives: a process that starts has a larger epoch than any before it, also where the clock was set back.

    /tokenmill-epoch/<deployment>     the largest epoch given in the deployment so far, 20 digits

An epoch is the present time in nanoseconds, or one more than the largest. The first alone would let an instance that
restarts after a backward step of the clock look older than its last life; the second alone would begin again at 1 where
etcd came back empty. Instances may share a number: epochs are compared within one instance only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from etcd3aio.kv import Compare, KVService

from controlplane.etcd import CALL_S, FAILURES, open_channel, parse_endpoints

__all__ = ["new_epoch"]

_RETRY_S = 0.5


async def new_epoch(endpoints: str, deployment: str, clock: Callable[[], int] = time.time_ns) -> int:
    """Waits for etcd, for ever."""
    while True:
        channel = await open_channel(parse_endpoints(endpoints))
        try:
            return await _take(KVService(channel, max_attempts=1), f"/tokenmill-epoch/{deployment}", clock)
        except FAILURES:
            await asyncio.sleep(_RETRY_S)
        finally:
            await channel.close()


async def _take(kv: KVService, key: str, clock: Callable[[], int]) -> int:
    while True:
        known = (await kv.get(key, timeout=CALL_S)).kvs
        epoch = max(clock(), int(known[0].value) + 1 if known else 0)
        written = kv.txn_op_put(key, f"{epoch:020}")
        if known:
            # Where another has put a larger one meanwhile, that one stands for ours, too.
            await kv.txn([kv.txn_compare_value(key, f"{epoch:020}", result=Compare.LESS)], [written], timeout=CALL_S)
            return epoch
        if (await kv.txn([kv.txn_compare_create_revision(key, 0)], [written], timeout=CALL_S)).succeeded:
            return epoch
