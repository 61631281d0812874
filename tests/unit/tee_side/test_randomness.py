"""The generator is AES-256-CTR, its numbers have their distributions, and no copy repeats it."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given

from tee_side.protect import randomness
from tee_side.protect.randomness import (
    MAX_KEYSTREAM_BYTES,
    Keystream,
    Randomness,
    derive_key,
)
from tsqp.lab.research.draws import integers, orthogonal, permutation, signs, uniform

KEY = bytes(range(32))


def _blocks(key: bytes, first: int, count: int) -> bytes:
    """AES of consecutive counters, one by one: what counter mode is defined as."""
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return b"".join(
        encryptor.update(((first + i) % 2**128).to_bytes(16, "big")) for i in range(count)
    )


def _chi_square(values: torch.Tensor, cells: int) -> float:
    counts = torch.bincount(values.flatten().to(torch.int64), minlength=cells).to(torch.float64)
    expected = counts.sum() / cells
    return float(((counts - expected) ** 2 / expected).sum())


def _plausible(chi_square: float, cells: int) -> bool:
    """Within 5 sigma of its mean; a fixed key decides once and for all."""
    freedom = cells - 1
    return abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


# ------------------------------------------------------------------------------- the generator


def test_bytes_are_counter_mode() -> None:
    generator = Randomness(KEY)
    drawn = generator.bytes(5) + generator.bytes(0) + generator.bytes(59)
    assert drawn == _blocks(KEY, 0, 4)
    assert isinstance(drawn, bytearray)


def test_nonce_is_the_first_counter_block_and_wraps() -> None:
    nonce = bytes([255]) * 15 + bytes([254])
    assert Randomness(KEY, nonce).bytes(64) == _blocks(KEY, 2**128 - 2, 4)


def test_keys_come_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Randomness().bytes(32) != Randomness().bytes(32)
    monkeypatch.setattr(os, "urandom", lambda count: KEY[:count])
    assert Randomness().bytes(32) == Randomness(KEY).bytes(32)


@pytest.mark.parametrize(("key", "nonce"), [(KEY[:16], bytes(16)), (KEY, bytes(12)), (b"", b"")])
def test_other_lengths_are_refused(key: bytes, nonce: bytes) -> None:
    with pytest.raises(ValueError, match="bytes, expected"):
        Randomness(key, nonce)


def test_negative_sizes_are_refused() -> None:
    for call in (
        lambda: Randomness(KEY).bytes(-1),
        lambda: Randomness(KEY).ring(-1, -2),
        lambda: Randomness(KEY).normal(2, -1),
    ):
        with pytest.raises(ValueError, match="at least 0"):
            call()


def test_same_key_same_numbers_in_the_same_order() -> None:
    def draw(generator: Randomness) -> list[torch.Tensor]:
        return [
            generator.ring(3, 2),
            generator.elements((5,), torch.int8),
            signs(generator, 4),
            uniform(generator, 2, low=-1.0, high=3.0),
            generator.normal(3),
            permutation(generator, 6),
            orthogonal(generator, 3),
        ]

    first, second = draw(Randomness(KEY)), draw(Randomness(KEY))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    generator = Randomness(KEY)
    again = [draw(generator), draw(generator)]
    assert not any(torch.equal(a, b) for a, b in zip(*again, strict=True))


def test_shapes_and_dtypes() -> None:
    generator = Randomness(KEY)
    assert generator.ring(2, 3).shape == (2, 3)
    assert generator.ring().shape == ()
    assert generator.ring(0, 3).shape == (0, 3)
    assert generator.normal(3, 5).shape == (3, 5)
    assert generator.normal(0).shape == (0,)
    assert permutation(generator, 0).shape == (0,)
    assert orthogonal(generator, 1).abs().tolist() == [[1.0]]
    assert generator.ring(1).dtype == torch.int32
    assert generator.elements((1,), torch.int8).dtype == signs(generator, 1).dtype == torch.int8
    assert generator.normal(1).dtype == orthogonal(generator, 1).dtype == torch.float64
    assert permutation(generator, 1).dtype == torch.int64
    assert uniform(generator, 1, dtype=torch.float32).dtype == torch.float32


def test_results_can_be_written_to() -> None:
    drawn = Randomness(KEY).ring(4)
    drawn += 1
    assert not torch.equal(drawn, Randomness(KEY).ring(4))


# ---------------------------------------------------------------------------- distributions


def test_ring_elements_and_digits_are_uniform_bytes() -> None:
    generator = Randomness(KEY)
    for drawn in (
        generator.ring(200_000).view(torch.uint8),
        generator.elements((800_000,), torch.int8) & 0xFF,
    ):
        assert _plausible(_chi_square(drawn.to(torch.int64) & 0xFF, 256), 256)


def test_ring_uses_all_32_bits() -> None:
    top = Randomness(KEY).ring(100_000) >> 24  # arithmetic shift: -128 .. 127
    assert _plausible(_chi_square(top + 128, 256), 256)


def test_signs_are_balanced() -> None:
    drawn = signs(Randomness(KEY), 1_000_000).to(torch.float64)
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(drawn.mean())) < 5 / 1000


@pytest.mark.parametrize("high", [1, 2, 7, 256])
def test_integers_are_equally_likely_up_to_the_last(high: int) -> None:
    drawn = integers(Randomness(KEY), high, 20_000)
    assert (int(drawn.min()), int(drawn.max())) == (0, high - 1)
    assert high == 1 or _plausible(_chi_square(drawn, high), high)


@pytest.mark.parametrize("high", [0, -1, 2**32])
def test_integers_of_an_impossible_range_are_refused(high: int) -> None:
    with pytest.raises(ValueError, match="expected 1"):
        integers(Randomness(KEY), high, 1)


def test_uniform_fills_its_range_evenly() -> None:
    drawn = uniform(Randomness(KEY), 500_000, low=-2.0, high=6.0)
    assert float(drawn.min()) >= -2
    assert float(drawn.max()) < 6
    assert _plausible(_chi_square(((drawn + 2) * 32).to(torch.int64), 256), 256)


def test_uniform_reaches_every_bit() -> None:
    bits = (uniform(Randomness(KEY), 4096) * 2.0**53).to(torch.int64)
    assert all(0.4 < float((bits >> k & 1).to(torch.float64).mean()) < 0.6 for k in range(53))


@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf), (math.nan, 1.0), (0.0, math.nan)]
)
def test_impossible_ranges_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low < high"):
        uniform(Randomness(KEY), 1, low=low, high=high)


def test_normal_has_its_moments_and_its_distribution() -> None:
    count = 1_000_001  # odd: one half of a pair is left out
    drawn = Randomness(KEY).normal(count)
    assert abs(float(drawn.mean())) < 5 / math.sqrt(count)
    assert abs(float(drawn.square().mean()) - 1) < 5 * math.sqrt(2 / count)
    assert abs(float(drawn.pow(3).mean())) < 5 * math.sqrt(15 / count)
    assert abs(float(drawn.pow(4).mean()) - 3) < 5 * math.sqrt(96 / count)
    below = torch.special.ndtr(drawn)
    assert _plausible(_chi_square((below * 256).clamp(max=255), 256), 256)


def test_both_halves_of_a_pair_are_independent() -> None:
    first, second = Randomness(KEY).normal(2, 500_000)
    bound = 5 / math.sqrt(500_000)
    assert abs(float((first * second).mean())) < bound
    assert abs(float(((first**2 - 1) * (second**2 - 1)).mean() / 2)) < bound


@pytest.mark.parametrize(("byte", "limit"), [(0, 8.6), (255, 1e-7)])
def test_normal_is_finite_at_both_ends(
    byte: int, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bits 0 is the smallest uniform, which must not be 0; all bits 1 the largest, 1."""
    generator = Randomness(KEY)
    monkeypatch.setattr(generator, "bytes", lambda n: bytearray([byte]) * n)
    drawn = generator.normal(6)
    assert drawn.isfinite().all()
    assert float(drawn.abs().max()) < limit


