"""The [decode] section."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.settings import setting
from engines.host.live import DecodeLimits

__all__ = ["DecodeSettings"]


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """The bounds of a decode worker."""

    max_waiting: int = setting(256, "most requests beyond max_num_seqs before new ones are refused", minimum=0)
    max_wait_s: float = setting(
        10.0, "a request that would wait longer for its first token is refused at once, seconds", minimum=0.001
    )
    max_handle_age_s: float = setting(10.0, "an older KV handle is not tried; the prompt is computed here", minimum=0)
    max_unsent_kb: int = setting(256, "most KiB of one answer kept for a frontend that does not read", minimum=1)
    stall_timeout_s: float = setting(
        60.0, "the process fails, to be started anew, after so long without an engine step, seconds", minimum=1
    )
    canary_idle_s: float = setting(
        10.0, "an engine idle for so long is asked for one token, to see that it lives, seconds; 0: never", minimum=0
    )

    def limits(self) -> DecodeLimits:
        """As the worker host takes them."""
        return DecodeLimits(
            max_waiting=self.max_waiting,
            max_wait_s=self.max_wait_s,
            max_handle_age_s=self.max_handle_age_s,
            max_unsent_bytes=self.max_unsent_kb << 10,
        )
