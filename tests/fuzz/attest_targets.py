"""Targets that read evidence of attestation: AMD's certificates in DER, reports, claims.

Leaves are read as if every signature were right, so that what lies behind it is reached.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any
from unittest.mock import patch

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.utils import CryptographyDeprecationWarning

from protocol.errors import EvidenceError, ProtocolError
from tee_side.attest import amd_certificates
from tee_side.attest.claims import Claims
from tee_side.attest.evidence import Evidence
from tee_side.attest.snp_report import Product, SigningKey, SnpReport, Tcb
from tee_side.attest.statement import Statement, read_certificate
from tee_side.serve.identity import certify
from tee_side.serve.sealed_bodies import Direction
from tests.fuzz.engine import Case, Target
from tests.fuzz.mutate import Mutator
from tests.fuzz.wire_targets import mutate_inline
from tests.kit import snp_chain
from tests.kit.snp_chain import children, element, make_chain, make_report, span

# Tags of every kind that certificates have, and whether an element holds others.
_TAGS = (1, 2, 3, 4, 5, 6, 12, 19, 23, 24, 0x30, 0x31, 0xA0, 0xA3)
_CONSTRUCTED = 0x20
_PRODUCTS: tuple[Product, ...] = ("milan", "turin")
_KINDS: tuple[SigningKey, ...] = ("vcek", "vlek")


# ------------------------------------------------------------------------------ certificates, DER


def _mutated(mutator: Mutator, encoded: bytes, other: bytes) -> bytes:
    """Change something inside an element, and write the lengths around it anew."""
    content = encoded[span(encoded)[0] :]
    if encoded[0] & _CONSTRUCTED and content and mutator.chance(0.9):
        parts, others = _inside(encoded), _inside(other)
        at, kind = mutator.below(len(parts)), mutator.below(12)
        if kind == 0:
            del parts[at]
        elif kind == 1:
            parts.insert(at, mutator.pick(parts))
        elif kind == 2:
            parts[at] = mutator.pick(others or parts)
        elif kind == 3:
            parts[at], parts[0] = parts[0], parts[at]
        else:
            parts[at] = _mutated(mutator, parts[at], others[at] if at < len(others) else other)
        return element(encoded[0], *parts)
    if mutator.chance(0.2):
        return element(mutator.pick(_TAGS), content)
    return element(encoded[0], mutator.bytes(content))


def _inside(encoded: bytes) -> list[bytes]:
    return [encoded[at : span(encoded, at)[1]] for at in children(encoded)]


def _mutate_der(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change an element, or bytes of any kind."""
    if mutator.chance(0.7):
        # Where an element is no longer one, its length leads nowhere.
        with suppress(IndexError):
            return (_mutated(mutator, case[0], other[0]),)
    return (mutator.bytes(case[0]),)


class _AnySignature:
    """A key for which every signature is right."""

    key_size = 4096

    def verify(self, *_arguments: object) -> None:
        """Accept it."""

    def public_key(self) -> _AnySignature:
        """Return it: it is its own certificate."""
        return self


RSAPublicKey.register(_AnySignature)
_signed_body = amd_certificates._signed_body


def _unverified(name: str, encoded: bytes, issuer: x509.Certificate) -> tuple[bytes, bytes]:
    by: Any = _AnySignature() if name == "leaf" else issuer
    return _signed_body(name, encoded, by)


_report = cache(lambda *which: SnpReport.parse(make_report(*which)))


def _run_leaf(case: Case) -> str:
    product: Product = "turin" if b"Turin" in case[0] else "milan"
    kind: SigningKey = "vlek" if b"VLEK" in case[0] else "vcek"
    chain = make_chain(product, kind)
    certificates = (case[0], chain.ask, chain.ark)
    with chain.pinned(), patch.object(amd_certificates, "_signed_body", _unverified):
        amd_certificates.verify_chain(_report(product, kind), certificates, snp_chain.NOW)
    return f"{product} {kind}"


@cache
def _leaves() -> list[Case]:
    return [(make_chain(product, kind).leaf,) for product in _PRODUCTS for kind in _KINDS]


# ------------------------------------------------------------------------------ reports, claims


def _run_report(case: Case) -> str:
    report = SnpReport.parse(case[0])
    if report.report_data != case[0][0x50:0x90]:
        raise ValueError("other bytes than those of the report")
    tcb = Tcb.parse(report.reported_tcb, report.product or "milan")
    return f"{case[0][0]} {report.product} {report.signing_key} {max(tcb) > 127}"


@cache
def _reports() -> list[Case]:
    return [
        (make_report(product, kind, version=version),)
        for product in (*_PRODUCTS, "genoa")
        for kind in _KINDS
        for version in (2, 3, 5)
    ]


