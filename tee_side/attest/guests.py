"""The evidence of confidential VMs: AMD SEV-SNP, Intel TDX, and a simulated TEE.

What a report says is appraised elsewhere (`appraisal`).

SEV-SNP: the report, AMD's certificates, and who signed what. Certificates: root (ARK), intermediate
(ASK, ASVK), leaf (VCEK, VLEK). Every leaf has serial number 0, which `cryptography.x509` is about
to refuse: the strict DER decoder of the same library reads it. The root is pinned; its certificate
may come from the other side. All numbers of a report are little-endian.

TDX: quotes, versions 4 and 5, by the package `dcap-qvl`, without a network. Collateral is what
Intel signs about platforms, as the JSON that `dcap-qvl` writes: the newest firmware, which
certificates are revoked. It comes from the other side and expires after 30 days, so that it may
hide what Intel has found for as long.

Bytes that dcap-qvl 0.7.0 does not look at change nothing of the result. In a quote: the type of its
outer certification data, low bits of two lengths, line breaks and texts between certificates, the
copy of Intel's root certificate, all behind that. In collateral: `pck_crl_issuer_chain`, and in
other chains line breaks and the copy of the root.

Sources: AMD, "SEV Secure Nested Paging Firmware ABI Specification" (56860), the structure
ATTESTATION_REPORT; "Versioned Chip Endorsement Key (VCEK) Certificate and KDS Interface
Specification" (57230); Intel, "Intel TDX DCAP: Quote Generation Library and Quote Verification
Library", appendix A (quotes), and "Intel Trust Domain Extensions Module Base Architecture
Specification" (ATTRIBUTES).
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import import_module
from typing import Annotated, Literal, NamedTuple, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat import asn1
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from protocol.errors import EvidenceError, SettingsError
from tee_side.attest.statement import REPORT_DATA_BYTES, Evidence

Product: TypeAlias = Literal["milan", "genoa", "turin"]

SigningKey: TypeAlias = Literal["vcek", "vlek"]

REPORT_BYTES, SIGNED_BYTES = 0x4A0, 0x2A0

# 0x00 version, 0x08 policy, 0x30 VMPL, 0x34 signature algorithm, 0x40 platform, 0x48 flags; then
# what is bytes, from 0x50, 0x90, 0xC0, 0x180, 0x1A0 and 0x1F0 on.
_LAYOUT = struct.Struct("<I4xQ 32xII 8xQ I4x 64s 48s 32s 160x8s 24x64s 16x8s")

_BYTES = ("report_data", "measurement", "host_data", "reported_tcb", "chip_id", "launch_tcb")


class Tcb(NamedTuple):
    """Security versions of a processor's firmware; `fmc` is of Turin alone, 0 on others."""

    bootloader: int
    tee: int
    snp: int
    microcode: int
    fmc: int = 0

    @classmethod
    def parse(cls, word: bytes, product: Product) -> Tcb:
        """Read the 8 bytes of a TCB_VERSION."""
        if product == "turin":
            return cls(word[1], word[2], word[3], word[7], word[0])
        return cls(word[0], word[1], word[6], word[7])


@dataclass(frozen=True, slots=True)
class SnpReport:
    """A report that was parsed, and not verified yet.

    `debug`: whether the host may read the guest's memory; `migration_agent`: whether one may be
    attached, which can read the guest. `product`: by CPUID, which reports have from version 3 on,
    or by the chip id of a Turin; None where the report does not tell. `reported_tcb`, `launch_tcb`:
    8 bytes whose meaning the product says.
    """

    report_data: bytes
    measurement: bytes
    host_data: bytes
    reported_tcb: bytes
    chip_id: bytes
    launch_tcb: bytes
    product: Product | None
    signing_key: SigningKey
    vmpl: int
    debug: bool
    migration_agent: bool
    alias_check: bool

    @classmethod
    def parse(cls, data: bytes) -> SnpReport:
        """Parse the 1184 bytes of a report. Raises EvidenceError."""
        _require_field(len(data) == REPORT_BYTES, "size", f"{len(data)} bytes", f"{REPORT_BYTES}")
        version, policy, vmpl, algorithm, platform, flags, *strings = _LAYOUT.unpack_from(data)
        key = flags >> 2 & 7
        _require_field(version in (2, 3, 5), "version", str(version), "2 or 3 or 5")
        _require_field(
            algorithm == 1, "signature algorithm", str(algorithm), "1, ECDSA P-384 by SHA-384"
        )
        _require_field(key in (0, 1), "signing key", str(key), "0, a VCEK, or 1, a VLEK")
        _require_field(bool(policy >> 17 & 1), "guest policy", f"{policy:#x}", "bit 17, always set")
        _require_field(
            not any(data[0x330:]), "bytes behind the signature", "others", "unsigned zeros"
        )
        return cls(
            **dict(zip(_BYTES, strings, strict=True)),
            product=_product(version, data),
            signing_key="vlek" if key else "vcek",
            vmpl=vmpl,
            debug=bool(policy >> 19 & 1),
            migration_agent=bool(policy >> 18 & 1),
            alias_check=bool(platform >> 5 & 1),
        )


