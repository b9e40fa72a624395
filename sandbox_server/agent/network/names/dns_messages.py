"""Reads and writes the messages of the domain name system. Slots and name servers are hostile, so everything is bounded and nothing is passed on unread."""

from __future__ import annotations

import dataclasses
import ipaddress
import struct
from typing import Sequence

TYPE_A, TYPE_CNAME, TYPE_AAAA, TYPE_OPT, TYPE_SVCB, TYPE_HTTPS = 1, 5, 28, 41, 64, 65
NO_ERROR, FORMAT_ERROR, SERVER_FAILURE, NO_SUCH_NAME, NOT_IMPLEMENTED, REFUSED = 0, 1, 2, 3, 4, 5
_CLASS_INTERNET = 1
_HEADER = struct.Struct("!HHHHHH")
_RESPONSE, _TRUNCATED, _RECURSION_DESIRED, _RECURSION_AVAILABLE = 0x8000, 0x0200, 0x0100, 0x0080
_OPERATION = 0x7800
_RECORD = struct.Struct("!HHIH")
_MAX_NAME, _MAX_LABEL, _MAX_POINTERS, _MAX_RECORDS, _MAX_ALIASES = 255, 63, 32, 128, 16
_SMALLEST_SIZE, _OWN_SIZE = 512, 1232
_LABEL_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")


class DnsError(Exception):
    """A message breaks the rules. It is not answered."""


