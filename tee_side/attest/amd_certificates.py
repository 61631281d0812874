"""The certificates of AMD's processors: root (ARK), intermediate (ASK, ASVK), leaf (VCEK, VLEK).

Source: AMD, "Versioned Chip Endorsement Key (VCEK) Certificate and KDS Interface Specification"
(57230). The root is pinned; its certificate may come from the other side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_der_public_key

from protocol.errors import EvidenceError
from tee_side.attest import der
from tee_side.attest.snp_report import Product, SigningKey, Tcb

# SHA-256 of the DER of each product's ARK.
PINNED_ROOTS: dict[str, Product] = {
    "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd": "milan",
    "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1": "genoa",
    "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a": "turin",
}
MAX_BYTES = 8192

_PSS_SHA384 = PSS(MGF1(SHA384()), 48)
# RSASSA-PSS with SHA-384, MGF1 with SHA-384 and a salt of 48 bytes, as an AlgorithmIdentifier; some
# of AMD's leaves write the last field, which is at its default.
_PSS_FIELDS = bytes.fromhex(
    "a00f300d06096086480165030402020500a11c301a06092a864886f70d010108300d06096086480165030402020500"
    "a203020130"
)
_PSS_OID = bytes.fromhex("06092a864886f70d01010a")
_PSS_SHA384_DER = (
    b"\x30\x41" + _PSS_OID + b"\x30\x34" + _PSS_FIELDS,
    b"\x30\x46" + _PSS_OID + b"\x30\x39" + _PSS_FIELDS + bytes.fromhex("a303020101"),
)
# Object identifiers, as they are encoded: 1.3.6.1.4.1.3704.1, AMD's, and 2.5.4.3.
_AMD = bytes.fromhex("2b060104019c7801")
_COMMON_NAME = bytes.fromhex("550403")
_COMMON_NAMES: dict[bytes, SigningKey] = {b"SEV-VCEK": "vcek", b"SEV-VLEK": "vlek"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """The certificate of the key that signs reports, verified; `chip_id`: of a VCEK alone."""

    product: Product
    kind: SigningKey
    key: EllipticCurvePublicKey
    tcb: Tcb
    chip_id: bytes | None


def verify_chain(
    certificates: Sequence[bytes],
    now: datetime,
    crl: bytes | None = None,
    roots: Mapping[str, Product] = PINNED_ROOTS,
) -> Leaf:
    """Verify leaf, intermediate and root, in DER, and return the leaf.

    `crl`: the root's list of revoked intermediates, in DER. Raises EvidenceError.
    """
    if len(certificates) != 3:
        raise _refused("certificates", str(len(certificates)), "leaf, ASK or ASVK, and ARK")
    leaf, intermediate, root = certificates
    product = roots.get(hashlib.sha256(root).hexdigest())
    if product is None:
        raise _refused("root", "another certificate", "an ARK that is pinned")
    ark = _load("ARK", root)
    _signed_fields("ASK", intermediate, ark)
    ask = _load("ASK", intermediate)
    for name, one in ("ARK", ark), ("ASK", ask):
        _require_valid(name, one.not_valid_before_utc, one.not_valid_after_utc, now)
    if ask.issuer != ark.subject:
        raise _refused("ASK", "another issuer", "the subject of the ARK")
    if crl is not None:
        _check_not_revoked(ask, ark, crl, now)
    return _verified_leaf(leaf, ask, product, now)


def _signed_fields(name: str, encoded: bytes, issuer: x509.Certificate) -> list[der.Element]:
    """Return the fields of a certificate or list; what `issuer` did not sign is read no further."""
    if len(encoded) > MAX_BYTES:
        raise _refused(name, f"{len(encoded)} bytes", f"{MAX_BYTES} at most")
    try:
        body, algorithm, signature = der.read(encoded, der.SEQUENCE).children()
    except ValueError:
        raise _refused(name, "other fields", "a body, an algorithm and a signature") from None
    if algorithm.encoded not in _PSS_SHA384_DER:
        raise _refused(name, "another signature algorithm", "RSA-PSS with SHA-384")
    key = issuer.public_key()
    if not isinstance(key, RSAPublicKey) or key.key_size != 4096:
        raise _refused(name, "an issuer with another key", "one of RSA with 4096 bits")
    try:
        key.verify(der.bits(signature), body.encoded, _PSS_SHA384, SHA384())
    except InvalidSignature:
        raise _refused(name, "a wrong signature", "that of its issuer") from None
    fields = body.require(der.SEQUENCE).children()
    if algorithm not in fields:
        raise _refused(name, "two signature algorithms", "the one that is signed")
    return fields


def _verified_leaf(encoded: bytes, ask: x509.Certificate, product: Product, now: datetime) -> Leaf:
    fields = _signed_fields("leaf", encoded, ask)
    try:
        version, _serial, _, issuer, validity, subject, key, last = fields
        begins, ends = map(der.moment, validity.require(der.SEQUENCE).children())
        found = _pairs(one for names in subject.children() for one in names.children())
        (inner,) = last.require(der.CONTEXT | 3).children()
        extensions = _pairs(inner.require(der.SEQUENCE).children())
    except ValueError:
        raise _refused("leaf", "other fields", "those of a certificate of AMD's") from None
    if version.encoded != bytes.fromhex("a003020102"):
        raise _refused("leaf", "another version", "version 3")
    if issuer.encoded != ask.subject.public_bytes():
        raise _refused("leaf", "another issuer", "the subject of the ASK or ASVK")
    _require_valid("leaf", begins, ends, now)
    kind = _COMMON_NAMES.get(found.get(_COMMON_NAME, b""))
    signed_by = ask.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    with_vlek = [str(name.value).startswith("SEV-VLEK-") for name in signed_by] == [True]
    if kind is None or with_vlek != (kind == "vlek"):
        raise _refused("leaf", "another name", "SEV-VCEK by an ASK, or SEV-VLEK by an ASVK")
    boot, tee, snp, microcode = (_security_version(extensions, one) for one in (1, 2, 3, 8))
    fmc = _security_version(extensions, 9) if product == "turin" else 0
    tcb = Tcb(boot, tee, snp, microcode, fmc)
    chip_id = extensions.get(_AMD + b"\x04")
    if (chip_id is None) == (kind == "vcek"):
        raise _refused("leaf", "another set of extensions", "a chip id in a VCEK, none in a VLEK")
    return Leaf(product, kind, _p384(key.encoded), tcb, chip_id)


def _pairs(elements: Iterable[der.Element]) -> dict[bytes, bytes]:
    """Map object identifiers, as they are encoded, to contents.

    Raises ValueError for an extension that is critical: it has three elements, and AMD's have two.
    """
    found = dict[bytes, bytes]()
    for element in elements:
        name, value = element.require(der.SEQUENCE).children()
        if name.require(der.OID).content in found:
            raise _refused("leaf", "one name or extension twice", "each of them once")
        found[name.content] = value.content
    return found


def _security_version(extensions: Mapping[bytes, bytes], number: int) -> int:
    encoded = extensions.get(_AMD + bytes((3, number)))
    if encoded is None:
        raise _refused("leaf", f"no extension 3.{number} of AMD's", "a processor's versions")
    return der.integer(der.read(encoded, der.INTEGER))


def _p384(encoded: bytes) -> EllipticCurvePublicKey:
    try:
        key = load_der_public_key(encoded)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP384R1):
        return key
    raise _refused("leaf", "another public key", "one of P-384")


def _load(name: str, encoded: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(encoded)
    except ValueError:
        raise _refused(name, "other bytes", "a certificate in DER") from None


def _require_valid(name: str, begins: datetime, ends: datetime, now: datetime) -> None:
    if not begins <= now <= ends:
        expected = f"a time from {begins.isoformat()} to {ends.isoformat()}"
        raise _refused(name, now.isoformat(timespec="seconds"), expected)


def _check_not_revoked(
    ask: x509.Certificate, ark: x509.Certificate, crl: bytes, now: datetime
) -> None:
    _signed_fields("CRL", crl, ark)
    try:
        found = x509.load_der_x509_crl(crl)
        begins, ends = found.last_update_utc, found.next_update_utc
        revoked = found.get_revoked_certificate_by_serial_number(ask.serial_number)
    except ValueError:
        raise _refused("CRL", "other bytes", "a list in DER") from None
    if found.issuer != ark.subject:
        raise _refused("CRL", "another issuer", "the subject of the ARK")
    _require_valid("CRL", begins, ends or begins, now)
    if revoked is not None:
        raise _refused("ASK", "a certificate that is revoked", "one that is not on the CRL")


def _refused(what: str, got: str, expected: str) -> EvidenceError:
    return EvidenceError(f"AMD {what}", got=got, expected=expected)