def _product(version: int, data: bytes) -> Product | None:
    family, model, chip_id = data[0x188], data[0x189], data[0x1A0:0x1E0]
    if version == 2:
        # A Turin has an id of 8 bytes, and zeros behind it.
        return "turin" if any(chip_id[:8]) and not any(chip_id[8:]) else None
    if family == 0x19 and (model <= 0x1F or 0xA0 <= model <= 0xAF):
        return "milan" if model <= 0x0F else "genoa"
    turin = family == 0x1A and model <= 0x11
    _require_field(turin, "processor", f"family {family}, model {model}", "Milan, Genoa or Turin")
    return "turin"


# SHA-256 of the DER of each product's ARK.
PINNED_ROOTS: dict[str, Product] = {
    "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd": "milan",
    "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1": "genoa",
    "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a": "turin",
}

_PSS = padding.PSS(padding.MGF1(hashes.SHA384()), salt_length=48)

# The same as AlgorithmIdentifiers: some of AMD's leaves write the last field, which is at its
# default.
_SHA384 = "300d06096086480165030402020500"

_FIELDS = f"a00f{_SHA384} a11c301a06092a864886f70d010108{_SHA384} a203020130"

_PSS_DER = (
    bytes.fromhex(f"3041 06092a864886f70d01010a 3034{_FIELDS}"),
    bytes.fromhex(f"3046 06092a864886f70d01010a 3039{_FIELDS} a303020101"),
)

_AMD = "1.3.6.1.4.1.3704.1"


@asn1.sequence
class _Signed:
    """OpenSSL would take a signature without its leading zeros, too: its size is in bits."""

    body: asn1.TLV
    algorithm: asn1.TLV
    signature: Annotated[asn1.BitString, asn1.Size.exact(4096)]


@asn1.sequence
class _Extension:
    """One that is not critical: that would be a third field."""

    name: x509.ObjectIdentifier
    value: bytes


@asn1.sequence
class _LeafBody:
    version: Annotated[int, asn1.Explicit(0)]
    serial: int
    algorithm: asn1.TLV
    issuer: asn1.TLV
    validity: list[asn1.UTCTime | asn1.GeneralizedTime]
    subject: asn1.TLV
    key: asn1.TLV
    extensions: Annotated[list[_Extension], asn1.Explicit(3)]


def verify_chain(
    report: SnpReport, certificates: Sequence[bytes], now: datetime, crl: bytes | None = None
) -> tuple[Product, ec.EllipticCurvePublicKey]:
    """Verify leaf, intermediate and root, in DER; return whose root it is and the leaf's key.

    The leaf has to be of the processor and the firmware of `report`. `crl`: the root's list of
    revoked intermediates, in DER. Raises EvidenceError.
    """
    _require(len(certificates) == 3, "certificates", str(len(certificates)), "leaf, ASK and ARK")
    leaf, intermediate, root = certificates
    product = PINNED_ROOTS.get(hashlib.sha256(root).hexdigest())
    if product is None:
        raise EvidenceError("AMD root", got="another certificate", expected="one that is pinned")
    _require(report.product in (None, product), "root", f"that of {product}", f"{report.product}")
    with EvidenceError.instead_of(
        (ValueError, UnsupportedAlgorithm), "AMD certificates", "other bytes", "AMD's DER"
    ):
        ark = x509.load_der_x509_certificate(root)
        _require_valid("ARK", ark.not_valid_before_utc, ark.not_valid_after_utc, now)
        _signed_body("ASK", intermediate, ark)
        ask = x509.load_der_x509_certificate(intermediate)
        ask.verify_directly_issued_by(ark)
        _require_valid("ASK", ask.not_valid_before_utc, ask.not_valid_after_utc, now)
        if crl is not None:
            _signed_body("CRL", crl, ark)
            found = x509.load_der_x509_crl(crl)
            _require(found.issuer == ark.subject, "CRL", "another issuer", "the ARK")
            begins, ends = found.last_update_utc, found.next_update_utc
            _require_valid("CRL", begins, ends or begins, now)
            revoked = found.get_revoked_certificate_by_serial_number(ask.serial_number)
            _require(
                revoked is None,
                "ASK",
                "a certificate that is revoked",
                "one that is not on the CRL",
            )
        return product, _leaf_key(leaf, ask, product, report, now)


