"""Certificates and reports as a GPU of NVIDIA's has them, by a root of our own."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from unittest.mock import patch

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from tee_side.attest import nvidia

BEGINS, ENDS = datetime(2022, 3, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
FIRMWARE = bytes(range(48))
MEASUREMENTS = tuple(hashlib.sha384(bytes([number])).digest() for number in range(1, 65))
# Version 96.00.5E.00.01 of the VBIOS, 535.86.09 of the driver, and a field that nothing reads.
FIELDS = ((6, bytes.fromhex("005e009601000000")), (3, b"535.86.09\0"), (11, b"U"))

_COMPOSITE_DEVICE_ID, _TCB_INFO = "2.23.133.5.4.1", "2.23.133.5.4.1.1"
_SHA384 = bytes.fromhex("0609608648016503040202")
_KEY_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


@dataclass(frozen=True)
class NvidiaGpu:
    """A GPU: its certificates in DER from leaf to root, and the key that signs its reports."""

    certificates: tuple[bytes, ...]
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        roots = nvidia.PINNED_ROOTS | {hashlib.sha256(self.certificates[-1]).hexdigest()}
        with patch.object(nvidia, "PINNED_ROOTS", roots):
            yield

    def sign(self, signed: bytes) -> bytes:
        r, s = decode_dss_signature(self.key.sign(signed, ec.ECDSA(SHA384())))
        return signed + r.to_bytes(48) + s.to_bytes(48)


def messages(
    nonce: bytes,
    measurements: Sequence[bytes] = MEASUREMENTS,
    fields: Sequence[tuple[int, bytes]] = FIELDS,
) -> bytes:
    """Return a request and its response, as they are signed."""
    blocks = b"".join(
        bytes.fromhex(f"{number:02x}013300013000") + value
        for number, value in enumerate(measurements, start=1)
    )
    head = (
        bytes.fromhex("11600000") + bytes([len(measurements)]) + len(blocks).to_bytes(3, "little")
    )
    own = b"".join(_sized(number) + _sized(len(value)) + value for number, value in fields)
    response = head + blocks + nonce[::-1] + _sized(len(own)) + own
    return bytes.fromhex("11e001ff") + nonce + b"\0" + response


@cache
def make_gpu(
    chip: str = "GH100",
    leaf: str = "{} A01 GSP FMC LF",
    identity: str = "NVIDIA {} Identity",
    dice: str = _COMPOSITE_DEVICE_ID,
    no_authority: int | None = None,
    ended: int | None = None,
    curve: type[ec.EllipticCurve] = ec.SECP384R1,
) -> NvidiaGpu:
    """Return a GPU that is genuine but for what is changed; places count from the leaf, which is 0.

    `dice`: by which extension the leaf says its firmware, "" for none; `no_authority`: the place of
    a certificate that must not issue others; `ended`: of one that was valid for a day; `curve`: of
    the key that signs reports.
    """
    names = [
        _name(leaf.format(chip), "NVIDIA Corporation", common_name_first=False),
        _name(f"{chip} A01 GSP BROM", "NVIDIA Corporation", common_name_first=False),
        _name(f"NVIDIA {chip} Provisioner ICA 1", "NVIDIA Corporation"),
        _name(identity.format(chip), "NVIDIA Corporation"),
        _name("NVIDIA Device Identity CA", "NVIDIA"),
    ]
    keys = [ec.generate_private_key(ec.SECP384R1() if place else curve()) for place in range(5)]
    certificates = []
    for place, (name, key) in enumerate(zip(names, keys, strict=True)):
        issuer = min(place + 1, len(names) - 1)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(names[issuer])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(BEGINS)
            .not_valid_after(BEGINS + timedelta(days=1) if place == ended else ENDS)
            .add_extension(_key_usage("key_cert_sign" if place else "digital_signature"), True)
            .add_extension(_issued_by(keys[issuer]), False)
        )
        if place:
            authority = x509.BasicConstraints(place != no_authority, None)
            builder = builder.add_extension(authority, True)
        elif dice:
            encoded = _tcb_info() if dice == _TCB_INFO else _composite_device_id(key)
            value = x509.UnrecognizedExtension(x509.ObjectIdentifier(dice), encoded)
            builder = builder.add_extension(value, False)
        certificates.append(builder.sign(keys[issuer], SHA384()).public_bytes(Encoding.DER))
    return NvidiaGpu(tuple(certificates), keys[0])


def make_blackwell() -> NvidiaGpu:
    return make_gpu("GB100", dice=_TCB_INFO)


def _name(common: str, organisation: str, common_name_first: bool = True) -> x509.Name:
    attributes = [
        x509.NameAttribute(NameOID.COMMON_NAME, common),
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation),
    ]
    if not common_name_first:
        attributes = [x509.NameAttribute(NameOID.SERIAL_NUMBER, "4F"), *reversed(attributes)]
    return x509.Name(attributes)


def _key_usage(used: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name == used for name in _KEY_USAGES})


def _issued_by(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _composite_device_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return _der(0x30, _der(0x02, b"\1") + public + _digest(FIRMWARE))


def _tcb_info() -> bytes:
    # The second digest is of what is not there.
    return _der(0x30, _der(0x80, b"NVIDIA") + _der(0xA6, _digest(FIRMWARE) + _digest(bytes(48))))


def _digest(value: bytes) -> bytes:
    return _der(0x30, _SHA384 + _der(0x04, value))


def _der(tag: int, content: bytes) -> bytes:
    length = bytes([len(content)]) if len(content) < 0x80 else bytes([0x81, len(content)])
    return bytes([tag]) + length + content


def _sized(number: int) -> bytes:
    return number.to_bytes(2, "little")
