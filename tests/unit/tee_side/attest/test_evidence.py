"""Tests of evidence as bytes: what is written is read, within limits, and nothing is quoted."""

from __future__ import annotations

import re
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from protocol.errors import EvidenceError
from tee_side.attest.evidence import Evidence
from tests.kit.rows import each_row

GOOD: dict[str, Any] = {
    "kind": "snp",
    "report": b"r" * 1184,
    "certificates": (b"leaf", b"intermediate", b"root"),
    "collateral": b"",
    "gpus": {},
}
_GPU = {"certificates": [b"leaf"], "report": b"report"}
_SECRET = "written-by-the-peer"


def _packed(**changed: Any) -> bytes:
    fields = {name: value for name, value in {**GOOD, **changed}.items() if value is not ...}
    packed: bytes = msgpack.packb(dict(sorted(fields.items())))
    return packed


@each_row("kind", ["snp", "tdx", "simulated"])
def test_what_is_written_is_read(kind: str) -> None:
    evidence = Evidence(**{**GOOD, "kind": kind})
    assert Evidence.decode(evidence.encode()) == evidence
    assert Evidence.decode(_packed(kind=kind)) == evidence


def test_gpus_go_with_it() -> None:
    found = Evidence.decode(_packed(gpus={"0": _GPU, "1": _GPU}))
    assert found.gpus["1"].certificates == (b"leaf",)
    assert found.encode() == _packed(gpus={"0": _GPU, "1": _GPU})


def test_it_does_not_change() -> None:
    with pytest.raises(ValidationError):
        Evidence(**GOOD).kind = "tdx"  # type: ignore[misc]


def test_largest() -> None:
    room = Evidence.max_bytes - len(_packed(report=bytes(70_000))) + 70_000
    data = _packed(report=bytes(room))
    assert len(data) == Evidence.max_bytes
    assert len(Evidence.decode(data).report) == room


_MAP = "expected a map within limits"


@each_row(
    ("data", "text"),
    [
        (bytes(Evidence.max_bytes + 1), "evidence: got 131073 bytes, expected at most 131072"),
        (b"", "evidence: got undecodable msgpack"),
        (b"\xc1", "evidence: got undecodable msgpack"),
        (_packed()[:-1], "evidence: got undecodable msgpack"),
        (_packed() + b"\0", "evidence: got undecodable msgpack"),
        (b"\x90", f"evidence: got list, {_MAP}"),
        (b"\xc0", f"evidence: got NoneType, {_MAP}"),
        (msgpack.packb({1: 2}), "evidence: got undecodable msgpack"),
        (msgpack.packb({b"kind": "snp"}), "evidence: got undecodable msgpack"),
        (b"\x82" + msgpack.packb("kind") * 4, "evidence: got undecodable msgpack"),
        (b"\xdc\xff\xff" * 21845, "evidence: got undecodable msgpack"),
        (b"\x91" * 60_000, "evidence: got undecodable msgpack"),
        (msgpack.packb({f"{n}": 0 for n in range(257)}), "evidence: got undecodable msgpack"),
        (_packed(report=msgpack.ExtType(1, b"x")), "evidence: got undecodable msgpack"),
        (_packed(kind=...), "evidence.kind: got nothing, expected a value"),
        (_packed(report=...), "evidence.report: got nothing, expected a value"),
        (_packed(certificates=...), "evidence.certificates: got nothing, expected a value"),
        (_packed(collateral=...), "evidence.collateral: got nothing, expected a value"),
        (_packed(gpus=...), "evidence: got another encoding, expected names in order"),
        (_packed(gpus={"0": b""}), "evidence.gpus: got a value of type bytes, expected"),
        (_packed(gpus={"0": {**_GPU, _SECRET: 1}}), "evidence.gpus: got an unknown field"),
        (_packed(gpus={_SECRET: {**_GPU, "report": ""}}), "evidence.gpus: got a string of 0"),
        (_packed(gpus={f"{n}": _GPU for n in range(9)}), "evidence.gpus: got a _Map of 9 items"),
        (_packed(**{_SECRET: 1}), "evidence: got an unknown field, expected only those of the sch"),
        (_packed(kind=_SECRET), "evidence.kind: got a string of 19 characters, expected 'snp', 't"),
        (_packed(kind="SNP"), "evidence.kind: got a string of 3 characters"),
        (_packed(kind=None), "evidence.kind: got None"),
        (_packed(report=_SECRET), "evidence.report: got a string of 19 characters, expected a val"),
        (_packed(report=None), "evidence.report: got None, expected a valid bytes"),
        (_packed(report=1), "evidence.report: got 1, expected a valid bytes"),
        (_packed(collateral=None), "evidence.collateral: got None, expected a valid bytes"),
        (_packed(certificates=b"x"), "evidence.certificates: got a value of type bytes, expected"),
        (_packed(certificates={}), "evidence.certificates: got a _Map of 0 items, expected"),
        (_packed(certificates=[b"", _SECRET]), "evidence.certificates: got a string of 19 charact"),
        (_packed(certificates=[[b""]]), "evidence: got undecodable msgpack"),
        (_packed(certificates=[b""] * 65), "evidence: got undecodable msgpack"),
    ],
)
def test_refused(data: bytes, text: str) -> None:
    with pytest.raises(EvidenceError, match=f"^{re.escape(text)}") as caught:
        Evidence.decode(data)
    assert _SECRET not in str(caught.value)


def test_a_key_twice_is_refused() -> None:
    """Two readers could take different ones."""
    packed = bytearray(_packed())
    packed[0] += 1
    with pytest.raises(EvidenceError, match="a duplicate key"):
        Evidence.decode(bytes(packed) + msgpack.packb("kind") + msgpack.packb("tdx"))