def _signed_body(name: str, encoded: bytes, issuer: x509.Certificate) -> tuple[bytes, bytes]:
    """Return the body of a certificate or list that `issuer` signed, and by which algorithm.

    What it did not sign is read no further. The algorithm stands outside of what is signed: a
    reader of the body compares it with the one inside.
    """
    _require(len(encoded) <= 8192, name, f"{len(encoded)} bytes", "8192 at most")
    found, key = asn1.decode_der(_Signed, encoded), issuer.public_key()
    body, algorithm = asn1.encode_der(found.body), asn1.encode_der(found.algorithm)
    _require(algorithm in _PSS_DER, name, "another signature algorithm", "RSA-PSS with SHA-384")
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size != 4096:
        raise EvidenceError(f"AMD {name}", got="an issuer with another key", expected="RSA-4096")
    with EvidenceError.instead_of(InvalidSignature, f"AMD {name}", "a wrong signature", "AMD's"):
        key.verify(found.signature.as_bytes(), body, _PSS, hashes.SHA384())
    return body, algorithm


def _leaf_key(
    encoded: bytes, ask: x509.Certificate, product: Product, report: SnpReport, now: datetime
) -> ec.EllipticCurvePublicKey:
    body, algorithm = _signed_body("leaf", encoded, ask)
    leaf = asn1.decode_der(_LeafBody, body)
    signed = asn1.encode_der(leaf.algorithm) == algorithm
    _require(signed, "leaf", "two signature algorithms", "the one that is signed")
    begins, ends = (one.as_datetime() for one in leaf.validity)
    _require_valid("leaf", begins, ends, now)
    _require(not begins.microsecond | ends.microsecond, "leaf", "a part of a second", "whole ones")
    _require(leaf.version == 2, "leaf", "another version", "version 3")
    kind, vlek = report.signing_key.upper(), report.signing_key == "vlek"
    asks = f"VLEK-{product.capitalize()}" if vlek else product.capitalize()
    names = asn1.encode_der(leaf.subject), asn1.encode_der(leaf.issuer), ask.subject.public_bytes()
    known = _name(kind), _name(asks), _name(asks)
    _require(names == known, "leaf", "another name", f"SEV-{kind} by SEV-{asks}")
    extensions = {one.name.dotted_string: one.value for one in leaf.extensions}
    _require(len(extensions) == len(leaf.extensions), "leaf", "an extension twice", "each once")
    parts = (1, 2, 3, 8, 9) if product == "turin" else (1, 2, 3, 8)
    numbers = (asn1.decode_der(int, extensions.get(f"{_AMD}.3.{part}", b"")) for part in parts)
    tcb, reported = Tcb(*numbers), Tcb.parse(report.reported_tcb, product)
    _require(tcb == reported, "leaf", f"{tcb}", f"{reported}, as the report says")
    chip_id = extensions.get(f"{_AMD}.4")
    # Turin's is of 8 bytes, and zeros follow in the report.
    same = (chip_id and chip_id.ljust(64, b"\0")) == (None if vlek else report.chip_id)
    _require(same, "leaf", "another chip id", "the report's in a VCEK, none in a VLEK")
    key = serialization.load_der_public_key(asn1.encode_der(leaf.key))
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise EvidenceError("AMD leaf", got="another public key", expected="one of P-384")
    return key


def _name(of: str) -> bytes:
    others = "O=Advanced Micro Devices,ST=CA,L=Santa Clara,C=US,OU=Engineering"
    return x509.Name.from_rfc4514_string(f"CN=SEV-{of},{others}").public_bytes()


def _require_valid(name: str, begins: datetime, ends: datetime, now: datetime) -> None:
    expected = f"a time from {begins.isoformat()} to {ends.isoformat()}"
    _require(begins <= now <= ends, name, now.isoformat(timespec="seconds"), expected)


def _require(condition: bool, what: str, got: str, expected: str, of: str = "AMD ") -> None:
    EvidenceError.unless(condition, of + what, got, expected)


_require_field = partial(_require, of="SNP report: ")


class VerifiedSnp(NamedTuple):
    """A report that a processor of AMD's signed, of this product and with this firmware.

    `revocation_checked`: whether a list of revoked certificates was there. `report_data`: what the
    guest had signed, 64 bytes.
    """

    report: SnpReport
    product: Product
    tcb: Tcb
    revocation_checked: bool
    report_data: bytes


