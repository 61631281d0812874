"""Evidence of a GPU and quotes of TDX are accepted as they were signed, and by no change."""

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.errors import EvidenceError, SettingsError
from tee_side.attest.guests import VerifiedTdx, verify_tdx
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


QUOTED = datetime(2026, 3, 16, 23, 34, 5, tzinfo=UTC)
_REGISTERS = ("mr_td", "rt_mr0", "rt_mr1", "rt_mr2", "rt_mr3", "report_data", "mr_config_id")
BODY = {
    name: f"{number:02x}" * (64 if name == "report_data" else 48)
    for number, name in enumerate(_REGISTERS, start=1)
}
BODY["td_attributes"] = "0000001000000000"


def answer(report: dict[str, Any], status: str = "UpToDate") -> dict[str, Any]:
    return {"status": status, "advisory_ids": ["INTEL-SA-00001"], "report": report}


def verify_told(
    told: dict[str, Any] | ValueError, collateral: bytes = b'{"a": 1}', now: datetime = QUOTED
) -> VerifiedTdx:
    """Verify with functions of dcap-qvl that answer what they are told, or fail with it."""
    library = Mock()
    library.QuoteCollateralV3.from_json = str
    library.verify.side_effect = [told]
    if isinstance(told, dict):
        library.verify.side_effect = [SimpleNamespace(to_json=lambda: json.dumps(told))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "dcap_qvl", library)
        found = verify_tdx(b"quote", collateral, now)
    library.verify.assert_called_once_with(b"quote", collateral.decode(), 1_773_704_045)
    return found


@each_row("report", [{"TD10": BODY}, {"TD15": {"base": BODY, "mr_service_td": "00" * 48}}])
def test_what_the_library_verified_is_returned(report: dict[str, Any]) -> None:
    found = verify_told(
        answer(report, "OutOfDate"), now=QUOTED.astimezone(timezone(timedelta(hours=-7)))
    )
    rtmr = (b"\2" * 48, b"\3" * 48, b"\4" * 48, b"\5" * 48)
    assert found == (b"\1" * 48, rtmr, b"\6" * 64, b"\7" * 48, "OutOfDate")


def _with_attributes(attributes: str) -> dict[str, Any]:
    return answer({"TD10": BODY | {"td_attributes": attributes}})


@each_row(
    "told, where",
    [
        (answer({"TD10": BODY}, "Revoked"), "TCB status"),
        (answer({"SgxEnclave": BODY}), "kind of TEE"),
        (answer({"TD15Ex": {"base": {"base": BODY}}}), "kind of TEE"),
        (_with_attributes("0000002000000000"), "attributes"),
        # A service TD migrates the guest.
        (answer({"TD15": {"base": BODY, "mr_service_td": "01" + "00" * 47}}), "attributes"),
        *((_with_attributes(f"{1 << bit:02x}00001000000000"), "attributes") for bit in range(8)),
    ],
)
def test_what_the_library_lets_pass_is_refused(told: dict[str, Any], where: str) -> None:
    with pytest.raises(EvidenceError) as refused:
        verify_told(told)
    assert refused.value.where == f"TDX: {where}"


def test_collateral_is_text_and_the_library_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # The library's words, which may quote the peer, are not repeated.
    with pytest.raises(EvidenceError) as refused:
        verify_told(ValueError("Failed to parse JSON: invalid type: SECRET"))
    assert (refused.value.got, "SECRET" in str(refused.value)) == ("JSON", False)
    with pytest.raises(EvidenceError, match="TDX: quote: got another"):
        verify_told(answer({"TD10": BODY}), b"\xff")
    monkeypatch.setitem(sys.modules, "dcap_qvl", None)
    with pytest.raises(SettingsError, match=r"no dcap-qvl, expected pip install '\.\[attest\]'"):
        verify_tdx(b"", b"", QUOTED)


# Lists of firmware and of revoked certificates end 30 days after they were made.
V4_NOW = datetime(2025, 6, 20, 10, 16, 3, tzinfo=UTC)
LATER = datetime(2026, 11, 21, tzinfo=UTC)
_NOW = {"v4": V4_NOW, "v5": QUOTED}


@each_row(
    "name, mrtd, rtmr0, report_data",
    [("v4", "91eb2b44", "44c0197b", "9a9d48e7"), ("v5", "7348651a", "5c8daf76", "945eaacf")],
)
def test_genuine_quotes_are_accepted(name: str, mrtd: str, rtmr0: str, report_data: str) -> None:
    quote, collateral = (
        read_vector(f"tdx/{name}-{part}") for part in ("quote.bin", "collateral.json")
    )
    found = verify_tdx(quote, collateral, _NOW[name])
    assert found.status == "UpToDate"
    assert found.mrtd.hex().startswith(mrtd)
    assert found.rtmr[0].hex().startswith(rtmr0)
    assert found.report_data.hex().startswith(report_data)
    # In what is signed, signatures, keys and the chain.
    for place in (100, 600, 720, 800, 1100, 1510):
        other = quote[:place] + bytes([quote[place] ^ 1]) + quote[place + 1 :]
        with pytest.raises(EvidenceError):
            verify_tdx(other, collateral, _NOW[name])


@each_row(
    "quote, collateral, now, got",
    [
        ("v5", "v5", LATER, "expired"),
        ("v4", "v5", QUOTED, "Fmspc"),
        ("debug", "debug", QUOTED, "Debug mode"),
        ("outdated", "v5", QUOTED, "No matching TCB"),
    ],
)
def test_other_quotes_are_refused(quote: str, collateral: str, now: datetime, got: str) -> None:
    given = read_vector(f"tdx/{quote}-quote.bin"), read_vector(f"tdx/{collateral}-collateral.json")
    with pytest.raises(EvidenceError) as refused:
        verify_tdx(*given, now)
    assert refused.value.got == got
