"""The workers that have failed one answer, and whether one of them may have it again. Pure.

None is used twice, except that nobody else can serve: then one that was lost, and is back since, is as good as a new
one. It is back in another epoch (a new process), or READY with a stream that was opened after the one it was lost on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from controlplane.errors import Draining, Stalled, TokenmillError, Unavailable

__all__ = ["Seen", "Tried", "may_be_replaced"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker as this frontend sees it now."""

    epoch: int
    stream: str
    """The id of the open stream to it; empty: there is none."""
    ready: bool = True


@dataclass(frozen=True, slots=True)
class _Failure:
    epoch: int
    stream: str
    may_return: bool


class Tried:
    """Owned by one answer; as many entries as it was tried on instances."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def add(self, instance_id: str, epoch: int, stream: str, error: TokenmillError) -> None:
        """That worker has failed the answer, on that stream."""
        self._failures[instance_id] = _Failure(epoch, stream, _was_lost(error))

    def excludes(self, instance_id: str, seen: Seen) -> bool:
        """Whether the worker must not have the answer."""
        failure = self._failures.get(instance_id)
        if failure is None or seen.epoch > failure.epoch:
            return False
        return not (failure.may_return and seen.ready and seen.stream not in ("", failure.stream))

    def is_second_choice(self, instance_id: str, seen: Seen) -> bool:
        """Whether it should have the answer only where nobody else can."""
        failure = self._failures.get(instance_id)
        return failure is not None and seen.epoch <= failure.epoch

    def __iter__(self) -> Iterator[str]:
        """Their ids."""
        return iter(self._failures)

    def __len__(self) -> int:
        """Instances tried."""
        return len(self._failures)


def may_be_replaced(error: TokenmillError | None) -> bool:
    """Whether waiting for another worker is of use, when nobody can serve and the last one said this. None: no one did.

    One that is full, or that fails this very request, is alive: nobody comes in its place.
    """
    return error is None or isinstance(error, Unavailable)


def _was_lost(error: TokenmillError) -> bool:
    return isinstance(error, Stalled) or (isinstance(error, Unavailable) and not isinstance(error, Draining))
