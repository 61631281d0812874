"""What reads evidence of attestation, and sealed bodies.

Leaves of certificates are read as if every signature were right, so that what lies behind it is
reached.
"""

import warnings
from functools import cache, partial
from typing import Any
from unittest.mock import Mock, patch

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.utils import CryptographyDeprecationWarning

from protocol.errors import EvidenceError, ProtocolError
from tee_side.attest import guests
from tee_side.attest.statement import Claims, Evidence, read_certificate
from tee_side.serve.sealed import Direction
from tests.fuzz.engine import Target
from tests.kit import mutate, snp_chain
from tests.kit.mutate import Case, Mutator
from tests.kit.snp_chain import make_chain, make_report


def _same_size(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change bytes; of another size a report is refused at once."""
    data = mutator.bytes(case[0])
    return (data[: len(case[0])].ljust(len(case[0]), b"\0") if mutator.chance(0.9) else data,)


# A key for which every signature is right, and its own certificate.
_ANY = Mock(spec=["key_size", "public_key", "verify"], key_size=4096, __class__=RSAPublicKey)
_ANY.public_key = lambda: _ANY
_signed_body = guests._signed_body
_report = cache(lambda *which: guests.SnpReport.parse(make_report(*which)))


def _unverified(name: str, encoded: bytes, issuer: x509.Certificate) -> tuple[bytes, bytes]:
    return _signed_body(name, encoded, _ANY if name == "leaf" else issuer)


def _leaf(case: Case) -> str:
    product: Any = "turin" if b"Turin" in case[0] else "milan"
    kind: Any = "vlek" if b"VLEK" in case[0] else "vcek"
    chain = make_chain(product, kind)
    certificates = (case[0], chain.ask, chain.ark)
    with chain.pinned(), patch.object(guests, "_signed_body", _unverified):
        guests.verify_chain(_report(product, kind), certificates, snp_chain.NOW)
    return f"{product} {kind}"


def _leaves() -> list[Case]:
    kinds: list[Any] = ["vcek", "vlek"]
    return [(make_chain(product, kind).leaf,) for product in ("milan", "turin") for kind in kinds]  # type: ignore[arg-type]


def _snp_report(case: Case) -> str:
    report = guests.SnpReport.parse(case[0])
    if report.report_data != case[0][0x50:0x90]:
        raise ValueError("other bytes than those of the report")
    tcb = guests.Tcb.parse(report.reported_tcb, report.product or "milan")
    return f"{case[0][0]} {report.product} {report.signing_key} {max(tcb) > 127}"


def _claims(case: Case) -> str:
    claims = Claims.decode(b"".join(case))
    if claims.encode() != b"".join(case):
        raise ValueError("claims with two encodings")
    return f"claims {claims.hpke_suite} {bool(claims.nonce)} {bool(claims.plugins)}"


def _evidence(case: Case) -> str:
    evidence = Evidence.decode(b"".join(case))
    if Evidence.decode(evidence.encode()) != evidence:
        raise ValueError("other evidence when it is encoded again")
    return f"{evidence.kind} {min(len(evidence.certificates), 4)}"


def _certificate(case: Case) -> str:
    with warnings.catch_warnings():
        # Of a serial number of 0, which a later version of the library refuses.
        warnings.simplefilter("ignore", CryptographyDeprecationWarning)
        stated, key = read_certificate(case[0])
    return f"{bool(stated.claims)} {bool(stated.evidence)} {len(key)}"


def _body(case: Case) -> str:
    opening = Direction(b"request", bytes(32), bytes(range(32)))
    opened = [piece for data in case for piece in opening.open(data)]
    opening.close()
    if not (b"head" + b"b" * 40).startswith(b"".join(opened)):
        raise ValueError("other content than was sealed")
    return f"{len(opened)} chunks of {min(len(case), 4)} pieces"


_target = partial(Target, errors=(EvidenceError,), weight=1.0)

EVIDENCE = (
    _target("amd-certificates", _leaf, mutate.one, made=_leaves),
    _target("snp-report", _snp_report, _same_size),
    _target("attestation-claims", _claims, mutate.parts),
    _target("attestation-evidence", _evidence, mutate.parts),
    _target("server-certificate", _certificate, mutate.one),
    _target("sealed-body", _body, mutate.parts, errors=(ProtocolError,)),
)
