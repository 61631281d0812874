"""Reads DER, as far as certificates need it; strict: one encoding for one value.

AMD's leaf certificates all have serial number 0, which libraries refuse or will refuse.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from protocol.errors import EvidenceError

INTEGER, BIT_STRING, OID = 2, 3, 6
UTC_TIME, GENERALIZED_TIME = 23, 24
SEQUENCE = 0x30
# Context-specific and constructed: optional fields are numbered with it.
CONTEXT = 0xA0

_LONG_FORM = 0x80
_MAX_LENGTH_BYTES = 3
_MAX_INTEGER_BYTES = 8


class Element(NamedTuple):
    """A tag, what it holds, and both with the length between them, as they were read."""

    tag: int
    content: bytes
    encoded: bytes

    def children(self) -> list[Element]:
        """Return the elements inside. Raises EvidenceError."""
        found, at = [], 0
        while at < len(self.content):
            element = _element(self.content, at)
            found.append(element)
            at += len(element.encoded)
        return found

    def require(self, tag: int) -> Element:
        """Return this element, which must have this tag. Raises EvidenceError."""
        if self.tag != tag:
            raise _refused(f"tag {self.tag:#x}", f"tag {tag:#x}")
        return self


def read(data: bytes, tag: int) -> Element:
    """Return the one element that `data` is. Raises EvidenceError."""
    element = _element(data, 0)
    if len(element.encoded) != len(data):
        raise _refused("more bytes behind an element", "nothing behind it")
    return element.require(tag)


def integer(element: Element) -> int:
    """Return a number that is not negative, of 8 bytes at most. Raises EvidenceError."""
    content = element.require(INTEGER).content
    long = len(content) > 1 and content[0] == 0 and content[1] < _LONG_FORM
    if not 0 < len(content) <= _MAX_INTEGER_BYTES or content[0] >= _LONG_FORM or long:
        raise _refused("another encoding", "a number of the fewest bytes, 8 at most, not below 0")
    return int.from_bytes(content)


def bits(element: Element) -> bytes:
    """Return a string of whole bytes. Raises EvidenceError."""
    content = element.require(BIT_STRING).content
    if content[:1] != b"\0":
        raise _refused("bits that are no whole bytes", "whole bytes")
    return content[1:]


def moment(element: Element) -> datetime:
    """Return a time of a certificate, to the second. Raises EvidenceError."""
    text = element.content.decode("ascii", "replace")
    if element.tag == UTC_TIME:
        text = ("19" if text >= "5" else "20") + text
    known = element.tag in (UTC_TIME, GENERALIZED_TIME) and len(text) == 15 and text[-1] == "Z"
    try:
        if known and text[:-1].isdigit():
            return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:  # such as a 32nd day
        pass
    raise _refused("another element or form", "a time such as 20260131235959Z")


def _element(data: bytes, at: int) -> Element:
    head = data[at : at + 2]
    if len(head) < 2 or head[0] & 0x1F == 0x1F:
        raise _refused("no tag of one byte with a length", "an element")
    length, begin = head[1], at + 2
    if length >= _LONG_FORM:
        size = length - _LONG_FORM
        length = int.from_bytes(data[begin : begin + size])
        begin += size
        shortest = (length.bit_length() + 7) // 8
        if size > _MAX_LENGTH_BYTES or length < _LONG_FORM or shortest != size:
            raise _refused("another encoding of a length", "the shortest, of 3 bytes at most")
    if len(data) < begin + length:
        raise _refused(f"{len(data) - begin} bytes", f"the {length} that its length says")
    return Element(head[0], data[begin : begin + length], data[at : begin + length])


def _refused(got: str, expected: str) -> EvidenceError:
    return EvidenceError("certificate", got=got, expected=expected)
