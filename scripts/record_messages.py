"""Records this version's messages, for the versions to come to be tested against: `tests/unit/protos/recorded/`.

Every message of protos/ is filled by a rule, encoded, and kept with what it says; so are the numbers, names and types
of its fields, every service's methods, and an instance's record as etcd holds it. Run it once for a release, and commit
what it writes. A later version must read all of it to the same values: then neighbours one version apart understand
each other.
"""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from controlplane.instances import Instance, ModelCard, State, encode_instance
from kvcache.format import KvFormat

__all__ = ["RECORDED", "as_said", "descriptors", "messages", "schema_of"]

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "tests" / "unit" / "protos" / "recorded"
_DEEPEST = 4
"""Levels of messages in messages that are filled."""


def main() -> None:
    """Writes one file, named after the version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    files = descriptors()
    recorded = {
        "messages": {
            one.full_name: {"schema": schema_of(one), "samples": list(_samples(one))} for one in messages(files)
        },
        "enums": {
            enum.full_name: {value.name: value.number for value in enum.values}
            for file in files
            for enum in (
                *file.enum_types_by_name.values(),
                *(enum for one in messages([file]) for enum in one.enum_types),
            )
        },
        "methods": {
            f"{service.full_name}/{method.name}": [
                method.input_type.full_name, method.client_streaming, method.output_type.full_name,
                method.server_streaming,
            ]
            for file in files
            for service in file.services_by_name.values()
            for method in service.methods
        },
        "instance": json.loads(encode_instance(_instance())),
    }  # fmt: skip
    RECORDED.mkdir(parents=True, exist_ok=True)
    path = RECORDED / f"{version}.json"
    path.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")


def descriptors() -> list[FileDescriptor]:
    """Of every proto."""
    paths = sorted((ROOT / "protos").rglob("*_pb2.py"))
    names = [".".join(path.relative_to(ROOT / "protos").with_suffix("").parts) for path in paths]
    return [importlib.import_module(name).DESCRIPTOR for name in names]


def messages(files: list[FileDescriptor]) -> Iterator[Descriptor]:
    """All of these files, those inside others too; maps' entries are fields, not messages."""
    waiting = [one for file in files for one in file.message_types_by_name.values()]
    while waiting:
        one = waiting.pop(0)
        if not one.GetOptions().map_entry:
            yield one
        waiting += one.nested_types


def schema_of(message: Descriptor) -> dict[str, list[Any]]:
    """What may never change of a field, by its number."""
    return {
        str(field.number): [
            field.name,
            field.type,
            field.is_repeated,
            field.has_presence,
            of.full_name if (of := field.message_type or field.enum_type) is not None else "",
        ]
        for field in message.fields
    }


def as_said(message: Message) -> dict[str, Any]:
    """The values that are set, by name. Large numbers are text, enums are numbers."""
    said: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, use_integers_for_enums=True)
    return said


def _samples(message: Descriptor) -> Iterator[dict[str, Any]]:
    """One for each choice of its oneofs, so that each alternative is set in one of them."""
    choices = max([len(one.fields) for one in message.oneofs], default=1)
    for choice in range(choices):
        filled = _filled(message, choice, _DEEPEST)
        yield {"hex": filled.SerializeToString(deterministic=True).hex(), "said": as_said(filled)}


def _filled(message: Descriptor, choice: int, deepest: int) -> Message:
    filled: Message = GetMessageClass(message)()
    for field in message.fields:
        oneof = field.containing_oneof
        if oneof is not None and oneof.fields[choice % len(oneof.fields)] is not field:
            continue
        if field.message_type is not None and not deepest:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            assert value.message_type is None, f"{field.full_name}: maps of messages are not filled yet"
            getattr(filled, field.name)[_value(field.message_type.fields_by_name["key"], 0)] = _value(value, 1)
        elif field.message_type is not None:
            for number in range(2 if field.is_repeated else 1):
                inner = _filled(field.message_type, choice + number, deepest - 1)
                target = getattr(filled, field.name)
                (target.add() if field.is_repeated else target).CopyFrom(inner)
                if not field.is_repeated:
                    target.SetInParent()
        elif field.is_repeated:
            getattr(filled, field.name).extend(_value(field, number) for number in range(3))
        else:
            setattr(filled, field.name, _value(field, 0))
    return filled


def _value(field: FieldDescriptor, number: int) -> Any:
    """Never the default, and another for each field."""
    size = 100 * field.number + number + 1
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return f"{field.name}-{number}" if field.type == FieldDescriptor.TYPE_STRING else bytes([number, 255])
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_ENUM:
            assert field.enum_type is not None
            values = field.enum_type.values
            return values[(number + 1) % len(values)].number
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return size / 4
        case FieldDescriptor.CPPTYPE_INT64 | FieldDescriptor.CPPTYPE_UINT64:
            return 2**40 + size
        case _:
            return size


def _instance() -> Instance:
    """With every field set."""
    form = KvFormat("fingerprint", "float16", 16, "layout", "engine", "1", "tp1-pp1")
    card = ModelCard("model", "tokenizer", form, 2048, 32000, 1000, 64, 8192, (1, 2), ("seed", "logprobs"))
    given: dict[str, Any] = {
        "service": "decode", "instance_id": "decode-1", "state": State.READY, "epoch": 2**60, "address": "a:1",
        "pid": 7, "host": "a", "version": "1", "model": card, "labels": {"zone": "a"},
    }  # fmt: skip
    for field in msgspec.structs.fields(Instance):
        if field.name not in given and field.type in (str, bool, int):
            given[field.name] = field.type(1) if field.type is not str else f"some {field.name}"
    return Instance(**given)


if __name__ == "__main__":
    main()
