"""Two independent verifiers from PyPI say the same of every vector that they support.

Neither looks at the time, at a VLEK, or at Turin; one knows Genoa alone, and is not to be had for
every machine.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable

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


def _sev_attest_tool(report: bytes, leaf: bytes, of: SnpVector) -> bool:
    """Ask what is built on the Rust crate `sev`; it has certificates of Genoa of its own."""
    verifier = pytest.importorskip("sev_attest_tool")
    try:
        verifier.verify_attestation_report(_as_json(report), leaf)
    except BaseException as error:
        # What it raises for a refusal is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        return False
    return True


# Names, where they lie (hexadecimal) and how many bytes they are, as that verifier reads a report.
_PLACES = """
version 0 4, guest_svn 4 4, policy 8 8, family_id 10 16, image_id 20 16, vmpl 30 4, sig_algo 34 4,
plat_info 40 8, _author_key_en 48 4, _reserved_0 4c 4, report_data 50 64, measurement 90 48,
host_data c0 32, id_key_digest e0 48, author_key_digest 110 48, report_id 140 32,
report_id_ma 160 32,
_reserved_1 188 24, chip_id 1a0 64, current_build 1e8 1, current_minor 1e9 1, current_major 1ea 1,
_reserved_2 1eb 1, committed_build 1ec 1, committed_minor 1ed 1, committed_major 1ee 1,
_reserved_3 1ef 1, _reserved_4 1f8 168
"""
_TCBS = {"current_tcb": 0x38, "reported_tcb": 0x180, "committed_tcb": 0x1E0, "launch_tcb": 0x1F0}


def _as_json(report: bytes) -> str:
    """Write a report with every byte of it, in the fields of version 2."""
    fields: dict[str, object] = {}
    for place in _PLACES.replace("\n", " ").split(","):
        name, at, size = place.split()
        content = report[int(at, 16) :][: int(size)]
        fields[name] = int.from_bytes(content, "little") if int(size) <= 8 else list(content)
    for name, start in _TCBS.items():
        bootloader, tee, *reserved, snp, microcode = report[start : start + 8]
        numbers = {"bootloader": bootloader, "tee": tee, "snp": snp, "microcode": microcode}
        fields[name] = {**numbers, "_reserved": reserved}
    r, s, rest = report[0x2A0:0x2E8], report[0x2E8:0x330], report[0x330:]
    fields["signature"] = {"r": list(r), "s": list(s), "_reserved": list(rest)}
    return json.dumps(fields)


_VCEK = [one for one in SNP_VECTORS if one.kind == "vcek" and one.product != "turin"]
_GENOA = [one for one in _VCEK if one.product == "genoa"]


@pytest.mark.parametrize(
    ("verifier", "vectors"),
    [(_omne, _VCEK), (_sev_attest_tool, _GENOA)],
    ids=["omne-attest", "sev-attest-tool"],
)
def test_it_says_the_same(
    verifier: Callable[[bytes, bytes, SnpVector], bool], vectors: list[SnpVector]
) -> None:
    """Of genuine reports, of other leaves, and of changes in what is signed and in r and s."""
    draw = random.Random(len(vectors))
    leaves = {one.name: one.leaf for one in SNP_VECTORS}
    leaves["invalid"] = read_vector("snp/invalid-leaf.der")
    places = [*range(SIGNED_BYTES), *range(0x2A0, 0x2D0), *range(0x2E8, 0x318)]
    assert vectors
    for vector in vectors:
        for name, leaf in leaves.items():
            verdicts = [one(vector.report, leaf, vector) for one in (verifier, _ours)]
            assert verdicts == [name == vector.name] * 2, f"{vector.name} by {name}"
        for at in draw.sample(places, 20):
            report = bytearray(vector.report)
            report[at] ^= draw.randrange(1, 256)
            verdicts = [one(bytes(report), vector.leaf, vector) for one in (verifier, _ours)]
            assert verdicts == [False, False], f"{vector.name} at {at:#x}"