def _mutate_report(mutator: Mutator, case: Case, other: Case) -> Case:
    data = mutator.bytes(case[0])
    if mutator.chance(0.9):
        # Of another size it is refused at once.
        data = data[: len(case[0])].ljust(len(case[0]), b"\0")
    return (data,)


def _claims() -> list[Case]:
    digest = bytes(range(32))
    claims = Claims(
        purpose="serve",
        nonce=digest,
        time=1_780_000_000,
        tls_key=digest,
        hpke_suite="x25519",
        hpke_key=digest,
        receipt_key=digest,
        model=digest,
        policy=digest,
        settings=digest,
        curve_keys={"runner": digest, "service 0": digest},
        plugins={"a": digest},
        gpus={"0": digest},
        attested_services="none",
        version="0.1.0",
    )
    bare: dict[str, Any] = {
        "purpose": "key",
        "receipt_key": None,
        "nonce": b"",
        "curve_keys": {},
        "plugins": {},
    }
    return [(claims.encode(),), (claims.model_copy(update=bare).encode(),)]


def _run_claims(case: Case) -> str:
    data = b"".join(case)
    claims = Claims.decode(data)
    if claims.encode() != data:
        raise ValueError("claims with two encodings")
    return f"claims {claims.hpke_suite} {bool(claims.nonce)} {bool(claims.plugins)}"


def _evidence() -> list[Case]:
    parts: dict[str, Any] = {"report": b"r" * 40, "collateral": b"{}"}
    return [
        (Evidence(kind="snp", certificates=(b"a", b"b", b"c"), **parts).encode(),),
        (Evidence(kind="tdx", certificates=(), **parts).encode(),),
        (Evidence(kind="simulated", certificates=(), report=b"", collateral=b"").encode(),),
    ]


def _run_evidence(case: Case) -> str:
    evidence = Evidence.decode(b"".join(case))
    if Evidence.decode(evidence.encode()) != evidence:
        raise ValueError("other evidence when it is encoded again")
    return f"{evidence.kind} {min(len(evidence.certificates), 4)}"


# ---------------------------------------------------------------- certificates of servers, bodies


@cache
def _certificates() -> list[Case]:
    key = ec.derive_private_key(1, ec.SECP256R1())
    stated = Statement(claims=_claims()[0][0], evidence=_evidence()[0][0])
    return [(certify(key, stated, snp_chain.NOW, timedelta(days=1)),)]


def _run_certificate(case: Case) -> str:
    with warnings.catch_warnings():
        # Of a serial number of 0, which a later version of the library refuses.
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)
        stated, key = read_certificate(case[0])
    return f"{bool(stated.claims)} {bool(stated.evidence)} {len(key)}"


def _direction() -> Direction:
    return Direction(b"request", bytes(32), bytes(range(32)))


@cache
def _bodies() -> list[Case]:
    sealing = _direction()
    chunks = sealing.seal(b"head"), sealing.seal(b"b" * 40), sealing.seal(b"", final=True)
    return [chunks, (b"".join(chunks),)]


def _mutate_body(mutator: Mutator, case: Case, other: Case) -> Case:
    pieces = list(case)
    at, kind = mutator.below(len(pieces)), mutator.below(4)
    if kind == 0:
        # The same bytes, cut elsewhere.
        middle = mutator.below(len(pieces[at]) + 1)
        pieces[at : at + 1] = [pieces[at][:middle], pieces[at][middle:]]
    elif kind == 1:
        pieces.insert(at, mutator.pick(other))
    elif kind == 2 and len(pieces) > 1:
        del pieces[at]
    else:
        pieces[at] = mutator.bytes(pieces[at])
    return tuple(pieces[:8])


def _run_body(case: Case) -> str:
    opening = _direction()
    opened = [piece for data in case for piece in opening.open(data)]
    opening.close()
    if not b"".join([b"head", b"b" * 40]).startswith(b"".join(opened)):
        raise ValueError("other content than was sealed")
    return f"{len(opened)} chunks of {min(len(case), 4)} pieces"


_target = partial(Target, errors=(EvidenceError,), weight=1.0)

ATTEST_TARGETS = (
    _target("amd-certificates", _leaves, _mutate_der, _run_leaf),
    _target("snp-report", _reports, _mutate_report, _run_report),
    _target("attestation-claims", _claims, mutate_inline, _run_claims),
    _target("attestation-evidence", _evidence, mutate_inline, _run_evidence),
    _target("server-certificate", _certificates, _mutate_der, _run_certificate),
    _target("sealed-body", _bodies, _mutate_body, _run_body, errors=(ProtocolError,)),
)
