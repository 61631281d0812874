"""Evidence of a GPU is accepted as it was signed, and by no change of a byte."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.errors import EvidenceError
from tee_side.attest.nvidia import VerifiedNvidia, verify_nvidia
from tests.kit.evidence import changed, read_vector
from tests.kit.nvidia_chain import (
    BEGINS,
    FIRMWARE,
    MEASUREMENTS,
    NvidiaGpu,
    make_blackwell,
    make_gpu,
    messages,
)
from tests.kit.rows import each_row

NOW = datetime(2026, 11, 21, tzinfo=UTC)
NONCE = bytes(range(100, 132))
GENUINE = messages(NONCE)
# Where what is in the messages.
PARAMETER, SLOT, RESPONSE, COUNT, BLOCK_2 = 2, 36, 37, 41, 100

Chain = Sequence[bytes]


def verify(gpu: NvidiaGpu, report: bytes, now: datetime = NOW, chain: Chain = ()) -> VerifiedNvidia:
    with gpu.pinned():
        return verify_nvidia(report, chain or gpu.certificates, NONCE, now)


def refuses(where: str, gpu: NvidiaGpu, report: bytes, **more: Any) -> None:
    with pytest.raises(EvidenceError) as refused:
        verify(gpu, report, **more)
    assert refused.value.where == f"NVIDIA {where}"


def test_a_report_says_firmware_measurements_and_versions() -> None:
    found = verify(make_gpu(), make_gpu().sign(GENUINE))
    assert found == (FIRMWARE, MEASUREMENTS, "535.86.09", "96.00.5E.00.01")
    # In another extension.
    assert verify(make_blackwell(), make_blackwell().sign(GENUINE)).firmware == FIRMWARE
    # One digest pins firmware and all measurements.
    last = found._replace(measurements=(*found.measurements[:-1], bytes(48)))
    assert len({found.digest, last.digest, found._replace(firmware=bytes(48)).digest}) == 3


def _with(place: int, value: int) -> bytes:
    return GENUINE[:place] + bytes([value]) + GENUINE[place + 1 :]


@each_row(
    "signed, where",
    [
        (messages(bytes(32)), "report: nonce"),
        (b"", "report: nonce"),
        (_with(0, 0x12), "report"),  # another version
        (_with(PARAMETER, 0), "report"),  # no signature asked for
        (_with(PARAMETER + 1, 1), "report"),  # one measurement asked for
        (_with(SLOT, 1), "report"),
        (_with(RESPONSE + 1, 0x7F), "report"),  # an error
        (_with(COUNT, 63), "report"),
        (_with(BLOCK_2, 3), "report"),  # out of order
        (_with(BLOCK_2 + 4, 0x81), "report"),  # no digest
        (messages(NONCE, MEASUREMENTS[:63]), "report"),
        (GENUINE + b"\0", "report"),
        (GENUINE[:-1], "report"),
    ],
)
def test_other_messages_are_refused_even_if_they_are_signed(signed: bytes, where: str) -> None:
    refuses(where, make_gpu(), make_gpu().sign(signed))


@each_row(
    "changes, where",
    [
        ({"leaf": "LS10 A01 GSP FMC LF"}, "certificates"),  # a switch
        ({"chip": "GB202"}, "certificates"),
        ({"leaf": "GB100 A01 GSP FMC LF"}, "certificates"),
        ({"identity": "NVIDIA LS10 Identity"}, "certificates"),
        ({"dice": ""}, "leaf"),
        ({"dice": "2.23.133.5.4.4"}, "leaf"),
        ({"curve": ec.SECP256R1}, "leaf"),
        *(({"no_authority": place}, "certificates") for place in (1, 3)),
        *(({"ended": place}, "certificates") for place in (0, 2, 4)),
    ],
)
def test_certificates_of_another_kind_are_refused(changes: dict[str, Any], where: str) -> None:
    gpu = make_gpu(**changes)
    refuses(where, gpu, gpu.sign(GENUINE))


def test_a_chain_that_is_not_whole_and_in_order_is_refused() -> None:
    gpu, two = make_gpu(), make_blackwell().certificates
    one = gpu.certificates
    for chain, where in (
        (one[:1], "certificates"),
        ((one[0], *one), "certificates"),
        ((one[0], one[2], one[1], *one[3:]), "certificates"),
        ((two[0], *one[1:]), "certificates"),
        ((*two[:4], one[4]), "certificates"),
        ((*one[:4], two[4]), "root"),
        ((one[0] + b"\0", *one[1:]), "certificates"),
    ):
        refuses(where, gpu, gpu.sign(GENUINE), chain=chain)


def test_a_report_is_by_the_key_of_its_leaf_below_the_root_that_is_pinned() -> None:
    gpu = make_gpu()
    refuses("report: signature", gpu, make_blackwell().sign(GENUINE))
    for certificates, where in ((gpu.certificates, "root"), ((), "certificates")):
        with pytest.raises(EvidenceError, match=f"NVIDIA {where}: got "):
            verify_nvidia(gpu.sign(GENUINE), certificates, NONCE, NOW)
    assert verify(gpu, gpu.sign(GENUINE), BEGINS).firmware == FIRMWARE
    refuses("certificates", gpu, gpu.sign(GENUINE), now=BEGINS - timedelta(seconds=1))


H200 = ("590.12", "96.00.A5.00.01", "956ecf09")
GENUINE_VECTORS = [
    ("gh100", ("535.86.09", "96.00.5E.00.01", "faa77bfb")),
    ("gb100", ("575.32", "97.00.88.00.0F", "d090cab1")),
    ("h200-0", H200),
    ("h200-1", H200),
]


@each_row("name, said", GENUINE_VECTORS)
def test_genuine_evidence_is_accepted_and_no_change_of_it(
    name: str, said: tuple[str, str, str]
) -> None:
    report = read_vector(f"nvidia/{name}-report.bin")
    pem = x509.load_pem_x509_certificates(read_vector(f"nvidia/{name}-chain.pem"))
    chain = [one.public_bytes(Encoding.DER) for one in pem]
    found = verify_nvidia(report, chain, report[4:36], NOW)
    assert (found.driver, found.vbios, found.firmware.hex()[:8]) == said
    for seed in range(20):  # a certificate by even ones
        parts = [report, *chain]
        place = 0 if seed % 2 else 1 + seed // 2 % len(chain)
        parts[place] = changed(parts[place], seed)
        with pytest.raises(EvidenceError):
            verify_nvidia(parts[0], parts[1:], report[4:36], NOW)
