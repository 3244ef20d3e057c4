"""What the router knows of a worker's blocks from its own placements alone. Pure.

A worker that tells of its blocks does so late: without a prediction, requests with one new prefix that come in the same
moment would each find it nowhere and scatter. So a placement stands for a few seconds, until the events have come.

A worker that tells of none (*approximate* mode: its engine has no events, or no KV cache group whose blocks stand for
whole prefixes) has its placements remembered for `silent_ttl_s`, at most as many blocks as it has, the latest ones.
That is a guess: what the engine evicts earlier, or computes for others, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcache.index import Holder, KvIndex

__all__ = ["Predictions", "sparse"]

STRIDE = 8
"""Every so many blocks one is remembered: an eighth of the cost, for a hint that may be short by seven blocks."""
LIFE_S = 5.0
"""At least so long, at most twice, a prediction stands: a prompt that takes longer has events by then."""
SILENT_TTL_S = 300.0
MOST_BLOCKS = 1_000_000
"""Remembered of all workers, about 100 MB; past it those that matched longest ago go."""
LOOK_S = 1.0
"""How often old ones are looked for."""


class _Memory:
    """One worker's placements in two generations; the older goes as a whole, so that nothing is taken out singly."""

    def __init__(self, young: Holder, now: float, life_s: float, blocks: int) -> None:
        self.young = young
        self.old: Holder | None = None
        self.turned_at = now
        """When the young generation began."""
        self.life_s = life_s
        self.blocks = blocks
        """Remembered blocks a generation may have."""


class Predictions:
    """A sparse index of what was placed where. Times are a monotonic clock's, passed in."""

    def __init__(self, silent_ttl_s: float = SILENT_TTL_S, max_blocks: int = MOST_BLOCKS) -> None:
        self._silent_ttl_s = silent_ttl_s
        self._max_blocks = max_blocks
        self._index = KvIndex(max_blocks)
        self._memories: dict[str, _Memory] = {}
        self._silent: dict[str, int] = {}
        """Workers that tell of no blocks, and how many they have."""
        self._look_at = 0.0

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._index)

    def set_silent(self, workers: dict[str, int]) -> None:
        """All workers that tell of no blocks now, and how many KV blocks each has."""
        self._silent = workers

    def add_sparse(self, instance_id: str, some: Sequence[int], now: float) -> None:
        """A prompt of which `sparse` left these hashes was placed there."""
        memory = self._memories.get(instance_id)
        if memory is None:
            silent = self._silent.get(instance_id)
            life_s = LIFE_S if silent is None else self._silent_ttl_s
            blocks = self._max_blocks if silent is None else max(1, silent // STRIDE // 2)
            memory = self._memories[instance_id] = _Memory(self._index.open(instance_id), now, life_s, blocks)
        some = some[: memory.blocks]
        full = memory.young.count and memory.young.count + len(some) > memory.blocks
        if full or now - memory.turned_at > memory.life_s:
            self._turn(memory, now)
        self._index.store(memory.young, None, some)

    def depths(self, hashes: Sequence[int], now: float) -> Iterator[tuple[int, Sequence[str]]]:
        """(leading blocks, workers that will soon hold so many), fewest first. One may come twice."""
        if now >= self._look_at:
            self._expire(now)
        blocks = len(hashes)
        for overlap, names in self._index.named(sparse(hashes)) if self._memories else ():
            yield min(overlap.blocks * STRIDE, blocks), names

    def forget(self, instance_id: str) -> None:
        """The worker is gone, or has begun anew."""
        memory = self._memories.pop(instance_id, None)
        if memory is not None:
            self._close(memory.young)
            self._close(memory.old)

    def _turn(self, memory: _Memory, now: float) -> None:
        self._close(memory.old)
        memory.old, memory.young = memory.young, self._index.open(memory.young.name)
        memory.turned_at = now

    def _expire(self, now: float) -> None:
        self._look_at = now + LOOK_S
        for instance_id, memory in list(self._memories.items()):
            age_s = now - memory.turned_at
            if age_s > 2 * memory.life_s:
                self.forget(instance_id)
            elif age_s > memory.life_s:
                self._close(memory.old)
                memory.old = None
        self._index.tidy(1_000)

    def _close(self, holder: Holder | None) -> None:
        if holder is not None:
            self._index.close(holder)


def sparse(hashes: Sequence[int]) -> Sequence[int]:
    """Every eighth block, and the last: a hash names all that is before it."""
    some = hashes[STRIDE - 1 :: STRIDE]
    return some if len(hashes) % STRIDE == 0 else [*some, hashes[-1]]
