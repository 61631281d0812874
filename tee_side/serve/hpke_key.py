"""What is sealed to the attested key of an enclave, by HPKE, opens in that enclave alone.

HPKE is RFC 9180's in base mode, with HKDF-SHA256 and AES-256-GCM. Its `info` is a domain tag of the
caller's and more: what was sealed for one purpose opens for no other.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Literal, TypeAlias

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from protocol.errors import ErrorCode, ProtocolError

SuiteName: TypeAlias = Literal["mlkem768-x25519", "x25519"]

KEY_BYTES = 32  # of X25519, and of what is sealed: keys of AES-256

_KEMS = {"mlkem768-x25519": hpke.KEM.MLKEM768_X25519, "x25519": hpke.KEM.X25519}
_TAG_BYTES = 16

_refused = partial(ProtocolError, "HPKE", code=ErrorCode.MALFORMED_MESSAGE)


class HpkeKey:
    """A private key, in memory alone. `public`: its public key, of `suite`.

    `hybrid`: with ML-KEM-768 where the library has it, whose public key stands before X25519's.
    `sealed_bytes`: of a key that is sealed to it.
    """

    def __init__(self, *, hybrid: bool = True) -> None:
        key = X25519PrivateKey.generate()
        self._private: X25519PrivateKey | hpke.MLKEM768X25519PrivateKey = key
        self.suite: SuiteName = "x25519"
        self.public = key.public_key().public_bytes_raw()
        with suppress(UnsupportedAlgorithm):
            if hybrid:
                other = MLKEM768PrivateKey.generate()
                self._private = hpke.MLKEM768X25519PrivateKey(other, key)
                self.suite = "mlkem768-x25519"
                self.public = other.public_key().public_bytes_raw() + self.public
        self.sealed_bytes = _KEMS[self.suite].enc_length() + KEY_BYTES + _TAG_BYTES

    def open(self, sealed: bytes, info: bytes) -> bytes:
        """Return what was sealed to this key. Raises ProtocolError."""
        try:
            return _hpke(self.suite).decrypt(sealed, self._private, info)
        except InvalidTag:
            expected = "bytes that were sealed to this key, for this purpose"
            raise _refused(got="another key, purpose or content", expected=expected) from None


def seal(suite: SuiteName, public: bytes, info: bytes, plain: bytes) -> bytes:
    """Return bytes sealed to a public key. Raises ProtocolError where it is no key of `suite`."""
    first = public[:-KEY_BYTES]
    try:
        key: X25519PublicKey | hpke.MLKEM768X25519PublicKey
        key = last = X25519PublicKey.from_public_bytes(public[-KEY_BYTES:])
        if first:
            key = hpke.MLKEM768X25519PublicKey(MLKEM768PublicKey.from_public_bytes(first), last)
        return _hpke(suite).encrypt(plain, key, info)
    except (TypeError, ValueError):
        raise _refused(got="another public key", expected=f"one of {suite}") from None


def _hpke(suite: SuiteName) -> hpke.Suite:
    return hpke.Suite(_KEMS[suite], hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
