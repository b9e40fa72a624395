"""Encodes records as JSON documents, and decodes them.

A document that was written by an older version may lack fields that were added later. Such a field takes the default of its dataclass. Fields
that this version does not have are ignored.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import orjson

from sandbox_server.core.execution import Result
from sandbox_server.core.types import Lease
from sandbox_server.store.base import (
    ClockRecord,
    KeyRecord,
    PoolRecord,
    Record,
    RecordedResult,
    RunBatchItemRecord,
    RunBatchRecord,
    SandboxRecord,
    SlotRecord,
)

#: The record types by the names that the state file uses for them.
KINDS: Mapping[str, type] = {
    "pool": PoolRecord,
    "sandbox": SandboxRecord,
    "slot": SlotRecord,
    "lease": Lease,
    "key": KeyRecord,
    "run_batch": RunBatchRecord,
    "run_batch_item": RunBatchItemRecord,
    "clock": ClockRecord,
}
OUTPUTS = ("output", "stdout", "stderr")
_RESULT_FIELDS = tuple(field.name for field in dataclasses.fields(Result) if field.name not in OUTPUTS)

RecordId = tuple[str, str]
"""Identifies the object that a record describes: the kind of the record, and a key that is unique among its kind."""


def record_id(record: Record) -> RecordId:
    """Return the id under which a record is stored.

    Raises:
        TypeError: the record is one that is not stored itself, such as a `Deletion`.
    """
    if isinstance(record, SlotRecord):
        return "slot", f"{record.ref.sandbox_id}/{record.ref.slot_id}"
    if isinstance(record, Lease):
        return "lease", record.lease_id
    if isinstance(record, SandboxRecord):
        return "sandbox", record.sandbox_id
    if isinstance(record, KeyRecord):
        return request_key_record_id(record.tenant, record.key)
    if isinstance(record, PoolRecord):
        return "pool", record.pool_id.key
    if isinstance(record, RunBatchItemRecord):
        return "run_batch_item", record.key
    if isinstance(record, RunBatchRecord):
        return "run_batch", record.batch_id
    if isinstance(record, ClockRecord):
        return "clock", ""
    raise TypeError(f"{type(record).__name__} is not stored")


def request_key_record_id(tenant: str, key: str) -> RecordId:
    """Return the id under which the `KeyRecord` of a tenant's request key is stored."""
    return "key", json.dumps([tenant, key])


def encode(value: Any) -> bytes:
    """Encode a record, or a value that consists of records and JSON values, as JSON."""
    try:
        return orjson.dumps(value, default=_mapping_as_dict)
    except TypeError:
        # orjson refuses lone surrogates, which occur in file names that are not UTF-8, and integers of more than 64 bits.
        return json.dumps(_as_json_value(value)).encode()


def _mapping_as_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _as_json_value(value: Any) -> Any:
    """Replace every part of a value that JSON cannot represent: lone surrogates by `?`, other objects by their text."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if dataclasses.is_dataclass(value):
        return {field.name: _as_json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_as_json_value(str(key)): _as_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json_value(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def decode(kind: str, document: str) -> Any:
    """Decode a document.

    Args:
        kind: the kind of the record, a key of `KINDS`.
        document: the JSON text.

    Returns:
        The record, an instance of `KINDS[kind]`.

    Raises:
        ValueError: the document is not JSON, or not a record of this kind.
    """
    try:
        return _builder(KINDS[kind])(json.loads(document))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a record of kind {kind!r} cannot be decoded: {error}") from error


def encode_result(result: Result) -> tuple[Any, list[bytes | None]]:
    """Return a result as a JSON value without its outputs, and the outputs in the order of `OUTPUTS`."""
    return {name: getattr(result, name) for name in _RESULT_FIELDS}, [getattr(result, name) for name in OUTPUTS]


def decode_result(identity: str, document: str, lengths: str, outputs: bytes) -> RecordedResult:
    """Decode a row of the table of results.

    Args:
        identity: the identity of the call, in hexadecimal.
        document: the result without its outputs, as JSON.
        lengths: a JSON array with the length of each output in bytes, in the order of `OUTPUTS`; null for an output that the result lacks.
        outputs: the outputs, one after the other.

    Raises:
        ValueError: the row cannot be decoded.
    """
    fields = json.loads(document)
    offset = 0
    for name, length in zip(OUTPUTS, json.loads(lengths), strict=True):
        fields[name] = None if length is None else outputs[offset : offset + length]
        offset += length or 0
    try:
        return RecordedResult(identity=bytes.fromhex(identity), result=_builder(Result)(fields))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a result cannot be decoded: {error}") from error


@cache
def _builder(hint: Any) -> Callable[[Any], Any]:
    """Return a function that converts a JSON value to a value of the type `hint`."""
    if dataclasses.is_dataclass(hint):
        return _dataclass_builder(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = _builder(next(arg for arg in args if arg is not types.NoneType))
        return inner if inner is _as_is else lambda value: None if value is None else inner(value)
    if origin is tuple:
        items = _builder(args[0])
        return tuple if items is _as_is else lambda value: tuple(items(item) for item in value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    return _as_is


def _as_is(value: Any) -> Any:
    return value


def _dataclass_builder(cls: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    changed = {name: builder for name in names if (builder := _builder(hints[name])) is not _as_is}

    def build(document: dict[str, Any]) -> Any:
        fields = {name: value for name, value in document.items() if name in names}
        for name, builder in changed.items():
            if name in fields:
                fields[name] = builder(fields[name])
        return cls(**fields)

    return build
