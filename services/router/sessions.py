"""Where each session was served last. Pure."""

from __future__ import annotations

__all__ = ["Sessions"]

TTL_S = 600.0
_MOST = 100_000
"""The sessions silent longest are forgotten past this many: about 20 MB."""


class Sessions:
    """Remembers a session's decode worker for a time after its last request."""

    def __init__(self, ttl_s: float = TTL_S) -> None:
        self._ttl_s = ttl_s
        self._homes: dict[str, tuple[str, float]] = {}
        """Worker and end of the memory, by session; the one silent longest first."""

    def __len__(self) -> int:
        """Sessions remembered, those whose time is over included until others come."""
        return len(self._homes)

    def home(self, session_id: str, now: float) -> str:
        """The session's worker, or nothing."""
        instance_id, until = self._homes.get(session_id, ("", 0.0))
        return instance_id if now < until else ""

    def settle(self, session_id: str, instance_id: str, now: float) -> None:
        """The session is served there from now on."""
        self._homes.pop(session_id, None)
        self._homes[session_id] = (instance_id, now + self._ttl_s)
        while self._homes:
            oldest = next(iter(self._homes))
            if len(self._homes) <= _MOST and self._homes[oldest][1] > now:
                return
            del self._homes[oldest]
