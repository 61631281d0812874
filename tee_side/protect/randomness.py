"""Random numbers that hide something: one generator, AES-256 in counter mode.

Masks are only as good as what they are drawn from. torch's own generators are not cryptographic:
an observer of some of their output can compute the rest. Here the key comes from the operating
system unless a test gives one, and everything is a function of the key and of the order of calls.

How much may be drawn: blocks of AES never repeat under one key, true random ones do, so n blocks
can be told from random numbers with probability about n^2 / 2^129. A `Randomness` refuses nothing,
since 2^48 bytes from one key (years of drawing) still leave 2^-41.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import repeat
from typing import TypeAlias

import numpy
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.keystream import BLOCK_BYTES, WORD_BYTES, Streams
from protocol.native import STREAM

KEY_BYTES = 32
# The counter of one keystream has 32 bits; past them it would run into the next site's blocks.
MAX_KEYSTREAM_BYTES = 2**32 * BLOCK_BYTES

# The type: inside the classes below, `bytes` is a method.
Bytes: TypeAlias = bytes


class Randomness:
    """A cryptographic generator. `key`: 32 bytes, from the operating system if None.

    The counter begins at 0: the same key gives the same numbers on every machine. For others vary
    the key, by `derive`.

    Threads: a generator belongs to one thread; give others a generator that was derived from it.
    Processes: a copy in a forked child would repeat what its parent draws, and is refused with
    RuntimeError.

    Raises ValueError for a key of another length.
    """

    def __init__(self, key: Bytes | None = None) -> None:
        if key is None:
            key = os.urandom(KEY_BYTES)
        self._key = key
        self._context = counting(key)
        # Not os.register_at_fork: it would not hear of a fork made by a C library.
        self._process = os.getpid()

    def bytes(self, n: int) -> bytearray:
        """Return `n` uniform bytes."""
        if n < 0:
            raise ValueError(f"randomness: got {n} bytes, expected at least 0")
        self._check_process()
        drawn = bytearray(n)
        self._context.update_into(b"\0" * n, drawn)
        return drawn

    def ring(self, *shape: int) -> torch.Tensor:
        """Return int32 elements, uniform over Z_2^32."""
        return self.elements(shape, torch.int32)

    def derive(self, label: Bytes) -> Randomness:
        """Return an independent generator (HKDF-SHA256, RFC 5869) that depends on key and label.

        Not on what was drawn before: the same label gives the same generator again, so a label
        is used once.
        """
        self._check_process()
        return Randomness(derive_key(self._key, b"tsqp randomness " + label))

    def elements(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return elements of an integer dtype, uniform over all its values."""
        count = math.prod(shape)
        if count == 0:  # torch refuses an empty buffer
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.bytes(count * dtype.itemsize), dtype=dtype).view(shape)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "randomness: got a generator copied by fork, expected one made in this process"
            )


class Keystream:
    """Pads' random numbers: for a token index and a site, always the same ones under one key.

    AES-256-CTR whose initial counter block is index (8 bytes, big endian) | site (4) | 0 (4).
    Blocks of different pairs never meet as long as one draw stays within 2^32 blocks; longer
    ones are refused. A model of 112 sites with 8 KiB each takes 2^16 blocks a token: after
    2^26 tokens the advantage of telling them from random is below 2^-44 (see the module).

    Raises ValueError for a key of another length.
    """

    def __init__(self, key: Bytes) -> None:
        counting(key)  # refuses one of another length
        self._key = numpy.frombuffer(key, STREAM["key"])

    def rows(self, indices: range, sizes: Mapping[int, int]) -> dict[int, Streams]:
        """Return a row for each index, of several sites by their numbers.

        `sizes`: features of each. Raises ValueError if anything overflows.
        """
        if not 0 <= indices.start <= indices.stop <= 2**64:
            raise ValueError(f"keystream: got index {indices.start}, expected 64 bits, unsigned")
        for site, features in sizes.items():
            size = WORD_BYTES * features
            if not (0 <= site < 2**32 and 0 <= size <= MAX_KEYSTREAM_BYTES):
                expected = f"32 bits, and at most {MAX_KEYSTREAM_BYTES} bytes"
                raise ValueError(f"keystream: got site {site}, {size} bytes, expected {expected}")
        streams = self._streams(indices, sizes)
        of_sites = torch.from_numpy(streams.view(numpy.uint8)).unbind()
        made = map(Streams, of_sites, repeat(streams.shape[2]), sizes.values())
        return dict(zip(sizes, made, strict=True))

    def _streams(self, indices: range, sizes: Mapping[int, int]) -> numpy.ndarray:
        """Return `STREAM` [sites, T, parts]."""
        streams = numpy.zeros((len(sizes), len(indices), 1), STREAM)
        streams["key"] = self._key
        streams["high"] = numpy.arange(len(indices), dtype=numpy.uint64)[:, None]
        streams["high"] += numpy.uint64(indices.start % 2**64)
        streams["low"] = numpy.array([*sizes], numpy.uint64)[:, None, None] << 32
        return streams


def derive_key(key: bytes, info: bytes, salt: bytes | None = None) -> bytes:
    """Return 32 bytes by HKDF-SHA256; another `info` or `salt` gives an unrelated key."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(key)


def counting(key: bytes) -> CipherContext:
    """Return AES in counter mode, from 0 on. Raises ValueError for a key of another length."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"randomness: key: got {len(key)} bytes, expected {KEY_BYTES}")
    return Cipher(algorithms.AES(key), modes.CTR(bytes(BLOCK_BYTES))).encryptor()
