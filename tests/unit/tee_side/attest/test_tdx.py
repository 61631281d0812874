"""Quotes of TDX: what `dcap-qvl` says of them, what is refused besides, and genuine ones."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from protocol.errors import EvidenceError, SettingsError
from tee_side.attest.tdx import VerifiedTdx, verify_tdx
from tests.kit.evidence import read_vector
from tests.kit.rows import each_row

NOW = datetime(2026, 3, 16, 23, 34, 5, tzinfo=UTC)
_REGISTERS = ("mr_td", "rt_mr0", "rt_mr1", "rt_mr2", "rt_mr3", "report_data", "mr_config_id")
BODY = {
    name: f"{number:02x}" * (64 if name == "report_data" else 48)
    for number, name in enumerate(_REGISTERS, start=1)
}
BODY["td_attributes"] = "0000001000000000"


def answer(report: dict[str, Any], status: str = "UpToDate") -> dict[str, Any]:
    return {"status": status, "advisory_ids": ["INTEL-SA-00001"], "report": report}


def verify(
    told: dict[str, Any] | ValueError, collateral: bytes = b'{"a": 1}', now: datetime = NOW
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
    found = verify(answer(report, "OutOfDate"), now=NOW.astimezone(timezone(timedelta(hours=-7))))
    rtmr = (b"\2" * 48, b"\3" * 48, b"\4" * 48, b"\5" * 48)
    assert found == (b"\1" * 48, rtmr, b"\6" * 64, b"\7" * 48, "OutOfDate", "tdx")


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
        verify(told)
    assert refused.value.where == f"TDX: {where}"


def test_collateral_is_text_and_the_library_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # The library's words, which may quote the peer, are not repeated.
    with pytest.raises(EvidenceError) as refused:
        verify(ValueError("Failed to parse JSON: invalid type: SECRET"))
    assert (refused.value.got, "SECRET" in str(refused.value)) == ("JSON", False)
    with pytest.raises(EvidenceError, match="TDX: quote: got another"):
        verify(answer({"TD10": BODY}), b"\xff")
    monkeypatch.setitem(sys.modules, "dcap_qvl", None)
    with pytest.raises(SettingsError, match=r"no dcap-qvl, expected pip install '\.\[attest\]'"):
        verify_tdx(b"", b"", NOW)


# Lists of firmware and of revoked certificates end 30 days after they were made.
V4_NOW = datetime(2025, 6, 20, 10, 16, 3, tzinfo=UTC)
LATER = datetime(2026, 11, 21, tzinfo=UTC)
_NOW = {"v4": V4_NOW, "v5": NOW}


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
        ("v4", "v5", NOW, "Fmspc"),
        ("debug", "debug", NOW, "Debug mode"),
        ("outdated", "v5", NOW, "No matching TCB"),
    ],
)
def test_other_quotes_are_refused(quote: str, collateral: str, now: datetime, got: str) -> None:
    given = read_vector(f"tdx/{quote}-quote.bin"), read_vector(f"tdx/{collateral}-collateral.json")
    with pytest.raises(EvidenceError) as refused:
        verify_tdx(*given, now)
    assert refused.value.got == got
