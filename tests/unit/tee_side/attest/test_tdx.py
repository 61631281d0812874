"""Quotes of TDX: what `dcap-qvl` says of them, what is refused besides, and genuine ones."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import EvidenceError, SettingsError
from tee_side.attest.tdx import VerifiedTdx, verify_tdx
from tests.kit.evidence import changed, needs_vectors, read_bytes
from tests.kit.rows import each_row

NOW = datetime(2026, 3, 16, 23, 34, 5, tzinfo=UTC)

needs_dcap_qvl = pytest.mark.skipif(find_spec("dcap_qvl") is None, reason="no extra attest")

BODY = {
    "mr_td": "01" * 48,
    "rt_mr0": "02" * 48,
    "rt_mr1": "03" * 48,
    "rt_mr2": "04" * 48,
    "rt_mr3": "05" * 48,
    "report_data": "06" * 64,
    "mr_config_id": "07" * 48,
    "td_attributes": "0000001000000000",
}


@dataclass
class FakeLibrary:
    """The functions of dcap-qvl that are called; it answers what it is told, or fails with it."""

    answer: dict[str, Any] | ValueError
    asked: tuple[bytes, str, int] | None = None

    @property
    def QuoteCollateralV3(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(from_json=str)

    def verify(self, quote: bytes, collateral: str, seconds: int) -> SimpleNamespace:
        self.asked = quote, collateral, seconds
        if isinstance(self.answer, ValueError):
            raise self.answer
        return SimpleNamespace(to_json=lambda: json.dumps(self.answer))


def answer(report: dict[str, Any], status: str = "UpToDate") -> dict[str, Any]:
    return {"status": status, "advisory_ids": ["INTEL-SA-00001"], "report": report}


def verify(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any] | ValueError, collateral: bytes = b"{}"
) -> VerifiedTdx:
    monkeypatch.setitem(sys.modules, "dcap_qvl", FakeLibrary(told))  # type: ignore[arg-type]
    return verify_tdx(b"quote", collateral, NOW)


@each_row("report", [{"TD10": BODY}, {"TD15": {"base": BODY, "mr_service_td": "00" * 48}}])
def test_what_the_library_verified_is_returned(
    monkeypatch: pytest.MonkeyPatch, report: dict[str, Any]
) -> None:
    found = verify(monkeypatch, answer(report, "OutOfDate"))

    rtmr = (b"\2" * 48, b"\3" * 48, b"\4" * 48, b"\5" * 48)
    assert found == (b"\1" * 48, rtmr, b"\6" * 64, b"\7" * 48, "OutOfDate", "tdx")


def test_the_library_is_given_quote_collateral_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLibrary(answer({"TD10": BODY}))
    monkeypatch.setitem(sys.modules, "dcap_qvl", fake)  # type: ignore[arg-type]

    verify_tdx(b"quote", b'{"a": 1}', NOW.astimezone(timezone(timedelta(hours=-7))))

    assert fake.asked == (b"quote", '{"a": 1}', 1_773_704_045)


@each_row(
    "told, where",
    [
        pytest.param(answer({"TD10": BODY}, "Revoked"), "TCB status", id="revoked"),
        pytest.param(answer({"SgxEnclave": BODY}), "kind of TEE", id="SGX"),
        pytest.param(answer({"TD15Ex": {"base": {"base": BODY}}}), "kind of TEE", id="unknown"),
        pytest.param(
            answer({"TD10": BODY | {"td_attributes": "0000002000000000"}}),
            "attributes",
            id="migratable",
        ),
        pytest.param(
            answer({"TD15": {"base": BODY, "mr_service_td": "01" + "00" * 47}}),
            "attributes",
            id="with a service TD, which migrates it",
        ),
        *(
            pytest.param(
                answer({"TD10": BODY | {"td_attributes": f"{1 << bit:02x}00001000000000"}}),
                "attributes",
                id=f"bit {bit} of the attributes",
            )
            for bit in range(8)
        ),
    ],
)
def test_what_the_library_lets_pass_is_refused(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], where: str
) -> None:
    with pytest.raises(EvidenceError) as raised:
        verify(monkeypatch, told)

    assert raised.value.where == f"TDX: {where}"


@each_row(
    "text, got",
    [
        ("Verification failed: TCBInfo expired", "expired"),
        ("Caused by:\n    CrlExpired { time: 1 }", "Expired"),
        ("TCBInfo issue date is in the future", "in the future"),
        ("CertNotValidYet { time: 1 }", "NotValidYet"),
        ("CertRevoked", "Revoked"),
        ("Debug mode is enabled", "Debug mode"),
        ("No matching TCB level found", "No matching TCB"),
        ("Fmspc mismatch", "Fmspc"),
        ("Failed to parse JSON: invalid type: SECRET", "JSON"),
        ("unknown variant SECRET", "another"),
    ],
)
def test_the_library_s_words_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, text: str, got: str
) -> None:
    with pytest.raises(EvidenceError) as raised:
        verify(monkeypatch, ValueError(text))

    assert raised.value.got == got
    assert "SECRET" not in str(raised.value)


def test_collateral_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvidenceError, match="TDX: quote: got another"):
        verify(monkeypatch, answer({"TD10": BODY}), b"\xff")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dcap_qvl", None)

    with pytest.raises(
        SettingsError, match=r"TDX: got no dcap-qvl, expected pip install '\.\[attest\]'"
    ):
        verify_tdx(b"", b"", NOW)


# Genuine ones.

_PHALA = "phala-dcap-qvl/sample"
_GOOGLE = "google-go-tdx-guest/testing/testdata"
_RS = "confidential-dot-ai-attestation-rs/crates/attestation/test_data"
_ISSUED = datetime(2025, 6, 20, 10, 16, 3, tzinfo=UTC)
_SIGNED_JSON = re.compile(r'\{"\w+":(\{.*\}),"signature":"(\w+)"\}\s*', re.DOTALL)


@dataclass(frozen=True)
class Vector:
    """A quote; its collateral is a file, or is put together with a list of firmware (`fmspc`)."""

    quote: str
    collateral: str = ""
    fmspc: str = ""
    now: datetime = NOW

    def read(self) -> tuple[bytes, bytes]:
        """Return quote and collateral."""
        quote = read_bytes(self.quote)
        if self.collateral:
            return quote, read_bytes(self.collateral)
        folder = f"{_RS}/collateral"
        tcb_info, tcb_signature = _signed(f"{folder}/tcb_info_{self.fmspc}.json")
        identity, identity_signature = _signed(f"{folder}/td_qe_identity.json")
        parts = {
            "pck_crl_issuer_chain": "",
            "root_ca_crl": read_bytes(f"{folder}/root_ca_crl.der").hex(),
            "pck_crl": read_bytes(f"{folder}/pck_crl_platform.der").hex(),
            "tcb_info_issuer_chain": read_bytes(f"{folder}/tcb_signing_chain.pem").decode(),
            "tcb_info": tcb_info,
            "tcb_info_signature": tcb_signature,
            "qe_identity_issuer_chain": read_bytes(
                f"{folder}/qe_identity_signing_chain.pem"
            ).decode(),
            "qe_identity": identity,
            "qe_identity_signature": identity_signature,
        }
        return quote, json.dumps(parts).encode()


def _signed(path: str) -> tuple[str, str]:
    """Return what Intel signed, byte by byte, and its signature."""
    found = _SIGNED_JSON.fullmatch(read_bytes(path).decode())
    assert found is not None, path
    return found[1], found[2]


V4 = Vector(f"{_PHALA}/tdx_quote", f"{_PHALA}/tdx_quote_collateral.json", now=_ISSUED)
V5 = Vector(f"{_GOOGLE}/quote_v5_sample.dat", fmspc="90c06f000000")
# An expiry date of the list of firmware or of revoked certificates is at most 30 days ahead.
_LATER = datetime(2026, 11, 21, tzinfo=UTC)

GENUINE = [
    (V4, "91eb2b44", "44c0197b", "9a9d48e7"),
    (V5, "7348651a", "5c8daf76", "945eaacf"),
]
REFUSED = [
    (replace(V4, now=_LATER), "Expired"),
    (replace(V5, now=_LATER), "expired"),
    (replace(V4, now=_ISSUED - timedelta(days=2)), "in the future"),
    (replace(V4, collateral=f"{_PHALA}/sgx_quote_collateral.json"), "another"),
    (
        Vector(f"{_PHALA}/tdx_quote_outdated", f"{_PHALA}/tdx_quote_outdated_collateral.json"),
        "No matching TCB",
    ),
    (
        Vector(f"{_GOOGLE}/tdx_prod_quote_SPR_E4.dat", fmspc="50806f000000"),
        "No matching TCB",
    ),
    (
        Vector(f"{_RS}/tdx_quote_5.dat", fmspc="90c06f000000"),
        "No matching TCB",
    ),
    (Vector(f"{_RS}/tdx_quote_4.dat", fmspc="50806f000000"), "Debug mode"),
    (
        Vector(f"{_RS}/tdx_quote_live.dat", fmspc="90c06f000000"),
        "NotValidYet",
    ),
    (
        Vector(f"{_RS}/tdx_quote_live.dat", "", "90c06f000000", NOW + timedelta(days=20)),
        "Fmspc",
    ),
    (Vector(f"{_RS}/tdx_tdreport_live.bin", fmspc="90c06f000000"), "another"),
    (Vector(f"{_GOOGLE}/report.dat", fmspc="90c06f000000"), "another"),
    (
        Vector(f"{_PHALA}/sgx_quote", f"{_PHALA}/sgx_quote_collateral.json", now=_ISSUED),
        "another",
    ),
]


@needs_vectors
@needs_dcap_qvl
@each_row("vector, mrtd, rtmr0, report_data", GENUINE, ids=lambda row: row[0].quote)
def test_genuine_quotes_are_accepted(
    vector: Vector, mrtd: str, rtmr0: str, report_data: str
) -> None:
    found = verify_tdx(*vector.read(), vector.now)

    assert found.status == "UpToDate"
    assert found.mrtd.hex().startswith(mrtd)
    assert found.rtmr[0].hex().startswith(rtmr0)
    assert found.report_data.hex().startswith(report_data)
    assert [len(one) for one in (found.mrtd, *found.rtmr, found.report_data)] == [48] * 5 + [64]


@needs_vectors
@needs_dcap_qvl
@each_row("vector, got", REFUSED, ids=lambda row: f"{row[0].quote} {row[1]}")
def test_other_quotes_are_refused(vector: Vector, got: str) -> None:
    with pytest.raises(EvidenceError) as raised:
        verify_tdx(*vector.read(), vector.now)

    assert raised.value.got == got


# Where what begins in the quotes of V4 and V5: what has no name between two of them is signed, or
# is a signature or key.
_SIZES = {V4: (632, 636, 764, 770, 1254, 1258), V5: (702, 706, 834, 840, 1324, 1328)}


def _ignored(vector: Vector, quote: bytes) -> set[int]:
    """Return the places of bytes that `dcap-qvl` need not look at (see tee_side.attest.tdx)."""
    auth_size, _, outer_kind, _, chain_size, chain = _SIZES[vector]
    root = [found.start() for found in re.finditer(b"-----BEGIN", quote)][2]
    lines = {place for place in range(chain, root) if quote[place] == ord("\n")}
    sizes = {auth_size, chain_size}
    return sizes | {outer_kind, outer_kind + 1} | lines | {*range(root, len(quote))}


def _flips(quote: bytes, places: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    draw = random.Random(0)
    for place in places:
        flipped = quote[place] ^ 1 << draw.randrange(8)
        yield place, quote[:place] + bytes([flipped]) + quote[place + 1 :]


def _accepted(vector: Vector, places: Iterable[int]) -> set[int]:
    """Flip a bit at each place; return where the quote is accepted all the same."""
    quote, collateral = vector.read()
    expected = verify_tdx(quote, collateral, vector.now)
    accepted = set()
    for place, other in _flips(quote, places):
        with suppress(EvidenceError):
            assert verify_tdx(other, collateral, vector.now) == expected
            accepted.add(place)
    return accepted


@needs_vectors
@needs_dcap_qvl
@each_row("vector", [V4, V5], ids=lambda vector: vector.quote)
def test_a_bit_of_what_is_signed_is_noticed(vector: Vector) -> None:
    chain = _SIZES[vector][-1]

    assert _accepted(vector, range(0, chain, 21)) <= _ignored(vector, read_bytes(vector.quote))


@needs_vectors
@needs_dcap_qvl
@pytest.mark.more
@pytest.mark.parametrize("vector", [V4, V5], ids=lambda vector: vector.quote)
def test_every_byte_is_noticed_but_those_that_are_listed(vector: Vector) -> None:
    quote = read_bytes(vector.quote)
    chain = _SIZES[vector][-1]
    accepted = _accepted(vector, [*range(chain), *range(chain, len(quote), 5)])

    assert accepted <= _ignored(vector, quote)
    assert {_SIZES[vector][2], _SIZES[vector][2] + 1} <= accepted


@needs_vectors
@needs_dcap_qvl
@pytest.mark.more
def test_what_is_accepted_of_changed_evidence_says_the_same() -> None:
    for vector in (V4, V5):
        evidence = vector.read()
        expected = verify_tdx(*evidence, vector.now)
        for seed in range(700):
            parts = list(evidence)
            parts[seed % 2] = changed(parts[seed % 2], seed)
            with suppress(EvidenceError):
                assert verify_tdx(parts[0], parts[1], vector.now) == expected


@needs_vectors
@needs_dcap_qvl
def test_parts_of_another_quote_are_noticed() -> None:
    one, collateral = V4.read()
    other, other_collateral = V5.read()
    body, key = _SIZES[V4][0], _SIZES[V4][1]
    swapped = [
        (one, other_collateral),
        (one[:body] + other[_SIZES[V5][0] :], collateral),
        (one[:key] + other[_SIZES[V5][1] :], collateral),
        (one[: _SIZES[V4][-1]] + other[_SIZES[V5][-1] :], collateral),
    ]
    for quote, with_collateral in swapped:
        with pytest.raises(EvidenceError):
            verify_tdx(quote, with_collateral, V4.now)
