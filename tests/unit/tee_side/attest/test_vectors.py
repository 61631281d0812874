"""Genuine reports and certificates of AMD's, each with the verdict that its source states."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from protocol.errors import EvidenceError
from tee_side.attest.amd_certificates import PINNED_ROOTS, verify_chain
from tee_side.attest.snp import verify_snp
from tee_side.attest.snp_report import Product, SnpReport, Tcb
from tests.kit.evidence import (
    DSTACK,
    GO,
    MICROSOFT,
    NOW,
    NOW_VLEK,
    OPENPCC,
    PINNED,
    RUST,
    RUST_SNP,
    SNP_VECTORS,
    VECTORS,
    VIRTEE,
    SnpVector,
    authority,
    certificates,
    needs_vectors,
    read_bytes,
    read_pem,
)
from tests.kit.rows import each_row
from tests.kit.snp_chain import make_report

pytestmark = needs_vectors

PRODUCTS: tuple[Product, ...] = ("milan", "genoa", "turin")


def _refuses(text: str) -> Any:
    return pytest.raises(EvidenceError, match=f"^{re.escape(text)}")


@each_row("vector", SNP_VECTORS, ids=lambda vector: vector.name)
def test_report_is_genuine(vector: SnpVector) -> None:
    verified = verify_snp(vector.report, vector.chain, vector.now)
    report = verified.report
    assert (verified.product, verified.tcb) == (vector.product, vector.tcb)
    assert (vector.report[0], report.signing_key) == (vector.version, vector.kind)
    assert (report.vmpl, report.debug) == (vector.vmpl, vector.debug)
    assert report.report_data == vector.report[0x50:0x90]
    assert not report.migration_agent


def test_a_report_that_allows_debug_is_genuine_and_says_so() -> None:
    """Its signature is right: the policy of whoever reads it must refuse it."""
    (vector,) = (vector for vector in SNP_VECTORS if vector.debug)
    report = verify_snp(vector.report, vector.chain, vector.now).report
    assert vector.report[0x08:0x10] == 0xB0000.to_bytes(8, "little")
    assert report.debug


def test_current_tcb_may_be_newer_than_the_one_of_the_leaf() -> None:
    by_name = {vector.name: vector for vector in SNP_VECTORS}
    for name in ("attestation-rs milan", "dstack"):
        vector = by_name[name]
        assert Tcb.parse(vector.report[0x38:0x40], vector.product) != vector.tcb
        assert verify_snp(vector.report, vector.chain, vector.now).tcb == vector.tcb


@each_row("vector", SNP_VECTORS, ids=lambda vector: vector.name)
def test_before_and_after_its_time_a_leaf_is_refused(vector: SnpVector) -> None:
    with _refuses("AMD leaf: got 2040-01-01T00:00:00+00:00, expected a time from 202"):
        verify_snp(vector.report, vector.chain, datetime(2040, 1, 1, tzinfo=UTC))
    with pytest.raises(EvidenceError, match=r"^AMD (leaf|ASK|ARK): got 2021-01-01T00:00:00"):
        verify_snp(vector.report, vector.chain, datetime(2021, 1, 1, tzinfo=UTC))


GENOA_TCB = Tcb(10, 0, 23, 84)
_CHIP_ID = bytes.fromhex("2b060104019c78010404")


def _report(leaf: bytes, product: Product, tcb: Tcb) -> SnpReport:
    """Return a report that a VCEK is right for, unsigned: its source has none."""
    behind = leaf.partition(_CHIP_ID)[2]
    changed = {0x1A0: behind[1 : 1 + behind[0]].ljust(64, b"\0")}
    return SnpReport.parse(make_report(product, tcb=tcb, changed=changed))


@each_row(
    ("path", "product", "tcb"),
    [
        (f"{VIRTEE}/vcek_turin.der", "turin", Tcb(0, 0, 0, 9, fmc=0)),
        (OPENPCC, "genoa", GENOA_TCB),
    ],
)
def test_leaf_without_a_report_is_genuine(path: str, product: Product, tcb: Tcb) -> None:
    leaf = read_pem(path)[-1] if path == OPENPCC else read_bytes(path)
    report = _report(leaf, product, tcb)
    assert verify_chain(report, certificates(leaf, product), NOW)[0] == product


@each_row("name", ["legacy", "new"])
def test_leaf_that_is_made_wrong_is_refused(name: str) -> None:
    leaf = read_bytes(f"{RUST_SNP}/test-vcek-invalid-{name}.der")
    for product in PRODUCTS:
        with pytest.raises(EvidenceError) as caught:
            verify_chain(_report(leaf, product, GENOA_TCB), certificates(leaf, product), NOW)
        assert caught.value.where == "AMD leaf"
        assert caught.value.got == "a wrong signature"


# -------------------------------------------------------------------------------------- roots


def test_pinned_roots_are_those_of_two_sources() -> None:
    for product in PRODUCTS:
        root = authority(product, "ark")
        assert PINNED_ROOTS[hashlib.sha256(root).hexdigest()] == product
        assert read_pem(f"{PINNED}/{product}_ark.pem") == [root]
    assert len(PINNED_ROOTS) == len(PRODUCTS)


@each_row(
    ("path", "product", "names"),
    [
        *((f"{GO}/trust/ask_ark_{p}.pem", p, ["ask", "ark"]) for p in ("milan", "genoa")),
        *((f"{GO}/trust/ask_ark_{p}_vlek.pem", p, ["asvk", "ark"]) for p in PRODUCTS),
        (f"{GO}/trust/ask_ark_turin_vcek.pem", "turin", ["ask", "ark"]),
        *((f"{VIRTEE}/cert_chain_{p}", p, ["ask", "ark"]) for p in ("milan", "turin")),
        (f"{DSTACK}/sev_snp_ask.pem", "milan", ["ask"]),
        *((f"{MICROSOFT}/{p}_ask.pem", p, ["ask"]) for p in PRODUCTS),
    ],
)
def test_every_source_has_the_same_authorities(
    path: str, product: Product, names: list[str]
) -> None:
    assert read_pem(path) == [authority(product, name) for name in names]


@each_row("vector", SNP_VECTORS, ids=lambda vector: vector.name)
def test_chain_of_another_product_or_kind_is_refused(vector: SnpVector) -> None:
    leaf, intermediate, _ = vector.chain
    for product in PRODUCTS:
        root = authority(product, "ark")
        # Reports of version 2 do not say their product.
        other = f"AMD root: got that of {product}, expected {vector.product}"
        known = product == vector.product or vector.version == 2
        for which in ("ask", "asvk"):
            chain = (leaf, authority(product, which), root)
            if chain != vector.chain:
                with _refuses("AMD leaf: got a wrong signature" if known else other):
                    verify_snp(vector.report, chain, vector.now)
        if product != vector.product:
            with _refuses("AMD ASK: got a wrong signature" if known else other):
                verify_snp(vector.report, (leaf, intermediate, root), vector.now)


# ------------------------------------------------------------------------------------ the CRLs


def _crl(product: Product) -> bytes:
    genoa, milan, *_ = read_pem(OPENPCC)
    return {"genoa": genoa, "milan": milan}[product]


@each_row(
    ("product", "inside", "behind"),
    [
        ("genoa", datetime(2025, 7, 1, tzinfo=UTC), datetime(2025, 11, 4, tzinfo=UTC)),
        ("milan", datetime(2026, 4, 1, tzinfo=UTC), datetime(2026, 5, 13, tzinfo=UTC)),
    ],
)
def test_crl_is_by_its_root_and_has_its_time(
    product: Product, inside: datetime, behind: datetime
) -> None:
    leaf = read_pem(OPENPCC)[-1] if product == "genoa" else SNP_VECTORS[0].leaf
    report = _report(leaf, product, GENOA_TCB if product == "genoa" else SNP_VECTORS[0].tcb)
    verify, crl = partial(verify_chain, report, certificates(leaf, product)), _crl(product)
    assert verify(inside, crl)[0] == product
    for now in (behind, datetime(2024, 10, 1, tzinfo=UTC)):
        with _refuses("AMD CRL: got 202"):
            verify(now, crl)
        if now == behind:
            assert verify(now)
    with _refuses("AMD CRL: got a wrong signature"):
        verify(inside, _crl("milan" if product == "genoa" else "genoa"))
    with _refuses("AMD CRL: got a wrong signature"):
        verify(inside, crl[:-1] + bytes((crl[-1] ^ 1,)))


# -------------------------------------------------------------------------------- all of them

_FOLDERS = (f"{RUST}/certs", RUST_SNP, f"{GO}/", VIRTEE, f"{DSTACK}/", PINNED, MICROSOFT, OPENPCC)
_FILES = 47


def test_files_are_those_that_are_listed() -> None:
    listed = re.findall(
        r"^## (\S+)$|^- `([^`]+)` \d+ B sha256 (\w{64})$",
        (VECTORS / "SOURCES.md").read_text(),
        re.MULTILINE,
    )
    folder, found = "", 0
    for heading, path, digest in listed:
        folder = heading or folder
        if path and f"{folder}/{path}".startswith(_FOLDERS):
            assert hashlib.sha256(read_bytes(f"{folder}/{path}")).hexdigest() == digest, path
            found += 1
    there = [path for path in VECTORS.rglob("*") if path.is_file()]
    names = [str(path.relative_to(VECTORS)) for path in there]
    assert found == sum(name.startswith(_FOLDERS) for name in names) == _FILES
    assert NOW_VLEK < NOW
