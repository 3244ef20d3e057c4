"""The [prefill] section."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.settings import setting
from engines.host.prefill_service import PrefillLimits

__all__ = ["PrefillSettings"]


@dataclass(frozen=True, kw_only=True)
class PrefillSettings:
    """The bounds of a prefill worker. How long KV is held is [engine] kv_lease_s."""

    max_waiting: int = setting(256, "most prompts beyond max_num_seqs before new ones are refused", minimum=0)
    max_wait_s: float = setting(
        10.0, "a prompt that would wait longer until it is computed is refused at once, seconds", minimum=0.001
    )
    stall_timeout_s: float = setting(
        60.0, "the process fails, to be started anew, after so long without an engine step, seconds", minimum=1
    )
    canary_idle_s: float = setting(
        10.0, "an engine idle for so long is asked for one token, to see that it lives, seconds; 0: never", minimum=0
    )

    def limits(self) -> PrefillLimits:
        """As the worker host takes them."""
        return PrefillLimits(max_waiting=self.max_waiting, max_wait_s=self.max_wait_s)
