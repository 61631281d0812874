"""Evidence of a GPU is accepted as it was signed, and by no change of a byte."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.errors import EvidenceError
from tee_side.attest.nvidia import VerifiedNvidia, verify_nvidia
from tests.kit.evidence import changed, needs_vectors, read_bytes
from tests.kit.nvidia_chain import (
    BEGINS,
    FIELDS,
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

_SDK = "nvidia-attestation-sdk"
_SAMPLES = "nv-attestation-sdk-cpp/unit-tests/testdata/sample_attestation_data/gpu"


def verify(gpu: NvidiaGpu, report: bytes, now: datetime = NOW) -> VerifiedNvidia:
    with gpu.pinned():
        return verify_nvidia(report, gpu.certificates, NONCE, now)


def test_a_report_says_firmware_measurements_and_versions() -> None:
    found = verify(make_gpu(), make_gpu().sign(GENUINE))

    assert found == (FIRMWARE, MEASUREMENTS, "535.86.09", "96.00.5E.00.01")


def test_blackwell_says_its_firmware_in_another_extension() -> None:
    found = verify(make_blackwell(), make_blackwell().sign(GENUINE))

    assert found.firmware == FIRMWARE


def test_one_digest_pins_firmware_and_all_measurements() -> None:
    found = verify(make_gpu(), make_gpu().sign(GENUINE))
    last = found._replace(measurements=(*found.measurements[:-1], bytes(48)))

    assert len({found.digest, last.digest, found._replace(firmware=bytes(48)).digest}) == 3


@each_row(
    "fields, driver, vbios",
    [
        ((), "", ""),
        (((3, b"\x1b[31m\xff\0"),), "?[31m\ufffd", ""),
        (((6, b"\1"), FIELDS[1]), "535.86.09", "01"),
        (((9, b""), *FIELDS), "535.86.09", "96.00.5E.00.01"),
    ],
)
def test_versions_are_read_where_they_are(
    fields: Sequence[tuple[int, bytes]], driver: str, vbios: str
) -> None:
    found = verify(make_gpu(), make_gpu().sign(messages(NONCE, fields=fields)))

    assert (found.driver, found.vbios) == (driver, vbios)


def _with(place: int, value: int) -> bytes:
    return GENUINE[:place] + bytes([value]) + GENUINE[place + 1 :]


@each_row(
    "signed, where",
    [
        pytest.param(messages(bytes(32)), "report: nonce", id="another nonce"),
        pytest.param(b"", "report: nonce", id="nothing"),
        pytest.param(GENUINE[:RESPONSE], "report", id="the request alone"),
        pytest.param(_with(0, 0x12), "report", id="another version"),
        pytest.param(_with(PARAMETER, 0), "report", id="no signature asked for"),
        pytest.param(_with(PARAMETER + 1, 1), "report", id="one measurement asked for"),
        pytest.param(_with(SLOT, 1), "report", id="another slot"),
        pytest.param(_with(RESPONSE + 1, 0x7F), "report", id="an error as response"),
        pytest.param(_with(COUNT, 63), "report", id="another count"),
        pytest.param(_with(BLOCK_2, 3), "report", id="a measurement out of order"),
        pytest.param(_with(BLOCK_2 + 4, 0x81), "report", id="no digest as measurement"),
        pytest.param(messages(NONCE, MEASUREMENTS[:63]), "report", id="63 measurements"),
        pytest.param(GENUINE + b"\0", "report", id="a byte behind it"),
        pytest.param(GENUINE[:-1], "report", id="cut"),
        pytest.param(GENUINE + bytes(70_000), "report", id="much behind it"),
    ],
)
def test_other_messages_are_refused_even_if_they_are_signed(signed: bytes, where: str) -> None:
    with pytest.raises(EvidenceError) as raised:
        verify(make_gpu(), make_gpu().sign(signed))

    assert raised.value.where == f"NVIDIA {where}"


@each_row(
    "changes, where",
    [
        pytest.param({"leaf": "LS10 A01 GSP FMC LF"}, "certificates", id="a switch"),
        pytest.param({"chip": "GB202"}, "certificates", id="a GPU that is not known"),
        pytest.param({"leaf": "{} A01 SEC2 FMC LF"}, "certificates", id="other firmware"),
        pytest.param({"leaf": "{} A01 GSP FMC LF 2"}, "certificates", id="a longer name"),
        pytest.param({"leaf": "GB100 A01 GSP FMC LF"}, "certificates", id="two chips"),
        pytest.param({"identity": "NVIDIA LS10 Identity"}, "certificates", id="not its chip"),
        pytest.param({"dice": ""}, "leaf", id="no digest of firmware"),
        pytest.param({"dice": "2.23.133.5.4.4"}, "leaf", id="another extension"),
        pytest.param({"curve": ec.SECP256R1}, "leaf", id="a key of P-256"),
        *(({"no_authority": place}, "certificates") for place in (1, 2, 3)),
        *(({"ended": place}, "certificates") for place in range(5)),
    ],
)
def test_certificates_of_another_kind_are_refused(changes: dict[str, Any], where: str) -> None:
    gpu = make_gpu(**changes)

    with pytest.raises(EvidenceError) as raised:
        verify(gpu, gpu.sign(GENUINE))

    assert raised.value.where == f"NVIDIA {where}"


def test_certificates_are_valid_from_their_first_second_on_in_any_time_zone() -> None:
    gpu, east = make_gpu(), timezone(timedelta(hours=9))
    report = gpu.sign(GENUINE)

    assert verify(gpu, report, BEGINS.astimezone(east)).firmware == FIRMWARE
    with pytest.raises(EvidenceError, match=r"valid at 2022-03-01T08:59:59\+09:00"):
        verify(gpu, report, (BEGINS - timedelta(seconds=1)).astimezone(east))


@each_row(
    "chain, where",
    [
        pytest.param(lambda one, two: (), "certificates", id="none"),
        pytest.param(lambda one, two: one[:1], "certificates", id="the leaf alone"),
        pytest.param(lambda one, two: one[:-1], "certificates", id="without the root"),
        pytest.param(lambda one, two: (one[0], *one), "certificates", id="one more"),
        pytest.param(
            lambda one, two: (one[0], one[2], one[1], *one[3:]), "certificates", id="disordered"
        ),
        pytest.param(lambda one, two: (two[0], *one[1:]), "certificates", id="another leaf"),
        pytest.param(lambda one, two: (*two[:4], one[4]), "certificates", id="of another GPU"),
        pytest.param(lambda one, two: (*one[:4], two[4]), "root", id="another root"),
        pytest.param(lambda one, two: (b"", *one[1:]), "certificates", id="an empty leaf"),
        pytest.param(
            lambda one, two: (one[0] + b"\0", *one[1:]), "certificates", id="a byte behind one"
        ),
    ],
)
def test_a_chain_that_is_not_whole_and_in_order_is_refused(
    chain: Callable[[Sequence[bytes], Sequence[bytes]], Sequence[bytes]], where: str
) -> None:
    gpu = make_gpu()
    certificates = chain(gpu.certificates, make_blackwell().certificates)

    with gpu.pinned(), pytest.raises(EvidenceError) as raised:
        verify_nvidia(gpu.sign(GENUINE), certificates, NONCE, NOW)

    assert raised.value.where == f"NVIDIA {where}"


def test_a_report_is_signed_by_the_key_of_its_leaf() -> None:
    with pytest.raises(EvidenceError, match="NVIDIA report: signature"):
        verify(make_gpu(), make_blackwell().sign(GENUINE))


def test_the_root_that_is_pinned_is_of_nvidia() -> None:
    gpu = make_gpu()

    with pytest.raises(EvidenceError, match="NVIDIA root: got another certificate"):
        verify_nvidia(gpu.sign(GENUINE), gpu.certificates, NONCE, NOW)


def _accepted(report: bytes, chain: Sequence[bytes], seeds: range) -> list[int]:
    """Change the report by odd seeds, and a certificate by even ones; return which are accepted."""
    accepted = []
    for seed in seeds:
        parts = [report, *chain]
        place = 0 if seed % 2 else 1 + seed // 2 % len(chain)
        parts[place] = changed(parts[place], seed)
        with suppress(EvidenceError):
            verify_nvidia(parts[0], parts[1:], report[4:36], NOW)
            accepted.append(seed)
    return accepted


def test_no_change_of_a_byte_is_accepted() -> None:
    gpu = make_gpu()

    with gpu.pinned():
        assert _accepted(gpu.sign(GENUINE), gpu.certificates, range(60)) == []


@dataclass(frozen=True)
class Vector:
    """Genuine evidence, and what it says."""

    driver: str
    vbios: str
    firmware: str
    name: str
    place: int | None = None

    def read(self) -> tuple[bytes, list[bytes]]:
        """Return report and certificates."""
        if self.place is None:
            report, chain = (
                _sample(f"{self.name}AttestationReport"),
                _sample(f"{self.name}CertChain"),
            )
            return bytes.fromhex(report.decode()), _der(chain)
        path = f"{_SDK}/common-test-data/serialized_test_evidence/{self.name}.json"
        found = json.loads(read_bytes(path))[self.place]
        assert found["nonce"] == base64.b64decode(found["evidence"])[4:36].hex()
        return base64.b64decode(found["evidence"]), _der(base64.b64decode(found["certificate"]))


def _sample(name: str) -> bytes:
    return read_bytes(f"{_SDK}/{_SAMPLES}/{name}.txt")


def _der(pem: bytes) -> list[bytes]:
    return [one.public_bytes(Encoding.DER) for one in x509.load_pem_x509_certificates(pem)]


H200 = ("590.12", "96.00.A5.00.01", "956ecf09")
GENUINE_VECTORS = [
    Vector("535.86.09", "96.00.5E.00.01", "faa77bfb", "hopper"),
    Vector("575.32", "97.00.88.00.0F", "d090cab1", "blackwell"),
    Vector(*H200, "hopper_evidence", 0),
    *(Vector(*H200, "multi_gpu_hopper", place) for place in range(4)),
]


@needs_vectors
@each_row("vector", GENUINE_VECTORS, ids=lambda vector: f"{vector.name} {vector.place}")
def test_genuine_evidence_is_accepted(vector: Vector) -> None:
    report, chain = vector.read()
    found = verify_nvidia(report, chain, report[4:36], NOW)

    assert (found.driver, found.vbios) == (vector.driver, vector.vbios)
    assert found.firmware.hex().startswith(vector.firmware)


@needs_vectors
def test_four_gpus_with_the_same_firmware_have_the_same_digest() -> None:
    evidence = [vector.read() for vector in GENUINE_VECTORS[3:]]
    found = [verify_nvidia(report, chain, report[4:36], NOW) for report, chain in evidence]

    assert len({one.digest for one in found}) == 1
    assert len({chain[0] for _, chain in evidence}) == 4


@needs_vectors
def test_a_report_that_was_not_signed_is_refused() -> None:
    report = bytes.fromhex(_sample("hopperAttestationReportInvalidSignature").decode())
    _, chain = GENUINE_VECTORS[0].read()

    with pytest.raises(EvidenceError, match="NVIDIA report: signature: got a wrong one"):
        verify_nvidia(report, chain, report[4:36], NOW)


@needs_vectors
@pytest.mark.more
def test_no_change_of_genuine_evidence_is_accepted() -> None:
    for vector in GENUINE_VECTORS[:3]:
        assert _accepted(*vector.read(), range(400)) == []


@needs_vectors
@pytest.mark.more
def test_no_report_is_accepted_by_the_certificates_of_another_gpu() -> None:
    evidence = [vector.read() for vector in GENUINE_VECTORS]
    for (report, own), (_, chain) in itertools.permutations(evidence, 2):
        if own == chain:
            continue
        for place in range(5):
            swapped = [*own[:place], chain[place], *own[place + 1 :]]
            if swapped != own:
                with pytest.raises(EvidenceError):
                    verify_nvidia(report, swapped, report[4:36], NOW)
