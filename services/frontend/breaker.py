"""Decides which instances to avoid after what they have done to earlier calls. Pure; times are passed in.

    closed      calls go there
    open        three calls in a row failed, or half of the last many did: avoided, for a second at first
    half open   that time is over: one call goes there to see; it fails: open again, for twice as long

Avoided is not refused: where nobody else can serve, a call goes there all the same, and counts like any other. Only
what shows that an instance is broken counts as a failure; one that is slow, full or leaving is not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from enum import StrEnum

from controlplane.errors import Draining, EngineFailed, TokenmillError, Unavailable
from services.frontend.migration import FrontendFailed

__all__ = ["Breaker", "BreakerState", "Breakers", "Outcome", "outcome_of"]

_IN_A_ROW = 3
_LAST = 20
"""Outcomes looked back on."""
_FEWEST = 8
"""Of these there must be as many, before their failures are held against each other."""
_FAILED_PART = 0.5
_FIRST_S, _LONGEST_S = 1.0, 30.0
_PROBE_S = 60.0
"""A probe of which nothing has come by then is forgotten, and the next call is one."""


class BreakerState(StrEnum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Outcome(StrEnum):
    """What a call shows of the instance it went to."""

    GOOD = "good"
    BROKEN = "broken"
    NOTHING = "nothing"
    """Cancelled, refused for good reasons, or another's fault."""


def outcome_of(error: TokenmillError) -> Outcome:
    """What a call's error shows of the instance that it went to."""
    if isinstance(error, Draining | FrontendFailed):
        return Outcome.NOTHING
    return Outcome.BROKEN if isinstance(error, Unavailable | EngineFailed) else Outcome.NOTHING


class Breaker:
    """One instance's, in one epoch of it."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._last: deque[bool] = deque(maxlen=_LAST)
        """Which failed."""
        self._in_a_row = 0
        self._pause_s = _FIRST_S
        self._until = 0.0
        """When an open one becomes half open, and when a probe is forgotten."""
        self._probing = False

    def avoids(self, now: float) -> bool:
        """Whether the next call should rather go elsewhere."""
        if self.state is BreakerState.OPEN and now >= self._until:
            self.state = BreakerState.HALF_OPEN
            self._probing = False
        if self.state is BreakerState.HALF_OPEN:
            return self._probing and now < self._until
        return self.state is BreakerState.OPEN

    def began(self, now: float) -> None:
        """A call goes there."""
        if self.state is BreakerState.HALF_OPEN and not self.avoids(now):
            self._probing, self._until = True, now + _PROBE_S

    def ended(self, outcome: Outcome, now: float) -> None:
        """What came of a call. A good answer closes it, whenever the call began."""
        match outcome:
            case Outcome.NOTHING:
                self._probing = False
            case Outcome.GOOD:
                if self.state is not BreakerState.CLOSED:
                    self.state = BreakerState.CLOSED
                    self._last.clear()
                    self._pause_s = _FIRST_S
                self._last.append(False)
                self._in_a_row = 0
            case Outcome.BROKEN:
                self._last.append(True)
                self._in_a_row += 1
                if self.state is BreakerState.HALF_OPEN:
                    self._open(min(2 * self._pause_s, _LONGEST_S), now)
                elif self.state is BreakerState.CLOSED and self._is_broken():
                    self._open(_FIRST_S, now)

    def _is_broken(self) -> bool:
        failed = sum(self._last)
        return self._in_a_row >= _IN_A_ROW or (len(self._last) >= _FEWEST and failed >= _FAILED_PART * len(self._last))

    def _open(self, pause_s: float, now: float) -> None:
        self.state = BreakerState.OPEN
        self._pause_s = pause_s
        self._until = now + pause_s
        self._probing = False


class Breakers:
    """One a known instance. An instance that has begun a new life begins with a new one."""

    def __init__(self, on_change: Callable[[str, BreakerState], None]) -> None:
        self._on_change = on_change
        self._breakers: dict[str, tuple[int, Breaker]] = {}

    def avoided(self, now: float) -> list[str]:
        """Instances that calls should rather not go to."""
        avoided = []
        for instance_id, (_, breaker) in self._breakers.items():
            before = breaker.state
            if breaker.avoids(now):
                avoided.append(instance_id)
            self._tell(instance_id, before, breaker.state)
        return avoided

    def began(self, instance_id: str, epoch: int, now: float) -> None:
        """A call goes there."""
        breaker = self._of(instance_id, epoch)
        if breaker is None:
            breaker = Breaker()
            self._breakers[instance_id] = epoch, breaker
        before = breaker.state
        breaker.began(now)
        self._tell(instance_id, before, breaker.state)

    def ended(self, instance_id: str, epoch: int, outcome: Outcome, now: float) -> None:
        """What came of a call; one to another epoch than the present one says nothing any more."""
        breaker = self._of(instance_id, epoch)
        if breaker is not None:
            before = breaker.state
            breaker.ended(outcome, now)
            self._tell(instance_id, before, breaker.state)

    def keep(self, instance_ids: Collection[str]) -> None:
        """Forgets all others."""
        for gone in self._breakers.keys() - instance_ids:
            del self._breakers[gone]

    def count(self, state: BreakerState) -> int:
        """Instances whose breaker is in that state."""
        return Counter(breaker.state for _, breaker in self._breakers.values())[state]

    def _of(self, instance_id: str, epoch: int) -> Breaker | None:
        known_epoch, breaker = self._breakers.get(instance_id, (0, None))
        return breaker if known_epoch == epoch else None

    def _tell(self, instance_id: str, before: BreakerState, after: BreakerState) -> None:
        if after is not before:
            self._on_change(instance_id, after)
