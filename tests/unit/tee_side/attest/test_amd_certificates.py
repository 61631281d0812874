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
from tee_side.attest.amd_certificates import MAX_BYTES, PINNED_ROOTS, Leaf, verify_chain
from tee_side.attest.snp_report import Product, SigningKey
from tests.tables import each_row
from tests.tools import snp_chain as made
from tests.tools.snp_chain import NOW, ark_key, ask_key, extension, make_chain

CHAIN = make_chain()


def _verify(
    certificates: Sequence[bytes] = CHAIN.certificates,
    now: datetime = NOW,
    crl: bytes | None = None,
    roots: Any = None,
) -> Leaf:
    return verify_chain(certificates, now, crl, CHAIN.roots if roots is None else roots)


def _refuses(text: str) -> Any:
    return pytest.raises(EvidenceError, match=f"^{re.escape(text)}")


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
    for kind in ("vcek", "vlek"):
        chain = make_chain(product, kind)
        leaf = _verify(chain.certificates, roots=chain.roots)
        assert (leaf.product, leaf.kind) == (product, kind)
        assert leaf.tcb == made.tcb_of(product)
        assert leaf.chip_id == (made.chip_id_of(product) if kind == "vcek" else None)
        assert leaf.key.public_numbers() == made.LEAF_KEY.public_key().public_numbers()


def test_both_forms_of_the_algorithm_are_read() -> None:
    """One of them writes the last field, which is at its default."""
    leaf = _leaf(algorithm=made.PSS_LONG)
    ask = replace(made.ask_body("milan"), algorithm=made.PSS_LONG).signed(ark_key())
    assert _verify((leaf, ask, CHAIN.ark)).kind == "vcek"


def test_time_is_an_argument_and_both_ends_are_inside() -> None:
    begins, ends = datetime(2024, 1, 1, tzinfo=UTC), datetime(2044, 1, 1, tzinfo=UTC)
    for now in (begins, ends):
        assert _verify(now=now)


def test_versions_above_127_are_read() -> None:
    leaf = _leaf(extensions={f"{made.AMD}.3.8": b"\x02\x02\x00\xff"})
    assert _verify((leaf, CHAIN.ask, CHAIN.ark)).tcb.microcode == 255


def test_pinned_roots_are_of_one_product_each() -> None:
    assert sorted(PINNED_ROOTS.values()) == ["genoa", "milan", "turin"]
    with _refuses("AMD root: got another certificate, expected an ARK that is pinned"):
        verify_chain(CHAIN.certificates, NOW)


# ------------------------------------------------------------------------- number and the root


