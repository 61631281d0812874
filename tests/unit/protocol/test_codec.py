"""msgpack under limits: one map of string keys, or MALFORMED_MESSAGE, and nothing quoted."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest

from protocol.codec import MAX_ARRAY_LENGTH, MAX_DEPTH, MAX_STRING_BYTES, pack, unpack
from protocol.errors import ErrorCode, ProtocolError
from tests.kit.rows import each_row

HUGE = struct.pack(">I", 2**32 - 1)


def _unpack(data: bytes, max_bytes: int = 65536, max_containers: int = 64) -> dict[str, Any]:
    return unpack(data, where="request", max_bytes=max_bytes, max_containers=max_containers)


def _nested(depth: int) -> dict[str, Any]:
    return {"a": _nested(depth - 1)} if depth > 1 else {}


@each_row(
    ("data", "text"),
    [
        (b"", "incomplete input"),
        (b"\xc1", "FormatError"),
        (b"\x81", "incomplete input"),
        (b"\x81\xa1a", "incomplete input"),
        (b"\x80\x80", "ExtraData"),
        (b"\x90", "got list, expected a map"),
        (b"\x01", "got int, expected a map"),
        (b"\xc0", "got NoneType, expected a map"),
        (b"\xa6canary", "got str, expected a map"),
        (b"\xc4\x06canary", "got bytes, expected a map"),
        (b"canary", "ExtraData"),
        (b"\x81\xa1a\xc4\x06canary\xff", "ExtraData"),
        (b"\x82\xc4\x06canary\xc0\xa1a\xc0", "a key that is not a string"),
        (b"\x81\xa1\xff\xc0", "UnicodeDecodeError"),
        (b"\x81\xa1a\xa1\xff", "UnicodeDecodeError"),
        (b"\x81\x01\xc0", "int is not allowed for map key"),
        (b"\x81\xc0\xc0", "is not allowed for map key"),
        (b"\x81\x90\xc0", "is not allowed for map key"),
        (b"\x81\xa1a\xd4\x05x", "max_ext_len"),
        (b"\x81\xa1a\xd6\xff\0\0\0\0", "max_ext_len"),
        (b"\x81\xa1a\xc7\x00\x05", "an extension type"),
        (b"\x82\xa1a\xc0\xa1a\xc0", "a duplicate key"),
        (b"\x81\xa1a\x91\x90", "an array of containers"),
        (b"\x81\xa1a\x91\x80", "an array of containers"),
        (msgpack.packb(_nested(MAX_DEPTH + 1)), f"nested more than {MAX_DEPTH} deep"),
        (msgpack.packb({"a": [0] * (MAX_ARRAY_LENGTH + 1)}), "max_array_len"),
        (msgpack.packb({"a": "x" * (MAX_STRING_BYTES + 1)}), "max_str_len"),
        (msgpack.packb({"x" * (MAX_STRING_BYTES + 1): 1}), "max_str_len"),
        (msgpack.packb({str(n): [] for n in range(64)}), "more than 64 maps and arrays"),
        (msgpack.packb({str(n): {} for n in range(64)}), "more than 64 maps and arrays"),
        (b"\x81\xa1a\xc6" + HUGE, "incomplete input"),
        (b"\x81\xa1a\xdb" + HUGE, "incomplete input"),
        (b"\x81\xa1a\xdd" + HUGE, "max_array_len"),
        (b"\xdf" + HUGE, "max_map_len"),
        (b"\x81\xa1a" * 100_000, "StackError"),
        (b"\x91" * 60_000, "StackError"),
    ],
)
def test_what_is_no_map_within_the_limits_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=r"^request: got ") as info:
        _unpack(data, max_bytes=2**20)
    assert info.value.code is ErrorCode.MALFORMED_MESSAGE
    assert text in str(info.value)
    assert "canary" not in str(info.value)


def test_limits_are_those_that_were_given() -> None:
    widest = {"ü": list(range(MAX_ARRAY_LENGTH)), "a": "x" * MAX_STRING_BYTES, "b": b"\0\xff"}
    for message in ({}, widest, _nested(MAX_DEPTH), {"a": [1, 2.0, None, True, -1, 2**63]}):
        assert _unpack(pack(message)) == message
    data = pack({"a": [b"x" * 100], "b": {}})
    assert _unpack(data, len(data), 3) == {"a": [b"x" * 100], "b": {}}
    with pytest.raises(ProtocolError, match="more than 2 maps and arrays"):
        _unpack(data, len(data), 2)
    for buffer in (data, bytearray(data), memoryview(data)):
        with pytest.raises(ProtocolError) as info:
            unpack(buffer, where="reply", max_bytes=len(data) - 1, max_containers=64)
        assert info.value.code is ErrorCode.LIMIT_EXCEEDED
        assert str(info.value) == f"reply: got {len(data)} bytes, expected at most {len(data) - 1}"
