"""What a `gpu-service` says of itself (`--attest`): claims of its key, and evidence of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from protocol.curve import read_secret_key
from protocol.errors import SettingsError

log = logging.getLogger("gpu_service")


def service_attestation(
    identity: Path | None, evidence: Mapping[str, Any], computes: Mapping[str, object]
) -> Callable[[bytes, str], bytes] | None:
    """Return what states a service for a nonce and the digest of its weights; None: no evidence.

    `identity`: of its secret key; `evidence`: the options of `--attest`; `computes`: how it
    computes, which is claimed. Evidence is asked for once at the start: raises EvidenceError,
    KeyFileError and SettingsError.
    """
    if evidence["attest"] is None:
        given = [name for name, value in evidence.items() if value]
        for name in given:
            expected = "--attest as well, or nothing"
            raise SettingsError(f"--{name.replace('_', '-')}", got="it alone", expected=expected)
        return None
    if identity is None:
        expected = "--identity: evidence names the key of the link"
        raise SettingsError("--attest", got="no --identity", expected=expected)
    from tee_side.attest.claims import NONE, Claims, gpu_nonce, report_data
    from tee_side.attest.statement import Statement
    from tsqp.attestation import attester_of, settings_digest
    from tsqp.gpu_evidence import ask_gpus

    own = z85.decode(zmq.curve_public(read_secret_key(identity)))
    attester, settings = attester_of(evidence), settings_digest(computes)

    def attest(nonce: bytes, weights: str) -> bytes:
        claims = Claims(
            nonce=nonce,
            time=round(time.time()),
            tls_key=NONE,
            hpke_suite="x25519",
            hpke_key=b"",
            receipt_key=NONE,
            model=bytes.fromhex(weights),
            policy=NONE,
            settings=settings,
            curve_keys={"service": own},
            plugins={},
            attested_services="none",
            version=version("tsqp"),
        ).encode()
        found = attester.attest(report_data(claims))
        if evidence["attest_gpus"]:
            found = found.model_copy(update={"gpus": ask_gpus(gpu_nonce(claims))})
        said = {"kind": found.kind, "gpus": len(found.gpus), "model": weights}
        log.info("evidence", extra={"fields": {**said, "settings": settings.hex()}})
        return Statement(claims=claims, evidence=found.encode()).encode()

    attest(bytes(32), NONE.hex())
    return attest
