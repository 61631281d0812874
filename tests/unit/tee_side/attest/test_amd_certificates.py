"""Tests of AMD's chain: what is accepted, and one refusal for each thing that may be wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from protocol.errors import EvidenceError
from tee_side.attest import amd_certificates
from tee_side.attest.amd_certificates import PINNED_ROOTS, verify_chain
from tee_side.attest.snp_report import Product, SigningKey, SnpReport
from tests.kit import snp_chain as made
from tests.kit.rows import each_row
from tests.kit.snp_chain import NOW, Chain, ark_key, ask_key, extension, make_chain

CHAIN = make_chain()


def _report(product: Product = "milan", kind: SigningKey = "vcek", **changed: Any) -> SnpReport:
    return SnpReport.parse(made.make_report(product, kind, **changed))


REPORT = _report()


def _verify(
    certificates: Sequence[bytes] = CHAIN.certificates,
    now: datetime = NOW,
    crl: bytes | None = None,
    chain: Chain = CHAIN,
    report: SnpReport = REPORT,
) -> ec.EllipticCurvePublicKey:
    """Verify certificates by the root of `chain`."""
    with chain.pinned():
        product, key = verify_chain(report, certificates, now, crl)
    assert product == chain.product
    return key


def _refuses(text: str) -> Any:
    return pytest.raises(EvidenceError, match=f"^{re.escape(text)}")


_BYTES = "AMD certificates: got other bytes, expected AMD's DER"


def _leaf(**changed: Any) -> bytes:
    """Return a leaf with other fields, signed; `extensions`: by identifier, None for none."""
    extensions = changed.pop("extensions", None)
    body = made.leaf_body(changed=extensions if isinstance(extensions, dict) else None)
    if isinstance(extensions, bytes):
        body = replace(body, extensions=extensions)
    return replace(body, **changed).signed(ask_key())


# ----------------------------------------------------------------------------------- accepted


@each_row("product", ["milan", "genoa", "turin"])
def test_leaf_is_read(product: Product) -> None:
    kinds: tuple[SigningKey, ...] = ("vcek", "vlek")
    for kind in kinds:
        chain, report = make_chain(product, kind), _report(product, kind)
        key = _verify(chain.certificates, chain=chain, report=report)
        assert key.public_numbers() == made.LEAF_KEY.public_key().public_numbers()


def test_both_forms_of_the_algorithm_are_read() -> None:
    """One of them writes the last field, which is at its default."""
    leaf = _leaf(algorithm=made.PSS_LONG)
    ask = replace(made.ask_body("milan"), algorithm=made.PSS_LONG).signed(ark_key())
    assert _verify((leaf, ask, CHAIN.ark))


def test_time_is_an_argument_and_both_ends_are_inside() -> None:
    begins, ends = datetime(2024, 1, 1, tzinfo=UTC), datetime(2044, 1, 1, tzinfo=UTC)
    for now in (begins, ends):
        assert _verify(now=now)


def test_versions_above_127_are_read() -> None:
    """They take two bytes."""
    for microcode in (127, 128, 255):
        tcb = made.TCB._replace(microcode=microcode)
        leaf = made.leaf_body(tcb=tcb).signed(ask_key())
        assert _verify((leaf, CHAIN.ask, CHAIN.ark), report=_report(tcb=tcb))


def test_pinned_roots_are_of_one_product_each() -> None:
    assert sorted(PINNED_ROOTS.values()) == ["genoa", "milan", "turin"]
    with _refuses("AMD root: got another certificate, expected one that is pinned"):
        verify_chain(REPORT, CHAIN.certificates, NOW)


# ------------------------------------------------------------------------- number and the root


@each_row("count", [0, 1, 2, 4])
def test_three_certificates_are_asked_for(count: int) -> None:
    certificates = (*CHAIN.certificates, CHAIN.ark)[:count]
    with _refuses(f"AMD certificates: got {count}, expected leaf, ASK and ARK"):
        _verify(certificates)


def test_order_matters() -> None:
    leaf, ask, ark = CHAIN.certificates
    for certificates in ((ark, ask, leaf), (leaf, ark, ask), (ask, leaf, ark), (ark, ark, ark)):
        with pytest.raises(EvidenceError):
            _verify(certificates)


def test_root_is_the_one_that_is_pinned_to_the_byte() -> None:
    with _refuses("AMD root: got another certificate"):
        _verify((CHAIN.leaf, CHAIN.ask, made.ark_body("milan").signed(ark_key())))
    with _refuses("AMD root: got another certificate"):
        _verify((CHAIN.leaf, CHAIN.ask, CHAIN.ark + b"\0"))
    # A pin of what is no certificate.
    chain = replace(CHAIN, ark=b"\x30\x00")
    with _refuses(_BYTES):
        _verify(chain.certificates, chain=chain)


# ------------------------------------------------------------------- signatures of all, alike

_BODY = made.leaf_body().encoded()
_BITS = made.element(3, b"\0", bytes(512))


@each_row("where", ["leaf", "ASK", "CRL"])
def test_signatures(where: str) -> None:
    """What is not exactly signed by its issuer is refused, in a leaf, an ASK and a CRL alike."""
    body = {
        "leaf": _BODY,
        "ASK": made.ask_body("milan").encoded(),
        "CRL": made.crl_body(),
    }[where]
    key, other = (ask_key(), ark_key()) if where == "leaf" else (ark_key(), ask_key())
    good = made.signed(body, key)
    signature = good[-512:]
    flipped = bytes((signature[0] ^ 1,)) + signature[1:]
    even = signature[:-1] + bytes((signature[-1] & 0xFE,))
    elsewhere = body[:-1] + bytes((body[-1] ^ 1,))

    def verify(encoded: bytes) -> ec.EllipticCurvePublicKey:
        leaf, ask = (
            encoded if where == one else kept
            for one, kept in zip(("leaf", "ASK"), CHAIN.certificates[:2], strict=True)
        )
        return _verify((leaf, ask, CHAIN.ark), crl=encoded if where == "CRL" else None)

    def parts(*found: bytes) -> bytes:
        return made.sequence(*found)

    bits = made.element(3, b"\0", signature)
    assert verify(good)
    algorithm, of = made.PSS_SHORT, f"AMD {where}: got"
    two = f"{of} two signature algorithms, expected the one" if where == "leaf" else _BYTES
    rows = [
        (b"", _BYTES),
        (good + b"\0", _BYTES),
        (b"\x31" + good[1:], _BYTES),
        (good[:-1], _BYTES),
        # Lengths that are not the shortest, inside and around.
        (b"\x30\x83\0" + good[2:], _BYTES),
        (parts(b"\x30\x83\0" + body[2:], algorithm, bits), _BYTES),
        (b"\x30\x80" + good[4:] + bytes(2), _BYTES),
        (parts(body, algorithm), _BYTES),
        (parts(body, algorithm, bits, bits), _BYTES),
        (parts(body, algorithm, made.element(4, b"\0", signature)), _BYTES),
        (parts(body, algorithm, made.element(3, b"\x08", signature)), _BYTES),
        (parts(body, algorithm, made.element(3)), _BYTES),
        (made.sequence(bytes(8189)), f"{of} 8193 bytes, expected 8192 at most"),
        (made.sequence(bytes(8188)), _BYTES),
        *(
            (parts(body, other_one, bits), f"{of} another signature algorithm")
            for other_one in (made.pss(salt=32), made.pss(b"\x05\0"), made.sequence(), bits)
        ),
        (parts(body, made.PSS_LONG, bits), two),
        *(
            (parts(body, algorithm, made.element(3, b"\0", wrong)), f"{of} a wrong signature")
            for wrong in (bytes(512), flipped)
        ),
        # One that begins with a zero is right for OpenSSL without it as well.
        *(
            (parts(body, algorithm, made.element(3, b"\0", wrong)), _BYTES)
            for wrong in (b"", signature[1:], b"\0" + signature, signature + b"\0")
        ),
        (parts(elsewhere, algorithm, bits), f"{of} a wrong signature, expected AMD's"),
        (parts(body, algorithm, made.element(3, b"\1", even)), _BYTES),
        (made.signed(body, other), f"{of} a wrong signature"),
        (made.signed(b"\x31" + body[1:], key), _BYTES),
        (made.signed(made.integer(1), key), _BYTES),
        (made.signed(made.sequence(), key), _BYTES),
    ]
    for encoded, text in rows:
        with _refuses(text):
            verify(encoded)


def test_the_algorithm_of_a_leaf_is_no_other_of_its_fields() -> None:
    sha1 = made.sequence(made.oid("1.2.840.113549.1.1.5"), made.element(5))
    extra = made.leaf_body("milan", changed={f"{made.AMD}.77": made.PSS_SHORT})
    leaf = made.signed(replace(extra, algorithm=sha1).encoded(), ask_key())
    with _refuses("AMD leaf: got two signature algorithms"):
        _verify((leaf, CHAIN.ask, CHAIN.ark))


@each_row("which", [(0, 1), (1, 3)])
def test_issuers_have_keys_of_4096_bits(which: tuple[int, int]) -> None:
    """Neither fewer, 3072, nor more, 5120, even where they are pinned."""
    primes = made.primes()
    key = made.rsa_key(*(primes[one] for one in which))
    ark = replace(made.ark_body("milan"), key=made.public(key)).signed(ark_key())
    with _refuses("AMD ASK: got an issuer with another key, expected RSA-4096"):
        _verify((CHAIN.leaf, CHAIN.ask, ark), chain=replace(CHAIN, ark=ark))
    chain = replace(CHAIN, ark=ark, ask=made.ask_body("milan").signed(key))
    with _refuses(_BYTES):
        _verify(chain.certificates, chain=chain)


def test_issuers_have_keys_of_rsa() -> None:
    body = replace(made.ask_body("milan"), key=made.public(made.LEAF_KEY))
    with _refuses("AMD leaf: got an issuer with another key, expected RSA-4096"):
        _verify((CHAIN.leaf, body.signed(ark_key()), CHAIN.ark))


# -------------------------------------------------------------------------------- intermediate


def test_another_thing_that_the_root_signed_is_no_intermediate() -> None:
    crl = made.signed(made.crl_body(), ark_key())
    with _refuses(_BYTES):
        _verify((CHAIN.leaf, crl, CHAIN.ark))
    with _refuses(_BYTES):
        _verify(crl=CHAIN.ask)
    with _refuses("AMD leaf: got a wrong signature"):
        _verify((CHAIN.leaf, CHAIN.ark, CHAIN.ark))


def test_intermediate_names_the_root() -> None:
    body = replace(made.ask_body("milan"), issuer=made.name("ARK-Genoa"))
    with _refuses("AMD certificates: got other bytes"):
        _verify((CHAIN.leaf, body.signed(ark_key()), CHAIN.ark))


def _validity(begins: bytes, ends: bytes) -> bytes:
    return made.sequence(made.time(begins), made.time(ends))


@each_row("where", ["ARK", "ASK", "leaf"])
def test_each_certificate_has_its_time(where: str) -> None:
    validity = _validity(b"250101000000Z", b"20260630000000Z")
    bodies = {
        "ARK": made.ark_body("milan"),
        "ASK": made.ask_body("milan"),
        "leaf": made.leaf_body(),
    }
    bodies[where] = replace(bodies[where], validity=validity)
    chain = made.Chain(
        "milan",
        leaf=bodies["leaf"].signed(ask_key()),
        ask=bodies["ASK"].signed(ark_key()),
        ark=bodies["ARK"].signed(ark_key()),
    )
    begins, ends = datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 6, 30, tzinfo=UTC)
    for now in (begins, ends):
        assert _verify(chain.certificates, now, chain=chain)
    second = timedelta(seconds=1)
    for now, said in (
        (begins - second, "2024-12-31T23:59:59"),
        (ends + second, "2026-06-30T00:00:01"),
    ):
        with _refuses(
            f"AMD {where}: got {said}+00:00, expected a time from 2025-01-01T00:00:00+00:00"
            " to 2026-06-30T00:00:00+00:00"
        ):
            _verify(chain.certificates, now, chain=chain)


# ------------------------------------------------------------------------------------- the CRL


def _crl(*revoked: int, **changed: Any) -> bytes:
    return made.signed(made.crl_body("milan", revoked, **changed), ark_key())


def test_crl_is_heeded() -> None:
    assert _verify(crl=_crl())
    assert _verify(crl=_crl(1, 3, 0))
    with _refuses("AMD ASK: got a certificate that is revoked, expected one that is not on the"):
        _verify(crl=_crl(1, 2))


@each_row(
    ("crl", "text"),
    [
        (b"", _BYTES),
        (_crl(issuer=made.name("ARK-Genoa")), "AMD CRL: got another issuer, expected the ARK"),
        (_crl(begins=b"260101000001Z"), "AMD CRL: got 2026-01-01T00:00:00+00:00, expected a time"),
        (_crl(ends=b"251231235959Z"), "AMD CRL: got 2026-01-01T00:00:00+00:00, expected a time"),
        (
            _crl(ends=None),
            "AMD CRL: got 2026-01-01T00:00:00+00:00, expected a time from 2024-01-01",
        ),
        (
            made.signed(made.sequence(made.integer(1), made.PSS_SHORT), ark_key()),
            _BYTES,
        ),
    ],
)
def test_another_crl_is_refused(crl: bytes, text: str) -> None:
    """One that says of no end is not taken as one for ever."""
    with _refuses(text):
        _verify(crl=crl)


def test_entries_that_cannot_be_read_are_refused() -> None:
    names = made.name("ARK-Milan")
    entries = made.sequence(made.sequence(made.integer(7)))
    times = made.time(made.BEGINS) + made.time(made.ENDS)
    body = made.sequence(made.integer(1), made.PSS_SHORT, names, times, entries)
    with _refuses(_BYTES):
        _verify(crl=made.signed(body, ark_key()))


# ------------------------------------------------------------------------------------ the leaf

_NAMES = "AMD leaf: got another name, expected SEV-VCEK by SEV-Milan"
_TWICE = "AMD leaf: got an extension twice, expected each once"
_CHIP_ID = "AMD leaf: got another chip id, expected the report's in a VCEK, none in a VLEK"
_KEY = "AMD leaf: got another public key, expected one of P-384"
_TCB = "AMD leaf: got Tcb("
_COMMON_NAME = made.sequence(made.oid("2.5.4.3"), made.element(0x0C, b"SEV-VCEK"))
_NAMED = made.name("SEV-VCEK")
_ALL = [extension(*one) for one in made.leaf_extensions("milan", "vcek", made.TCB).items()]
_NO_TIMES = (
    *(b"440101000000", b"440101000000z", b"4401010000Z", b"440101000000+", b"4401 1000000Z"),
    *(b"440230000000Z", b"441301000000Z", b"440100000000Z", b"440101240000Z", b"440101006000Z"),
    *(b"20440101000000", b"2044010100000Z\n", b"00000101000000Z", b"20440101000000.0Z"),
)


def _p(number: int, content: bytes) -> bytes:
    return _leaf(extensions={f"{made.AMD}.3.{number}": content})


@each_row(
    ("leaf", "text"),
    [
        (_leaf(version=b""), _BYTES),
        (_leaf(version=made.element(0xA0, made.integer(1))), "AMD leaf: got another version"),
        (_leaf(version=made.element(0xA0, made.integer(3))), "AMD leaf: got another version, expe"),
        (_leaf(version=made.integer(2)), _BYTES),
        (_leaf(serial=made.integer(0) * 2), _BYTES),
        (_leaf(serial=b"\x02\x02\0\0"), _BYTES),
        (_leaf(algorithm=made.PSS_SHORT, extensions=b""), _BYTES),
        *((_leaf(issuer=made.name(one)), _NAMES) for one in ("SEV-Genoa", "SEV-VLEK-Milan", "ARK")),
        # The country as text of another type.
        (_leaf(issuer=made.name("SEV-Milan").replace(b"\x13\x02", b"\x0c\x02")), _NAMES),
        (_leaf(subject=_NAMED.replace(b"\x13\x02", b"\x0c\x02")), _NAMES),
        (_leaf(validity=made.sequence(made.time(made.BEGINS))), _BYTES),
        (_leaf(validity=made.sequence(*[made.time(made.BEGINS)] * 3)), _BYTES),
        (_leaf(validity=made.element(0x31)), _BYTES),
        *((_leaf(validity=_validity(made.BEGINS, text)), _BYTES) for text in _NO_TIMES),
        (
            _leaf(validity=_validity(made.BEGINS, b"20440101000000.5Z")),
            "AMD leaf: got a part of a second, expected whole ones",
        ),
        (_leaf(subject=made.name("SEV-VLEK")), _NAMES),
        (_leaf(subject=made.name("SEV-VCEK ")), _NAMES),
        (_leaf(subject=made.name("SEV-Milan")), _NAMES),
        (_leaf(subject=made.sequence()), _NAMES),
        (_leaf(subject=made.sequence(made.element(0x31, _COMMON_NAME))), _NAMES),
        (_leaf(subject=made.sequence(_NAMED[2:], made.element(0x31, _COMMON_NAME))), _NAMES),
        (_leaf(subject=made.sequence(_NAMED[2:], _NAMED[2:])), _NAMES),
        (_leaf(subject=made.sequence(made.element(0x31, _COMMON_NAME * 2))), _NAMES),
        (_leaf(subject=made.sequence(_COMMON_NAME)), _NAMES),
        (_leaf(subject=made.integer(1)), _NAMES),
        (_leaf(extensions=made.element(0xA2, made.sequence())), _BYTES),
        (_leaf(extensions=made.element(0xA3)), _BYTES),
        (_leaf(extensions=made.element(0xA3, made.sequence() * 2)), _BYTES),
        (_leaf(extensions=made.element(0xA3, made.element(0x31))), _BYTES),
        (_leaf(extensions=made.extensions(b"\x05\0")), _BYTES),
        (_leaf(extensions=made.extensions(made.sequence(made.oid("1.2")))), _BYTES),
        (_leaf(extensions=made.extensions(made.sequence(made.oid("1.2"), b"\x02\1\0"))), _BYTES),
        (_leaf(extensions=made.extensions(made.sequence(made.integer(1), b"\x04\0"))), _BYTES),
        (
            _leaf(extensions=made.extensions(*_ALL, extension("2.5.29.19", b"", critical=True))),
            _BYTES,
        ),
        (_leaf(extensions=made.extensions(*_ALL, made.integer(1))), _BYTES),
        (_leaf(extensions=made.extensions(extension(f"{made.AMD}.3.1", b"\2\1\0") * 2)), _TWICE),
        *((_leaf(extensions={f"{made.AMD}.3.{number}": None}), _BYTES) for number in (1, 2, 3, 8)),
        (_p(1, b""), _BYTES),
        (_p(2, b"\x02\x01"), _BYTES),
        (_p(3, b"\x02\x01\x18\x00"), _BYTES),
        (_p(3, b"\x02\x02\x00\x18"), _BYTES),
        (_p(3, b"\x02\x81\x01\x18"), _BYTES),
        (_p(8, b"\x04\x01\xdb"), _BYTES),
        (_p(8, b"\x02\x01\xdb"), _TCB),
        (_p(8, b"\x02\x02\x01\xdb"), _TCB),
        (_p(8, b"\x02\x82\x10\x00" + b"\x7f" * 4096), _BYTES),
        (_leaf(extensions={f"{made.AMD}.4": None}), _CHIP_ID),
        (_leaf(extensions={f"{made.AMD}.4": b""}), _CHIP_ID),
        (_leaf(extensions={f"{made.AMD}.4": made.chip_id_of("milan") + b"\0"}), _CHIP_ID),
        (_leaf(key=made.public(ask_key())), _KEY),
        (_leaf(key=made.public(ec.derive_private_key(5, ec.SECP256R1()))), _KEY),
        (_leaf(key=made.sequence()), _BYTES),
        (_leaf(key=made.public(made.LEAF_KEY)[:-1] + b"\0"), _BYTES),
    ],
)
def test_another_leaf_is_refused(leaf: bytes, text: str) -> None:
    with _refuses(text):
        _verify((leaf, CHAIN.ask, CHAIN.ark))


def test_leaf_of_the_other_kind_has_the_other_intermediate_and_extensions() -> None:
    asvk = make_chain("milan", "vlek").ask

    def refuses(kind: SigningKey, text: str, **changed: Any) -> None:
        body = replace(made.leaf_body("milan", kind, changed=changed.pop("more", None)), **changed)
        with _refuses(text):
            _verify((body.signed(ask_key()), asvk, CHAIN.ark), report=_report(kind=kind))

    by_asvk, by_vlek = made.name("SEV-VLEK-Milan"), "AMD leaf: got another name, expected SEV-VLEK"
    refuses("vcek", _NAMES, issuer=by_asvk)
    refuses("vlek", _CHIP_ID, more={f"{made.AMD}.4": made.chip_id_of("milan")})
    refuses("vlek", _CHIP_ID, more={f"{made.AMD}.4": b""})
    refuses("vlek", _CHIP_ID, more={f"{made.AMD}.4": bytes(64)})
    refuses("vlek", f"{by_vlek} by SEV-VLEK-Milan", subject=made.name("SEV-VCEK"))


def test_a_vlek_is_not_by_an_ask() -> None:
    leaf = replace(made.leaf_body("milan", "vlek"), issuer=made.name("SEV-Milan"))
    with _refuses("AMD leaf: got another name, expected SEV-VLEK by SEV-VLEK-Milan"):
        _verify((leaf.signed(ask_key()), CHAIN.ask, CHAIN.ark), report=_report(kind="vlek"))


@each_row("common_names", [(), ("SEV-VLEK-Milan", "SEV-VLEK-Milan"), ("SEV-VLEK",)])
def test_intermediate_of_a_vlek_has_one_name_of_its_kind(common_names: tuple[str, ...]) -> None:
    parts = [
        made.element(0x31, made.sequence(made.oid("2.5.4.3"), made.element(0x0C, one.encode())))
        for one in common_names
    ]
    subject = made.sequence(*parts)
    ask = replace(made.ask_body("milan", "vlek"), subject=subject).signed(ark_key())
    leaf = replace(made.leaf_body("milan", "vlek"), issuer=subject).signed(ask_key())
    with _refuses("AMD leaf: got another name, expected SEV-VLEK by SEV-VLEK-Milan"):
        _verify((leaf, ask, CHAIN.ark), report=_report(kind="vlek"))


def test_intermediate_is_of_the_product() -> None:
    ask = replace(made.ask_body("milan"), subject=made.name("SEV-Genoa")).signed(ark_key())
    leaf = replace(made.leaf_body(), issuer=made.name("SEV-Genoa")).signed(ask_key())
    with _refuses(_NAMES):
        _verify((leaf, ask, CHAIN.ark))


def test_turin_has_a_fifth_version() -> None:
    chain, report = make_chain("turin"), _report("turin")
    for encoded, text in ((None, _BYTES), (b"\x02\x01\x00", _TCB)):
        body = made.leaf_body("turin", changed={f"{made.AMD}.3.9": encoded})
        with _refuses(text):
            _verify((body.signed(ask_key()), chain.ask, chain.ark), chain=chain, report=report)
    # Of others it is not read.
    assert _verify((_p(9, b"\x02\x01\x07"), CHAIN.ask, CHAIN.ark))


def test_the_report_says_whose_root_it_is() -> None:
    with _refuses("AMD root: got that of milan, expected genoa"):
        _verify(report=_report("genoa"))
    # That of version 2 does not.
    assert _verify(report=_report(version=2))


def test_nothing_but_signed_bytes_reaches_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parsers of certificates are large: only what AMD signed is given to them."""
    seen = []
    load = amd_certificates.x509.load_der_x509_certificate
    monkeypatch.setattr(
        amd_certificates.x509,
        "load_der_x509_certificate",
        lambda encoded: seen.append(encoded) or load(encoded),  # type: ignore[func-returns-value]
    )
    forged = made.signed(made.ask_body("milan").encoded(), ask_key())
    with _refuses("AMD ASK: got a wrong signature"):
        _verify((CHAIN.leaf, forged, CHAIN.ark))
    assert seen == [CHAIN.ark]
    with _refuses("AMD leaf: got a wrong signature"):
        _verify((made.signed(_BODY, ark_key()), CHAIN.ask, CHAIN.ark))
    assert seen == [CHAIN.ark] * 2 + [CHAIN.ask]