@dataclasses.dataclass(frozen=True)
class Question:
    """What a slot asks for.

    Args:
        number: the number of the message.
        name: the name in lower case, without a final dot.
        kind: the type of the records.
        size: the largest answer over UDP that the slot accepts, in bytes.
    """

    number: int
    name: str
    kind: int
    size: int = _SMALLEST_SIZE


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a name server answers.

    Args:
        code: the code of the answer.
        is_truncated: whether it did not fit.
        addresses: the IPv4 addresses of the name, if it was asked for these.
        time_s: for how long they hold, in seconds.
    """

    code: int
    is_truncated: bool
    addresses: tuple[str, ...]
    time_s: int


def read_question(data: bytes) -> Question:
    """Read the message of a slot.

    Raises:
        DnsError: it is no question, or not a single one of the internet.
    """
    try:
        number, flags, questions, answers, authorities, further = _HEADER.unpack_from(data)
        if flags & (_RESPONSE | _OPERATION) or questions != 1 or answers or authorities or further > 2:
            raise DnsError("not one question")
        name, at = _read_name(data, _HEADER.size, may_point=False)
        kind, of_class = struct.unpack_from("!HH", data, at)
    except struct.error:
        raise DnsError("it is too short") from None
    if of_class != _CLASS_INTERNET:
        raise DnsError("not a question of the internet")
    return Question(number, name, kind, _read_size(data, at + 4) if further else _SMALLEST_SIZE)


def _read_size(data: bytes, at: int) -> int:
    """Return the size that the first further record of a question says."""
    if len(data) < at + 1 + _RECORD.size or data[at] != 0:
        return _SMALLEST_SIZE
    kind, size, _, _ = _RECORD.unpack_from(data, at + 1)
    return min(max(size, _SMALLEST_SIZE), _OWN_SIZE) if kind == TYPE_OPT else _SMALLEST_SIZE


def _read_name(data: bytes, at: int, may_point: bool = True) -> tuple[str, int]:
    """Return a name in lower case and the position behind it."""
    labels: list[str] = []
    length = pointers = 0
    end = -1
    while True:
        if at >= len(data):
            raise DnsError("a name is cut off")
        size = data[at]
        if size == 0:
            return ".".join(labels), (end if end >= 0 else at + 1)
        if size & 0xC0 == 0xC0:
            if not may_point or pointers >= _MAX_POINTERS or at + 1 >= len(data):
                raise DnsError("a name points too often")
            pointers += 1
            end = end if end >= 0 else at + 2
            at = (size & 0x3F) << 8 | data[at + 1]
            continue
        label = data[at + 1 : at + 1 + size].lower()
        length += size + 1
        if size > _MAX_LABEL or len(label) < size or length > _MAX_NAME - 1:
            raise DnsError("a name is too long")
        if not _LABEL_CHARACTERS.issuperset(label):
            raise DnsError("a name has other characters than those of names of hosts")
        labels.append(label.decode("ascii"))
        at += 1 + size


def _write_question(question: Question) -> bytes:
    labels = [label.encode("ascii") for label in question.name.split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0" + struct.pack("!HH", question.kind, _CLASS_INTERNET)


def write_query(question: Question, number: int) -> bytes:
    """Return the message that asks a name server.

    Args:
        question: the question of the slot. Nothing else of its message is passed on.
        number: the number of the new message, which nobody can guess.
    """
    options = b"\0" + _RECORD.pack(TYPE_OPT, _OWN_SIZE, 0, 0)
    return _HEADER.pack(number, _RECURSION_DESIRED, 1, 0, 0, 1) + _write_question(question) + options


def read_answer(data: bytes, question: Question, number: int) -> Answer:
    """Read the answer of a name server.

    Args:
        data: the message.
        question: what it was asked.
        number: the number of the query.

    Raises:
        DnsError: it is not the answer to this query, or breaks the rules.
    """
    try:
        answer_number, flags, questions, records, _, _ = _HEADER.unpack_from(data)
        if answer_number != number or not flags & _RESPONSE or flags & _OPERATION or questions != 1:
            raise DnsError("not the answer to this query")
        name, at = _read_name(data, _HEADER.size)
        if name != question.name or struct.unpack_from("!HH", data, at) != (question.kind, _CLASS_INTERNET):
            raise DnsError("not the answer to this question")
        code, is_truncated = flags & 0xF, bool(flags & _TRUNCATED)
        if is_truncated or question.kind != TYPE_A:
            return Answer(code, is_truncated, (), 0)
        addresses, time_s = _read_addresses(data, at + 4, min(records, _MAX_RECORDS), question.name)
    except struct.error:
        raise DnsError("it is too short") from None
    return Answer(code, False, addresses, time_s)


def _read_addresses(data: bytes, at: int, count: int, name: str) -> tuple[tuple[str, ...], int]:
    """Return the addresses of a name and of what it is an alias of, and for how long they hold."""
    aliases: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    time_s = 1 << 31
    for _ in range(count):
        owner, at = _read_name(data, at)
        kind, of_class, lives_s, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if at + size > len(data):
            raise DnsError("a record is cut off")
        if of_class == _CLASS_INTERNET and kind in (TYPE_A, TYPE_CNAME):
            time_s = min(time_s, lives_s)
            if kind == TYPE_CNAME:
                aliases.setdefault(owner, _read_name(data, at)[0])
            elif size == 4:
                found.setdefault(owner, []).append(str(ipaddress.IPv4Address(data[at : at + 4])))
        at += size
    for _ in range(_MAX_ALIASES):
        if name in found or name not in aliases:
            break
        name = aliases[name]
    return tuple(dict.fromkeys(found.get(name, ()))), time_s


def write_answer(question: Question, code: int, addresses: Sequence[str] = (), time_s: int = 0, is_truncated: bool = False) -> bytes:
    """Return the answer to a slot. Addresses that do not fit are left out.

    Args:
        question: its question.
        code: the code of the answer.
        addresses: the IPv4 addresses of the name.
        time_s: for how long they hold, in seconds.
        is_truncated: whether the slot has to ask again over TCP.
    """
    flags = _RESPONSE | _RECURSION_DESIRED | _RECURSION_AVAILABLE | (_TRUNCATED if is_truncated else 0) | code
    asked = _write_question(question)
    room = _SMALLEST_SIZE - _HEADER.size - len(asked)
    record_size = 2 + _RECORD.size + 4
    fitting = addresses[: room // record_size]
    # Each record names its owner by a pointer to the question.
    records = [b"\xc0\x0c" + _RECORD.pack(TYPE_A, _CLASS_INTERNET, time_s, 4) + ipaddress.IPv4Address(address).packed for address in fitting]
    return _HEADER.pack(question.number, flags, 1, len(records), 0, 0) + asked + b"".join(records)


def with_number(data: bytes, number: int) -> bytes:
    """Return a message with another number."""
    return struct.pack("!H", number) + data[2:]