@each_row("count", [0, 1, 2, 4])
def test_three_certificates_are_asked_for(count: int) -> None:
    certificates = (*CHAIN.certificates, CHAIN.ark)[:count]
    with _refuses(f"AMD certificates: got {count}, expected leaf, ASK or ASVK, and ARK"):
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
    with _refuses("AMD ARK: got other bytes, expected a certificate in DER"):
        _verify(chain.certificates, roots=chain.roots)


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
    elsewhere = body[:-1] + bytes((body[-1] ^ 1,))

    def verify(encoded: bytes) -> Leaf:
        leaf, ask = (
            encoded if where == one else kept
            for one, kept in zip(("leaf", "ASK"), CHAIN.certificates[:2], strict=True)
        )
        return _verify((leaf, ask, CHAIN.ark), crl=encoded if where == "CRL" else None)

    def parts(*found: bytes) -> bytes:
        return made.sequence(*found)

    bits = made.element(3, b"\0", signature)
    assert verify(good)
    rows = [
        (b"", "certificate: got no tag"),
        (good + b"\0", "certificate: got more bytes behind an element"),
        (b"\x31" + good[1:], "certificate: got tag 0x31, expected tag 0x30"),
        (good[:-1], "certificate: got "),
        (made.sequence(bytes(MAX_BYTES)), f"AMD {where}: got {MAX_BYTES + 4} bytes, expected 8192"),
        (parts(body, made.PSS_SHORT), f"AMD {where}: got other fields, expected a body, an alg"),
        (parts(body, made.PSS_SHORT, bits, bits), f"AMD {where}: got other fields"),
        *(
            (parts(body, algorithm, bits), f"AMD {where}: got another signature algorithm")
            for algorithm in (made.pss(salt=32), made.pss(b"\x05\0"), made.sequence(), bits)
        ),
        (parts(body, made.PSS_LONG, bits), f"AMD {where}: got two signature algorithms"),
        *(
            (
                parts(body, made.PSS_SHORT, made.element(3, b"\0", wrong)),
                f"AMD {where}: got a wrong",
            )
            for wrong in (b"", bytes(512), flipped, signature[1:], b"\0" + signature)
        ),
        (
            parts(elsewhere, made.PSS_SHORT, bits),
            f"AMD {where}: got a wrong signature, expected that",
        ),
        (parts(body, made.PSS_SHORT, made.element(3, b"\1", signature)), "certificate: got bits"),
        (
            parts(body, made.PSS_SHORT, made.element(4, b"\0", signature)),
            "certificate: got tag 0x4",
        ),
        (made.signed(body, other), f"AMD {where}: got a wrong signature"),
        (made.signed(b"\x31" + body[1:], key), "certificate: got tag 0x31, expected tag 0x30"),
        (made.signed(made.integer(1), key), "certificate: got tag 0x2, expected tag 0x30"),
        (made.signed(made.sequence(), key), f"AMD {where}: got two signature algorithms"),
    ]
    for encoded, text in rows:
        with _refuses(text):
            verify(encoded)


@each_row("which", [(0, 1), (1, 3)])
def test_issuers_have_keys_of_4096_bits(which: tuple[int, int]) -> None:
    """Neither fewer, 3072, nor more, 5120, even where they are pinned."""
    primes = made.primes()
    key = made.rsa_key(*(primes[one] for one in which))
    ark = replace(made.ark_body("milan"), key=made.public(key)).signed(ark_key())
    chain = replace(CHAIN, ark=ark, ask=made.ask_body("milan").signed(key))
    with _refuses("AMD ASK: got an issuer with another key, expected one of RSA with 4096 bits"):
        _verify(chain.certificates, roots=chain.roots)


def test_issuers_have_keys_of_rsa() -> None:
    body = replace(made.ask_body("milan"), key=made.public(made.LEAF_KEY))
    with _refuses("AMD leaf: got an issuer with another key, expected one of RSA with 4096 bits"):
        _verify((CHAIN.leaf, body.signed(ark_key()), CHAIN.ark))


# -------------------------------------------------------------------------------- intermediate


def test_another_thing_that_the_root_signed_is_no_intermediate() -> None:
    crl = made.signed(made.crl_body(), ark_key())
    with _refuses("AMD ASK: got other bytes, expected a certificate in DER"):
        _verify((CHAIN.leaf, crl, CHAIN.ark))
    with _refuses("AMD CRL: got other bytes, expected a list in DER"):
        _verify(crl=CHAIN.ask)
    with _refuses("AMD leaf: got a wrong signature"):
        _verify((CHAIN.leaf, CHAIN.ark, CHAIN.ark))


