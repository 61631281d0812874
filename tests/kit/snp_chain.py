"""Makes certificates as AMD's are, and reports of SEV-SNP that they sign: of any content.

Everything is written in DER by hand, so that a test can make what is wrong in one place and signed
all the same. The keys are the same in every run, and nothing is a secret: to make two keys of 4096
bits takes seconds.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from unittest.mock import patch

from cryptography.hazmat.asn1 import encode_der
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import (
    RSAPrivateKey,
    RSAPrivateNumbers,
    RSAPublicNumbers,
    rsa_crt_dmp1,
    rsa_crt_dmq1,
    rsa_crt_iqmp,
)
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import Name, ObjectIdentifier

from tee_side.attest.guests import REPORT_BYTES, SIGNED_BYTES, Product, SigningKey, Tcb

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BEGINS, ENDS = b"240101000000Z", b"440101000000Z"
TCB = Tcb(bootloader=4, tee=0, snp=24, microcode=219)
TURIN_TCB = Tcb(bootloader=1, tee=1, snp=4, microcode=81, fmc=1)
AMD = "1.3.6.1.4.1.3704.1"
# Family, model and stepping.
CPUID = {
    "milan": bytes((0x19, 0x01, 1)),
    "genoa": bytes((0x19, 0x11, 1)),
    "turin": bytes((0x1A, 2, 1)),
}
POLICY = 0x3001F
ALIAS_CHECKED = 1 << 5


def element(tag: int, *contents: bytes) -> bytes:
    content = b"".join(contents)
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(length))) + length + content


def sequence(*elements: bytes) -> bytes:
    return element(0x30, *elements)


def integer(number: int) -> bytes:
    return encode_der(number)


def oid(name: str) -> bytes:
    return encode_der(ObjectIdentifier(name))


def time(text: bytes) -> bytes:
    """Write a time: of 13 characters as UTCTime, else as GeneralizedTime."""
    return element(23 if len(text) == 13 else 24, text)


def name(common_name: str) -> bytes:
    common = common_name.replace(" ", "\\ ")
    rest = "O=Advanced Micro Devices,ST=CA,L=Santa Clara,C=US,OU=Engineering"
    return Name.from_rfc4514_string(f"CN={common},{rest}").public_bytes()


def extension(number: str, content: bytes, *, critical: bool = False) -> bytes:
    flag = element(1, b"\xff") if critical else b""
    return sequence(oid(number), flag, element(4, content))


def extensions(*encoded: bytes) -> bytes:
    return element(0xA3, sequence(*encoded))


def pss(*more: bytes, salt: int = 48) -> bytes:
    sha384 = sequence(oid("2.16.840.1.101.3.4.2.2"), element(5))
    mgf1 = sequence(oid("1.2.840.113549.1.1.8"), sha384)
    fields = (element(0xA0, sha384), element(0xA1, mgf1), element(0xA2, integer(salt)))
    return sequence(oid("1.2.840.113549.1.1.10"), sequence(*fields, *more))


VERSION_3 = element(0xA0, integer(2))
PSS_SHORT, PSS_LONG = pss(), pss(element(0xA3, integer(1)))


def _rsa_key(p_below: int, q_below: int) -> RSAPrivateKey:
    """Return a key of 4096 bits; its factors are primes, so far below 2**2048."""
    p, q, exponent = 2**2048 - p_below, 2**2048 - q_below, 65537
    d = pow(exponent, -1, (p - 1) * (q - 1))
    parts = rsa_crt_dmp1(d, p), rsa_crt_dmq1(d, q), rsa_crt_iqmp(p, q)
    numbers = RSAPrivateNumbers(p, q, d, *parts, RSAPublicNumbers(exponent, p * q))
    # The factors are known to be primes; to find that again takes long.
    return numbers.private_key(unsafe_skip_rsa_key_validation=True)


ARK_KEY, ASK_KEY = _rsa_key(1557, 2543), _rsa_key(7437, 8507)
LEAF_KEY = ec.derive_private_key(0x1EAF, ec.SECP384R1())


def public(key: RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def signed(body: bytes, key: RSAPrivateKey, algorithm: bytes = PSS_SHORT) -> bytes:
    """Write a certificate or a list: its body, how it is signed, and the signature."""
    signature = key.sign(body, PSS(MGF1(SHA384()), 48), SHA384())
    return sequence(body, algorithm, element(3, b"\0", signature))


@dataclass(frozen=True, kw_only=True)
class Body:
    """What a certificate says; each field as it is encoded."""

    version: bytes = VERSION_3
    serial: bytes = integer(0)
    algorithm: bytes = PSS_SHORT
    issuer: bytes
    validity: bytes = sequence(time(BEGINS), time(ENDS))
    subject: bytes
    key: bytes
    extensions: bytes

    def encoded(self) -> bytes:
        begin = (self.version, self.serial, self.algorithm, self.issuer, self.validity)
        return sequence(*begin, self.subject, self.key, self.extensions)

    def signed(self, key: RSAPrivateKey) -> bytes:
        return signed(self.encoded(), key, self.algorithm)


def _authority(issuer: str, subject: str, key: RSAPrivateKey, serial: int) -> Body:
    constraint = extension("2.5.29.19", sequence(element(1, b"\xff")), critical=True)
    return Body(
        serial=integer(serial),
        issuer=name(issuer),
        subject=name(subject),
        key=public(key),
        extensions=extensions(constraint),
    )


def ark_body(product: Product) -> Body:
    ark = f"ARK-{product.capitalize()}"
    return _authority(ark, ark, ARK_KEY, 1)


def _ask_name(product: Product, kind: SigningKey) -> str:
    return f"SEV-{'VLEK-' if kind == 'vlek' else ''}{product.capitalize()}"


def ask_body(product: Product, kind: SigningKey = "vcek") -> Body:
    """Return the ASK, or the ASVK for a VLEK, before it is signed."""
    return _authority(f"ARK-{product.capitalize()}", _ask_name(product, kind), ASK_KEY, 2)


def tcb_of(product: Product) -> Tcb:
    """Return what a leaf and a report of this product have, unless a test says otherwise."""
    return TURIN_TCB if product == "turin" else TCB


def chip_id_of(product: Product) -> bytes:
    """Return an id as a certificate has it: of 8 bytes in Turin's, of 64 in others."""
    return hashlib.sha512(product.encode()).digest()[: 8 if product == "turin" else 64]


