"""Seeds: 32 bytes that cross in place of uniform numbers, and what both sides expand them to."""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.tensors import Buffer

# The key of AES-256.
SEED_BYTES = 32
SEED_SHAPE = (SEED_BYTES // 4,)  # as a tensor int32
# Made beside the elements, and dropped.
TAG_BYTES = 16
_NONCE = bytes(12)


def expand(seed: Buffer, count: int) -> bytearray:
    """Return what a seed of 32 bytes stands for: `count` elements int32, uniform over Z_2^32.

    The keystream of AES-256-CTR under the seed as its key, from counter block 2, little endian: it
    is what AES-GCM makes of zeros, and OpenSSL is ready for that in a third of the time.
    """
    size = 4 * count
    drawn = bytearray(size + TAG_BYTES)
    AESGCM(bytes(seed)).encrypt_into(_NONCE, bytes(size), None, drawn)
    del drawn[size:]
    return drawn
