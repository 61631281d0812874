"""An independent verifier from PyPI says the same of every vector that it supports.

It does not look at the time, at a VLEK, or at Turin.
"""

from __future__ import annotations

import hashlib
import random

import omne_attest
import pytest

from protocol.errors import EvidenceError
from tee_side.attest.snp import verify_snp
from tee_side.attest.snp_report import SIGNED_BYTES
from tests.kit.evidence import SNP_VECTORS, SnpVector, read_vector

# The serial number of every VCEK is 0.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Parsed a serial number")]


def _ours(report: bytes, leaf: bytes, of: SnpVector) -> bool:
    try:
        verify_snp(report, of.chain_of(leaf), of.now)
    except EvidenceError:
        return False
    return True


def _omne(report: bytes, leaf: bytes, of: SnpVector) -> bool:
    chain = of.chain_of(leaf)
    policy = omne_attest.Policy(max_vmpl=3, reject_debug=False)
    try:
        omne_attest.verify(report, *chain, hashlib.sha256(chain[-1]).digest(), policy)
    except omne_attest.Fail:
        return False
    return True


def test_it_says_the_same() -> None:
    """Of genuine reports, of other leaves, and of changes in what is signed and in r and s."""
    vectors = [one for one in SNP_VECTORS if one.kind == "vcek" and one.product != "turin"]
    draw = random.Random(len(vectors))
    leaves = {one.name: one.leaf for one in SNP_VECTORS}
    leaves["invalid"] = read_vector("snp/invalid-leaf.der")
    places = [*range(SIGNED_BYTES), *range(0x2A0, 0x2D0), *range(0x2E8, 0x318)]
    assert vectors
    for vector in vectors:
        for name, leaf in leaves.items():
            verdicts = [one(vector.report, leaf, vector) for one in (_omne, _ours)]
            assert verdicts == [name == vector.name] * 2, f"{vector.name} by {name}"
        for at in draw.sample(places, 20):
            report = bytearray(vector.report)
            report[at] ^= draw.randrange(1, 256)
            verdicts = [one(bytes(report), vector.leaf, vector) for one in (_omne, _ours)]
            assert verdicts == [False, False], f"{vector.name} at {at:#x}"
