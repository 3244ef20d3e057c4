"""How far a request has come. Pure names: of metrics, logs and tests."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Stage"]


class Stage(StrEnum):
    """In order. Each answer of a request has its own from QUEUED on."""

    READING = "reading"
    """Its body is coming."""
    TOKENISING = "tokenising"
    QUEUED = "queued"
    """The router has been asked where."""
    PLACED = "placed"
    """Its workers are known and have not been told yet."""
    PREFILLING = "prefilling"
    """Its prompt is being computed, by a prefill worker or by decode itself."""
    PREFILLED = "prefilled"
    """A prefill worker holds its KV, and decode does not know yet."""
    TRANSFERRING = "transferring"
    """Decode has been told where the KV is, and no token has come."""
    DECODING = "decoding"
    WRITING = "writing"
    """All tokens have come; the client has not taken all of them."""