def test_permutations_are_equally_likely() -> None:
    generator = Randomness(KEY)
    ranks = []
    for _ in range(24_000):
        order = permutation(generator, 4).tolist()
        assert sorted(order) == [0, 1, 2, 3]
        ranks.append(order[0] * 64 + order[1] * 16 + order[2] * 4 + order[3])
    counts = torch.tensor(ranks).unique(return_counts=True)[1]
    assert len(counts) == 24
    chi_square = float(((counts - 1000.0) ** 2 / 1000).sum())
    assert _plausible(chi_square, 24)


def test_permutation_draws_again_on_a_collision(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Randomness(KEY)
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
    determinants = torch.linalg.det(corners)
    assert abs(float(determinants.mean())) < 5 / math.sqrt(2000)
    assert torch.allclose(corners.square().mean(0), torch.tensor(1 / 3).double(), atol=0.04)


# ------------------------------------------------------------------- derivation and copies


def test_derived_generators_are_unrelated_and_repeatable() -> None:
    parent = Randomness(KEY)
    streams = [
        bytes(generator.bytes(64))
        for generator in (
            parent,
            parent.derive(b"a"),
            parent.derive(b"b"),
            parent.derive(b""),
            parent.derive(b"a").derive(b"a"),
            Randomness(KEY, bytes(15) + b"\1").derive(b"a"),
            Randomness(bytes(32)).derive(b"a"),
        )
    ]
    for position, stream in enumerate(streams):
        for other in streams[position + 1 :]:
            equal = sum(a == b for a, b in zip(stream, other, strict=True))
            assert equal < 8
    assert Randomness(KEY).derive(b"a").bytes(64) == streams[1]


def test_deriving_does_not_disturb_the_parent() -> None:
    parent = Randomness(KEY)
    parent.bytes(3)
    child = parent.derive(b"label").bytes(16)
    assert parent.bytes(13) == _blocks(KEY, 0, 1)[3:]
    assert child == Randomness(KEY).derive(b"label").bytes(16)


def test_derived_keys_are_hkdf() -> None:
    """RFC 5869, test case 1, first 32 of its 42 bytes."""
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
        outcome = b"drew"
        try:
            generator.bytes(16)
        except RuntimeError:
            outcome = b"refused"
        try:
            generator.derive(b"x")
            outcome += b" derived"
        except RuntimeError:
            outcome += b" refused"
        os.write(writer, outcome)
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 100) == b"refused refused"
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0
    assert generator.bytes(15) == _blocks(KEY, 0, 1)[1:]


