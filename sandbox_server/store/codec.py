"""Records as JSON documents and back. A document without a field that has a default is an older one, and reads as if it said the default."""

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
from sandbox_server.store.base import ClockRecord, KeyRecord, PoolRecord, Record, RecordedResult, SandboxRecord, SlotRecord

#: What a record is called in the file.
KINDS: Mapping[str, type] = {"pool": PoolRecord, "sandbox": SandboxRecord, "slot": SlotRecord, "lease": Lease, "key": KeyRecord, "clock": ClockRecord}
OUTPUTS = ("output", "stdout", "stderr")
_RESULT_FIELDS = tuple(field.name for field in dataclasses.fields(Result) if field.name not in OUTPUTS)

Name = tuple[str, str]
"""The kind of a thing, and its key among its kind."""


def name_of(record: Record) -> Name:
    """What the record is a record of."""
    if isinstance(record, SlotRecord):
        return "slot", f"{record.ref.sandbox_id}/{record.ref.slot_id}"
    if isinstance(record, Lease):
        return "lease", record.lease_id
    if isinstance(record, SandboxRecord):
        return "sandbox", record.sandbox_id
    if isinstance(record, KeyRecord):
        return name_of_key(record.tenant, record.key)
    if isinstance(record, PoolRecord):
        return "pool", record.pool_id.key
    if isinstance(record, ClockRecord):
        return "clock", ""
    raise TypeError(f"{type(record).__name__} is not kept")


def name_of_key(tenant: str, key: str) -> Name:
    """The name of a tenant's request key."""
    return "key", json.dumps([tenant, key])


def encode(value: Any) -> bytes:
    """A record, or anything made of records and JSON values, as JSON."""
    try:
        return orjson.dumps(value, default=_plain)
    except TypeError:
        # Text that is no text (half of a surrogate pair out of a file name), or a number beyond 64 bits.
        return json.dumps(_simple(value)).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _simple(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if dataclasses.is_dataclass(value):
        return {field.name: _simple(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_simple(str(key)): _simple(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_simple(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def decode(kind: str, document: str) -> Any:
    """The record of a document.

    Raises:
        ValueError: it is not one.
    """
    try:
        return _builder(KINDS[kind])(json.loads(document))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a record of kind {kind!r} makes no sense: {error}") from error


def encode_result(result: Result) -> tuple[Any, list[bytes | None]]:
    """A result as a JSON value, and its outputs beside it."""
    return {name: getattr(result, name) for name in _RESULT_FIELDS}, [getattr(result, name) for name in OUTPUTS]


def decode_verdict(identity: str, document: str, lengths: str, outputs: bytes) -> RecordedResult:
    """The verdict of a row.

    Raises:
        ValueError: it is not one.
    """
    fields = json.loads(document)
    at = 0
    for name, length in zip(OUTPUTS, json.loads(lengths), strict=True):
        fields[name] = None if length is None else outputs[at : at + length]
        at += length or 0
    try:
        return RecordedResult(identity=bytes.fromhex(identity), result=_builder(Result)(fields))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a verdict makes no sense: {error}") from error


@cache
def _builder(hint: Any) -> Callable[[Any], Any]:
    """What makes a value of this type out of JSON."""
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
