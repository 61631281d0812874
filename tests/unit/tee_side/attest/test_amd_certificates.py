"""AMD's chain: what is accepted, and a refusal for each thing that may be wrong."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from protocol.errors import EvidenceError
from tee_side.attest import guests
from tee_side.attest.guests import Product, SigningKey, SnpReport, verify_chain
from tests.kit import snp_chain as made
from tests.kit.rows import each_row
from tests.kit.snp_chain import ARK_KEY, ASK_KEY, NOW, Chain, extension, make_chain

CHAIN = make_chain()
LEAF, ASK, ARK = CHAIN.certificates


def _report(product: Product = "milan", kind: SigningKey = "vcek", **changed: Any) -> SnpReport:
    return SnpReport.parse(made.make_report(product, kind, **changed))


REPORT = _report()


def _verify(
    certificates: Sequence[bytes] = CHAIN.certificates,
    now: datetime = NOW,
    crl: bytes | None = None,
    chain: Chain = CHAIN,
    report: SnpReport = REPORT,
) -> None:
    with chain.pinned():
        product, key = verify_chain(report, certificates, now, crl)
    assert product == chain.product
    assert key.public_numbers() == made.LEAF_KEY.public_key().public_numbers()


def _refuses(text: str, *arguments: Any, **more: Any) -> None:
    with pytest.raises(EvidenceError) as refused:
        _verify(*arguments, **more)
    assert str(refused.value).startswith(text)


_BYTES = "AMD certificates: got other bytes, expected AMD's DER"


def _leaf(**changed: Any) -> bytes:
    """Return a leaf with other fields, signed; `extensions`: by identifier, None for none."""
    extensions = changed.pop("extensions", None)
    body = made.leaf_body(changed=extensions if isinstance(extensions, dict) else None)
    if isinstance(extensions, bytes):
        body = replace(body, extensions=extensions)
    return replace(body, **changed).signed(ASK_KEY)


def test_chains_of_every_product_and_kind_are_accepted() -> None:
    for product in made.CPUID:
        for kind in ("vcek", "vlek"):
            chain = make_chain(product, kind)
            _verify(chain.certificates, chain=chain, report=_report(product, kind))
    # A report of version 2 does not say its product.
    _verify(report=_report(version=2))
    # The algorithm's last field, which is at its default, may be written.
    long = replace(made.ask_body("milan"), algorithm=made.PSS_LONG).signed(ARK_KEY)
    _verify((_leaf(algorithm=made.PSS_LONG), long, ARK))
    # Versions above 127 take two bytes.
    tcb = made.TCB._replace(microcode=128)
    _verify((made.leaf_body(tcb=tcb).signed(ASK_KEY), ASK, ARK), report=_report(tcb=tcb))


def test_three_certificates_in_order_to_a_root_that_is_pinned_to_the_byte() -> None:
    for count in (0, 1, 2, 4):
        text = f"AMD certificates: got {count}, expected leaf, ASK and ARK"
        _refuses(text, (*CHAIN.certificates, ARK)[:count])
    for certificates in ((ARK, ASK, LEAF), (LEAF, ARK, ASK), (ASK, LEAF, ARK), (ARK, ARK, ARK)):
        _refuses("AMD ", certificates)
    # Another thing that the root signed is no intermediate.
    _refuses(_BYTES, (LEAF, made.signed(made.crl_body(), ARK_KEY), ARK))
    _refuses(_BYTES, crl=ASK)
    for other in (made.ark_body("milan").signed(ARK_KEY), ARK + b"\0"):
        _refuses("AMD root: got another certificate", (LEAF, ASK, other))
    with pytest.raises(EvidenceError, match="AMD root: got another certificate"):
        verify_chain(REPORT, CHAIN.certificates, NOW)
    _refuses("AMD root: got that of milan, expected genoa", report=_report("genoa"))


_BODY = made.leaf_body().encoded()


@each_row("where", ["leaf", "ASK", "CRL"])
def test_what_is_not_exactly_signed_by_its_issuer_is_refused(where: str) -> None:
    bodies = {"leaf": _BODY, "ASK": made.ask_body("milan").encoded(), "CRL": made.crl_body()}
    body = bodies[where]
    key, other = (ASK_KEY, ARK_KEY) if where == "leaf" else (ARK_KEY, ASK_KEY)
    good = made.signed(body, key)
    signature = good[-512:]
    flipped = bytes((signature[0] ^ 1,)) + signature[1:]
    even = signature[:-1] + bytes((signature[-1] & 0xFE,))
    elsewhere = body[:-1] + bytes((body[-1] ^ 1,))

    def given(encoded: bytes) -> dict[str, Any]:
        leaf = encoded if where == "leaf" else LEAF
        ask = encoded if where == "ASK" else ASK
        return {"certificates": (leaf, ask, ARK), "crl": encoded if where == "CRL" else None}

    def bits(content: bytes, unused: bytes = b"\0") -> bytes:
        return made.element(3, unused, content)

    _verify(**given(good))
    parts = made.sequence
    algorithm, of = made.PSS_SHORT, f"AMD {where}: got"
    two = f"{of} two signature algorithms" if where == "leaf" else _BYTES
    rows = [
        (good + b"\0", _BYTES),
        # A length that is not the shortest.
        (parts(b"\x30\x83\0" + body[2:], algorithm, bits(signature)), _BYTES),
        (parts(body, algorithm, bits(signature), bits(signature)), _BYTES),
        (made.sequence(bytes(8189)), f"{of} 8193 bytes, expected 8192 at most"),
        *(
            (parts(body, other_one, bits(signature)), f"{of} another signature algorithm")
            for other_one in (made.pss(salt=32), made.pss(b"\x05\0"), made.sequence())
        ),
        (parts(body, made.PSS_LONG, bits(signature)), two),
        (parts(body, algorithm, bits(flipped)), f"{of} a wrong signature"),
        # One that begins with a zero is right for OpenSSL without it as well.
        *(
            (parts(body, algorithm, bits(wrong)), _BYTES)
            for wrong in (b"", signature[1:], b"\0" + signature, signature + b"\0")
        ),
        (parts(elsewhere, algorithm, bits(signature)), f"{of} a wrong signature"),
        (parts(body, algorithm, bits(even, b"\1")), _BYTES),
        (made.signed(body, other), f"{of} a wrong signature"),
    ]
    for encoded, text in rows:
        _refuses(text, **given(encoded))
    # Its algorithm is no other of its fields.
    sha1 = made.sequence(made.oid("1.2.840.113549.1.1.5"), made.element(5))
    extra = made.leaf_body("milan", changed={f"{made.AMD}.77": made.PSS_SHORT})
    leaf = made.signed(replace(extra, algorithm=sha1).encoded(), ASK_KEY)
    _refuses("AMD leaf: got two signature algorithms", (leaf, ASK, ARK))


def test_issuers_have_rsa_keys_of_4096_bits_even_where_they_are_pinned() -> None:
    for bits in (3072, 5120):
        public = RSAPublicNumbers(65537, 2**bits - 1).public_key()
        key = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        chain = replace(CHAIN, ark=replace(made.ark_body("milan"), key=key).signed(ARK_KEY))
        _refuses("AMD ASK: got an issuer with another key", chain.certificates, chain=chain)
    body = replace(made.ask_body("milan"), key=made.public(made.LEAF_KEY))
    text = "AMD leaf: got an issuer with another key, expected RSA-4096"
    _refuses(text, (LEAF, body.signed(ARK_KEY), ARK))


def test_nothing_but_signed_bytes_reaches_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parsers of certificates are large: only what AMD signed is given to them."""
    seen = []
    load = guests.x509.load_der_x509_certificate
    monkeypatch.setattr(
        guests.x509,
        "load_der_x509_certificate",
        lambda encoded: seen.append(encoded) or load(encoded),  # type: ignore[func-returns-value]
    )
    forged = made.signed(made.ask_body("milan").encoded(), ASK_KEY)
    _refuses("AMD ASK: got a wrong signature", (LEAF, forged, ARK))
    assert seen == [ARK]
    _refuses("AMD leaf: got a wrong signature", (made.signed(_BODY, ARK_KEY), ASK, ARK))
    assert seen == [ARK, ARK, ASK]


