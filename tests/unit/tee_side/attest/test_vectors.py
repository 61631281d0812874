"""Genuine evidence of AMD's processors: accepted as it was signed, and by no change."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random

import pytest

from protocol.errors import EvidenceError
from tee_side.attest.amd_certificates import PINNED_ROOTS
from tee_side.attest.snp import VerifiedSnp, verify_snp
from tee_side.attest.snp_report import Tcb
from tests.kit.evidence import PRODUCTS, SNP_VECTORS, VECTORS, SnpVector, authority, read_vector
from tests.kit.rows import each_row

_BY_NAME = {vector.name: vector for vector in SNP_VECTORS}
_ROW = re.compile(r"^\| (\w+/\S+) \| [^|]+ \| [^|]+ \| [^|]+ \| ([0-9a-f]{64}) \|$", re.MULTILINE)


def _refusal(
    vector: SnpVector,
    certificates: Sequence[bytes],
    now: datetime | None = None,
    crl: bytes | None = None,
) -> str:
    with pytest.raises(EvidenceError) as refused:
        verify_snp(vector.report, certificates, now or vector.now, crl)
    return str(refused.value)


def test_the_table_of_the_files_is_whole_and_says_their_digests() -> None:
    listed = dict(_ROW.findall((VECTORS / "README.md").read_text()))
    found = [path for path in VECTORS.rglob("*") if path.is_file()]
    evidence = {str(path.relative_to(VECTORS)): path.read_bytes() for path in found}
    texts = [name for name in evidence if name.startswith("licences/")]
    for name in texts:
        assert name.encode() in evidence["README.md"]
    assert {
        name: hashlib.sha256(content).hexdigest()
        for name, content in evidence.items()
        if name not in (*texts, "README.md")
    } == listed
    assert sum(map(len, evidence.values())) <= 1_000_000
    assert not any(b"PRIVATE KEY" in content for content in evidence.values())


@each_row("vector", SNP_VECTORS, ids=lambda vector: vector.name)
def test_a_report_is_genuine_within_the_time_of_its_leaf(vector: SnpVector) -> None:
    verified = verify_snp(vector.report, vector.chain, vector.now)
    report = verified.report
    assert (verified.product, verified.tcb) == (vector.product, vector.tcb)
    assert (vector.report[0], report.signing_key) == (vector.version, vector.kind)
    # That a guest may be debugged is for a policy to refuse.
    assert (report.vmpl, report.debug) == (vector.vmpl, vector.debug)
    assert (report.report_data, report.migration_agent) == (vector.report[0x50:0x90], False)
    late, early = datetime(2040, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC)
    assert _refusal(vector, vector.chain, late).startswith("AMD leaf: got 2040-01-01T")
    assert re.match("AMD (leaf|ASK|ARK): got 2021-01-01T", _refusal(vector, vector.chain, early))


def test_pinned_roots_and_the_tcb_of_a_leaf() -> None:
    for product in PRODUCTS:
        assert PINNED_ROOTS[hashlib.sha256(authority(product, "ark")).hexdigest()] == product
    assert len(PINNED_ROOTS) == len(PRODUCTS)
    # The current one may be newer than the one that the leaf is of.
    old = _BY_NAME["milan-v2"]
    assert Tcb.parse(old.report[0x38:0x40], old.product) != old.tcb


@each_row("vector", SNP_VECTORS, ids=lambda vector: vector.name)
def test_a_chain_of_another_product_or_kind_is_refused(vector: SnpVector) -> None:
    leaf, intermediate, _ = vector.chain
    for product in PRODUCTS:
        root = authority(product, "ark")
        # Reports of version 2 do not say their product.
        known = product == vector.product or vector.version == 2
        other = f"AMD root: got that of {product}, expected {vector.product}"
        for which in ("ask", "asvk"):
            chain = (leaf, authority(product, which), root)
            if chain != vector.chain:
                found = _refusal(vector, chain)
                assert found.startswith("AMD leaf: got a wrong signature" if known else other)
        if product != vector.product:
            found = _refusal(vector, (leaf, intermediate, root))
            assert found.startswith("AMD ASK: got a wrong signature" if known else other)
    forged = _refusal(vector, vector.chain_of(read_vector("snp/invalid-leaf.der")))
    assert forged.startswith("AMD leaf: got a wrong signature")


def test_a_list_of_revoked_certificates_is_by_its_root_and_has_its_time() -> None:
    milan, genoa = (read_vector(f"snp/{product}-crl.der") for product in ("milan", "genoa"))
    inside, behind = datetime(2026, 4, 1, tzinfo=UTC), datetime(2026, 5, 13, tzinfo=UTC)
    vcek, vlek = _BY_NAME["milan"], _BY_NAME["milan-vlek"]
    assert verify_snp(vcek.report, vcek.chain, inside, milan).revocation_checked
    assert verify_snp(vlek.report, vlek.chain, vlek.now, milan).revocation_checked
    assert verify_snp(vcek.report, vcek.chain, behind).product == "milan"
    for now in (behind, datetime(2024, 10, 1, tzinfo=UTC)):
        assert _refusal(vcek, vcek.chain, now, milan).startswith("AMD CRL: got 202")
    for wrong in (genoa, milan[:-1] + bytes((milan[-1] ^ 1,))):
        found = _refusal(vcek, vcek.chain, inside, wrong)
        assert found.startswith("AMD CRL: got a wrong signature")
    # Genoa's ended before the leaf began, which is read behind it.
    other = _BY_NAME["genoa"]
    for now, what in ((datetime(2025, 7, 1, tzinfo=UTC), "leaf"), (other.now, "CRL")):
        assert _refusal(other, other.chain, now, genoa).startswith(f"AMD {what}: got 202")


def _accepted(vector: SnpVector, parts: Sequence[bytes]) -> VerifiedSnp | None:
    report, *chain = parts
    try:
        return verify_snp(report, chain, vector.now)
    except EvidenceError:
        return None


def test_no_byte_of_a_report_or_certificate_may_change() -> None:
    """Each byte of a report in one of the vectors; of certificates, one in 21."""
    draw, free, tried = Random(384), [], 0
    for number, vector in enumerate(SNP_VECTORS):
        parts = [vector.report, *vector.chain]
        assert _accepted(vector, parts)
        for which, data in enumerate(parts):
            step = len(SNP_VECTORS) * (1 if which == 0 else 3)
            for at in range(number, len(data), step):
                other = bytes((data[at] ^ draw.randrange(1, 256),))
                changed = data[:at] + other + data[at + 1 :]
                tried += 1
                if _accepted(vector, [*parts[:which], changed, *parts[which + 1 :]]):
                    free.append((vector.name, which, at))
    assert free == []
    assert tried > 2500
