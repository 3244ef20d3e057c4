"""The one interface every inference engine stands behind.

The worker host (`engines/host`), the simulator and the services know nothing of an engine but what is written here.
An adapter lives in `engines/<name>/` and is made by `engines.create`. All methods are called on the event loop's
thread; none may block it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol

from kvcache.events import KvEvent
from kvcache.format import KvFormat

__all__ = [
    "MAX_LOGPROBS",
    "Capability",
    "Engine",
    "EngineInfo",
    "EngineRequest",
    "Failure",
    "FinishReason",
    "Handle",
    "KvEventSink",
    "KvOutcome",
    "LoadSnapshot",
    "PrefillResult",
    "Role",
    "SamplingParams",
    "StepOutput",
    "StepSink",
    "TokenLogprob",
    "Usage",
]


MAX_LOGPROBS = 20
"""Most best tokens told with each token, as in OpenAI's API."""


class Role(StrEnum):
    """What an instance does now. A property of the instance, not of the engine."""

    PREFILL = "prefill"
    DECODE = "decode"


class Capability(StrEnum):
    """What an engine may lack. A request that needs a missing one is refused at the edge with `Unsupported`."""

    REMOTE_PREFILL = "remote_prefill"
    """Reads KV that another engine computed."""
    HOLD_KV = "hold_kv"
    """Holds computed KV for a reader."""
    LOGPROBS = "logprobs"
    SEED = "seed"
    PENALTIES = "penalties"
    MIN_TOKENS = "min_tokens"
    PRIORITY = "priority"
    KV_EVENTS = "kv_events"


class FinishReason(Enum):
    """Why an answer ended. Values are those of common.proto."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


class KvOutcome(Enum):
    """What became of the KV a request was handed. Values are those of decode.proto."""

    NONE = 0
    READ = 1
    LOCAL = 2
    TOO_OLD = 3
    LATE = 4
    CORRUPT = 5
    UNREACHABLE = 6
    INCOMPATIBLE = 7


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Ranges are checked at the edge (see common.proto), not here."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Handle:
    """KV blocks held on another worker for one reader: the receiver's view of common.proto's KvHandle."""

    handle_id: str
    instance_id: str
    epoch: int
    address: str
    format: KvFormat
    tokens: int
    engine_params: bytes
    digests: tuple[bytes, ...]
    received_at: float
    """`time.monotonic()` here, when the message came."""
    lease_s: float
    """Time left then."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to run. `kv` is set when its KV waits on a prefill worker."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    kv: Handle | None = None
    priority: int = 0
    """Higher runs first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request; see common.proto."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    remote_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of one token's probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one request failed: a code and message of `controlplane.errors`."""

    code: str
    message: str


@dataclass(slots=True)
class StepOutput:
    """What one engine step gave one request. Tokens, an end, or both."""

    request_id: str
    token_ids: Sequence[int]
    finish: FinishReason | None = None
    usage: Usage | None = None
    """Set with `finish`."""
    failure: Failure | None = None
    """Set exactly when finish is ERROR."""
    kv_outcome: KvOutcome = KvOutcome.NONE
    """Meaningful with `finish`."""
    logprobs: Sequence[Sequence[TokenLogprob]] | None = None
    """One entry a token: the chosen one first, then the best ones in order."""


StepSink = Callable[[Sequence[StepOutput]], None]
"""Called at most once per engine step with all that step produced, on the event loop. Must not block or raise."""

KvEventSink = Callable[[Sequence[KvEvent]], None]
"""Called with the engine's KV events in order, as sequence hashes, on the event loop. Must not block or raise."""


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """KV held for one reader. `engine_params` and `digests` travel to the reader's engine untouched."""

    handle_id: str
    tokens: int
    """Tokens whose KV is held, from the start of the prompt."""
    cached_tokens: int
    engine_params: bytes
    digests: tuple[bytes, ...]
    lease_s: float
    """Time the blocks are still held, from now."""


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """How busy an engine is. `steps` grows with each step: running requests without growth mean no progress."""

    running_requests: int = 0
    waiting_requests: int = 0
    queued_prefill_tokens: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    kv_leased_blocks: int = 0
    step_time_s: float = 0.0
    steps: int = 0
    kv_leases: int = 0
    """Handles made by `prefill` and not yet read, released or expired."""
    kv_leases_expired: int = 0
    """Handles whose lease ended unread, since start."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, known once it has started."""

    model: str
    """The name it is served under."""
    tokenizer: str
    """Local directory with tokenizer.json and the chat template, or "builtin" (see `engines/sim/tokenizer.py`)."""
    format: KvFormat
    total_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    """Tokens of prompt and answer together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    capabilities: frozenset[Capability] = field(default_factory=frozenset)
    least_stall_s: float = 3.0
    """So long without a step is no sign of a hang. More where steps share their processors with whatever else runs."""


class Engine(Protocol):
    """An inference engine in one process of ours (it may own others)."""

    async def start(self, on_kv_events: KvEventSink, on_progress: Callable[[str], None]) -> EngineInfo:
        """Loads the model; returns when it can serve. `on_progress` takes short texts for a person ("loading weights").

        Raises `SettingsError` when it cannot be configured so, `EngineFailed` when it breaks.
        """

    async def stop(self) -> None:
        """Ends every process and frees every resource. Safe to call twice, and after a failed start."""

    async def generate(self, request: EngineRequest, sink: StepSink) -> None:
        """Takes a request; returns once it is admitted. All its output, an end included, goes to `sink`.

        With `request.kv`, reads and verifies that KV; where it cannot be had or trusted, computes the prompt here
        instead and says so in `kv_outcome`. The answer is the same either way. Raises `InvalidRequest`, `Unsupported`
        or `Overloaded`, before admission only.
        """

    async def prefill(self, request: EngineRequest) -> PrefillResult:
        """Computes the prompt's KV and holds it for one reader. Cancelling the call stops the work and holds nothing.

        The reader's engine frees the blocks by a notice through the transfer; `release` and the lease's end do too.
        """

    def abort(self, request_id: str) -> bool:
        """Stops a request in whatever stage; its sink gets an end with CANCELLED. False: not known (any more)."""

    async def release(self, handle_id: str) -> bool:
        """Frees KV that nobody will read. False: it was read, released or expired before."""

    def load(self) -> LoadSnapshot:
        """The present load. Cheap."""

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; a `Cleared` event follows. False: blocks are in use, nothing was done."""

    def failed(self) -> str | None:
        """Why the engine can no longer serve, or None while it can."""
