"""Verifies the evidence of NVIDIA's GPUs, Hopper and Blackwell: which firmware measured what.

A report is one exchange of SPDM 1.1: the request, which has a nonce, and the response of the GPU,
which signs both. Numbers are little-endian, those of the signature big-endian.

Proved: a GPU that NVIDIA made, started by the firmware whose digest its boot ROM certified, signed
these measurements after it saw the nonce.

Not proved, because no service of NVIDIA's is asked: which measurements are good (RIM, the service
of reference measurements, would say so; a policy pins them), and that no certificate was revoked
(OCSP would say so). Nor which machine has the GPU and drives it in confidential mode: the nonce has
to be a digest of that machine's claims, and its own evidence says which driver it runs.

Source: DMTF, "Security Protocol and Data Model (SPDM) Specification" 1.1 (DSP0274), the messages
GET_MEASUREMENTS and MEASUREMENTS; TCG, "DICE Attestation Architecture", the firmware's digest.
"""

import hashlib
import re
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.x509.verification import ExtensionPolicy, PolicyBuilder, Store, VerificationError

from protocol.errors import EvidenceError, one_line

# SHA-256 of the DER of "NVIDIA Device Identity CA".
PINNED_ROOTS = frozenset({"102bf659d5419614c9d8e6aecebc80454eb26b1df6a769ac720b9a690b167b48"})
# Of the firmware, the boot ROM, the provisioner of the GPU, its kind of chip, and the root.
CHAIN_LENGTH = 5

# Below the same root are other devices' certificates, switches' for example.
_LEAF_NAME = re.compile(r"CN=(GH100|GB100) [A-Z]\d\d GSP FMC LF,O=NVIDIA Corporation,.*")
_BELOW_ROOT = "O=NVIDIA Corporation,CN=NVIDIA {} Identity"
# CompositeDeviceID (Hopper) and DiceTcbInfo (Blackwell), and what is before their first SHA-384.
_DICE = ("2.23.133.5.4.1", "2.23.133.5.4.1.1")
_BEFORE_SHA384 = bytes.fromhex("303d06096086480165030402020430")
_SHA384_BYTES = 48

# A request of version 1.1, with its nonce and slot 0, for all measurements, signed; its response:
# 64 measurements in 3520 bytes, 32 random bytes, and with their size NVIDIA's own fields.
_NONCE, _BLOCKS, _SIZE, _FIELDS = slice(4, 36), range(45, 3565, 55), slice(3597, 3599), 3599
_REQUEST, _RESPONSE = bytes.fromhex("11e001ff"), bytes.fromhex("001160000040c00d00")
# Before a measurement: its number; DMTF's form, 51 bytes; a digest of firmware, 48 bytes.
_BEFORE_BLOCKS = [bytes.fromhex(f"{number:02x}013300013000") for number in range(1, 65)]
_DRIVER, _VBIOS = 3, 6


class VerifiedNvidia(NamedTuple):
    """A report that a GPU of NVIDIA's signed.

    `firmware`: SHA-384 of what the boot ROM started, by the certificate of the key that signed.
    `measurements`: numbers 1 to 64, 48 bytes each; zeros where the GPU has none of that number.
    """

    firmware: bytes
    measurements: tuple[bytes, ...]
    driver: str
    vbios: str

    @property
    def digest(self) -> bytes:
        """SHA-384 of `firmware` and `measurements`: one value that pins them all."""
        return hashlib.sha384(self.firmware + b"".join(self.measurements)).digest()


