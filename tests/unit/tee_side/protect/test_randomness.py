"""Generators have their distributions, no copy repeats them; what masks send is checked."""

import math
import os
from collections.abc import Callable
from itertools import combinations
from typing import Any, cast
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given

from protocol import native
from protocol.errors import MaskError, PolicyError
from tee_side.protect.masking import MaskRules
from tee_side.protect.masks.mask import (
    Factors,
    Given,
    Mask,
    Masked,
    MaskKey,
    Pad,
    Seed,
    in_the_clear,
)
from tee_side.protect.randomness import MAX_KEYSTREAM_BYTES, Keystream, Randomness, derive_key
from tee_side.protect.sites import site_number
from tests.kit.rows import each_row
from tsqp.lab.research.draws import normal
from tsqp.lab.research.feature_masks import FeaturePermutation, SegmentPermutation
from tsqp.lab.research.row_masks import RowPermutation
from tsqp.mask_kinds import FeatureSite

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


def test_bytes_are_counter_mode_and_elements_are_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Randomness(KEY)
    assert generator.bytes(5) + generator.bytes(0) + generator.bytes(59) == _blocks(KEY, 0, 4)
    drawn = Randomness(KEY).ring(4, 2)
    assert (drawn.dtype, drawn.numpy().tobytes()) == (torch.int32, _blocks(KEY, 0, 2))
    nothing = Keystream(KEY).rows(range(3), {0: 0})[0].elements()
    assert generator.ring(3, 0).shape == nothing.shape == (3, 0)
    for wrong in (lambda: generator.bytes(-1), lambda: generator.ring(-1), lambda: Keystream(b"")):
        with pytest.raises(ValueError, match="randomness: "):
            wrong()
    # Keys come from the operating system.
    assert Randomness().bytes(32) != Randomness().bytes(32)
    monkeypatch.setattr(os, "urandom", lambda count: KEY[:count])
    assert Randomness().bytes(32) == Randomness(KEY).bytes(32)


def test_derived_generators_are_unrelated_repeatable_and_leave_the_parent_alone() -> None:
    parent = Randomness(KEY)
    made = (
        parent.derive(b"a"),
        parent.derive(b"b"),
        parent.derive(b"a").derive(b"a"),
        Randomness(bytes(32)).derive(b"a"),
        parent,
    )
    streams = [bytes(generator.bytes(64)) for generator in made]
    for one, other in combinations(streams, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 8
    assert Randomness(KEY).derive(b"a").bytes(64) == parent.derive(b"a").bytes(64) == streams[0]
    assert streams[-1] == _blocks(KEY, 0, 4)
    # RFC 5869, test case 1.
    salt, info = bytes(range(13)), bytes(range(0xF0, 0xFA))
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert derive_key(b"\x0b" * 22, info, salt).hex() == expected


def test_a_forked_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, parent = Randomness(KEY), os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: parent + 1)
        for call in (lambda: generator.bytes(16), lambda: generator.derive(b"x")):
            with pytest.raises(RuntimeError):
                call()
    assert generator.bytes(16) == _blocks(KEY, 0, 1)


def test_normal_has_its_distribution_and_is_finite_at_both_ends() -> None:
    """All bits 0 is the smallest uniform, which must not be 0; all bits 1 the largest, 1."""
    drawn = normal(Randomness(KEY), 1_000_001)  # odd: one half of a pair is left out
    assert _is_even((torch.special.ndtr(drawn) * 256).clamp(max=255), 256)
    # Both halves of a pair are independent.
    first, second = normal(Randomness(KEY), 2, 500_000)
    assert abs(float((first * second).mean())) < 5 / math.sqrt(500_000)
    for byte, limit in ((0, 8.6), (255, 1e-7)):
        generator = Randomness(KEY)
        generator.bytes = lambda n, byte=byte: bytearray([byte]) * n  # type: ignore[misc]
        drawn = normal(generator, 6)
        assert drawn.isfinite().all()
        assert float(drawn.abs().max()) < limit


