"""What a router is told of a request. Pure data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """Hashes and lengths, never text or tokens. The fields are those of router.proto's ScheduleRequest."""

    request_id: str
    model: str
    block_hashes: Sequence[int]
    prompt_tokens: int
    excluded: Collection[str] = ()
    """Instances not to use."""
    avoided: Collection[str] = ()
    """Instances to use only when no other can serve."""
    max_tokens: int = 0
    """Most tokens the answer may have; 0: unknown."""
    priority: int = 0
    tenant: str = ""
    lora: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What a worker's labels must say."""
    capabilities: Collection[str] = ()
    """What a worker must be capable of."""
    session_id: str = ""
    session_hard: bool = False
    """The session's worker or nobody, as long as that worker lives."""
    pinned: str = ""
    """This decode worker or nobody."""
    timeout_s: float = 0.0
    """Time the whole answer may take; 0: no limit."""
    frontend_id: str = ""
    """Whose request it is: gone with that instance."""
    waited_s: float = 0.0
    """For its turn, before a worker refused it."""

    @property
    def is_particular(self) -> bool:
        """Whether it asks for anything but a model."""
        return bool(self.excluded or self.avoided or self.lora or self.labels or self.capabilities or self.pinned)