def verify_nvidia(
    report: bytes,
    certificates: Sequence[bytes],
    nonce: bytes,
    now: datetime,
) -> VerifiedNvidia:
    """Verify a report by its certificates in DER, from leaf to root. Raises EvidenceError.

    `nonce`: 32 bytes, which the GPU was asked with; `now`: when, with a time zone.
    """
    leaf = _verified_leaf(certificates, now)
    signed, r, s = report[:-96], report[-96:-48], report[-48:]
    with EvidenceError.instead_of(
        (InvalidSignature, UnsupportedAlgorithm, ValueError),
        "NVIDIA report: signature",
        "a wrong one",
        "that of the leaf's key",
    ):
        key = leaf.public_key()
        if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
            raise EvidenceError("NVIDIA leaf", "another public key", "one of P-384")
        signature = encode_dss_signature(int.from_bytes(r), int.from_bytes(s))
        key.verify(signature, signed, ECDSA(SHA384()))
    _require(
        signed[_NONCE] == nonce, "report: nonce", "another", "the one that the GPU was asked with"
    )
    return VerifiedNvidia(_firmware(leaf), *_parse(signed))


def _verified_leaf(certificates: Sequence[bytes], now: datetime) -> x509.Certificate:
    _require(
        len(certificates) == CHAIN_LENGTH,
        "certificates",
        str(len(certificates)),
        f"{CHAIN_LENGTH}, leaf to root",
    )
    _require(
        hashlib.sha256(certificates[-1]).hexdigest() in PINNED_ROOTS,
        "root",
        "another certificate",
        "the one that is pinned",
    )
    expected = f"one to the root, each valid at {now.isoformat(timespec='seconds')}"
    with EvidenceError.instead_of(
        (VerificationError, ValueError), "NVIDIA certificates", "another chain", expected
    ):
        leaf, *between, root = chain = [*map(x509.load_der_x509_certificate, certificates)]
        # As in browsers, whose rules a leaf that is no server's does not meet.
        ca, leaves = ExtensionPolicy.webpki_defaults_ca(), ExtensionPolicy.permit_all()
        rules = PolicyBuilder().store(Store([root])).time(now)
        rules = rules.extension_policies(ca_policy=ca, ee_policy=leaves)
        found = rules.build_client_verifier().verify(leaf, between).chain
    named = _LEAF_NAME.fullmatch(leaf.subject.rfc4514_string())
    below_root = between[-1].subject.rfc4514_string()
    _require(
        found == chain and named is not None and below_root == _BELOW_ROOT.format(named[1]),
        "certificates",
        "those of another device",
        "those of GH100 or GB100",
    )
    return leaf


def _firmware(leaf: x509.Certificate) -> bytes:
    found = [one.value for one in leaf.extensions if one.oid.dotted_string in _DICE]
    encoded = b"".join(value.public_bytes() for value in found)
    digest = encoded.partition(_BEFORE_SHA384)[2][:_SHA384_BYTES]
    _require(
        len(digest) == _SHA384_BYTES, "leaf", "no digest of firmware", "one of SHA-384, by DICE"
    )
    return digest


def _parse(signed: bytes) -> tuple[tuple[bytes, ...], str, str]:
    """Return measurements, version of the driver, version of the VBIOS."""
    blocks, rest = [signed[at : at + _BLOCKS.step] for at in _BLOCKS], signed[_FIELDS:]
    read = signed[: _BLOCKS.start], [block[:-_SHA384_BYTES] for block in blocks]
    size = int.from_bytes(signed[_SIZE], "little")
    _require(
        read == (_REQUEST + signed[_NONCE] + _RESPONSE, _BEFORE_BLOCKS) and size == len(rest),
        "report",
        "other messages",
        "a request, and 64 measurements of SHA-384",
    )
    fields = dict[int, bytes]()
    while rest:
        number, size = (int.from_bytes(rest[at : at + 2], "little") for at in (0, 2))
        fields[number], rest = rest[4 : 4 + size], rest[4 + size :]
    driver, vbios = (fields.get(number, b"") for number in (_DRIVER, _VBIOS))
    text = one_line(driver.rstrip(b"\0").decode("ascii", "replace"))
    written = (vbios[3::-1] + vbios[4:5]).hex(".").upper()
    return tuple(block[-_SHA384_BYTES:] for block in blocks), text, written


def _require(holds: bool, what: str, got: str, expected: str) -> None:
    EvidenceError.unless(holds, f"NVIDIA {what}", got, expected)