def leaf_extensions(product: Product, kind: SigningKey, tcb: Tcb) -> dict[str, bytes]:
    """Return what AMD adds to a leaf, by identifier."""
    numbers = {1: tcb.bootloader, 2: tcb.tee, 3: tcb.snp, 8: tcb.microcode}
    if product == "turin":
        numbers[9] = tcb.fmc
    found = {f"{AMD}.1": integer(1), f"{AMD}.2": element(0x16, product.capitalize().encode())}
    found |= {f"{AMD}.3.{number}": integer(value) for number, value in numbers.items()}
    if kind == "vcek":
        return found | {f"{AMD}.4": chip_id_of(product)}
    return found | {f"{AMD}.5": element(0x16, b"a provider")}


def leaf_body(
    product: Product = "milan",
    kind: SigningKey = "vcek",
    tcb: Tcb | None = None,
    changed: Mapping[str, bytes | None] | None = None,
) -> Body:
    """Return a leaf before it is signed. `changed`: extensions by identifier; None: without it."""
    found = {**leaf_extensions(product, kind, tcb or tcb_of(product)), **(changed or {})}
    encoded = [extension(key, value) for key, value in found.items() if value is not None]
    return Body(
        issuer=name(_ask_name(product, kind)),
        subject=name(f"SEV-{kind.upper()}"),
        key=public(LEAF_KEY),
        extensions=extensions(*encoded),
    )


@dataclass(frozen=True)
class Chain:
    """Certificates in DER, and how to trust them."""

    product: Product
    leaf: bytes
    ask: bytes
    ark: bytes

    @property
    def certificates(self) -> tuple[bytes, bytes, bytes]:
        return self.leaf, self.ask, self.ark

    @contextmanager
    def pinned(self) -> Iterator[None]:
        roots = {hashlib.sha256(self.ark).hexdigest(): self.product}
        with patch.dict("tee_side.attest.guests.PINNED_ROOTS", roots, clear=True):
            yield


@cache
def make_chain(product: Product = "milan", kind: SigningKey = "vcek") -> Chain:
    return Chain(
        product,
        leaf=leaf_body(product, kind).signed(ASK_KEY),
        ask=ask_body(product, kind).signed(ARK_KEY),
        ark=ark_body(product).signed(ARK_KEY),
    )


def crl_body(
    product: Product = "milan",
    revoked: Iterable[int] = (),
    *,
    begins: bytes = BEGINS,
    ends: bytes | None = ENDS,
    issuer: bytes | None = None,
) -> bytes:
    """Return a root's list of revoked certificates, by serial number, before it is signed."""
    entries = [sequence(integer(serial), time(BEGINS)) for serial in revoked]
    return sequence(
        *(integer(1), PSS_SHORT, issuer or name(f"ARK-{product.capitalize()}"), time(begins)),
        *((time(ends),) if ends else ()),
        *((sequence(*entries),) if entries else ()),
    )


def make_report(
    product: Product = "milan",
    kind: SigningKey = "vcek",
    *,
    version: int = 3,
    policy: int = POLICY,
    vmpl: int = 0,
    platform: int = ALIAS_CHECKED,
    report_data: bytes = bytes(64),
    measurement: bytes = bytes(48),
    host_data: bytes = bytes(32),
    tcb: Tcb | None = None,
    changed: Mapping[int, bytes] | None = None,
    key: ec.EllipticCurvePrivateKey = LEAF_KEY,
) -> bytes:
    """Return a report that is signed. `changed`: bytes by where they lie, before it is."""
    tcb = tcb or tcb_of(product)
    word = bytes((tcb.bootloader, tcb.tee, 0, 0, 0, 0, tcb.snp, tcb.microcode))
    if product == "turin":
        word = bytes((tcb.fmc, tcb.bootloader, tcb.tee, tcb.snp, 0, 0, 0, tcb.microcode))
    fields = {
        0x00: version.to_bytes(4, "little"),
        0x08: policy.to_bytes(8, "little"),
        0x30: vmpl.to_bytes(4, "little"),
        0x34: (1).to_bytes(4, "little"),
        0x38: word,
        0x40: platform.to_bytes(8, "little"),
        0x48: (4 if kind == "vlek" else 0).to_bytes(4, "little"),
        0x50: report_data,
        0x90: measurement,
        0xC0: host_data,
        0x180: word,
        0x188: CPUID[product] if version >= 3 else b"",
        0x1A0: chip_id_of(product) if kind == "vcek" else b"",
        0x1E0: word,
        0x1F0: word,
        **(changed or {}),
    }
    data = bytearray(REPORT_BYTES)
    for at, value in fields.items():
        data[at : at + len(value)] = value
    r, s = decode_dss_signature(key.sign(bytes(data[:SIGNED_BYTES]), ec.ECDSA(SHA384())))
    data[SIGNED_BYTES : SIGNED_BYTES + 144] = r.to_bytes(72, "little") + s.to_bytes(72, "little")
    return bytes(data)
