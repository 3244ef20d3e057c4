"""What two engines must share before KV bytes may pass between them."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["KvFormat"]


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The identity of KV bytes, beyond which tokens they stand for.

    Two engines whose formats differ in any field read each other's blocks as garbage without an error, so a
    difference refuses the pair when it is discovered, not when it transfers.
    """

    model_fingerprint: str
    """Of the weights' content, never their path."""
    dtype: str
    block_size: int
    """Tokens."""
    layout: str
    """The engine's name for how a block lies in memory."""
    engine: str
    engine_version: str
    parallel: str
    """Parallel shape, e.g. "tp1-pp1"."""

    def differences(self, other: KvFormat) -> list[str]:
        """One sentence part a differing field, e.g. "block_size 32 != 64"; empty when KV may pass."""
        return [
            f"{f.name} {getattr(self, f.name)} != {getattr(other, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