def _validity(begins: bytes, ends: bytes) -> bytes:
    return made.sequence(made.time(begins), made.time(ends))


@each_row("where", ["ARK", "ASK", "leaf"])
def test_each_certificate_has_its_time(where: str) -> None:
    bodies = {
        "ARK": made.ark_body("milan"),
        "ASK": made.ask_body("milan"),
        "leaf": made.leaf_body(),
    }
    ends_as_general = _validity(b"250101000000Z", b"20260630000000Z")
    bodies[where] = replace(bodies[where], validity=ends_as_general)
    leaf, ask, ark = (
        bodies[one].signed(key)
        for one, key in (("leaf", ASK_KEY), ("ASK", ARK_KEY), ("ARK", ARK_KEY))
    )
    chain = Chain("milan", leaf, ask, ark)
    begins, ends = datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 6, 30, tzinfo=UTC)
    for now in (begins, ends):
        _verify(chain.certificates, now, chain=chain)
    for now in (begins - timedelta(seconds=1), ends + timedelta(seconds=1)):
        text = f"AMD {where}: got {now.isoformat()}, expected a time from {begins.isoformat()} to "
        _refuses(text, chain.certificates, now, chain=chain)


def _crl(*revoked: int, **changed: Any) -> bytes:
    return made.signed(made.crl_body("milan", revoked, **changed), ARK_KEY)


