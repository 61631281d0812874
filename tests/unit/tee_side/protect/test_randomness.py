"""The generator is AES-256-CTR, its numbers have their distributions, and no copy repeats it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import hypothesis.strategies as st
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given

from tee_side.protect import randomness
from tee_side.protect.randomness import MAX_KEYSTREAM_BYTES, Keystream, Randomness, derive_key
from tests.kit.rows import each_row
from tsqp.lab.research.draws import integers, orthogonal, permutation, signs, uniform

KEY = bytes(range(32))


def _blocks(key: bytes, first: int, count: int) -> bytes:
    """AES of consecutive counters, one by one: what counter mode is defined as."""
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return b"".join(
        encryptor.update(((first + i) % 2**128).to_bytes(16, "big")) for i in range(count)
    )


def _is_even(values: torch.Tensor, cells: int) -> bool:
    """Chi-square within 5 sigma of its mean; a fixed key decides once and for all."""
    counts = torch.bincount(values.flatten().to(torch.int64), minlength=cells).to(torch.float64)
    expected, freedom = counts.sum() / cells, cells - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return len(counts) == cells and abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


# -------------------------------------------------------------------------------- the generator


def test_bytes_are_counter_mode_and_elements_are_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Randomness(KEY)
    assert generator.bytes(5) + generator.bytes(0) + generator.bytes(59) == _blocks(KEY, 0, 4)
    # The nonce is the first counter block, and wraps.
    nonce = bytes([255]) * 15 + bytes([254])
    assert Randomness(KEY, nonce).bytes(64) == _blocks(KEY, 2**128 - 2, 4)
    drawn = Randomness(KEY).ring(4, 2)
    assert (drawn.dtype, drawn.numpy().tobytes()) == (torch.int32, _blocks(KEY, 0, 2))
    drawn += 1  # may be written to
    assert Randomness(KEY).elements((16,), torch.int8).numpy().tobytes() == _blocks(KEY, 0, 1)
    assert Randomness(KEY).ring().shape == ()
    assert Randomness(KEY).ring(0, 3).shape == (0, 3)
    # Keys come from the operating system.
    assert Randomness().bytes(32) != Randomness().bytes(32)
    monkeypatch.setattr(os, "urandom", lambda count: KEY[:count])
    assert Randomness().bytes(32) == Randomness(KEY).bytes(32)


@each_row(
    "call",
    [
        lambda: Randomness(KEY[:16], bytes(16)),
        lambda: Randomness(KEY, bytes(12)),
        lambda: Randomness(b"", b""),
        lambda: Keystream(KEY[:16]),
        lambda: Randomness(KEY).bytes(-1),
        lambda: Randomness(KEY).ring(-1, -2),
        lambda: Randomness(KEY).normal(2, -1),
    ],
)
def test_other_lengths_and_negative_sizes_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"randomness: .*, expected"):
        call()


def test_derived_generators_are_unrelated_repeatable_and_leave_the_parent_alone() -> None:
    parent = Randomness(KEY)
    made = (
        parent.derive(b"a"),
        parent.derive(b"b"),
        parent.derive(b""),
        parent.derive(b"a").derive(b"a"),
        Randomness(KEY, bytes(15) + b"\1").derive(b"a"),
        Randomness(bytes(32)).derive(b"a"),
        parent,
    )
    streams = [bytes(generator.bytes(64)) for generator in made]
    for one, other in combinations(streams, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 8
    assert Randomness(KEY).derive(b"a").bytes(64) == parent.derive(b"a").bytes(64) == streams[0]
    assert streams[-1] == _blocks(KEY, 0, 4)
    # RFC 5869, test case 1, first 32 of its 42 bytes.
    salt, info = bytes(range(13)), bytes(range(0xF0, 0xFA))
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert derive_key(b"\x0b" * 22, info, salt).hex() == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only draws
def test_a_forked_copy_is_refused() -> None:
    generator = Randomness(KEY)
    generator.bytes(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = b""
        for call in (lambda: generator.bytes(16), lambda: generator.derive(b"x")):
            try:
                call()
                outcome += b"drew "
            except RuntimeError:
                outcome += b"refused "
        os.write(writer, outcome)
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 100) == b"refused refused "
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0
    assert generator.bytes(15) == _blocks(KEY, 0, 1)[1:]


# -------------------------------------------------------------------------------- distributions


def test_normal_has_its_moments_and_its_distribution() -> None:
    count = 1_000_001  # odd: one half of a pair is left out
    drawn = Randomness(KEY).normal(count)
    assert abs(float(drawn.mean())) < 5 / math.sqrt(count)
    assert abs(float(drawn.square().mean()) - 1) < 5 * math.sqrt(2 / count)
    assert abs(float(drawn.pow(3).mean())) < 5 * math.sqrt(15 / count)
    assert abs(float(drawn.pow(4).mean()) - 3) < 5 * math.sqrt(96 / count)
    assert _is_even((torch.special.ndtr(drawn) * 256).clamp(max=255), 256)
    # Both halves of a pair are independent.
    first, second = Randomness(KEY).normal(2, 500_000)
    bound = 5 / math.sqrt(500_000)
    assert abs(float((first * second).mean())) < bound
    assert abs(float(((first**2 - 1) * (second**2 - 1)).mean() / 2)) < bound
    assert Randomness(KEY).normal(0).shape == (0,)


@each_row(("byte", "limit"), [(0, 8.6), (255, 1e-7)])
def test_normal_is_finite_at_both_ends(byte: int, limit: float) -> None:
    """All bits 0 is the smallest uniform, which must not be 0; all bits 1 the largest, 1."""
    generator = Randomness(KEY)
    generator.bytes = lambda n: bytearray([byte]) * n  # type: ignore[method-assign]
    drawn = generator.normal(6)
    assert drawn.isfinite().all()
    assert float(drawn.abs().max()) < limit


def test_signs_integers_and_floats_are_equally_likely() -> None:
    drawn = signs(Randomness(KEY), 1_000_000)
    assert (drawn.dtype, drawn.unique().tolist()) == (torch.int8, [-1, 1])
    assert abs(float(drawn.double().mean())) < 5 / 1000
    for high in (1, 2, 7, 256):
        whole = integers(Randomness(KEY), high, 20_000)
        assert (int(whole.min()), int(whole.max())) == (0, high - 1)
        assert high == 1 or _is_even(whole, high)
    floats = uniform(Randomness(KEY), 500_000, low=-2.0, high=6.0)
    assert -2 <= float(floats.min()) < float(floats.max()) < 6
    assert _is_even((floats + 2) * 32, 256)
    bits = (uniform(Randomness(KEY), 4096) * 2.0**53).to(torch.int64)
    assert all(0.4 < float((bits >> k & 1).double().mean()) < 0.6 for k in range(53))


def test_permutations_are_equally_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, ranks = Randomness(KEY), []
    for _ in range(24_000):
        order = permutation(generator, 4).tolist()
        assert sorted(order) == [0, 1, 2, 3]
        ranks.append(order[0] * 64 + order[1] * 16 + order[2] * 4 + order[3])
    assert _is_even(torch.tensor(ranks).unique(return_inverse=True)[1], 24)
    assert permutation(generator, 0).shape == (0,)
    # It draws again on a collision.
    draws = [torch.tensor([5, 3, 5]), torch.tensor([7, 7, 7]), torch.tensor([2, -9, 1])]
    monkeypatch.setattr(generator, "elements", lambda shape, dtype: draws.pop(0))
    assert permutation(generator, 3).tolist() == [1, 2, 0]
    assert not draws


def test_orthogonal_is_orthogonal_and_has_no_preferred_sign() -> None:
    generator = Randomness(KEY)
    q = orthogonal(generator, 40)
    assert torch.allclose(q @ q.T, torch.eye(40, dtype=torch.float64), atol=1e-13)
    corners = torch.stack([orthogonal(generator, 3) for _ in range(2000)])
    # Without the sign fix the diagonal of LAPACK's Q leans to one side, and det is constant.
    assert float(corners.mean(0).abs().max()) < 5 / math.sqrt(3 * 2000)
    assert abs(float(torch.linalg.det(corners).mean())) < 5 / math.sqrt(2000)
    assert torch.allclose(corners.square().mean(0), torch.tensor(1 / 3).double(), atol=0.04)


# ----------------------------------------------------------------------------------- keystreams


@given(index=st.integers(0, 2**64 - 1), site=st.integers(0, 2**32 - 1), count=st.integers(0, 100))
def test_keystream_is_counter_mode_from_index_and_site(index: int, site: int, count: int) -> None:
    stream, expected = Keystream(KEY), _blocks(KEY, index << 64 | site << 32, 7)
    assert stream.bytes(index, site, count) == expected[:count]
    # It depends on nothing before.
    assert stream.bytes(index, site, count) == expected[:count]
    if index < 2**64 - 2:
        rows = stream.rows(range(index, index + 2), site, 6)
        following = _blocks(KEY, (index + 1) << 64 | site << 32, 2)
        assert rows.numpy().tobytes() == expected[:24] + following[:24]
    assert stream.rows(range(0), site, 6).shape == (0, 6)


@each_row(
    ("index", "site", "count"),
    [
        (2**64, 0, 4),
        (-1, 0, 4),
        (0, 2**32, 4),
        (0, -1, 4),
        (0, 0, -1),
        (0, 0, MAX_KEYSTREAM_BYTES + 1),
    ],
)
def test_keystream_refuses_counters_that_would_meet(index: int, site: int, count: int) -> None:
    with pytest.raises(ValueError, match="keystream: got"):
        Keystream(KEY).bytes(index, site, count)
    if count == 4:
        words = torch.zeros(1, 1, dtype=torch.int32)
        with pytest.raises(ValueError, match="keystream: got"):
            Keystream(KEY).fill(range(index, index + 1), site, words)


@each_row(("first", "features"), [(n, size) for n in (0, 2**64 - 21) for size in (1, 4, 6, 33)])
def test_many_rows_are_the_same_numbers_in_fewer_calls(first: int, features: int) -> None:
    """Over several chunks, the last one shorter, and by threads that share a keystream."""
    stream, indices = Keystream(KEY), range(first, first + 21)
    expected = Keystream(KEY).rows(indices, 2**32 - 1, features)
    filled = [torch.zeros(21, features, dtype=torch.int32) for _ in range(4)]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as threads:
        patch.setattr(randomness, "_CHUNK_BYTES", 8 * 16 * -(-features // 4))
        list(threads.map(lambda words: stream.fill(indices, 2**32 - 1, words), filled))
    for words in filled:
        assert torch.equal(words, expected)
