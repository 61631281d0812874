"""What reads evidence of attestation, sealed bodies, and elements for compiled kernels.

Leaves of certificates are read as if every signature were right, so that what lies behind it is
reached. Compiled code computes on bytes of the other side, at any address, as torch does.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.utils import CryptographyDeprecationWarning

from protocol.errors import EvidenceError, KernelError, ProtocolError
from protocol.integer import ring_product
from tee_side.attest import amd_certificates
from tee_side.attest.claims import Claims
from tee_side.attest.evidence import Evidence
from tee_side.attest.snp_report import SnpReport, Tcb
from tee_side.attest.statement import read_certificate
from tee_side.native import sites
from tee_side.serve.sealed_bodies import Direction
from tests.fuzz import mutate
from tests.fuzz.engine import Target
from tests.fuzz.mutate import Case, Mutator
from tests.kit import snp_chain
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.snp_chain import children, element, make_chain, make_report, span

# Tags of every kind that certificates have, and whether an element holds others.
_TAGS = (1, 2, 3, 4, 5, 6, 12, 19, 23, 24, 0x30, 0x31, 0xA0, 0xA3)
_CONSTRUCTED = 0x20


def _parts(encoded: bytes) -> list[bytes]:
    return [encoded[at : span(encoded, at)[1]] for at in children(encoded)]


def _changed(mutator: Mutator, encoded: bytes, other: bytes) -> bytes:
    """Change something inside an element, and write the lengths around it anew."""
    content = encoded[span(encoded)[0] :]
    if encoded[0] & _CONSTRUCTED and content and mutator.chance(0.9):
        parts, others = _parts(encoded), _parts(other)
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
            parts[at] = _changed(mutator, parts[at], others[at] if at < len(others) else other)
        return element(encoded[0], *parts)
    if mutator.chance(0.2):
        return element(mutator.pick(_TAGS), content)
    return element(encoded[0], mutator.bytes(content))


def _der(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change an element of a certificate, or any bytes."""
    if mutator.chance(0.7):
        # Where an element is no longer one, its length leads nowhere.
        with suppress(IndexError):
            return (_changed(mutator, case[0], other[0]),)
    return mutate.raw(mutator, case, other)


def _same_size(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change bytes; of another size a report is refused at once."""
    data = mutator.bytes(case[0])
    return (data[: len(case[0])].ljust(len(case[0]), b"\0") if mutator.chance(0.9) else data,)


class _AnySignature:
    """A key for which every signature is right, and its own certificate."""

    key_size = 4096

    def verify(self, *_arguments: object) -> None:
        """Accept it."""

    def public_key(self) -> _AnySignature:
        """Return the key."""
        return self


RSAPublicKey.register(_AnySignature)
_signed_body = amd_certificates._signed_body
_report = cache(lambda *which: SnpReport.parse(make_report(*which)))


def _unverified(name: str, encoded: bytes, issuer: x509.Certificate) -> tuple[bytes, bytes]:
    by: Any = _AnySignature() if name == "leaf" else issuer
    return _signed_body(name, encoded, by)


def _leaf(case: Case) -> str:
    product: Any = "turin" if b"Turin" in case[0] else "milan"
    kind: Any = "vlek" if b"VLEK" in case[0] else "vcek"
    chain = make_chain(product, kind)
    certificates = (case[0], chain.ask, chain.ark)
    with chain.pinned(), patch.object(amd_certificates, "_signed_body", _unverified):
        amd_certificates.verify_chain(_report(product, kind), certificates, snp_chain.NOW)
    return f"{product} {kind}"


def _leaves() -> list[Case]:
    kinds: list[Any] = ["vcek", "vlek"]
    return [(make_chain(product, kind).leaf,) for product in ("milan", "turin") for kind in kinds]  # type: ignore[arg-type]


def _snp_report(case: Case) -> str:
    report = SnpReport.parse(case[0])
    if report.report_data != case[0][0x50:0x90]:
        raise ValueError("other bytes than those of the report")
    tcb = Tcb.parse(report.reported_tcb, report.product or "milan")
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


def _kernels(case: Case) -> str:
    """Multiply elements of a request, and take a service's product of as many apart."""
    (data,) = case
    rows, shift = (data or b"\0")[0], len(data) % 2
    columns = (len(data) - 2) // (4 * rows) if 1 <= rows <= 40 else 0
    if columns < 2:
        raise KernelError("case", got="no size", expected="1 to 40 rows of 2 or more")
    memory = bytearray(shift) + data[2 : 2 + 4 * rows * columns]
    y = torch.frombuffer(memory, dtype=torch.int32, offset=shift).view(rows, columns)
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randint(-128, 128, (19, columns), generator=generator).to(torch.int8)
    ring = torch.randint(-(2**31), 2**31, (2 + rows, columns), generator=generator).int()
    factor, bias = torch.rand(2, columns, generator=generator).unbind(0)
    has_bias, has_pad, is_half, has_scale = (data[1] >> bit & 1 for bit in (0, 1, 2, 5))
    dtype = torch.bfloat16 if is_half else torch.float32
    pad = ring[2:].contiguous() if has_pad else None
    scale = torch.arange(1, rows + 1) / 7 if has_scale else None
    plain = y.clone() if pad is None else y.clone() - pad
    product = (y.clone().long() @ weight.long().t()).int()
    decoded = plain * (factor if scale is None else scale[:, None])
    decoded = (decoded if scale is None else decoded * factor).to(dtype)
    added = bias.to(dtype) if has_bias else None
    decoded = decoded if added is None else decoded + added
    right = plain.long() @ ring[:2].long().t()
    around = (pad, scale, factor, added, dtype, ring[:2].contiguous())
    for name in KERNELS[1:]:
        with using_kernels(name):
            found = sites.decode(y, *around, right)
            wrong = sites.decode(y, *around, right + 1)
            if found is None or wrong is not None or not torch.equal(found, decoded):
                raise ValueError(f"{name} decodes other numbers, or checks otherwise")
            if not torch.equal(ring_product(y, weight), product):
                raise ValueError(f"{name} multiplies to other numbers")
    return f"{min(rows, 3)} rows {columns % 16 and 'odd'} {shift} {data[1] & 39}"


_target = partial(Target, errors=(EvidenceError,), weight=1.0)

EVIDENCE = (
    _target("amd-certificates", _leaf, _der, made=_leaves),
    _target("snp-report", _snp_report, _same_size),
    _target("attestation-claims", _claims, mutate.frames),
    _target("attestation-evidence", _evidence, mutate.frames),
    _target("server-certificate", _certificate, _der),
    _target("sealed-body", _body, mutate.pieces, errors=(ProtocolError,)),
    _target("kernels", _kernels, mutate.raw, errors=(KernelError,)),
)
