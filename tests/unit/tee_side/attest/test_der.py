"""Tests of DER: one encoding for one value, and a refusal that says what is wrong with another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from protocol.errors import EvidenceError
from tee_side.attest import der
from tests.tables import each_row
from tests.tools import snp_chain


def _fails(text: str) -> object:
    return pytest.raises(EvidenceError, match=f"^certificate: got {text}$")


# ----------------------------------------------------------------------------------- elements


@each_row("size", [0, 1, 127, 128, 255, 256, 65535, 65536])
def test_lengths_are_read(size: int) -> None:
    data = snp_chain.element(4, bytes(size))
    assert der.read(data, 4) == (4, bytes(size), data)


def test_children_are_read_in_order() -> None:
    parts = [snp_chain.integer(5), snp_chain.sequence(snp_chain.oid("1.2.3")), b"\x05\0"]
    found = der.read(snp_chain.sequence(*parts), der.SEQUENCE).children()
    assert [one.encoded for one in found] == parts
    assert [one.tag for one in found] == [2, 0x30, 5]
    assert der.read(snp_chain.sequence(), der.SEQUENCE).children() == []


_NO_ELEMENT = "no tag of one byte with a length, expected an element"
_LENGTH = "another encoding of a length, expected the shortest, of 3 bytes at most"


@each_row(
    ("data", "text"),
    [
        (b"", _NO_ELEMENT),
        (b"\x30", _NO_ELEMENT),
        (b"\x1f\x01\x00", _NO_ELEMENT),
        (b"\xbf\x01\x00", _NO_ELEMENT),
        (b"\x30\x80", _LENGTH),
        (b"\x30\x80\x00\x00", _LENGTH),
        (b"\x30\x81\x7f" + bytes(127), _LENGTH),
        (b"\x30\x82\x00\x80" + bytes(128), _LENGTH),
        (b"\x30\x83\x00\xff\xff" + bytes(65535), _LENGTH),
        (b"\x30\x84\x01\x00\x00\x00" + bytes(99), _LENGTH),
        (b"\x30\xff" + b"\x01" * 127, _LENGTH),
        (b"\x30\x81", _LENGTH),
        (b"\x30\x82\x01", _LENGTH),
        (b"\x30\x01", "0 bytes, expected the 1 that its length says"),
        (b"\x30\x05\x00\x00", "2 bytes, expected the 5 that its length says"),
        (b"\x30\x81\x80" + bytes(127), "127 bytes, expected the 128 that its length says"),
        (b"\x30\x00\x00", "more bytes behind an element, expected nothing behind it"),
        (b"\x31\x00", "tag 0x31, expected tag 0x30"),
        (b"\x10\x00", "tag 0x10, expected tag 0x30"),
    ],
)
def test_other_encodings_are_refused(data: bytes, text: str) -> None:
    with _fails(text):
        der.read(data, der.SEQUENCE)


def test_children_are_as_strict() -> None:
    for content in (b"\x02", b"\x02\x02\x01", b"\x02\x01\x01\x00", b"\x02\x81\x01\x01"):
        with pytest.raises(EvidenceError):
            der.read(snp_chain.element(0x30, content), der.SEQUENCE).children()


@given(st.binary(max_size=40))
@example(b"\x30\x03\x02\x01\x00")
@example(b"\x30\x81\x80" + bytes(128))
def test_what_is_read_has_no_other_encoding(data: bytes) -> None:
    try:
        found = der.read(data, data[0] if data else 0)
    except EvidenceError:
        return
    assert snp_chain.element(found.tag, found.content) == data


# -------------------------------------------------------------------------------------- values


@each_row("number", [0, 1, 127, 128, 219, 255, 256, 2**31, 2**63 - 1])
def test_integers_are_read(number: int) -> None:
    assert der.integer(der.read(snp_chain.integer(number), der.INTEGER)) == number


def test_numbers_above_127_take_two_bytes() -> None:
    assert snp_chain.integer(219) == b"\x02\x02\x00\xdb"


_INTEGER = "another encoding, expected a number of the fewest bytes, 8 at most, not below 0"


@each_row(
    ("data", "text"),
    [
        (b"\x02\x00", _INTEGER),
        (b"\x02\x01\x80", _INTEGER),
        (b"\x02\x01\xff", _INTEGER),
        (b"\x02\x02\x00\x00", _INTEGER),
        (b"\x02\x02\x00\x7f", _INTEGER),
        (b"\x02\x09\x00\xff" + bytes(7), _INTEGER),
        (b"\x02\x82\x07\xd0\x7f" + bytes(1999), _INTEGER),
        (b"\x0a\x01\x01", "tag 0xa, expected tag 0x2"),
    ],
)
def test_other_integers_are_refused(data: bytes, text: str) -> None:
    with _fails(text):
        der.integer(der.read(data, data[0]))


def test_bits_are_whole_bytes() -> None:
    def read(content: bytes, tag: int = 3) -> bytes:
        return der.bits(der.read(snp_chain.element(tag, content), tag))

    assert read(b"\0ab") == b"ab"
    assert read(b"\0") == b""
    for content in (b"", b"\x01ab", b"\x07\x80", b"\x08"):
        with _fails("bits that are no whole bytes, expected whole bytes"):
            read(content)
    with _fails("tag 0x4, expected tag 0x3"):
        read(b"\0ab", 4)


def _at(*numbers: int) -> datetime:
    return datetime(*numbers, tzinfo=UTC)  # type: ignore[misc, arg-type]


@each_row(
    ("tag", "text", "time"),
    [
        (23, b"260131235959Z", _at(2026, 1, 31, 23, 59, 59)),
        (23, b"491231235959Z", _at(2049, 12, 31, 23, 59, 59)),
        (23, b"500101000000Z", _at(1950, 1, 1)),
        (23, b"991231235959Z", _at(1999, 12, 31, 23, 59, 59)),
        (23, b"000229120000Z", _at(2000, 2, 29, 12)),
        (24, b"20260131235959Z", _at(2026, 1, 31, 23, 59, 59)),
        (24, b"99991231235959Z", _at(9999, 12, 31, 23, 59, 59)),
    ],
)
def test_times_are_read(tag: int, text: bytes, time: datetime) -> None:
    assert der.moment(der.read(snp_chain.element(tag, text), tag)) == time


@each_row(
    ("tag", "text"),
    [
        *((23, text) for text in (b"", b"Z", b"260131235959", b"260131235959z", b"2601312359Z")),
        *((23, text) for text in (b"260131235959+0000", b"260131235959-0100", b"20260131235959Z")),
        *((23, text) for text in (b"260230000000Z", b"261301000000Z", b"260100000000Z")),
        *((23, text) for text in (b"260131240000Z", b"260131236000Z", b"260131235960Z")),
        *((23, text) for text in (b"2601 1235959Z", b"-60131235959Z", b"26013123595\xb2Z")),
        *((24, text) for text in (b"20260131235959", b"20260131235959.0Z", b"00000101000000Z")),
        *((24, text) for text in (b"260131235959Z", b"20260131235959ZZ", b"2026013123595Z\n")),
        (4, b"20260131235959Z"),
        (0x37, b"260131235959Z"),
    ],
)
def test_other_times_are_refused(tag: int, text: bytes) -> None:
    with _fails("another element or form, expected a time such as 20260131235959Z"):
        der.moment(der.Element(tag, text, b""))


@each_row("read", [der.integer, der.bits, der.moment, der.Element.children])
def test_no_content_raises_another_error(read: Callable[[der.Element], object]) -> None:
    for tag in (2, 3, 23, 24, 0x30):
        for content in (b"", b"\xff" * 15, b"\x80", bytes(8192), b"\x00Z", b"\x30\xff"):
            with suppress(EvidenceError):
                read(der.Element(tag, content, b""))
