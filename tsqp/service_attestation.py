"""What a `gpu-service` says of itself (`--attest`): claims of its key, and evidence of them.

The key of its links is made here, at each start, and is on no disk: one that its host had given
would let that host stand in between, with genuine evidence.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from protocol.curve import require_curve
from protocol.errors import SettingsError
from tsqp.key_files import replace_public_key

log = logging.getLogger("gpu_service")


class Attested(NamedTuple):
    """`secret`: of the links; `attest`: states the service, by nonce and digest of its weights."""

    secret: bytes
    attest: Callable[[bytes, str], bytes]


def attested_service(
    evidence: Mapping[str, Any], computes: Mapping[str, object]
) -> Attested | None:
    """Make a service's key, and what gives evidence of it; None for one without `--attest`.

    `evidence`: the options of `--attest`; `computes`: how it computes, which is claimed. Evidence
    is asked for once: raises EvidenceError, SettingsError, and KeyFileError where the public key
    cannot be written.
    """
    kind, with_gpus = evidence["attest"], evidence["attest_gpus"]
    if kind is None:
        for name in (name for name, value in evidence.items() if value):
            expected = "--attest as well, or nothing"
            raise SettingsError(f"--{name.replace('_', '-')}", got="it alone", expected=expected)
        return None
    if str(computes["device"]).startswith("cuda") and not with_gpus:
        expected = "--attest-gpus: what is sent goes to a GPU, which has to prove itself as well"
        raise SettingsError("--attest", got=f"--device {computes['device']}", expected=expected)
    from tee_side.attest.statement import NONE, Claims, Statement, gpu_nonce, report_data
    from tsqp.attestation import attester_of, settings_digest
    from tsqp.gpu_evidence import ask_gpus, read_certificates

    require_curve()
    public, secret = zmq.curve_keypair()
    attester, settings = attester_of(evidence), settings_digest(computes)

    def attest(nonce: bytes, weights: str) -> bytes:
        leaves = {name: one[0] for name, one in read_certificates().items()} if with_gpus else {}
        claims = Claims(
            purpose="service",
            nonce=nonce,
            time=round(time.time()),
            tls_key=NONE,
            hpke_suite="x25519",
            hpke_key=b"",
            receipt_key=None,
            model=bytes.fromhex(weights),
            policy=NONE,
            settings=settings,
            curve_keys={"service": z85.decode(public)},
            plugins={},
            gpus={name: hashlib.sha256(leaf).digest() for name, leaf in leaves.items()},
            attested_services="none",
            version=version("tsqp"),
        ).encode()
        found = attester.attest(report_data(claims))
        if with_gpus:
            found = found.model_copy(update={"gpus": ask_gpus(gpu_nonce(claims))})
        said = {"kind": found.kind, "gpus": len(found.gpus), "model": weights}
        log.info("evidence", extra={"fields": {**said, "settings": settings.hex()}})
        return Statement(claims=claims, evidence=found.encode()).encode()

    attester.attest(report_data(b""))
    if with_gpus:
        ask_gpus(bytes(32))
    if evidence["public_key"] is not None:
        replace_public_key(evidence["public_key"], public)
    return Attested(secret, attest)
