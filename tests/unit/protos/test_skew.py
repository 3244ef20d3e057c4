"""Neighbours one version apart understand each other: what earlier versions recorded is read as it was meant.

Record a release's own with `scripts/record_messages.py`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto
from google.protobuf.internal.encoder import TagBytes
from google.protobuf.internal.wire_format import WIRETYPE_LENGTH_DELIMITED, WIRETYPE_VARINT
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from controlplane.instances import Instance, decode_instance
from scripts.record_messages import RECORDED, as_said, descriptors, messages, schema_of

VERSIONS = sorted(RECORDED.glob("*.json"))
FILES = descriptors()
MESSAGES: dict[str, Descriptor] = {one.full_name: one for one in messages(FILES)}
ENUMS: dict[str, EnumDescriptor] = {
    enum.full_name: enum
    for enums in (
        *(file.enum_types_by_name.values() for file in FILES),
        *(message.enum_types for message in MESSAGES.values()),
    )
    for enum in enums
}
SERVICES: list[ServiceDescriptor] = [one for file in FILES for one in file.services_by_name.values()]
FUTURE = b"".join(
    (
        TagBytes(18_999, WIRETYPE_VARINT) + b"\x96\x01",
        TagBytes(18_998, WIRETYPE_LENGTH_DELIMITED) + b"\x04soon",
    )
)
"""Two fields that no version has."""


def test_there_is_a_recorded_version() -> None:
    assert VERSIONS


@pytest.fixture(params=VERSIONS, ids=lambda path: path.stem)
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    path: Path = request.param
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_what_was_sent_is_read_as_it_was_meant(recorded: dict[str, Any]) -> None:
    for name, one in recorded["messages"].items():
        for sample in one["samples"]:
            assert as_said(parsed(name, bytes.fromhex(sample["hex"]))) == sample["said"], name


def test_fields_of_the_future_are_passed_over_at_any_depth(recorded: dict[str, Any]) -> None:
    for name, one in recorded["messages"].items():
        for sample in one["samples"]:
            message = parsed(name, bytes.fromhex(sample["hex"]))
            assert as_said(parsed(name, from_the_future(message))) == sample["said"], name


def test_half_of_the_fields_are_enough_to_be_read(recorded: dict[str, Any]) -> None:
    """As an older neighbour sends it, which knows fewer."""
    rng = random.Random(7)
    for name, one in recorded["messages"].items():
        for sample in one["samples"]:
            message = parsed(name, bytes.fromhex(sample["hex"]))
            for field in list(message.DESCRIPTOR.fields):
                if rng.random() < 0.5:
                    message.ClearField(field.name)  # type: ignore[arg-type]  # the stub wants literals
            left = {key: value for key, value in sample["said"].items() if key in as_said(message)}
            assert as_said(parsed(name, message.SerializeToString())) == left, name


def test_no_field_was_renumbered_retyped_or_given_another_meaning(recorded: dict[str, Any]) -> None:
    for name, one in recorded["messages"].items():
        now = schema_of(MESSAGES[name])
        for number, field in one["schema"].items():
            assert number not in now or now[number] == field, f"{name}: field {number}"
            if number not in now:
                assert is_reserved(MESSAGES[name], int(number)), f"{name}: {number} must be reserved, it had a meaning"


def test_no_enum_value_or_method_was_lost_or_changed(recorded: dict[str, Any]) -> None:
    for name, values in recorded["enums"].items():
        assert values.items() <= {value.name: value.number for value in ENUMS[name].values}.items(), name
    now = {
        f"{service.full_name}/{method.name}": [
            method.input_type.full_name, method.client_streaming, method.output_type.full_name, method.server_streaming,
        ]
        for service in SERVICES
        for method in service.methods
    }  # fmt: skip
    assert recorded["methods"].items() <= now.items()


def test_an_instances_record_is_read_with_fields_more_and_fields_fewer(recorded: dict[str, Any]) -> None:
    record: dict[str, Any] = recorded["instance"]
    instance = decode_instance(json.dumps(record).encode())
    assert json.loads(msgspec.json.encode(instance)).items() >= record.items()
    assert decode_instance(json.dumps(record | {"of_the_future": {"a": [1]}}).encode()) == instance
    optional = [field.name for field in msgspec.structs.fields(Instance) if not field.required]
    for name in optional:
        decode_instance(json.dumps({key: value for key, value in record.items() if key != name}).encode())
    deeper = record | {"model": record["model"] | {"of_the_future": 1}}
    assert decode_instance(json.dumps(deeper).encode()) == instance


def parsed(name: str, data: bytes) -> Message:
    message: Message = GetMessageClass(MESSAGES[name])()
    message.ParseFromString(data)
    return message


def from_the_future(message: Message) -> bytes:
    """The same message with unknown fields in it and in every message inside."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and not field.message_type.GetOptions().map_entry:
            for one in value if field.is_repeated else [value]:
                one.ParseFromString(from_the_future(one))
    return message.SerializeToString() + FUTURE


def is_reserved(message: Descriptor, number: int) -> bool:
    proto = DescriptorProto()
    message.CopyToProto(proto)
    return any(one.start <= number < one.end for one in proto.reserved_range)