@each_row(
    ("crl", "text"),
    [
        (_crl(), ""),
        (_crl(1, 3, 0), ""),
        (_crl(1, 2), "AMD ASK: got a certificate that is revoked"),
        (_crl(issuer=made.name("ARK-Genoa")), "AMD CRL: got another issuer, expected the ARK"),
        (_crl(begins=b"260101000001Z"), "AMD CRL: got 2026-01-01T00:00:00+00:00, expected a time"),
        (_crl(ends=b"251231235959Z"), "AMD CRL: got 2026-01-01T00:00:00+00:00, expected a time"),
        # One that says of no end is not taken as one for ever.
        (_crl(ends=None), "AMD CRL: got 2026-01-01T00:00:00+00:00, expected a time from 2024-01"),
    ],
)
def test_a_list_of_revoked_certificates_is_heeded(crl: bytes, text: str) -> None:
    if text:
        _refuses(text, crl=crl)
    else:
        _verify(crl=crl)


_NAMES = "AMD leaf: got another name, expected SEV-VCEK by SEV-Milan"
_TWICE = "AMD leaf: got an extension twice, expected each once"
_CHIP_ID = "AMD leaf: got another chip id, expected the report's in a VCEK, none in a VLEK"
_KEY = "AMD leaf: got another public key, expected one of P-384"
_TCB = "AMD leaf: got Tcb("
_COMMON_NAME = made.sequence(made.oid("2.5.4.3"), made.element(0x0C, b"SEV-VCEK"))
_NAMED = made.name("SEV-VCEK")
_CRITICAL = extension("2.5.29.19", b"", critical=True)
_FIRST = extension(f"{made.AMD}.3.1", b"\2\1\0")
_ALL = [extension(*one) for one in made.leaf_extensions("milan", "vcek", made.TCB).items()]


@each_row(
    ("leaf", "text"),
    [
        (_leaf(version=made.element(0xA0, made.integer(1))), "AMD leaf: got another version"),
        (_leaf(serial=b"\x02\x02\0\0"), _BYTES),
        *((_leaf(issuer=made.name(one)), _NAMES) for one in ("SEV-Genoa", "SEV-VLEK-Milan", "ARK")),
        # The country as text of another type.
        (_leaf(subject=_NAMED.replace(b"\x13\x02", b"\x0c\x02")), _NAMES),
        (_leaf(validity=_validity(made.BEGINS, b"440230000000Z")), _BYTES),
        (_leaf(validity=_validity(made.BEGINS, b"20440101000000.5Z")), "AMD leaf: got a part of a"),
        *((_leaf(subject=made.name(one)), _NAMES) for one in ("SEV-VLEK", "SEV-VCEK ")),
        (_leaf(subject=made.sequence(_NAMED[2:], made.element(0x31, _COMMON_NAME))), _NAMES),
        (_leaf(extensions=made.element(0xA2, made.sequence())), _BYTES),
        (_leaf(extensions=made.extensions(*_ALL, _CRITICAL)), _BYTES),
        (_leaf(extensions=made.extensions(_FIRST, _FIRST)), _TWICE),
        *((_leaf(extensions={f"{made.AMD}.3.{number}": None}), _BYTES) for number in (1, 2, 3, 8)),
        (_leaf(extensions={f"{made.AMD}.3.3": b"\x02\x02\x00\x18"}), _BYTES),
        (_leaf(extensions={f"{made.AMD}.3.8": b"\x02\x01\xdb"}), _TCB),
        (_leaf(extensions={f"{made.AMD}.4": None}), _CHIP_ID),
        (_leaf(extensions={f"{made.AMD}.4": made.chip_id_of("milan") + b"\0"}), _CHIP_ID),
        (_leaf(key=made.public(ASK_KEY)), _KEY),
        (_leaf(key=made.public(ec.derive_private_key(5, ec.SECP256R1()))), _KEY),
    ],
)
def test_another_leaf_is_refused(leaf: bytes, text: str) -> None:
    _refuses(text, (leaf, ASK, ARK))


def test_a_leaf_and_its_intermediate_are_of_the_kind_and_product_of_the_report() -> None:
    vlek, asvk = made.leaf_body("milan", "vlek"), made.ask_body("milan", "vlek")
    names = "AMD leaf: got another name, expected SEV-VLEK by SEV-VLEK-Milan"

    def refuses(kind: SigningKey, text: str, leaf: made.Body, ask: made.Body) -> None:
        chain = (leaf.signed(ASK_KEY), ask.signed(ARK_KEY), ARK)
        _refuses(text, chain, report=_report(kind=kind))

    by_asvk = replace(made.leaf_body(), issuer=made.name("SEV-VLEK-Milan"))
    refuses("vcek", _NAMES, by_asvk, asvk)
    for chip_id in (made.chip_id_of("milan"), b"", bytes(64)):
        with_id = made.leaf_body("milan", "vlek", changed={f"{made.AMD}.4": chip_id})
        refuses("vlek", _CHIP_ID, with_id, asvk)
    refuses("vlek", names, replace(vlek, subject=made.name("SEV-VCEK")), asvk)
    by_ask = replace(vlek, issuer=made.name("SEV-Milan"))
    refuses("vlek", names, by_ask, made.ask_body("milan"))
    # An intermediate has one name, of its kind and product.
    genoa = made.name("SEV-Genoa")
    ask = replace(made.ask_body("milan"), subject=genoa)
    refuses("vcek", _NAMES, replace(made.leaf_body(), issuer=genoa), ask)
