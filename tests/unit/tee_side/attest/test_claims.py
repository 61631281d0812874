"""Tests of claims: one encoding of them, every field checked, one digest for all of them."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from protocol.errors import EvidenceError
from tee_side.attest.claims import Claims, report_data
from tests.kit.rows import each_row

_DIGEST = bytes(range(32))
GOOD: dict[str, Any] = {
    "purpose": "serve",
    "nonce": b"n" * 32,
    "time": 1_780_000_000,
    "tls_key": _DIGEST,
    "hpke_suite": "mlkem768-x25519",
    "hpke_key": b"h" * 1216,
    "receipt_key": _DIGEST,
    "model": _DIGEST,
    "policy": _DIGEST,
    "settings": _DIGEST,
    "curve_keys": {"service 0": _DIGEST, "runner": _DIGEST},
    "plugins": {},
    "gpus": {},
    "attested_services": "none",
    "version": "0.1.0",
}
_SECRET = "written-by-the-peer"


def _in_order(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _in_order(value) if isinstance(value, dict) else value
        for name, value in sorted(fields.items())
    }


def _packed(**changed: Any) -> bytes:
    fields = {name: value for name, value in {**GOOD, **changed}.items() if value is not ...}
    packed: bytes = msgpack.packb(_in_order(fields))
    return packed


def test_what_is_written_is_read() -> None:
    claims = Claims(**GOOD)
    assert claims.encode() == _packed()
    assert Claims.decode(_packed()) == claims
    # The digest is of the bytes behind the domain.
    expected = hashlib.sha512(b"TSQP attestation claims 1\0" + _packed()).digest()
    assert report_data(_packed()) == expected
    for changed in (
        {"nonce": b"", "time": 0},
        {"purpose": "key", "receipt_key": None, "time": 2**53 - 1},
        {"curve_keys": {f"service {n}": _DIGEST for n in range(255)}},
        {"attested_services": "", "version": "v" * 256},
    ):
        assert Claims.decode(_packed(**changed)) == Claims(**{**GOOD, **changed})


@each_row("written", ["v" * 257, "1\nverified", "\x1b[2J", "ü"])
def test_a_name_that_could_not_be_read_or_shown_is_not_written(written: str) -> None:
    for name in ("version", "attested_services"):
        with pytest.raises(ValidationError):
            Claims(**{**GOOD, name: written})


def test_each_field_is_in_the_digest() -> None:
    others: dict[str, Any] = {
        "purpose": "key",
        "nonce": b"o" * 32,
        "time": 1_780_000_001,
        "hpke_suite": "x25519",
        "hpke_key": b"o",
        # The same keys of other owners.
        "curve_keys": {"service 1": _DIGEST, "runner": _DIGEST},
        "plugins": {"a.py": _DIGEST},
        "gpus": {"0": _DIGEST},
        "attested_services": "snp",
        "version": "0.1.1",
    }
    digests = {report_data(_packed())}
    for name in GOOD:
        digests.add(report_data(Claims(**{**GOOD, name: others.get(name, b"o" * 32)}).encode()))
    assert len(digests) == 1 + len(GOOD)


@each_row("name", [name for name in GOOD if name not in ("curve_keys", "plugins", "gpus")])
def test_every_field_has_its_type(name: str) -> None:
    absent = [] if name == "receipt_key" else [None]
    for value in (*absent, [], {}, True, 1.5, _SECRET if isinstance(GOOD[name], bytes) else b"x"):
        with pytest.raises(EvidenceError, match=f"^claims.{name}: got ") as caught:
            Claims.decode(_packed(**{name: value}))
        assert _SECRET not in str(caught.value)


_NO_KEY = "got a value of type bytes, expected a public key of Ed25519, and no point of small"
_LONG = "claims: got undecodable msgpack"


@each_row(
    ("data", "text"),
    [
        (bytes(Claims.max_bytes + 1), "claims: got 16385 bytes, expected at most 16384"),
        *(
            (_packed(**{name: ...}), f"claims.{name}: got nothing, expected a value")
            for name in GOOD
            if name != "gpus"
        ),
        (_packed(gpus=...), "claims: got another encoding, expected names in order"),
        (
            _packed(**{_SECRET: 1}),
            "claims: got an unknown field, expected only those of the schema",
        ),
        (_packed(purpose="any"), "claims.purpose: got a string of 3 characters, expected"),
        (_packed(receipt_key=bytes(32)), f"claims.receipt_key: {_NO_KEY}"),
        (_packed(nonce=b"n" * 33), "claims.nonce: got a value of type bytes, expected"),
        (_packed(time=2**53), "claims.time: got a large integer, expected"),
        *(
            (_packed(**{name: bytes(size)}), f"claims.{name}: got a value of type bytes, expected")
            for name in ("tls_key", "receipt_key", "model", "policy", "settings")
            for size in (31, 33)
        ),
        (_packed(hpke_suite="none"), "claims.hpke_suite: got a string of 4 characters, expected"),
        (_packed(hpke_key=bytes(2049)), "claims.hpke_key: got a value of type bytes, expected"),
        (_packed(version="v" * 257), _LONG),
        (_packed(curve_keys={f"{_SECRET}.x": None}), "claims.curve_keys: got None, expected"),
        (_packed(curve_keys={"x" * 257: _DIGEST}), _LONG),
        (_packed(plugins={_SECRET: "x" * 32}), "claims.plugins: got a string of 32 characters"),
        (_packed(curve_keys={f"{n}": _DIGEST for n in range(257)}), _LONG),
    ],
)
def test_refused(data: bytes, text: str) -> None:
    with pytest.raises(EvidenceError, match=f"^{re.escape(text)}") as caught:
        Claims.decode(data)
    assert _SECRET not in str(caught.value)


@each_row(
    "data",
    [
        msgpack.packb(dict(reversed(_in_order(GOOD).items()))),
        msgpack.packb(_in_order(GOOD) | {"curve_keys": GOOD["curve_keys"]}),
        # A longer form of the outer map, and of a length.
        b"\xde\x00\x0f" + _packed()[1:],
        _packed().replace(b"\xc4\x20" + b"n" * 32, b"\xc5\x00\x20" + b"n" * 32),
        _packed(time=5).replace(b"\xa4time\x05", b"\xa4time\xcc\x05"),
    ],
)
def test_another_encoding_of_the_same_is_refused(data: bytes) -> None:
    assert data not in (_packed(), _packed(time=5))
    text = "^claims: got another encoding, expected names in order$"
    with pytest.raises(EvidenceError, match=text):
        Claims.decode(data)
