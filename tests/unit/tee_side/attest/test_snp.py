"""Tests of a report with its chain: who signed it, and that it is about that very processor."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from protocol.errors import EvidenceError
from tee_side.attest.snp import VerifiedSnp, verify_snp
from tee_side.attest.snp_report import SIGNED_BYTES, Product, SigningKey, Tcb
from tests.kit import snp_chain as made
from tests.kit.rows import each_row
from tests.kit.snp_chain import NOW, Chain, make_chain, make_report

# Of P-384.
_ORDER = 2**384 - 1388124618062372383947042015309946732620727252194336364173


def _verify(report: bytes, chain: Chain | None = None, crl: bytes | None = None) -> VerifiedSnp:
    chain = chain or make_chain()
    with chain.pinned():
        return verify_snp(report, chain.certificates, NOW, crl)


def _refuses(text: str) -> Any:
    return pytest.raises(EvidenceError, match=f"^{re.escape(text)}")


def _with_signature(report: bytes, r: int, s: int) -> bytes:
    numbers = r.to_bytes(72, "little") + s.to_bytes(72, "little")
    return report[:SIGNED_BYTES] + numbers + report[SIGNED_BYTES + 144 :]


def _signature(report: bytes) -> tuple[int, int]:
    at = SIGNED_BYTES
    return int.from_bytes(report[at : at + 72], "little"), int.from_bytes(
        report[at + 72 : at + 144], "little"
    )


@each_row("product", ["milan", "genoa", "turin"])
def test_accepted(product: Product) -> None:
    for kind in ("vcek", "vlek"):
        for version in (2, 3, 5):
            report = make_report(product, kind, version=version, report_data=bytes(range(64)))
            verified = _verify(report, make_chain(product, kind))
            assert verified.kind == "snp"
            assert verified.product == product
            assert verified.tcb == made.tcb_of(product)
            assert verified.report_data == bytes(range(64))


def test_what_a_report_says_is_not_judged_here() -> None:
    """Debug, levels and so on are for the policy of whoever reads it."""
    report = _verify(make_report(policy=0xF0000, vmpl=3, platform=0)).report
    assert report.debug
    assert report.migration_agent
    assert report.vmpl == 3
    assert not report.alias_check


def test_tcb_is_the_reported_one() -> None:
    """The current one may be newer: certificates are issued for the one that is reported."""
    newer = made.tcb_word(Tcb(9, 9, 99, 255), "milan")
    assert _verify(make_report(changed={0x38: newer, 0x1E0: newer, 0x1F0: newer})).tcb == made.TCB


def test_every_report_is_parsed_first() -> None:
    with _refuses("SNP report: size: got 3 bytes, expected 1184"):
        _verify(b"abc")


def test_certificates_and_crl_are_verified() -> None:
    chain = make_chain()
    crl = made.signed(made.crl_body("milan", [2]), made.ark_key())
    with _refuses("AMD ASK: got a certificate that is revoked"):
        _verify(make_report(), chain, crl)
    crl = made.signed(made.crl_body(), made.ark_key())
    assert _verify(make_report(), chain, crl).revocation_checked
    assert not _verify(make_report(), chain).revocation_checked
    with _refuses("AMD root: got another certificate"):
        verify_snp(make_report(), chain.certificates, NOW)


@each_row(
    ("of", "by"), [("milan", "genoa"), ("genoa", "milan"), ("turin", "genoa"), ("genoa", "turin")]
)
def test_report_is_of_the_product_whose_root_it_is(of: Product, by: Product) -> None:
    chain = make_chain(by, "vlek")
    tcb = made.tcb_word(made.tcb_of(by), by)
    report = make_report(of, "vlek", changed={0x180: tcb})
    with _refuses(f"AMD root: got that of {by}, expected {of}"):
        _verify(report, chain)


def test_a_turin_is_known_by_its_chip_id_where_the_report_has_no_cpuid() -> None:
    changed = {0x1A0: made.chip_id_of("turin") + bytes(56)}
    report = make_report("milan", "vlek", version=2, changed=changed)
    with _refuses("AMD root: got that of milan, expected turin"):
        _verify(report, make_chain("milan", "vlek"))


@each_row(("of", "by"), [("vcek", "vlek"), ("vlek", "vcek")])
def test_report_says_which_key_signed_it(of: SigningKey, by: SigningKey) -> None:
    asks = {"vcek": "SEV-VCEK by SEV-Milan", "vlek": "SEV-VLEK by SEV-VLEK-Milan"}
    with _refuses(f"AMD leaf: got another name, expected {asks[of]}"):
        _verify(make_report(kind=of), make_chain("milan", by))


@each_row("product", ["milan", "genoa", "turin"])
def test_each_part_of_the_tcb_is_the_leafs(product: Product) -> None:
    tcb, chain = made.tcb_of(product), make_chain(product)
    names = [name for name in tcb._fields if name != "fmc" or product == "turin"]
    for name in names:
        for step in (1, -1):
            other = tcb._replace(**{name: (getattr(tcb, name) + step) % 256})
            with _refuses(f"AMD leaf: got {tcb}, expected {other}, as the report says"):
                _verify(make_report(product, tcb=other), chain)


@each_row("product", ["milan", "genoa"])
def test_chip_is_the_leafs(product: Product) -> None:
    chip, chain = made.chip_id_of(product), make_chain(product)
    for other in (bytes(64), chip[:8] + bytes(56), chip[:-1] + b"\0", b"\0" + chip[1:], chip[::-1]):
        with _refuses("AMD leaf: got another chip id, expected the report's in a VCEK"):
            _verify(make_report(product, changed={0x1A0: other}), chain)


def test_chip_of_a_turin_is_8_bytes_and_zeros() -> None:
    chip, chain = made.chip_id_of("turin"), make_chain("turin")
    for other in (
        bytes(64),
        chip[:7] + bytes(57),
        chip + b"\1" + bytes(55),
        chip + bytes(55) + b"\1",
    ):
        with _refuses("AMD leaf: got another chip id, expected the report's in a VCEK"):
            _verify(make_report("turin", changed={0x1A0: other}), chain)


def test_an_empty_chip_id_in_a_leaf_is_none() -> None:
    """One that was masked is all zeros, which nothing padded with zeros may equal."""
    body = made.leaf_body(changed={f"{made.AMD}.4": b""})
    good = make_chain()
    chain = Chain("milan", leaf=body.signed(made.ask_key()), ask=good.ask, ark=good.ark)
    with _refuses("AMD leaf: got another chip id, expected the report's in a VCEK"):
        _verify(make_report(changed={0x1A0: bytes(64)}), chain)


@each_row("at", range(0, SIGNED_BYTES, 16))
def test_every_part_is_signed(at: int) -> None:
    report = bytearray(make_report())
    report[at] ^= 0x40
    with pytest.raises(EvidenceError):
        _verify(bytes(report))


def test_signature_is_by_the_leafs_key() -> None:
    other = ec.derive_private_key(7, ec.SECP384R1())
    report, (r, s) = make_report(), _signature(make_report(vmpl=1))
    unsigned = [
        *(make_report(key=other), _with_signature(report, r, s), _with_signature(report, 0, 0)),
        *(_with_signature(report, *one) for one in ((1, 1), (2**576 - 1, 2**576 - 1), (_ORDER, 0))),
    ]
    for wrong in unsigned:
        with _refuses("SNP report: got a wrong signature, expected the leaf's"):
            _verify(wrong)
    r, s = _signature(report)
    for pair in ((s, r), (r + _ORDER, s), (r, s + _ORDER), (r, 0), (0, s), (r | 1 << 384, s)):
        with _refuses("SNP report: got a wrong signature"):
            _verify(_with_signature(report, *pair))
    assert _verify(_with_signature(report, r, s))


def test_a_signature_has_a_twin_which_says_nothing_else() -> None:
    """As every one of ECDSA: so the digest of a whole report identifies nothing."""
    report = make_report(report_data=b"d" * 64)
    r, s = _signature(report)
    twin = _with_signature(report, r, _ORDER - s)
    assert twin != report
    assert _verify(twin) == _verify(report)