def verify_snp(
    report: bytes, certificates: Sequence[bytes], now: datetime, crl: bytes | None = None
) -> VerifiedSnp:
    """Verify a report of 1184 bytes by leaf, intermediate and root, in DER. Raises EvidenceError.

    `now`: when, with a time zone; `crl`: the root's list of revoked intermediates, in DER. A
    signature (r, s) has a twin, (r, n - s): a report is known by what is signed, not by its bytes.
    """
    parsed = SnpReport.parse(report)
    product, key = verify_chain(parsed, certificates, now, crl)
    # Two little-endian numbers of 72 bytes, of which those of P-384 take 48.
    r, s = (int.from_bytes(report[at : at + 72], "little") for at in (0x2A0, 0x2E8))
    with EvidenceError.instead_of(
        InvalidSignature, "SNP report", "a wrong signature", "the leaf's"
    ):
        key.verify(encode_dss_signature(r, s), report[:SIGNED_BYTES], ec.ECDSA(hashes.SHA384()))
    return VerifiedSnp(
        parsed,
        product,
        Tcb.parse(parsed.reported_tcb, product),
        crl is not None,
        parsed.report_data,
    )


MEASUREMENT_BYTES = 48

_HEADER = b"TSQP simulated TEE 1\0"

_SIMULATED_BYTES = len(_HEADER) + MEASUREMENT_BYTES + REPORT_DATA_BYTES

# A key that is published here: simulated evidence proves nothing.
_ROOT = ed25519.Ed25519PrivateKey.from_private_bytes(hashlib.sha256(_HEADER).digest())


class VerifiedSimulated(NamedTuple):
    """What a simulated report says: 48 and 64 bytes."""

    measurement: bytes
    report_data: bytes


def simulate(report_data: bytes, measurement: bytes) -> Evidence:
    """Return evidence of a measurement (48 bytes) and of `report_data` (64 bytes)."""
    signed = _HEADER + measurement + report_data
    report = signed + _ROOT.sign(signed)
    return Evidence(kind="simulated", report=report, certificates=(), collateral=b"")


def verify_simulated(report: bytes) -> VerifiedSimulated:
    """Verify that `simulate` wrote it. Raises EvidenceError."""
    signed, signature = report[:_SIMULATED_BYTES], report[_SIMULATED_BYTES:]
    try:
        _ROOT.public_key().verify(signature, signed)
    except InvalidSignature:
        signed = b""
    EvidenceError.unless(
        signed.startswith(_HEADER), "simulated report", "other bytes", "one that was signed"
    )
    return VerifiedSimulated(signed[len(_HEADER) : -REPORT_DATA_BYTES], signed[-REPORT_DATA_BYTES:])


_TD_FIELDS = ("mr_td", "rt_mr0", "rt_mr1", "rt_mr2", "rt_mr3", "report_data", "mr_config_id")
# In the first byte no bit is one of a guest that is left alone; then: a guest that may be migrated.
_OPEN = 0xFF | 1 << 29
# Parts of the library's messages; the rest is not repeated: it may quote what it was given.
_REASONS = "[Ee]xpired|in the future|NotValidYet|Revoked|Debug mode|No matching TCB|Fmspc|JSON"


class VerifiedTdx(NamedTuple):
    """A quote that Intel's key signed; `status`: of the platform's firmware, by Intel's list.

    `mrtd`, `rtmr` 0 to 3, `config_id`: 48 bytes each.
    """

    mrtd: bytes
    rtmr: tuple[bytes, ...]
    report_data: bytes
    config_id: bytes
    status: str


def verify_tdx(quote: bytes, collateral: bytes, now: datetime) -> VerifiedTdx:
    """Verify a quote by collateral; `now`: when, with a time zone.

    Firmware that is out of date is the `status`, for a policy to judge. Raises EvidenceError, and
    SettingsError where `dcap-qvl` is not installed.
    """
    try:
        library = import_module("dcap_qvl")
        given = library.QuoteCollateralV3.from_json(collateral.decode())
        found = json.loads(library.verify(quote, given, int(now.timestamp())).to_json())
    except ImportError:
        raise SettingsError("TDX", got="no dcap-qvl", expected="pip install '.[attest]'") from None
    except ValueError as error:
        reason = re.search(_REASONS, str(error))
        got = reason[0] if reason else "another"
        raise EvidenceError("TDX: quote", got=got, expected="what dcap-qvl verifies") from None
    match found["report"]:
        case {"TD10": dict(body)}:
            service = ""
        case {"TD15": {"base": dict(body), "mr_service_td": str(service)}}:
            pass
        case _:
            raise EvidenceError("TDX: kind of TEE", got="another", expected="TDX 1.0 or 1.5")
    mrtd, *rtmr, data, config_id = (bytes.fromhex(body[name]) for name in _TD_FIELDS)
    attributes = int.from_bytes(bytes.fromhex(body["td_attributes"]), "little")
    # The library refuses debugging as well. A service TD is what migrates a guest.
    EvidenceError.unless(
        not attributes & _OPEN and not service.strip("0"),
        "TDX: attributes",
        "debugging or migration",
        "neither",
    )
    EvidenceError.unless(found["status"] != "Revoked", "TDX: TCB status", "Revoked", "any but that")
    return VerifiedTdx(mrtd, tuple(rtmr), data, config_id, found["status"])
