"""Seeds: the bytes that both sides make of one."""

from __future__ import annotations

import os

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from protocol.messages import SeededRingLinearRequest
from protocol.seed import SEED_SHAPE, expand
from protocol.tensors import from_torch, to_torch
from tee_side.protect.masks.mask import Seed

# AES-256 of blocks 2 and 3 under the zero key.
KNOWN = "cea7403d4d606b6e074ec5d3baf39d18726003ca37a62a74d1a2f58e7506358e"


def test_the_keystream_is_that_of_aes_256_in_counter_mode() -> None:
    assert expand(bytes(32), 8).hex() == KNOWN
    for count in (1, 3, 4, 8, 1000):
        for seed in (bytes(32), os.urandom(32)):
            cipher = Cipher(algorithms.AES(seed), modes.CTR((2).to_bytes(16, "big")))
            assert expand(seed, count) == cipher.encryptor().update(bytes(4 * count))
    plain = expand(bytes(32), 64)
    for place in range(32):
        other = bytearray(32)
        other[place] = 0x10
        same = sum(a == b for a, b in zip(expand(other, 64), plain, strict=True))
        assert same < 16, place


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
    assert repr(Seed(b"secret", (1, 2))) == "Seed(shape=(1, 2))"
