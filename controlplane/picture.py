"""What is believed of every instance, given what was seen of their records and when. No I/O; the clock is passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from controlplane.instances import Instance, State

__all__ = ["FORGET_AFTER_S", "Picture"]

FORGET_AFTER_S = 30.0
"""How long an instance that has gone quiet is remembered as SUSPECT."""


@dataclass(slots=True)
class _Quiet:
    suspect_at: float
    forget_at: float


class Picture:
    """Instances by id. One whose record vanished is first kept as it was, then SUSPECT, then forgotten.

    Of those that have gone quiet only STARTING and READY ones become SUSPECT: one that was DRAINING must not look
    usable again, and one that FAILED has nothing left to say and is forgotten at once.
    """

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self._quiet: dict[str, _Quiet] = {}

    def present(self, instance: Instance) -> None:
        """Its record was seen."""
        self._quiet.pop(instance.instance_id, None)
        self.instances[instance.instance_id] = instance

    def left(self, instance_id: str) -> None:
        """It said farewell."""
        self._quiet.pop(instance_id, None)
        self.instances.pop(instance_id, None)

    def vanished(self, instance_id: str, now: float, grace_s: float = 0.0) -> None:
        """Its record is gone without a farewell; for `grace_s` it is still believed."""
        known = self.instances.get(instance_id)
        if known is None:
            return
        if known.state is State.FAILED:
            self.left(instance_id)
        else:
            self._quiet[instance_id] = _Quiet(now + grace_s, now + grace_s + FORGET_AFTER_S)
            self.advance(now)

    def listed(self, present: Mapping[str, Instance | None], now: float, grace_s: float) -> None:
        """All there are, None for one that said farewell. Who is known and not among them has vanished."""
        for instance_id, instance in present.items():
            if instance is None:
                self.left(instance_id)
            else:
                self.present(instance)
        for instance_id in self.instances.keys() - present.keys():
            if grace_s or instance_id not in self._quiet:
                self.vanished(instance_id, now, grace_s)

    def advance(self, now: float) -> None:
        """Lets time pass for those that have gone quiet."""
        for instance_id, quiet in list(self._quiet.items()):
            known = self.instances[instance_id]
            if now >= quiet.forget_at:
                self.left(instance_id)
            elif now >= quiet.suspect_at and known.state in (State.STARTING, State.READY):
                self.instances[instance_id] = msgspec.structs.replace(known, state=State.SUSPECT)

    def next_change(self, now: float) -> float | None:
        """When `advance` next has something to do, if ever."""
        due = (at for quiet in self._quiet.values() for at in (quiet.suspect_at, quiet.forget_at) if at > now)
        return min(due, default=None)
