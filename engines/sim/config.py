"""What a simulated engine is made of. Plain values; `engines/settings.py` maps the user's settings onto them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controlplane.errors import SettingsError

__all__ = ["FAULTS", "SimConfig"]

FAULTS = ("", "corrupt-block", "late-read", "hang")
"""Ways to misbehave, for tests. "corrupt-block": a prefill engine flips a byte of each hold's first block after
digesting it. "late-read": a decode engine starts a read only after the handle's lease has ended. "hang": it makes no
step from the signal SIGUSR1 on, until SIGUSR2."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A simulated engine. Raises `SettingsError` on values that cannot work together."""

    model: str = ""
    """Local directory whose tokenizer is served. Empty: the built-in tokenizer."""
    served_model_name: str = ""
    """Empty: the directory's last part, or "sim"."""
    block_size: int = 16
    """Tokens a KV block."""
    total_blocks: int = 4096
    max_num_seqs: int = 256
    """Most requests in one step."""
    max_batched_tokens: int = 8192
    """Most tokens computed in one step; longer prompts are computed in chunks."""
    max_model_len: int = 32768
    """Most tokens of prompt and answer together."""
    time_scale: float = 1.0
    """How many times faster than the profile says: 1 is real time, 10 ten times faster. 0 and infinity: no waiting."""
    profile: str = "h100-8b"
    """Name of one in `profiles/`, or a file's path; see `profile.py`."""
    kv_bytes_per_block: int = 4096
    """Real bytes behind each block, a multiple of 8. 0: none, and no KV passes between engines."""
    lease_s: float = 120.0
    """How long prefilled KV is held for its reader. Real seconds, whatever the time scale."""
    read_timeout_s: float = 5.0
    """How long a reader waits for the bytes before it computes the prompt itself. Real seconds."""
    seed: int = 0
    """Same seed, same prompt: same answer."""
    answer_tokens: int = 200
    """Mean length of an answer that was given no max_tokens; with max_tokens, that is its length. 0: it goes on until
    the model's length is full."""
    fault: str = ""
    """One of `FAULTS`. For tests."""

    def __post_init__(self) -> None:
        for name in ("block_size", "total_blocks", "max_num_seqs", "max_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; it must be at least 1", param=name)
        for name in ("lease_s", "read_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise SettingsError(f"{name} is {getattr(self, name)}; it must be more than 0 seconds", param=name)
        if math.isnan(self.time_scale) or self.time_scale < 0:
            raise SettingsError(f"time_scale is {self.time_scale}; it must be 0 or more", param="time_scale")
        if self.kv_bytes_per_block < 0 or self.kv_bytes_per_block % 8:
            raise SettingsError(
                f"kv_bytes_per_block is {self.kv_bytes_per_block}; it must be 0 or a multiple of 8",
                param="kv_bytes_per_block",
            )
        if self.answer_tokens < 0:
            raise SettingsError(f"answer_tokens is {self.answer_tokens}; it must be 0 or more", param="answer_tokens")
        if self.max_model_len > self.total_blocks * self.block_size:
            raise SettingsError(
                f"max_model_len {self.max_model_len} does not fit in total_blocks {self.total_blocks} of block_size "
                f"{self.block_size}; raise total_blocks or lower max_model_len",
                param="max_model_len",
            )
        if self.fault not in FAULTS:
            raise SettingsError(f"fault is {self.fault!r}; it must be one of {', '.join(FAULTS[1:])}", param="fault")
