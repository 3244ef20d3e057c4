"""What an instance of a service publishes of itself in etcd. Pure data, no I/O."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvcache.format import KvFormat

__all__ = ["Instance", "ModelCard", "State", "decode_instance", "encode_instance"]


class State(StrEnum):
    """STARTING, READY, DRAINING and FAILED are published by the instance.

    SUSPECT is what others think of one that has gone quiet.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    FAILED = "failed"


class ModelCard(msgspec.Struct, frozen=True):
    """What a frontend must know to serve a model, and a router to place its requests. Workers publish it."""

    name: str
    tokenizer: str
    """Directory with tokenizer.json and the chat template, or "builtin"."""
    format: KvFormat
    max_model_len: int
    vocab_size: int
    total_blocks: int
    max_num_seqs: int
    max_batched_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    capabilities: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    """LoRA adapters it can apply."""


class Instance(msgspec.Struct, frozen=True):
    """One running service process, as found under /tokenmill/<deployment>/instances/<service>/<instance_id>."""

    service: str
    """"frontend", "router", "prefill" or "decode"."""
    instance_id: str
    state: State
    epoch: int
    """Grows with every restart; events and handles of another epoch are void."""
    address: str
    """host:port of its gRPC server, as others reach it."""
    pid: int
    host: str
    version: str
    role: str = ""
    """"prefill" or "decode" for workers, else empty."""
    metrics_address: str = ""
    http_address: str = ""
    """A frontend's HTTP server."""
    tls: bool = False
    """Its gRPC and HTTP servers speak TLS only; metrics are in clear text always."""
    progress: str = ""
    """While STARTING: what it is doing. When FAILED: why."""
    labels: dict[str, str] = {}
    model: ModelCard | None = None


def encode_instance(instance: Instance) -> bytes:
    """JSON, as stored in etcd."""
    return msgspec.json.encode(instance)


def decode_instance(value: bytes) -> Instance:
    """Raises `msgspec.MsgspecError` on a record this version cannot read; unknown fields are ignored."""
    return msgspec.json.decode(value, type=Instance)
