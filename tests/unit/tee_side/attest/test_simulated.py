"""Tests of the simulated TEE: what it writes is read, and nothing else is."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import EvidenceError
from tee_side.attest import simulated
from tee_side.attest.evidence import Evidence
from tee_side.attest.simulated import simulate, verify_simulated
from tests.kit.rows import each_row
from tests.kit.snp_chain import make_report

MEASUREMENT, DATA = b"m" * 48, b"d" * 64
REPORT = simulate(DATA, MEASUREMENT).report
_SIGNED = len(REPORT) - 64
_STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def test_what_is_written_is_read() -> None:
    evidence = simulate(DATA, MEASUREMENT)
    assert evidence.kind == "simulated"
    assert evidence.certificates == ()
    assert evidence.collateral == b""
    verified = verify_simulated(evidence.report)
    assert verified == (MEASUREMENT, DATA, "simulated")
    assert Evidence.decode(evidence.encode()) == evidence


def test_key_is_the_same_everywhere() -> None:
    """Evidence of one machine is read on another; it proves nothing on either."""
    assert simulate(DATA, MEASUREMENT).report == REPORT


def _signed(data: bytes) -> bytes:
    return data + simulated._ROOT.sign(data)


@each_row(
    "report",
    [
        *(b"", b"x", REPORT[:-1], REPORT + b"\0", REPORT[1:], bytes(len(REPORT))),
        *(make_report(), REPORT[:_SIGNED], REPORT[:_SIGNED] + _STRANGER.sign(REPORT[:_SIGNED])),
        *(_signed(b""), _signed(REPORT[: _SIGNED - 1]), _signed(REPORT[:_SIGNED] + b"\0")),
        *(_signed(bytes(_SIGNED)), _signed(b"\0" + REPORT[1:_SIGNED])),
    ],
)
def test_all_else_is_refused(report: bytes) -> None:
    text = "^simulated report: got other bytes, expected one that was signed$"
    with pytest.raises(EvidenceError, match=text):
        verify_simulated(report)


def test_every_byte_counts() -> None:
    for at in range(len(REPORT)):
        changed = bytearray(REPORT)
        changed[at] ^= 1
        with pytest.raises(EvidenceError):
            verify_simulated(bytes(changed))
