"""KV events and load reports, between dataclasses and protobuf."""

from __future__ import annotations

from kvcache.events import Cleared, KvEvent, KvEventBatch, Removed, Stored, Tier
from kvcache.load import KvCheck, LoadReport
from tokenmill.kv.v1 import kv_pb2

__all__ = [
    "batch_from_bytes",
    "batch_to_bytes",
    "kv_subject",
    "load_from_bytes",
    "load_subject",
    "load_to_bytes",
    "subject_instance",
    "tier_from_proto",
    "tier_to_proto",
]

_TO_PROTO: dict[Tier, kv_pb2.Tier.ValueType] = {
    Tier.DEVICE: kv_pb2.TIER_DEVICE,
    Tier.HOST: kv_pb2.TIER_HOST,
    Tier.DISK: kv_pb2.TIER_DISK,
    Tier.PEER: kv_pb2.TIER_PEER,
}
_FROM_PROTO: dict[int, Tier] = {value: tier for tier, value in _TO_PROTO.items()}


def kv_subject(deployment: str, instance_id: str) -> str:
    """Where a worker's KV events go; instance "*" for all of them."""
    return f"tokenmill.{deployment}.kv.{instance_id}"


def load_subject(deployment: str, instance_id: str) -> str:
    """Where a worker's load reports go; instance "*" for all of them."""
    return f"tokenmill.{deployment}.load.{instance_id}"


def subject_instance(subject: str) -> str:
    """The instance a kv or load subject belongs to."""
    return subject.rpartition(".")[2]


def batch_to_bytes(batch: KvEventBatch) -> bytes:
    """As published."""
    return kv_pb2.KvEventBatch(
        instance_id=batch.instance_id,
        epoch=batch.epoch,
        dp_rank=batch.dp_rank,
        first_seq=batch.first_seq,
        events=[_event_to_proto(event) for event in batch.events],
    ).SerializeToString()


def batch_from_bytes(data: bytes) -> KvEventBatch:
    """Raises `google.protobuf.message.DecodeError`, or `ValueError` for an event this version does not know.

    An unknown event must not be skipped: the picture after it would be wrong. The caller treats it as a gap.
    """
    message = kv_pb2.KvEventBatch.FromString(data)
    return KvEventBatch(
        message.instance_id,
        message.epoch,
        message.first_seq,
        tuple(map(_event_from_proto, message.events)),
        message.dp_rank,
    )


def load_to_bytes(report: LoadReport) -> bytes:
    """As published."""
    return kv_pb2.LoadReport(
        instance_id=report.instance_id,
        epoch=report.epoch,
        last_seq=report.last_seq,
        held_xor=report.held_xor,
        held_blocks=report.held_blocks,
        running_requests=report.running_requests,
        waiting_requests=report.waiting_requests,
        queued_prefill_tokens=report.queued_prefill_tokens,
        kv_used_blocks=report.kv_used_blocks,
        kv_total_blocks=report.kv_total_blocks,
        kv_leased_blocks=report.kv_leased_blocks,
        step_time_us=report.step_time_us,
        steps=report.steps,
        other_ranks=[
            kv_pb2.KvCheck(
                dp_rank=check.dp_rank,
                last_seq=check.last_seq,
                held_xor=check.held_xor,
                held_blocks=check.held_blocks,
            )
            for check in report.other_ranks
        ],
    ).SerializeToString()


def load_from_bytes(data: bytes) -> LoadReport:
    """Raises `google.protobuf.message.DecodeError`."""
    message = kv_pb2.LoadReport.FromString(data)
    return LoadReport(
        instance_id=message.instance_id,
        epoch=message.epoch,
        last_seq=message.last_seq,
        held_xor=message.held_xor,
        held_blocks=message.held_blocks,
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        queued_prefill_tokens=message.queued_prefill_tokens,
        kv_used_blocks=message.kv_used_blocks,
        kv_total_blocks=message.kv_total_blocks,
        kv_leased_blocks=message.kv_leased_blocks,
        step_time_us=message.step_time_us,
        steps=message.steps,
        other_ranks=tuple(
            KvCheck(check.dp_rank, check.last_seq, check.held_xor, check.held_blocks) for check in message.other_ranks
        ),
    )


def _event_to_proto(event: KvEvent) -> kv_pb2.KvEvent:
    match event:
        case Stored(parent, hashes, tier):
            return kv_pb2.KvEvent(stored=kv_pb2.Stored(parent=parent, hashes=hashes, tier=tier_to_proto(tier)))
        case Removed(hashes, tier):
            return kv_pb2.KvEvent(removed=kv_pb2.Removed(hashes=hashes, tier=tier_to_proto(tier)))
        case Cleared():
            return kv_pb2.KvEvent(cleared=kv_pb2.Cleared())


def _event_from_proto(message: kv_pb2.KvEvent) -> KvEvent:
    match message.WhichOneof("event"):
        case "stored":
            stored = message.stored
            parent = stored.parent if stored.HasField("parent") else None
            return Stored(parent, tuple(stored.hashes), tier_from_proto(stored.tier))
        case "removed":
            removed = message.removed
            return Removed(tuple(removed.hashes), tier_from_proto(removed.tier))
        case "cleared":
            return Cleared()
        case other:
            raise ValueError(f"KV event of unknown kind {other}; the sender is newer than this process")


def tier_to_proto(tier: Tier) -> kv_pb2.Tier.ValueType:
    """The same tier in kv.proto's words."""
    return _TO_PROTO[tier]


def tier_from_proto(value: int) -> Tier:
    """Raises `ValueError` for a tier this version does not know."""
    try:
        return _FROM_PROTO[value]
    except KeyError:
        raise ValueError(f"KV event for unknown tier {value}; the sender is newer than this process") from None
