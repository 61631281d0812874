"""What an enclave says of itself and signs: statements of claims and evidence, and receipts.

Each is a record: one map of msgpack. Every field is written, and a map has one encoding: names in
order, numbers and lengths at their shortest.

Claims say which keys, model, policy and program an enclave speaks for. They are bound into its
evidence, which is what hardware says of what runs, with the certificates that prove it; a verifier
needs nothing else, and no network.

    report_data = SHA-512(domain tag | claims as they were sent)

One digest covers every channel. A verifier hashes the bytes that it received and reads them
afterwards, so that no two readings of them can differ. In a certificate a statement is an extension
(RA-TLS): the key of a connection is one of the claims, so the other end of the connection is the
enclave, and nothing that copied its evidence.

A receipt is what a server signs of each of its answers, in a chain. It travels as a record, and
behind it 64 bytes: the Ed25519 signature of a domain tag and that record, by the key of claim
`receipt_key`. Each has the SHA-256 of the one before it, its signature included, so that one that
is left out, put in or moved shows.
"""

import hashlib
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import AfterValidator, Field

from protocol.encoding import pack, unpack
from protocol.errors import EvidenceError, ProtocolError
from protocol.messages import NONCE_BYTES
from protocol.validation import Strict, validate

# Of maps and arrays, and of keys in a map.
_MAX_CONTAINERS = 256

# SHA-256, or a public key of as many bytes.
Digest: TypeAlias = Annotated[bytes, Field(min_length=32, max_length=32)]

# Shown to people as it is.
Name: TypeAlias = Annotated[str, Field(max_length=256, pattern=r"\A[ -~]*\z")]


class Record(Strict):
    """A record, whose name in errors is that of its class. `max_bytes`: of one that is read."""

    max_bytes: ClassVar[int]

    def encode(self) -> bytes:
        """Return it as bytes."""
        return pack(_in_order(self.model_dump()))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what a peer sent; nothing of it is quoted. Raises EvidenceError."""
        where = cls.__name__.lower()
        most = {"max_bytes": cls.max_bytes, "max_containers": _MAX_CONTAINERS}
        try:
            found = validate(cls, unpack(data, where=where, **most), where)
        except ProtocolError as error:
            # Behind the name of a field come keys that the peer chose.
            field = ".".join(error.where.split(".")[:2])
            raise EvidenceError(field, got=error.got, expected=error.expected) from None
        EvidenceError.unless(found.encode() == data, where, "another encoding", "names in order")
        return found


def _in_order(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a map and those in it with their names in order."""
    pairs = sorted(fields.items())
    return {name: _in_order(item) if isinstance(item, dict) else item for name, item in pairs}


SIGNATURE_BYTES = 64

RECEIPT_DOMAIN = b"TSQP receipt 1\0"

_P = 2**255 - 19  # Curve25519 is over the integers modulo this

Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


class Receipt(Record):
    """What was asked and answered; digests are SHA-256.

    `sequence`: how many receipts the key signed before; `previous`: digest of the last of them.
    `time`: seconds since 1970, by the server's clock. `model`, `policy`: as in its claims.
    `request`, `response`: of the bodies, the response's up to the receipt. `sampling`: parameters
    by name, as they were used; `seed`: of the first sample, None where none was asked for. Tokens
    are counted as the answer tells them.
    """

    # In base64, 4 KiB; with the greatest numbers, a receipt has less than 900 bytes.
    max_bytes: ClassVar[int] = 3 * 1024

    sequence: Count
    previous: Digest
    time: Annotated[int, Field(ge=0, lt=2**37)]
    model: Digest
    policy: Digest
    request: Digest
    response: Digest
    sampling: dict[Name, int | float]
    seed: Count | None
    prompt_tokens: Count
    completion_tokens: Count


_KEY = "a public key of Ed25519, and no point of small order"


def require_key(encoded: bytes) -> bytes:
    """Return these 32 bytes, the public key that receipts are signed by. Raises ValueError.

    A point of small order is no key, and 32 zeros are one: under it, signatures of one message in
    eight or more need no secret. Such points have 14 encodings, and OpenSSL reads each of them.
    """
    y = int.from_bytes(encoded, "little") % 2**255  # without the sign of x
    # Of the orders 1, 2 and 4, y is 1, -1 and 0. Twice a point of order 8 is one of order 4:
    # x^2 = -y^2, in the curve's equation -x^2 + y^2 = 1 - 121665/121666 x^2 y^2 (RFC 8032, 5.1).
    if len(encoded) != 32 or not y * (y**2 - 1) * (121665 * y**4 - 243332 * y**2 + 121666) % _P:
        raise ValueError(_KEY)
    return encoded


def verify_receipt(signed: bytes, key: bytes) -> Receipt:
    """Return the receipt that a public key signed: see `require_key`. Raises EvidenceError."""
    packed, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    with (
        EvidenceError.instead_of(
            ValueError, "receipt key", "another" if any(key) else "none", _KEY
        ),
        EvidenceError.instead_of(InvalidSignature, "receipt", "another signature", "the key's"),
    ):
        Ed25519PublicKey.from_public_bytes(require_key(key)).verify(
            signature, RECEIPT_DOMAIN + packed
        )
    return Receipt.decode(packed)


Kind: TypeAlias = Literal["snp", "tdx", "simulated"]

