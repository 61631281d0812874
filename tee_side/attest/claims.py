"""Claims: which keys, model, policy and program an enclave speaks for, bound into its evidence.

    report_data = SHA-512(domain tag | claims as they were sent)

One digest covers every channel. A verifier hashes the bytes that it received and reads them
afterwards, so that no two readings of them can differ.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field

from protocol.messages import NONCE_BYTES
from tee_side.attest.receipts import require_key
from tee_side.attest.record import Digest, Name, Record

Purpose: TypeAlias = Literal["serve", "key", "service"]

# In the place of a digest that there is none of.
NONE = bytes(32)

_DOMAIN = b"TSQP attestation claims 1\0"


class Claims(Record):
    """What an enclave says of itself; digests are SHA-256, `NONE` where there is nothing.

    `purpose`: for whom it is: "serve" for clients of a server, "key" for a key server, "service"
    for the runner of a service; no other reader may accept it. `nonce`: of 32 bytes, the reader's;
    empty in a certificate. `time`: seconds since 1970, by the enclave's clock. `tls_key`: of the
    public key (SubjectPublicKeyInfo). `hpke_key`: public, of `hpke_suite`. `receipt_key`: see
    `require_key`; None where no receipts are signed. `model`: of its manifest; of a service, the
    digest of its weights. `policy`: see `policy_digest`. `settings`: of every other option.
    `curve_keys`: public keys of ZeroMQ's CURVE by owner: "runner", and "service" with its number
    for those that it speaks to; a service's own alone is "service". `plugins`: of files that are
    the operator's own, masks among them, by name. `gpus`: of the leaf certificates of the machine's
    GPUs, where they give evidence as well, by name. `attested_services`: what evidence services had
    to give to this enclave, "none" for none.
    """

    what: ClassVar[str] = "claims"
    max_bytes: ClassVar[int] = 16 * 1024

    purpose: Purpose
    nonce: Annotated[bytes, Field(max_length=NONCE_BYTES)]
    time: Annotated[int, Field(ge=0, lt=2**53)]
    tls_key: Digest
    hpke_suite: Literal["mlkem768-x25519", "x25519"]
    hpke_key: Annotated[bytes, Field(max_length=2048)]
    receipt_key: Annotated[Digest, AfterValidator(require_key)] | None
    model: Digest
    policy: Digest
    settings: Digest
    curve_keys: dict[Name, Digest]
    plugins: dict[Name, Digest]
    gpus: dict[Name, Digest] = Field(default_factory=dict)
    attested_services: Name
    version: Name


def report_data(claims: bytes) -> bytes:
    """Return the 64 bytes that evidence of these claims has in its report."""
    return hashlib.sha512(_DOMAIN + claims).digest()


def gpu_nonce(claims: bytes) -> bytes:
    """Return the 32 bytes that a GPU of the machine with these claims is asked with."""
    return hashlib.sha256(b"TSQP attestation claims, to a GPU 1\0" + claims).digest()
