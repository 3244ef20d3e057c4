"""What `tokenmill up` is told: the [up] section."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.settings import setting

__all__ = ["UpSettings"]


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """The shape of a deployment on one machine, and how to start it."""

    prefill: int = setting(
        1, "prefill workers; with 0, decode workers compute the prompts, too", minimum=0, metavar="N"
    )
    decode: int = setting(1, "decode workers", minimum=1, metavar="N")
    fleet: int = setting(
        0, "light decode workers more, many in a process; for --engine sim and --prefill 0", minimum=0, metavar="N"
    )
    ask: str | None = setting(None, "show the answer to this prompt when ready, then keep serving", metavar="PROMPT")
    once: str | None = setting(
        None,
        "only stream the answer to this prompt to standard output, then stop; fails if no prefill worker took part",
        metavar="PROMPT",
    )
    max_tokens: int = setting(256, "longest answer to --ask and --once, tokens", minimum=1)
    detach: bool = setting(False, "return when ready and keep running in the background", short="-d")
    start_timeout_s: float = setting(3600.0, "longest wait until a request can be served, seconds", minimum=1)
