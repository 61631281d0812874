"""Seeds: the bytes that both sides make of one."""

from __future__ import annotations

import os

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from protocol.messages import SeededRingLinearRequest
from protocol.seed import SEED_SHAPE, expand
from protocol.tensors import from_torch, to_torch
from tee_side.protect.masks.mask import Seed

KNOWN = "cea7403d4d606b6e074ec5d3baf39d18726003ca37a62a74d1a2f58e7506358e"


def _counter_mode(seed: bytes, size: int) -> bytes:
    """Return what another implementation makes of a seed, with no more than AES in counter mode."""
    cipher = Cipher(algorithms.AES(seed), modes.CTR((2).to_bytes(16, "big")))
    return cipher.encryptor().update(bytes(size))


@pytest.mark.parametrize("count", [1, 3, 4, 8, 1000])
def test_the_keystream_is_that_of_aes_256_in_counter_mode(count: int) -> None:
    for seed in (bytes(32), os.urandom(32)):
        assert expand(seed, count) == _counter_mode(seed, 4 * count)
    # AES-256 of blocks 2 and 3 under the zero key.
    assert expand(bytes(32), 8).hex() == KNOWN


def test_both_sides_make_the_same_of_a_seed() -> None:
    seed = Seed(os.urandom(32), (5, 7))
    assert (seed.words().dtype, tuple(seed.words().shape)) == (torch.int32, SEED_SHAPE)
    request = SeededRingLinearRequest(
        layer_idx=1, module_names=("o_proj",), rows=5, columns=7, seed=from_torch(seed.words())
    )
    whole = request.expanded()
    assert (whole.layer_idx, whole.module_names) == (1, ("o_proj",))
    assert torch.equal(to_torch(whole.elements), seed.elements())
    assert seed.elements().shape == seed.shape


@pytest.mark.parametrize("byte", range(32))
def test_another_bit_of_the_seed_is_another_tensor(byte: int) -> None:
    other = bytearray(32)
    other[byte] = 0x10
    plain = Seed(bytes(32), (1, 64)).elements()
    assert int((Seed(other, (1, 64)).elements() == plain).sum()) <= 1


def test_a_seed_is_not_shown() -> None:
    assert repr(Seed(b"secret", (1, 2))) == "Seed(shape=(1, 2))"
