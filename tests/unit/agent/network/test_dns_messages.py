"""Messages of the domain name system, from hostile slots and hostile name servers."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox_server.agent.network.names import dns_messages as dns

NAME = b"\x03www\x04test\0"
QUESTION = dns.Question(number=7, name="www.test", kind=dns.TYPE_A)


def header(number: int = 7, flags: int = 0x8180, questions: int = 1, answers: int = 0) -> bytes:
    return struct.pack("!HHHHHH", number, flags, questions, answers, 0, 0)


def asked(name: bytes = NAME, kind: int = dns.TYPE_A) -> bytes:
    return name + struct.pack("!HH", kind, 1)


def record(owner: bytes, kind: int, data: bytes, time_s: int = 60) -> bytes:
    return owner + struct.pack("!HHIH", kind, 1, time_s, len(data)) + data


def test_a_question_is_read_in_lower_case_with_the_size_that_fits() -> None:
    plain = struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0) + asked(b"\x03WwW\x04tEST\0")
    assert dns.read_question(plain) == QUESTION
    options = struct.pack("!HHHHHH", 7, 0x0120, 1, 0, 0, 1) + asked() + b"\0" + struct.pack("!HHIH", dns.TYPE_OPT, 4096, 0, 0)
    assert dns.read_question(options).size == 1232


def test_a_query_passes_on_nothing_but_the_question() -> None:
    query = dns.write_query(QUESTION, 99)
    read = dns.read_question(query)
    assert (read.number, read.name, read.kind) == (99, "www.test", dns.TYPE_A)


def test_an_answer_is_followed_through_aliases_and_nothing_else() -> None:
    alias = record(b"\xc0\x0c", dns.TYPE_CNAME, b"\x05other\xc0\x10", 30)
    wanted = record(b"\x05other\xc0\x10", dns.TYPE_A, socket.inet_aton("198.51.100.7"), 300)
    foreign = record(b"\x04evil\0", dns.TYPE_A, socket.inet_aton("198.51.100.66"))
    answer = dns.read_answer(header(answers=3) + asked() + alias + foreign + wanted, QUESTION, 7)
    assert answer == dns.Answer(code=0, is_truncated=False, addresses=("198.51.100.7",), time_s=30)


@pytest.mark.parametrize(
    "data",
    [
        header(number=8) + asked(),
        header(flags=0x0100) + asked(),
        header() + asked(b"\x03www\x05other\0"),
        header() + asked(kind=dns.TYPE_AAAA),
        header(questions=2) + asked(),
        header(answers=1) + asked() + record(b"\xc0\x0c", dns.TYPE_A, b"\1\2\3\4")[:-1],
        header() + b"\xc0\x0c" + asked(),
        header()[:11],
    ],
    ids=["another number", "a question", "another name", "another kind", "two questions", "a record that is cut off", "a name that points at itself", "short"],
)
def test_what_does_not_answer_the_query_is_refused(data: bytes) -> None:
    with pytest.raises(dns.DnsError):
        dns.read_answer(data, QUESTION, 7)


def test_an_alias_of_itself_leads_nowhere() -> None:
    loop = record(b"\xc0\x0c", dns.TYPE_CNAME, b"\xc0\x0c")
    assert dns.read_answer(header(answers=1) + asked() + loop, QUESTION, 7).addresses == ()


def test_an_answer_fits_into_the_smallest_packet_and_can_be_read() -> None:
    written = dns.write_answer(QUESTION, dns.NO_ERROR, [f"198.51.100.{number}" for number in range(100)], 60)
    assert len(written) <= 512
    read = dns.read_answer(written, QUESTION, 7)
    assert (read.addresses[0], len(read.addresses) > 20, read.time_s) == ("198.51.100.0", True, 60)


@given(st.binary(max_size=600))
@example(header() + asked())
def test_no_message_does_anything_but_be_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(dns.DnsError):
        question = dns.read_question(data)
        assert len(question.name) <= 255
        assert dns.read_question(dns.write_query(question, 1)).name == question.name
    with contextlib.suppress(dns.DnsError):
        dns.read_answer(data, QUESTION, 7)


@given(st.binary(max_size=300), st.integers(0, 65535))
def test_no_records_do_anything_but_be_read_or_refused(records: bytes, count: int) -> None:
    with contextlib.suppress(dns.DnsError):
        answer = dns.read_answer(header(answers=count) + asked() + records, QUESTION, 7)
        for address in answer.addresses:
            socket.inet_aton(address)
