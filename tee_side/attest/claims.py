"""Claims: which keys, model, policy and program an enclave speaks for, bound into its evidence.

    report_data = SHA-512(domain tag | claims as they were sent)

One digest covers every channel. A verifier hashes the bytes that it received and reads them
afterwards, so that no two readings of them can differ.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from protocol.codec import pack
from protocol.errors import EvidenceError
from tee_side.attest.evidence import read_map

MAX_CLAIMS_BYTES = 16 * 1024
NONCE_BYTES = 32

_DOMAIN = b"TSQP attestation claims 1\0"

Digest: TypeAlias = Annotated[bytes, Field(strict=True, min_length=32, max_length=32)]
# Shown to people as it is.
Name: TypeAlias = Annotated[str, Field(strict=True, max_length=256, pattern=r"\A[ -~]*\z")]


class Claims(BaseModel):
    """What an enclave says of itself; digests are SHA-256.

    `nonce`: of 32 bytes, the client's; empty in a certificate. `time`: seconds since 1970, by the
    enclave's clock. `tls_key`: of the public key (SubjectPublicKeyInfo). `hpke_key`: public, of
    `hpke_suite`. `receipt_key`: public, of Ed25519. `model`: of its manifest. `policy`: see
    `policy_digest`. `settings`: of every other option. `curve_keys`: public keys of ZeroMQ's CURVE
    by owner: "runner", and "service" with its number for those that it speaks to; zeros: none.
    `plugins`: of files that are the operator's own, masks among them, by name.
    `attested_services`: what evidence services had to give to this enclave, "none" for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nonce: Annotated[bytes, Field(strict=True, max_length=NONCE_BYTES)]
    time: Annotated[int, Field(strict=True, ge=0, lt=2**53)]
    tls_key: Digest
    hpke_suite: Literal["mlkem768-x25519", "x25519"]
    hpke_key: Annotated[bytes, Field(strict=True, max_length=2048)]
    receipt_key: Digest
    model: Digest
    policy: Digest
    settings: Digest
    curve_keys: dict[Name, Digest]
    plugins: dict[Name, Digest]
    attested_services: Name
    version: Name

    def encode(self) -> bytes:
        """Return the bytes that are hashed: one map of msgpack, names in order."""
        return pack(_in_order(self.model_dump()))

    @classmethod
    def decode(cls, data: bytes) -> Claims:
        """Read what the other side sent, in the one encoding of it. Raises EvidenceError."""
        claims = read_map(cls, data, "claims", MAX_CLAIMS_BYTES)
        if claims.encode() != data:
            raise EvidenceError("claims", got="another encoding", expected="that of `encode`")
        return claims


def report_data(claims: bytes) -> bytes:
    """Return the 64 bytes that evidence of these claims has in its report."""
    return hashlib.sha512(_DOMAIN + claims).digest()


def _in_order(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a map and those in it with their names in order."""
    pairs = sorted(fields.items())
    return {name: _in_order(item) if isinstance(item, dict) else item for name, item in pairs}
