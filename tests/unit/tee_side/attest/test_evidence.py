"""Evidence as bytes: what is written is read, within limits; and that of the simulated TEE."""

from __future__ import annotations

import re
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from protocol.errors import EvidenceError
from tee_side.attest import simulated
from tee_side.attest.evidence import Evidence
from tee_side.attest.simulated import simulate, verify_simulated
from tests.kit.rows import each_row
from tests.kit.snp_chain import make_report

GOOD: dict[str, Any] = {
    "kind": "snp",
    "report": b"r" * 1184,
    "certificates": (b"leaf", b"intermediate", b"root"),
    "collateral": b"",
    "gpus": {},
}
_GPU = {"certificates": [b"leaf"], "report": b"report"}
_SECRET = "written-by-the-peer"
_UNDECODABLE = "evidence: got undecodable msgpack"


def _packed(**changed: Any) -> bytes:
    fields = {name: value for name, value in {**GOOD, **changed}.items() if value is not ...}
    packed: bytes = msgpack.packb(dict(sorted(fields.items())))
    return packed


def test_what_is_written_is_read_and_does_not_change() -> None:
    for kind in ("snp", "tdx", "simulated"):
        evidence = Evidence(**{**GOOD, "kind": kind})
        assert Evidence.decode(evidence.encode()) == Evidence.decode(_packed(kind=kind)) == evidence
        with pytest.raises(ValidationError):
            evidence.kind = "snp"  # type: ignore[misc]
    found = Evidence.decode(_packed(gpus={"0": _GPU, "1": _GPU}))
    assert found.gpus["1"].certificates == (b"leaf",)
    assert found.encode() == _packed(gpus={"0": _GPU, "1": _GPU})
    room = Evidence.max_bytes - len(_packed(report=bytes(70_000))) + 70_000
    longest = _packed(report=bytes(room))
    assert len(longest) == Evidence.max_bytes
    assert len(Evidence.decode(longest).report) == room


def _twice() -> bytes:
    """Return a map with a key twice: two readers could take different ones."""
    packed = _packed()
    return bytes([packed[0] + 1]) + packed[1:] + msgpack.packb("kind") + msgpack.packb("tdx")


@each_row(
    ("data", "text"),
    [
        (bytes(Evidence.max_bytes + 1), "evidence: got 131073 bytes, expected at most 131072"),
        (b"", _UNDECODABLE),
        (_packed()[:-1], _UNDECODABLE),
        (_packed() + b"\0", _UNDECODABLE),
        (b"\xc0", "evidence: got NoneType, expected a map within limits"),
        (msgpack.packb({b"kind": "snp"}), _UNDECODABLE),
        (b"\xdc\xff\xff" * 21845, _UNDECODABLE),
        (b"\x91" * 60_000, _UNDECODABLE),
        (_twice(), f"{_UNDECODABLE} (ValueError: a duplicate key)"),
        (_packed(report=msgpack.ExtType(1, b"x")), _UNDECODABLE),
        *(
            (_packed(**{name: ...}), f"evidence.{name}: got nothing, expected a value")
            for name in ("kind", "report", "certificates", "collateral")
        ),
        (_packed(gpus=...), "evidence: got another encoding, expected names in order"),
        (_packed(gpus={"0": b""}), "evidence.gpus: got a value of type bytes, expected"),
        (_packed(gpus={"0": {**_GPU, _SECRET: 1}}), "evidence.gpus: got an unknown field"),
        (_packed(gpus={_SECRET: {**_GPU, "report": ""}}), "evidence.gpus: got a string of 0"),
        (_packed(gpus={f"{n}": _GPU for n in range(9)}), "evidence.gpus: got a _Map of 9 items"),
        (_packed(**{_SECRET: 1}), "evidence: got an unknown field, expected only those of the sch"),
        (_packed(kind=_SECRET), "evidence.kind: got a string of 19 characters, expected 'snp', 't"),
        (_packed(kind=None), "evidence.kind: got None"),
        (_packed(report=_SECRET), "evidence.report: got a string of 19 characters, expected a val"),
        (_packed(collateral=None), "evidence.collateral: got None, expected a valid bytes"),
        (_packed(certificates=b"x"), "evidence.certificates: got a value of type bytes, expected"),
        (_packed(certificates=[b"", _SECRET]), "evidence.certificates: got a string of 19 charact"),
        (_packed(certificates=[b""] * 65), _UNDECODABLE),
    ],
)
def test_refused(data: bytes, text: str) -> None:
    with pytest.raises(EvidenceError, match=f"^{re.escape(text)}") as caught:
        Evidence.decode(data)
    assert _SECRET not in str(caught.value)


MEASUREMENT, DATA = b"m" * 48, b"d" * 64
REPORT = simulate(DATA, MEASUREMENT).report
_SIGNED = len(REPORT) - 64
_STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def test_what_the_simulated_tee_writes_is_read_everywhere() -> None:
    evidence = simulate(DATA, MEASUREMENT)
    assert (evidence.kind, evidence.certificates, evidence.collateral) == ("simulated", (), b"")
    assert verify_simulated(evidence.report) == (MEASUREMENT, DATA, "simulated")
    # Its key is the same everywhere, and so it proves nothing.
    assert evidence.report == REPORT


def _signed(data: bytes) -> bytes:
    return data + simulated._ROOT.sign(data)


def _flipped(at: int) -> bytes:
    return REPORT[:at] + bytes([REPORT[at] ^ 1]) + REPORT[at + 1 :]


def test_all_else_is_refused_as_a_simulated_report() -> None:
    others = [
        *(b"", b"x", REPORT[:-1], REPORT + b"\0", REPORT[1:], bytes(len(REPORT))),
        *(make_report(), REPORT[:_SIGNED], REPORT[:_SIGNED] + _STRANGER.sign(REPORT[:_SIGNED])),
        *(_signed(b""), _signed(REPORT[: _SIGNED - 1]), _signed(REPORT[:_SIGNED] + b"\0")),
        *(_signed(bytes(_SIGNED)), _signed(b"\0" + REPORT[1:_SIGNED])),
        *map(_flipped, range(len(REPORT))),
    ]
    for other in others:
        with pytest.raises(EvidenceError, match="simulated report: got other bytes"):
            verify_simulated(other)
