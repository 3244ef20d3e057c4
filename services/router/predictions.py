"""Blocks that are about to be where a request was just placed, until the worker's own events say so. Pure.

Without them, requests with one new prefix that come in the same moment would each find it nowhere and scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.index import Holder, KvIndex

__all__ = ["Predictions"]

STRIDE = 8
"""Every so many blocks one is remembered: an eighth of the cost, for a hint that may be short by seven blocks."""
LIFE_S = 5.0
"""At least so long, at most twice, a prediction stands: a prompt that takes longer has events by then."""
MOST_BLOCKS = 100_000


class _Generation:
    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.index = KvIndex()
        self.holders: dict[str, Holder] = {}


class Predictions:
    """Two generations of a sparse index. The older is thrown away whole, so that nothing has to be taken out singly."""

    def __init__(self) -> None:
        self._young = self._old = _Generation(0.0)

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._old.index) + (len(self._young.index) if self._young is not self._old else 0)

    def add(self, instance_id: str, hashes: Sequence[int], now: float) -> None:
        """This prompt was placed there."""
        if now - self._young.began_at > LIFE_S or len(self._young.index) > MOST_BLOCKS // 2:
            self._old, self._young = self._young, _Generation(now)
        young = self._young
        holder = young.holders.get(instance_id)
        if holder is None:
            holder = young.holders[instance_id] = young.index.open(instance_id)
        young.index.store(holder, None, _sparse(hashes))

    def overlaps(self, hashes: Sequence[int], now: float) -> dict[str, int]:
        """Leading blocks that each worker will soon hold."""
        sparse = _sparse(hashes)
        found: dict[str, int] = {}
        for generation in (self._old, self._young):
            if now - generation.began_at <= 2 * LIFE_S:
                for instance_id, depth in generation.index.overlaps(sparse).items():
                    found[instance_id] = max(found.get(instance_id, 0), min(depth * STRIDE, len(hashes)))
        return found

    def forget(self, instance_id: str) -> None:
        """The worker is gone, or has begun anew."""
        for generation in (self._old, self._young):
            holder = generation.holders.pop(instance_id, None)
            if holder is not None:
                generation.index.close(holder)


def _sparse(hashes: Sequence[int]) -> Sequence[int]:
    """Every eighth block, and the last: a hash names all that is before it."""
    sparse = hashes[STRIDE - 1 :: STRIDE]
    return sparse if len(hashes) % STRIDE == 0 else [*sparse, hashes[-1]]
