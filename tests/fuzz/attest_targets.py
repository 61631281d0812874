"""Targets that read evidence of attestation: DER, AMD's certificates, reports, claims.

Certificates are read as if every signature were right, so that what lies behind it is reached.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from protocol.errors import EvidenceError
from tee_side.attest import der
from tee_side.attest.amd_certificates import _verified_leaf
from tee_side.attest.claims import Claims
from tee_side.attest.evidence import Evidence
from tee_side.attest.snp_report import Product, SigningKey, SnpReport, Tcb
from tests.fuzz.engine import Case, Target
from tests.fuzz.mutate import Mutator
from tests.fuzz.wire_targets import mutate_inline
from tests.tools import snp_chain

# Whether an element holds others, and tags of every kind that certificates have.
_CONSTRUCTED = 0x20
_TAGS = (1, 2, 3, 4, 5, 6, 12, 19, 23, 24, 0x30, 0x31, 0xA0, 0xA3)
_PRODUCTS: tuple[Product, ...] = ("milan", "turin")
_KINDS: tuple[SigningKey, ...] = ("vcek", "vlek")


# ----------------------------------------------------------------------------------------- DER


def _read(element: der.Element) -> int:
    """Read everything inside an element; return how many elements there are."""
    if snp_chain.element(element.tag, element.content) != element.encoded:
        raise ValueError("an element with two encodings")
    if element.tag == der.INTEGER:
        if snp_chain.integer(der.integer(element)) != element.encoded:
            raise ValueError("a number with two encodings")
    elif element.tag == der.BIT_STRING:
        der.bits(element)
    elif element.tag in (der.UTC_TIME, der.GENERALIZED_TIME):
        der.moment(element)
    return 1 + sum(map(_read, element.children() if element.tag & _CONSTRUCTED else ()))


def _run_der(case: Case) -> str:
    (data,) = case
    element = der.read(data, data[0] if data else 0)
    tag = element.tag if element.tag in _TAGS else "unknown"
    return f"tag {tag}, {min(_read(element), 3)} of them"


def _mutated(mutator: Mutator, element: der.Element, other: der.Element) -> bytes:
    """Change something inside an element, and write the lengths around it anew."""
    tag, content, _ = element
    if tag & _CONSTRUCTED and content and mutator.chance(0.9):
        parts, others = element.children(), other.children()
        at, kind = mutator.below(len(parts)), mutator.below(12)
        encoded = [part.encoded for part in parts]
        if kind == 0:
            del encoded[at]
        elif kind == 1:
            encoded.insert(at, mutator.pick(encoded))
        elif kind == 2:
            encoded[at] = mutator.pick(others or parts).encoded
        elif kind == 3:
            encoded[at], encoded[0] = encoded[0], encoded[at]
        else:
            encoded[at] = _mutated(mutator, parts[at], others[at] if at < len(others) else other)
        return snp_chain.element(tag, *encoded)
    if mutator.chance(0.2):
        return snp_chain.element(mutator.pick(_TAGS), content)
    return snp_chain.element(tag, mutator.bytes(content))


def _mutate_der(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change an element, or bytes of any kind."""
    if mutator.chance(0.7):
        with suppress(EvidenceError):
            first, second = (der.read(one, one[0] if one else 0) for one in (case[0], other[0]))
            return (_mutated(mutator, first, second),)
    return (mutator.bytes(case[0]),)


@cache
def _fields() -> list[Case]:
    body = der.read(snp_chain.make_chain().leaf, der.SEQUENCE).children()[0]
    return [(field.encoded,) for field in body.children()]


# -------------------------------------------------------------------------------- certificates


class _AnySignature:
    """A key for which every signature is right."""

    key_size = 4096

    def verify(self, *_arguments: object) -> None:
        """Accept it."""


RSAPublicKey.register(_AnySignature)


class _Issuer:
    """An intermediate whose key is such."""

    def __init__(self, product: Product, kind: SigningKey) -> None:
        encoded = snp_chain.make_chain(product, kind).ask
        self.subject = x509.load_der_x509_certificate(encoded).subject

    def public_key(self) -> _AnySignature:
        """Return the key."""
        return _AnySignature()


_issuer = cache(_Issuer)


def _run_leaf(case: Case) -> str:
    product: Product = "turin" if b"Turin" in case[0] else "milan"
    issuer: Any = _issuer(product, "vlek" if b"VLEK" in case[0] else "vcek")
    leaf = _verified_leaf(case[0], issuer, product, snp_chain.NOW)
    return f"{leaf.product} {leaf.kind} {min(len(leaf.chip_id or b''), 65) // 8}"


@cache
def _leaves() -> list[Case]:
    return [(snp_chain.make_chain(product, kind).leaf,) for product in _PRODUCTS for kind in _KINDS]


# ------------------------------------------------------------------------------ reports, claims


def _run_report(case: Case) -> str:
    report = SnpReport.parse(case[0])
    if report.signed != case[0][: len(report.signed)] or len(report.report_data) != 64:
        raise ValueError("other bytes than those of the report")
    tcb = Tcb.parse(report.reported_tcb, report.product or "milan")
    return f"{report.version} {report.product} {report.signing_key} {max(tcb) > 127}"


@cache
def _reports() -> list[Case]:
    return [
        (snp_chain.make_report(product, kind, version=version),)
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
        attested_services="none",
        version="0.1.0",
    )
    bare: dict[str, Any] = {"nonce": b"", "curve_keys": {}, "plugins": {}}
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


_target = partial(Target, errors=(EvidenceError,), weight=1.0)

ATTEST_TARGETS = (
    _target("der", _fields, _mutate_der, _run_der),
    _target("amd-certificates", _leaves, _mutate_der, _run_leaf),
    _target("snp-report", _reports, _mutate_report, _run_report),
    _target("attestation-claims", _claims, mutate_inline, _run_claims),
    _target("attestation-evidence", _evidence, mutate_inline, _run_evidence),
)