# ------------------------------------------------------------------------------ keystreams


@given(index=st.integers(0, 2**64 - 1), site=st.integers(0, 2**32 - 1), count=st.integers(0, 100))
def test_keystream_is_counter_mode_from_index_and_site(index: int, site: int, count: int) -> None:
    expected = _blocks(KEY, index << 64 | site << 32, 7)[:count]
    assert Keystream(KEY).bytes(index, site, count) == expected


def test_keystream_depends_on_nothing_before() -> None:
    stream = Keystream(KEY)
    first = stream.bytes(7, 3, 50)
    stream.bytes(8, 3, 999)
    assert stream.bytes(7, 3, 50) == first
    assert stream.bytes(7, 4, 50) != first != stream.bytes(8, 3, 50)
    assert Keystream(bytes(32)).bytes(7, 3, 50) != first


@pytest.mark.parametrize(
    ("index", "site", "count"),
    [
        (2**64, 0, 1),
        (-1, 0, 1),
        (0, 2**32, 1),
        (0, -1, 1),
        (0, 0, -1),
        (0, 0, MAX_KEYSTREAM_BYTES + 1),
    ],
)
def test_keystream_refuses_counters_that_would_meet(index: int, site: int, count: int) -> None:
    with pytest.raises(ValueError, match="keystream: got"):
        Keystream(KEY).bytes(index, site, count)


def test_rows_are_the_keystreams_of_the_indices() -> None:
    stream = Keystream(KEY)
    rows = stream.rows(range(5, 8), 2, 6)
    for row, index in zip(rows, range(5, 8), strict=True):
        assert row.numpy().tobytes() == bytes(Keystream(KEY).bytes(index, 2, 24))
    assert torch.equal(stream.rows(range(6, 7), 2, 6), rows[1:2])
    assert stream.rows(range(0), 2, 6).shape == (0, 6)


@pytest.mark.parametrize("features", [1, 4, 6, 33])
@pytest.mark.parametrize("first", [0, 2**64 - 21])
def test_many_rows_are_the_same_numbers_in_fewer_calls(
    monkeypatch: pytest.MonkeyPatch, first: int, features: int
) -> None:
    """Over several chunks, the last one shorter, and by threads that share a keystream."""
    monkeypatch.setattr(randomness, "_CHUNK_BYTES", 8 * 16 * -(-features // 4))
    stream, indices = Keystream(KEY), range(first, first + 21)
    expected = Keystream(KEY).rows(indices, 2**32 - 1, features)
    filled = [torch.zeros(21, features, dtype=torch.int32) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda words: stream.fill(indices, 2**32 - 1, words), filled))
    for words in filled:
        assert torch.equal(words, expected)


@pytest.mark.parametrize(
    ("indices", "site"),
    [(range(2**64, 2**64 + 1), 0), (range(-1, 0), 0), (range(1), 2**32), (range(1), -1)],
)
def test_many_rows_refuse_counters_that_would_meet(indices: range, site: int) -> None:
    with pytest.raises(ValueError, match="keystream: got"):
        Keystream(KEY).fill(indices, site, torch.zeros(1, 4, dtype=torch.int32))


def test_pads_look_uniform_across_indices_and_sites() -> None:
    """Chi-square over the bytes of 4 MB, and no word more often equal to its neighbour's."""
    stream = Keystream(KEY)
    rows = torch.cat([stream.rows(range(256), site, 1024) for site in range(4)])
    assert _plausible(_chi_square(rows.view(torch.uint8), 256), 256)
    pairs = rows.numpy().tobytes()
    both = torch.frombuffer(bytearray(pairs), dtype=torch.int16).to(torch.int64) + 2**15
    assert _plausible(_chi_square(both, 2**16), 2**16)
    assert int((rows[1:] == rows[:-1]).sum()) < 5
