"""Reports, made and genuine: what they say, who signed them, and which processor they are about."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from random import Random

import omne_attest
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from protocol.errors import EvidenceError
from tee_side.attest.guests import (
    REPORT_BYTES,
    SIGNED_BYTES,
    Product,
    SnpReport,
    VerifiedSnp,
    verify_snp,
)
from tests.kit import snp_chain as made
from tests.kit.evidence import SNP_VECTORS, VECTORS, SnpVector, read_vector
from tests.kit.rows import each_row
from tests.kit.snp_chain import ASK_KEY, NOW, Chain, make_chain, make_report

# Of P-384.
_ORDER = 2**384 - 1388124618062372383947042015309946732620727252194336364173
_CHIP = "AMD leaf: got another chip id, expected the report's in a VCEK"


def _verify(report: bytes, chain: Chain | None = None) -> VerifiedSnp:
    chain = chain or make_chain()
    with chain.pinned():
        return verify_snp(report, chain.certificates, NOW)


def _refuses(text: str, report: bytes, chain: Chain | None = None) -> None:
    with pytest.raises(EvidenceError) as refused:
        _verify(report, chain)
    assert str(refused.value).startswith(text)


def _with_signature(report: bytes, r: int, s: int) -> bytes:
    numbers = r.to_bytes(72, "little") + s.to_bytes(72, "little")
    return report[:SIGNED_BYTES] + numbers + report[SIGNED_BYTES + 144 :]


def _signature(report: bytes) -> tuple[int, int]:
    r, s = report[SIGNED_BYTES:][:72], report[SIGNED_BYTES + 72 :][:72]
    return int.from_bytes(r, "little"), int.from_bytes(s, "little")


@each_row("product", ["milan", "genoa", "turin"])
def test_tcb_and_chip_are_the_leafs(product: Product) -> None:
    tcb, chip, chain = made.tcb_of(product), made.chip_id_of(product), make_chain(product)
    for name in [name for name in tcb._fields if name != "fmc" or product == "turin"]:
        for step in (1, -1):
            other = tcb._replace(**{name: (getattr(tcb, name) + step) % 256})
            text = f"AMD leaf: got {tcb}, expected {other}, as the report says"
            _refuses(text, make_report(product, tcb=other), chain)
    others = [bytes(64), chip[:8] + bytes(56), chip[:-1] + b"\0", b"\0" + chip[1:], chip[::-1]]
    if product == "turin":
        # Its own is of 8 bytes, and zeros.
        others = [bytes(64), chip[:7] + bytes(57)]
        others += [chip + b"\1" + bytes(55), chip + bytes(55) + b"\1"]
    for chip_id in others:
        _refuses(_CHIP, make_report(product, changed={0x1A0: chip_id}), chain)


def test_an_empty_chip_id_in_a_leaf_is_none() -> None:
    """One that was masked is all zeros, which nothing padded with zeros may equal."""
    leaf = made.leaf_body(changed={f"{made.AMD}.4": b""}).signed(ASK_KEY)
    chain = Chain("milan", leaf, make_chain().ask, make_chain().ark)
    _refuses(_CHIP, make_report(changed={0x1A0: bytes(64)}), chain)


def test_every_part_is_signed_by_the_key_of_the_leaf() -> None:
    report, wrong = make_report(), "SNP report: got a wrong signature, expected the leaf's"
    r, s = _signature(report)
    other = _signature(make_report(vmpl=1))
    _refuses(wrong, make_report(key=ec.derive_private_key(7, ec.SECP384R1())))
    pairs = [other, (0, 0), (1, 1), (2**576 - 1, 2**576 - 1), (_ORDER, 0), (s, r), (r, 0), (0, s)]
    for pair in [*pairs, (r + _ORDER, s), (r, s + _ORDER), (r | 1 << 384, s)]:
        _refuses(wrong, _with_signature(report, *pair))
    # As every one of ECDSA it has a twin: so the digest of a whole report identifies nothing.
    twin = _with_signature(report, r, _ORDER - s)
    assert twin != report
    assert _verify(twin) == _verify(report)


def _report_with(at: int, value: bytes, version: int = 3) -> bytes:
    return make_report(version=version, changed={at: value})


def test_fields_are_read() -> None:
    data = make_report(
        policy=0x10F0000,
        vmpl=3,
        report_data=bytes(range(64)),
        measurement=b"m" * 48,
        host_data=b"h" * 32,
        changed={0x1E0: b"committd", 0x1F0: b"launched", 0x180: b"reported"},
    )
    report = SnpReport.parse(data)
    assert (report.vmpl, report.alias_check, report.signing_key) == (3, True, "vcek")
    assert report.report_data == bytes(range(64))
    assert (report.measurement, report.host_data) == (b"m" * 48, b"h" * 32)
    assert (report.reported_tcb, report.launch_tcb) == (b"reported", b"launched")
    assert report.chip_id == made.chip_id_of("milan")
    by_policy = [SnpReport.parse(make_report(policy=1 << 17 | 1 << bit)) for bit in range(64)]
    by_platform = [SnpReport.parse(make_report(platform=1 << bit)) for bit in range(64)]
    assert [bit for bit, report in enumerate(by_policy) if report.debug] == [19]
    assert [bit for bit, report in enumerate(by_policy) if report.migration_agent] == [18]
    assert [bit for bit, report in enumerate(by_platform) if report.alias_check] == [5]
    keys = {flags: _report_with(0x48, bytes((flags,))) for flags in (0, 3, 4, 7, 32)}
    found = {flags: SnpReport.parse(data).signing_key for flags, data in keys.items()}
    assert found == {0: "vcek", 3: "vcek", 4: "vlek", 7: "vlek", 32: "vcek"}


@each_row(
    ("chip_id", "product"),
    [
        (b"\x01" * 8 + bytes(56), "turin"),
        (bytes(7) + b"\x01" + bytes(56), "turin"),
        (b"\x01" * 9 + bytes(55), None),
        (b"\x01" * 8 + bytes(55) + b"\x01", None),
        (bytes(64), None),
    ],
)
def test_product_of_version_2_is_told_by_the_chip_id(chip_id: bytes, product: str | None) -> None:
    assert SnpReport.parse(_report_with(0x1A0, chip_id, version=2)).product == product
    # Of later versions CPUID says it, whatever the chip id is.
    for family, models, known in (
        (0x19, (0x00, 0x01, 0x0F), "milan"),
        (0x19, (0x10, 0x1F, 0xA0, 0xAF), "genoa"),
        (0x1A, (0x00, 0x11), "turin"),
    ):
        for model in models:
            data = _report_with(0x188, bytes((family, model)))
            assert SnpReport.parse(data[:0x1A0] + chip_id + data[0x1E0:]).product == known


def _processor(family: int, model: int) -> tuple[bytes, str]:
    text = f"processor: got family {family}, model {model}, expected Milan, Genoa or Turin"
    return _report_with(0x188, bytes((family, model))), text


def _unsigned(at: int) -> tuple[bytes, str]:
    report = make_report()
    data = report[:at] + b"\1" + report[at + 1 :]
    return data, "bytes behind the signature: got others, expected unsigned zeros"


def _number(at: int, n: int, what: str, expected: str) -> tuple[bytes, str]:
    return _report_with(at, n.to_bytes(4, "little")), f"{what}: got {n}, expected {expected}"


_ALGORITHM = ("signature algorithm", "1, ECDSA P-384 by SHA-384")


@each_row(
    ("data", "text"),
    [
        (b"", "size: got 0 bytes, expected 1184"),
        (make_report()[:-1], "size: got 1183 bytes, expected 1184"),
        (make_report() + b"\0", "size: got 1185 bytes, expected 1184"),
        *(_number(0, n, "version", "2 or 3 or 5") for n in (0, 1, 4, 6, 2 + 2**16)),
        *(_number(0x34, n, *_ALGORITHM) for n in (0, 2, 257)),
        (_report_with(0x48, bytes((2 << 2,))), "signing key: got 2, expected 0, a VCEK, or"),
        (_report_with(0x48, bytes((7 << 2,))), "signing key: got 7, expected 0, a VCEK, or"),
        *map(_unsigned, (0x330, 0x331, 0x400, REPORT_BYTES - 1)),
        (make_report(policy=0), "guest policy: got 0x0, expected bit 17, always set"),
        *(_processor(0x19, model) for model in (0x20, 0x9F, 0xB0, 0xFF)),
        *(_processor(0x1A, model) for model in (0x12, 0xFF)),
        *(_processor(family, 0x01) for family in (0, 0x18, 0x1B)),
    ],
)
def test_a_report_of_another_form_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(EvidenceError, match=f"^SNP report: {re.escape(text)}"):
        SnpReport.parse(data)


_BY_NAME = {vector.name: vector for vector in SNP_VECTORS}


def _refusal(
    vector: SnpVector,
    certificates: Sequence[bytes],
    now: datetime | None = None,
    crl: bytes | None = None,
) -> str:
    with pytest.raises(EvidenceError) as refused:
        verify_snp(vector.report, certificates, now or vector.now, crl)
    return str(refused.value)


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


def test_a_list_of_revoked_certificates_is_by_its_root_and_has_its_time() -> None:
    milan, genoa = (read_vector(f"snp/{product}-crl.der") for product in ("milan", "genoa"))
    inside, behind = datetime(2026, 4, 1, tzinfo=UTC), datetime(2026, 5, 13, tzinfo=UTC)
    vcek, vlek = _BY_NAME["milan"], _BY_NAME["milan-vlek"]
    assert verify_snp(vcek.report, vcek.chain, inside, milan).revocation_checked
    assert verify_snp(vlek.report, vlek.chain, vlek.now, milan).revocation_checked
    for now in (behind, datetime(2024, 10, 1, tzinfo=UTC)):
        assert _refusal(vcek, vcek.chain, now, milan).startswith("AMD CRL: got 202")
    for wrong in (genoa, milan[:-1] + bytes((milan[-1] ^ 1,))):
        found = _refusal(vcek, vcek.chain, inside, wrong)
        assert found.startswith("AMD CRL: got a wrong signature")


def _accepted(vector: SnpVector, parts: Sequence[bytes]) -> VerifiedSnp | None:
    report, *chain = parts
    try:
        return verify_snp(report, chain, vector.now)
    except EvidenceError:
        return None


def test_no_byte_of_a_report_or_certificate_may_change() -> None:
    """Each third byte of a report in one of the vectors; of certificates, one in 70."""
    draw, free, tried = Random(384), [], 0
    for number, vector in enumerate(SNP_VECTORS):
        parts = [vector.report, *vector.chain]
        assert _accepted(vector, parts)
        for which, data in enumerate(parts):
            for at in range(number, len(data), 21 if which == 0 else 70):
                other = bytes((data[at] ^ draw.randrange(1, 256),))
                changed = data[:at] + other + data[at + 1 :]
                tried += 1
                if _accepted(vector, [*parts[:which], changed, *parts[which + 1 :]]):
                    free.append((vector.name, which, at))
    assert free == []
    assert tried > 700


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Parsed a serial number")  # that of every VCEK is 0
def test_an_independent_verifier_says_the_same() -> None:
    """Of genuine reports, of other leaves, and of changes in what is signed and in r and s.

    It does not look at the time, at a VLEK, or at Turin.
    """
    draw, policy = Random(384), omne_attest.Policy(max_vmpl=3, reject_debug=False)
    leaves = {one.name: one.leaf for one in SNP_VECTORS}
    leaves["invalid"] = read_vector("snp/invalid-leaf.der")
    places = [*range(SIGNED_BYTES), *range(0x2A0, 0x2D0), *range(0x2E8, 0x318)]

    def verdicts(report: bytes, leaf: bytes, of: SnpVector) -> tuple[bool, bool]:
        chain = of.chain_of(leaf)
        ours = _accepted(of, [report, *chain]) is not None
        try:
            omne_attest.verify(report, *chain, sha256(chain[-1]).digest(), policy)
        except omne_attest.Fail:
            return False, ours
        return True, ours

    for vector in SNP_VECTORS:
        if vector.kind == "vlek" or vector.product == "turin":
            continue
        for name, leaf in leaves.items():
            said = verdicts(vector.report, leaf, vector)
            assert said == (name == vector.name,) * 2, f"{vector.name} by {name}"
        for at in draw.sample(places, 20):
            report = bytearray(vector.report)
            report[at] ^= draw.randrange(1, 256)
            assert verdicts(bytes(report), vector.leaf, vector) == (False, False), hex(at)


def test_genuine_evidence_is_what_its_table_lists() -> None:
    listed = re.findall(
        r"^\| (\S+/\S+) \|.*\| ([0-9a-f]{64}) \|$",
        (VECTORS / "README.md").read_text(),
        re.MULTILINE,
    )
    assert dict(listed) == {
        str(path.relative_to(VECTORS)): sha256(path.read_bytes()).hexdigest()
        for path in VECTORS.glob("*/*")
        if path.suffix != ".txt"
    }