@given(index=st.integers(0, 2**64 - 1), site=st.integers(0, 2**32 - 1), size=st.integers(0, 600))
def test_keystream_is_counter_mode_from_index_and_site(index: int, site: int, size: int) -> None:
    indices = range(index, min(index + 2, 2**64))
    rows = Keystream(KEY).rows(indices, {7: 3, site: size})[site]
    blocks = -(-size // 4)
    expected = [_blocks(KEY, n << 64 | site << 32, blocks)[: 4 * size] for n in indices]
    with pytest.MonkeyPatch.context() as patch:
        assert [row.numpy().tobytes() for row in rows.elements()] == expected
        # Without compiled kernels.
        patch.setattr("protocol.native._chosen", native.Choice("torch", ()))
        assert [row.numpy().tobytes() for row in rows.elements()] == expected


@each_row(
    ("index", "site", "size"),
    [(2**64, 0, 1), (-1, 0, 1), (0, 2**32, 1), (0, -1, 1), (0, 0, MAX_KEYSTREAM_BYTES // 4 + 1)],
)
def test_keystream_refuses_counters_that_would_meet(index: int, site: int, size: int) -> None:
    with pytest.raises(ValueError, match="keystream: got"):
        Keystream(KEY).rows(range(index, index + 1), {site: size})


Tensor = torch.Tensor
X = torch.arange(12.0).reshape(3, 4)


def test_pads_and_keyed_maps_are_those_of_the_site() -> None:
    masked = in_the_clear(X)
    assert masked.sent[0] is masked.unmask(X) is X
    pads = Mock()
    pads.draw.return_value = Factors(torch.full((3, 4), 7).int(), torch.ones(3, 2).int())
    masked = Pad().hiding(Given((5, "down_proj"), Randomness(), pads.draw))(X.int())
    assert torch.equal(cast("Tensor", masked.sent[0]), X.int() + 7)
    assert masked.unmask(torch.ones(3, 2).int() * 3).tolist() == [[2, 2]] * 3
    pads.draw.assert_called_once_with(site_number(5, "down_proj"), 3)
    mask = FeaturePermutation()
    transforms: Any = {
        (layer, "o_proj"): mask.transform(
            FeatureSite(4, (4,), None, Randomness(bytes([layer]) * 32))
        ).mask
        for layer in range(2)
    }
    given = [Given((n, "o_proj"), Randomness(), key=MaskKey("", "", transforms)) for n in range(3)]
    hides = [mask.hiding(one) for one in given[:2]]
    first, second = (cast("Tensor", hide(X).sent[0]) for hide in hides)
    assert not torch.equal(first, second)
    with pytest.raises(KeyError):
        mask.hiding(given[2])


def test_a_mask_that_lacks_what_it_needs_is_refused() -> None:
    lacking: Any = {
        "no key": FeaturePermutation(),
        "no factors": Pad(),
        "a linear operator": SegmentPermutation(),
    }
    for got, one in lacking.items():
        with pytest.raises(PolicyError, match=f"got {got}"):
            one.hiding(Given((0, "o_proj"), Randomness()))


def _same(y: Tensor) -> Tensor:
    return y


def _seed(x: Tensor, size: int = 32, rows: int = 3, features: int = 4) -> Masked:
    return Masked((x, Seed(bytes(size), (rows, features))), torch.add)


INTEGERS = "int32 .{}. to send, expected int32 .rows, 4., at most 3 rows"


@each_row(
    ("mask", "masked", "said"),
    [
        *(
            (mask, masked, said)
            for mask in (RowPermutation(), None)
            for masked, said in (
                (_same, "got Tensor, expected Masked"),
                (lambda x: Masked(x, _same), "got Masked, expected Masked"),
                (lambda x: Masked((x, x), _same), "got 2 tensors to send, expected 1 tensors"),
                (lambda x: Masked((x.double(),), _same), "got float64 .3, 4. to send"),
                (lambda x: Masked((x[:, :3],), _same), "got float32 .3, 3. to send, expected flo"),
                (lambda x: Masked((x[0],), _same), "got float32 .4. to send, expected float32 .ro"),
                (lambda x: Masked((Seed(bytes(32), (3, 4)),), _same), "got int32 .3, 4. to send"),
            )
        ),
        (Pad(), lambda x: _seed(x, 31), "a seed of 31 bytes, expected 32"),
        (Pad(), lambda x: _seed(x, 33), "a seed of 33 bytes, expected 32"),
        (Pad(), lambda x: _seed(x, rows=2), INTEGERS.format("2, 4")),
        (Pad(), lambda x: _seed(x, features=3), INTEGERS.format("3, 3")),
        (Pad(), lambda x: Masked((x,), _same), "got 1 tensors to send, expected 2"),
    ],
)
def test_what_must_not_cross_is_refused_before_it_is_sent(
    mask: Mask | None, masked: Callable[[Tensor], Any], said: str
) -> None:
    x, name = X.int() if isinstance(mask, Pad) else X, mask.name if mask else "no mask"
    rules = MaskRules(mask, dealers=int(isinstance(mask, Pad)))
    with pytest.raises(MaskError, match=f"{name}: o_proj: (got )?{said}"):
        rules.check_sent("o_proj", x, masked(x))


def test_tensors_or_seeds_may_be_sent_and_seeds_of_rows_of_what_has_weights_alone() -> None:
    x, rules = X.int(), MaskRules(Pad(), dealers=1)
    for sent in ((x, x), (x, Seed(bytes(32), (3, 4))), (Seed(bytes(32), (3, 4)), x)):
        rules.check_sent("o_proj", x, Masked(sent, torch.add))
    rules.check_sent("lm_head", x, _seed(x))
    with pytest.raises(MaskError, match="embedding: got a seed, expected one of rows of a linear"):
        rules.check_sent("embedding", x, _seed(x))
    # No more rows than the reply has room for: an honest service would be barred for it.
    for mask, most in ((RowPermutation(), 2 * 3 + 4096), (Pad(), 3), (None, 3)):
        rules = MaskRules(mask)
        rules.check_sent("o_proj", X, Masked((torch.ones(most, 4),), _same))
        many = Masked((torch.ones(most + 1, 4),), _same)
        with pytest.raises(MaskError, match=f"at most {most} rows"):
            rules.check_sent("o_proj", X, many)


@each_row(
    ("unmasked", "said"),
    [
        (None, "nothing from unmask, expected float32"),
        (X.double(), "float64 .3, 4. from unmask"),
        (X[:2], "float32 .2, 4. from unmask, expected float32 .3, 4."),
    ],
)
def test_what_unmask_returns_is_checked(unmasked: Tensor | None, said: str) -> None:
    rules = MaskRules(RowPermutation())
    rules.check_unmasked("o_proj", X, (3, 4), torch.float32)
    with pytest.raises(MaskError, match=f"o_proj: got {said}"):
        rules.check_unmasked("o_proj", unmasked, (3, 4), torch.float32)