Certificates: TypeAlias = Annotated[tuple[bytes, ...], Field(strict=False)]

REPORT_DATA_BYTES = 64


class GpuEvidence(Record):
    """A GPU's report, and its certificates in DER from leaf to root; see `nvidia`."""

    report: bytes
    certificates: Annotated[Certificates, Field(min_length=1)]


class Evidence(Record):
    """Evidence of one kind, and of the GPUs of the same machine.

    `report`: a report of SEV-SNP, a quote of TDX, or what `simulated` writes. `certificates`: in
    DER, of SEV-SNP: leaf, intermediate, root. `collateral`: of SEV-SNP a list of revoked
    certificates (DER) or nothing, of TDX what Intel says of the platform (JSON). `gpus`: by name;
    each has a digest of the claims in its report.
    """

    max_bytes: ClassVar[int] = 128 * 1024

    kind: Kind
    report: bytes
    certificates: Certificates
    collateral: bytes
    gpus: Annotated[dict[Name, GpuEvidence], Field(max_length=8)] = Field(default_factory=dict)


Purpose: TypeAlias = Literal["serve", "key", "service"]

# In the place of a digest that there is none of.
NONE = bytes(32)

_CLAIMS_DOMAIN = b"TSQP attestation claims 1\0"


class About(Record):
    """What an enclave runs; digests are SHA-256.

    `model`: of its manifest; of a service, the digest of its weights. `policy`: see
    `policy_digest`. `settings`: of every other option. `curve_keys`: public keys of ZeroMQ's CURVE
    by owner: "runner", and "service" with its number for those that it speaks to; a service's own
    alone is "service". `plugins`: of files that are the operator's own, masks among them, by name.
    `attested_services`: what evidence services had to give to this enclave, "none" for none.
    """

    model: Digest
    policy: Digest
    settings: Digest
    curve_keys: dict[Name, Digest]
    plugins: dict[Name, Digest]
    attested_services: Name
    version: Name

    def __str__(self) -> str:
        """Return what a person compares with what others find."""
        return (
            f"model {self.model.hex()}, policy {self.policy.hex()}, settings {self.settings.hex()}"
        )


class Claims(About):
    """What an enclave says of itself: what it runs, and its keys. `NONE` stands for no digest.

    `purpose`: its reader: "serve" is a client of a server, "key" a key server, "service"
    the runner of a service; no other reader may accept it. `nonce`: of 32 bytes, the reader's;
    empty in a certificate. `time`: seconds since 1970, by the enclave's clock. `tls_key`: of the
    public key (SubjectPublicKeyInfo). `hpke_key`: public, of `hpke_suite`. `receipt_key`: see
    `require_key`; None where no receipts are signed. `gpus`: of the leaf certificates of the
    machine's GPUs, where they give evidence as well, by name.
    """

    max_bytes: ClassVar[int] = 16 * 1024

    purpose: Purpose
    nonce: Annotated[bytes, Field(max_length=NONCE_BYTES)]
    time: Annotated[int, Field(ge=0, lt=2**53)]
    tls_key: Digest
    hpke_suite: Literal["mlkem768-x25519", "x25519"]
    hpke_key: Annotated[bytes, Field(max_length=2048)]
    receipt_key: Annotated[Digest, AfterValidator(require_key)] | None
    gpus: dict[Name, Digest] = Field(default_factory=dict)


def report_data(claims: bytes) -> bytes:
    """Return the 64 bytes that evidence of these claims has in its report."""
    return hashlib.sha512(_CLAIMS_DOMAIN + claims).digest()


def gpu_nonce(claims: bytes) -> bytes:
    """Return the 32 bytes that a GPU of the machine with these claims is asked with."""
    return hashlib.sha256(b"TSQP attestation claims, to a GPU 1\0" + claims).digest()


# Of the Trusted Computing Group, for evidence in a certificate ("DICE Attestation Architecture").
EXTENSION = x509.ObjectIdentifier("2.23.133.5.4.9")

# What the library raises for certificates that it cannot read.
_UNREADABLE = (
    *(ValueError, x509.ExtensionNotFound, x509.DuplicateExtension),
    *(x509.UnsupportedGeneralNameType, x509.InvalidVersion, UnsupportedAlgorithm),
)


class Statement(Record):
    """Claims and evidence, as bytes."""

    max_bytes: ClassVar[int] = Claims.max_bytes + Evidence.max_bytes + 64

    claims: bytes
    evidence: bytes


def read_certificate(encoded: bytes) -> tuple[Statement, bytes]:
    """Return the statement in a certificate (DER), and the digest of its key.

    Raises EvidenceError.
    """
    with EvidenceError.instead_of(
        _UNREADABLE,
        "certificate of the server",
        "another",
        f"a certificate with evidence ({EXTENSION.dotted_string})",
    ):
        certificate = x509.load_der_x509_certificate(encoded)
        stated = certificate.extensions.get_extension_for_oid(EXTENSION).value
        public = certificate.public_key()
        if not isinstance(stated, x509.UnrecognizedExtension):
            raise ValueError
    return Statement.decode(stated.value), key_digest(public)


def key_digest(public: CertificatePublicKeyTypes) -> bytes:
    """Return SHA-256 over a public key (SubjectPublicKeyInfo), as claims have it."""
    encoded = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).digest()
