"""Bodies that are sealed open as they were, and no other way."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.errors import ProtocolError
from tee_side.serve.hpke_key import KEY_BYTES, HpkeKey
from tee_side.serve.sealed_bodies import CHUNK_BYTES, Direction, open_secret, seal_secret
from tests.kit.rows import each_row

TARGET = b"/v1/completions?a=b"
DOMAIN = b"TSQP sealed body 1\0"
SALT, SECRET = b"s" * 32, b"k" * 32
# A chunk has this much beside its content.
MORE = 5 + 16
PIECES = [b"head", b"", b"Once upon a time", b"x" * 40]


@cache
def key(hybrid: bool) -> HpkeKey:
    return HpkeKey(hybrid=hybrid)


def sealer(name: str = "request", salt: bytes = SALT, secret: bytes = SECRET) -> Direction:
    return Direction(name.encode(), salt, secret)  # type: ignore[arg-type]


def chunks_of(pieces: list[bytes]) -> list[bytes]:
    sealing = sealer()
    return [sealing.seal(piece, final=at + 1 == len(pieces)) for at, piece in enumerate(pieces)]


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def opening(data: bytes, by: Direction, step: int) -> Iterator[bytes]:
    """Open what comes in steps of so many bytes, to its end. Raises ProtocolError."""
    for at in range(0, len(data), step):
        yield from by.open(data[at : at + step])
    by.close()


def opened(data: bytes, by: Direction | None = None, step: int = 2**30) -> list[bytes]:
    return list(opening(data, by or sealer(), step))


def refused(data: bytes, step: int = 2**30) -> str:
    """Have data refused; what was opened before is the beginning of what was sealed."""
    found = list[bytes]()
    with pytest.raises(ProtocolError) as error:
        found.extend(opening(data, sealer(), step))
    assert found == PIECES[: len(found)] != PIECES
    return str(error.value)


@each_row(
    "hybrid, suite, public, sealed",
    [(True, "mlkem768-x25519", 1216, 1168), (False, "x25519", 32, 80)],
)
def test_a_secret_opens_as_it_is_by_its_key_and_at_its_target_alone(
    hybrid: bool, suite: str, public: int, sealed: int
) -> None:
    mine = key(hybrid)
    assert (mine.suite, len(mine.public), mine.sealed_bytes) == (suite, public, sealed)
    secret, front = seal_secret(mine.suite, mine.public, TARGET)
    assert (len(secret), len(front)) == (KEY_BYTES, sealed)
    assert open_secret(mine, front, TARGET) == secret
    again, another = seal_secret(mine.suite, mine.public, TARGET)
    assert again != secret
    assert another[:32] != front[:32]
    others = [(HpkeKey(hybrid=hybrid), front, TARGET)]
    others += [(mine, front, target) for target in (b"", b"/v1/chat/completions")]
    fronts = [front[:-1], front + b"\0", bytes(len(front))]
    fronts += [flipped(front, at, at % 8) for at in range(0, len(front), 7)]
    for by, data, target in [*others, *((mine, one, TARGET) for one in fronts)]:
        with pytest.raises(ProtocolError, match="another key, purpose or content"):
            open_secret(by, data, target)


@each_row(
    "suite, public",
    [
        ("x25519", bytes(32)),  # of small order: no secret comes of it
        ("x25519", key(True).public),
        ("mlkem768-x25519", key(True).public + b"x"),
        ("mlkem768-x25519", b"\xff" * 1216),
        ("mlkem768-x25519", key(True).public[:-32] + bytes(32)),
    ],
    ids=str,
)
def test_nothing_is_sealed_to_what_is_no_key_of_the_suite(suite: str, public: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"another public key, expected one of {suite}"):
        seal_secret(suite, public, TARGET)  # type: ignore[arg-type]


@each_row("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5])
def test_a_piece_of_any_size_opens_as_it_was(size: int) -> None:
    piece = bytes(at % 251 for at in range(size))
    for final in (True, False):
        sealing = sealer()
        sealed = sealing.seal(piece, final=final)
        count = max(1, -(-size // CHUNK_BYTES))
        assert len(sealed) == size + count * MORE
        if not final:
            sealed += sealing.seal(b"", final=True)
        found = opened(sealed)
        assert b"".join(found) == piece
        assert max(map(len, found)) <= CHUNK_BYTES
        assert opened(sealed, step=1000) == found


def test_a_body_that_was_changed_cut_or_put_in_another_order_is_refused() -> None:
    one, two, three, last = parts = chunks_of(PIECES)
    sealed = b"".join(parts)
    for at in range(len(sealed)):
        refused(flipped(sealed, at, at % 8))
        for step in (2**30, 7):
            assert "an early end" in refused(sealed[:at], step)
    other = sealer(secret=b"o" * 32).seal(b"head")
    for order in (
        [two, one, three, last],
        [one, three, last],
        [one, one, two, three, last],
        [other, two, three, last],
    ):
        for step in (2**30, 1):
            refused(b"".join(order), step)
    # Its last chunk is the end, at the place of another as well.
    early = chunks_of(PIECES[:2])[-1]
    assert opened(one + early) == PIECES[:2]
    for more in (b"\0", two, early):
        for step in (1, 2**30):
            with pytest.raises(ProtocolError, match="more bytes"):
                opened(one + early + more, step=step)


def test_a_chunk_says_a_length_that_one_can_have() -> None:
    for length in (CHUNK_BYTES + 17, 2**31, 2**32 - 1):
        with pytest.raises(ProtocolError, match="a longer chunk, expected 65536 bytes at most"):
            sealer().open(b"\0" + length.to_bytes(4))
    assert sealer().open(b"\0" + (CHUNK_BYTES + 16).to_bytes(4)) == []
    for length in range(16):  # short of a tag
        with pytest.raises(ProtocolError, match="other bytes"):
            sealer().open(b"\1" + length.to_bytes(4) + bytes(length))


@each_row("change", [{"name": "response"}, {"salt": b"S" * 32}, {"secret": b"K" * 32}], ids=str)
def test_another_direction_salt_or_secret_has_another_key(change: dict[str, bytes]) -> None:
    sealed = sealer().seal(b"one", final=True)
    assert opened(sealed) == [b"one"]
    assert opened(sealer(**change).seal(b"one", final=True), sealer(**change)) == [b"one"]  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="other bytes"):
        opened(sealed, sealer(**change))  # type: ignore[arg-type]


@each_row("hybrid", [True, False])
def test_the_format_is_the_one_that_is_written_down(hybrid: bool) -> None:
    """Read by what the module's first lines say, and no code of it."""
    x25519, mlkem = X25519PrivateKey.generate(), MLKEM768PrivateKey.generate()
    public = x25519.public_key().public_bytes_raw()
    private: X25519PrivateKey | hpke.MLKEM768X25519PrivateKey = x25519
    kem, size = hpke.KEM.X25519, 32
    if hybrid:
        public = mlkem.public_key().public_bytes_raw() + public
        private = hpke.MLKEM768X25519PrivateKey(mlkem, x25519)
        kem, size = hpke.KEM.MLKEM768_X25519, 1120
    secret, front = seal_secret("mlkem768-x25519" if hybrid else "x25519", public, TARGET)
    suite = hpke.Suite(kem, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
    assert len(front) == size + 32 + 16
    assert suite.decrypt(front, private, DOMAIN + TARGET) == secret
    for name in ("request", "response"):
        sealing = sealer(name, front, secret)
        data = sealing.seal(b"head") + sealing.seal(b"body", final=True)
        by = AESGCM(HKDF(SHA256(), 32, front, DOMAIN + name.encode()).derive(secret))
        expected = b""
        for at, piece in enumerate((b"head", b"body")):
            before = bytes([at]) + (4 + 16).to_bytes(4, "big")
            expected += before + by.encrypt(at.to_bytes(12, "big"), piece, before)
        assert data == expected