def test_intermediate_names_the_root() -> None:
    body = replace(made.ask_body("milan"), issuer=made.name("ARK-Genoa"))
    with _refuses("AMD ASK: got another issuer, expected the subject of the ARK"):
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
        assert _verify(chain.certificates, now, roots=chain.roots)
    second = timedelta(seconds=1)
    for now, said in (
        (begins - second, "2024-12-31T23:59:59"),
        (ends + second, "2026-06-30T00:00:01"),
    ):
        with _refuses(
            f"AMD {where}: got {said}+00:00, expected a time from 2025-01-01T00:00:00+00:00"
            " to 2026-06-30T00:00:00+00:00"
        ):
            _verify(chain.certificates, now, roots=chain.roots)


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
        (b"", "certificate: got no tag of one byte with a length"),
        (_crl(issuer=made.name("ARK-Genoa")), "AMD CRL: got another issuer, expected the subject"),
        (_crl(begins=b"260101000001Z"), "AMD CRL: got 2026-01-01T00:00:00+00:00, expected a time"),
        (_crl(ends=b"251231235959Z"), "AMD CRL: got 2026-01-01T00:00:00+00:00, expected a time"),
        (
            _crl(ends=None),
            "AMD CRL: got 2026-01-01T00:00:00+00:00, expected a time from 2024-01-01",
        ),
        (
            made.signed(made.sequence(made.integer(1), made.PSS_SHORT), ark_key()),
            "AMD CRL: got other bytes, expected a list in DER",
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
    with _refuses("AMD CRL: got other bytes, expected a list in DER"):
        _verify(crl=made.signed(body, ark_key()))


# ------------------------------------------------------------------------------------ the leaf

_FIELDS = "AMD leaf: got other fields, expected those of a certificate of AMD's"
_NAMES = "AMD leaf: got another name, expected SEV-VCEK by an ASK, or SEV-VLEK by an ASVK"
_TWICE = "AMD leaf: got one name or extension twice, expected each of them once"
_EXTENSION_SET = "AMD leaf: got another set of extensions, expected a chip id in a VCEK, none in"
_KEY = "AMD leaf: got another public key, expected one of P-384"
_COMMON_NAME = made.sequence(made.oid("2.5.4.3"), made.element(0x0C, b"SEV-VCEK"))


def _p(number: int, content: bytes) -> bytes:
    return _leaf(extensions={f"{made.AMD}.3.{number}": content})


@each_row(
    ("leaf", "text"),
    [
        (_leaf(version=b""), _FIELDS),
        (_leaf(version=made.element(0xA0, made.integer(1))), "AMD leaf: got another version"),
        (_leaf(version=made.element(0xA0, made.integer(3))), "AMD leaf: got another version"),
        (_leaf(version=made.integer(2)), "AMD leaf: got another version, expected version 3"),
        (_leaf(serial=made.integer(0) * 2), _FIELDS),
        (_leaf(algorithm=made.PSS_SHORT, extensions=b""), _FIELDS),
        (_leaf(issuer=made.name("SEV-Genoa")), "AMD leaf: got another issuer, expected the subje"),
        (_leaf(issuer=made.name("SEV-VLEK-Milan")), "AMD leaf: got another issuer"),
        (_leaf(issuer=made.name("ARK-Milan")), "AMD leaf: got another issuer"),
        (_leaf(validity=made.sequence(made.time(made.BEGINS))), _FIELDS),
        (_leaf(validity=made.sequence(*[made.time(made.BEGINS)] * 3)), _FIELDS),
        (_leaf(validity=made.element(0x31)), "certificate: got tag 0x31, expected tag 0x30"),
        (_leaf(validity=_validity(b"240101000000+", made.ENDS)), "certificate: got another eleme"),
        (_leaf(subject=made.name("SEV-VLEK")), _NAMES),
        (_leaf(subject=made.name("SEV-VCEK ")), _NAMES),
        (_leaf(subject=made.name("SEV-Milan")), _NAMES),
        (_leaf(subject=made.sequence()), _NAMES),
        (_leaf(subject=made.sequence(made.element(0x31, _COMMON_NAME) * 2)), _TWICE),
        (_leaf(subject=made.sequence(made.element(0x31, _COMMON_NAME * 2))), _TWICE),
        (_leaf(subject=made.sequence(_COMMON_NAME)), "certificate: got tag 0x6, expected tag 0x30"),
        (_leaf(subject=made.sequence(made.element(0x31, made.sequence()))), _FIELDS),
        (_leaf(extensions=made.element(0xA2, made.sequence())), "certificate: got tag 0xa2, expe"),
        (_leaf(extensions=made.element(0xA3)), _FIELDS),
        (_leaf(extensions=made.element(0xA3, made.sequence() * 2)), _FIELDS),
        (_leaf(extensions=made.element(0xA3, made.element(0x31))), "certificate: got tag 0x31"),
        (_leaf(extensions=made.extensions(b"\x05\0")), "certificate: got tag 0x5, expected tag"),
        (_leaf(extensions=made.extensions(made.sequence(made.oid("1.2")))), _FIELDS),
        (
            _leaf(extensions=made.extensions(made.sequence(made.integer(1), made.integer(1)))),
            "certificate: got tag 0x2, expected tag 0x6",
        ),
        (_leaf(extensions=made.extensions(extension("2.5.29.19", b"", critical=True))), _FIELDS),
        (_leaf(extensions=made.extensions(extension(f"{made.AMD}.3.1", b"\2\1\0") * 2)), _TWICE),
        *(
            (
                _leaf(extensions={f"{made.AMD}.3.{number}": None}),
                f"AMD leaf: got no extension 3.{number} of AMD's, expected a processor's versions",
            )
            for number in (1, 2, 3, 8)
        ),
        (_p(1, b""), "certificate: got no tag of one byte with a length"),
        (_p(2, b"\x02\x01"), "certificate: got 0 bytes, expected the 1 that its length says"),
        (_p(3, b"\x02\x01\x18\x00"), "certificate: got more bytes behind an element"),
        (_p(8, b"\x02\x01\xdb"), "certificate: got another encoding, expected a number"),
        (_p(8, b"\x04\x01\x18"), "certificate: got tag 0x4, expected tag 0x2"),
        (_p(8, b"\x02\x82\x10\x00" + b"\x7f" * 4096), "certificate: got another encoding, expecte"),
        (_leaf(extensions={f"{made.AMD}.4": None}), _EXTENSION_SET),
        (_leaf(key=made.public(ask_key())), _KEY),
        (_leaf(key=made.public(ec.derive_private_key(5, ec.SECP256R1()))), _KEY),
        (_leaf(key=made.sequence()), _KEY),
        (_leaf(key=made.public(made.LEAF_KEY)[:-1] + b"\0"), _KEY),
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
            _verify((body.signed(ask_key()), asvk, CHAIN.ark))

    by_asvk = made.name("SEV-VLEK-Milan")
    refuses("vcek", _NAMES, issuer=by_asvk)
    refuses("vlek", _EXTENSION_SET, more={f"{made.AMD}.4": made.chip_id_of("milan")})
    refuses("vlek", _NAMES, subject=made.name("SEV-VCEK"))


@each_row("common_names", [(), ("SEV-VLEK-Milan", "SEV-VLEK-Milan"), ("SEV-VLEK",)])
def test_intermediate_of_a_vlek_has_one_name_of_its_kind(common_names: tuple[str, ...]) -> None:
    parts = [
        made.element(0x31, made.sequence(made.oid("2.5.4.3"), made.element(0x0C, one.encode())))
        for one in common_names
    ]
    subject = made.sequence(*parts)
    ask = replace(made.ask_body("milan", "vlek"), subject=subject).signed(ark_key())
    leaf = replace(made.leaf_body("milan", "vlek"), issuer=subject).signed(ask_key())
    with _refuses(_NAMES):
        _verify((leaf, ask, CHAIN.ark))


def test_turin_has_a_fifth_version() -> None:
    chain = make_chain("turin")
    body = made.leaf_body("turin", changed={f"{made.AMD}.3.9": None})
    with _refuses("AMD leaf: got no extension 3.9 of AMD's, expected a processor's versions"):
        _verify((body.signed(ask_key()), chain.ask, chain.ark), roots=chain.roots)
    # Of others it is not read.
    assert _verify((_p(9, b"\x02\x01\x07"), CHAIN.ask, CHAIN.ark)).tcb.fmc == 0


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
