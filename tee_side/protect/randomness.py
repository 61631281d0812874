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
from typing import TypeAlias

import numpy
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32
# Of AES; a counter is one.
BLOCK_BYTES = 16
# The counter of one keystream has 32 bits; past them it would run into the next site's blocks.
MAX_KEYSTREAM_BYTES = 2**32 * BLOCK_BYTES
# Of a keystream, encrypted in one call: it stays in a core's own cache, and the call is long enough
# for other threads to run meanwhile.
_CHUNK_BYTES = 256 * 1024

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

    An instance belongs to one thread at a time; it has no state but its cipher context. `fill` has
    a context of its own, and any number of threads may be in it.
    """

    def __init__(self, key: Bytes) -> None:
        self._key = key
        self._context = counting(key)

    def rows(self, indices: range, site: int, features: int) -> torch.Tensor:
        """Return int32 [len(indices), features], uniform over Z_2^32: bytes read little endian.

        Raises ValueError if anything overflows.
        """
        return self.sites(indices, {site: features})[site]

    def sites(self, indices: range, sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Return `rows` of several sites, by number. `sizes`: features of each."""
        counts = {site: 4 * features for site, features in sizes.items()}
        self._check(indices, counts)
        words = numpy.empty(len(indices) * sum(sizes.values()), numpy.int32)
        left, context = words.view(numpy.uint8).data, self._context
        zeros = memoryview(bytes(max(counts.values(), default=0)))
        for site, count in counts.items():
            for index in indices:
                context.reset_nonce((index << 64 | site << 32).to_bytes(BLOCK_BYTES, "big"))
                context.update_into(zeros[:count], left[:count])
                left = left[count:]
        rows = [len(indices) * features for features in sizes.values()]
        parts = zip(sizes.items(), torch.from_numpy(words).split(rows), strict=True)
        return {site: part.view(len(indices), features) for (site, features), part in parts}

    def fill(self, indices: range, site: int, words_TI: torch.Tensor) -> None:
        """Write `rows` into int32 [T, I], contiguous; for many rows, of which it makes few calls.

        Raises ValueError as `rows`.
        """
        rows, features = words_TI.shape
        self._check(indices, {site: 4 * features})
        blocks = math.ceil(4 * features / BLOCK_BYTES)
        step = max(1, min(rows, _CHUNK_BYTES // (BLOCK_BYTES * max(1, blocks))))
        # Counter mode, over the counters of many rows at once.
        context = Cipher(algorithms.AES(self._key), modes.ECB()).encryptor()  # noqa: S305
        counters = numpy.empty((step, blocks, 2), ">u8")
        counters[:, :, 1] = (site << 32) + numpy.arange(blocks, dtype=numpy.uint64)
        # `update_into` asks for room for a block that is not whole.
        drawn = numpy.empty(counters.nbytes + BLOCK_BYTES - 1, numpy.uint8)
        words = drawn[: counters.nbytes].view(numpy.int32).reshape(step, 4 * blocks)
        for start in range(0, rows, step):
            part = words_TI.numpy()[start : start + step]
            numbers = numpy.arange(len(part), dtype=numpy.uint64)[:, None]
            counters[: len(part), :, 0] = numbers + numpy.uint64(indices[start])
            context.update_into(counters[: len(part)].view(numpy.uint8).data.cast("B"), drawn.data)
            part[:] = words[: len(part), :features]

    def seed(self, dealer: int, first: int, site: int) -> Bytes:
        """Raise RuntimeError: no dealer multiplies these, but those of a `DealtKeystream`."""
        raise RuntimeError(f"keystream: got dealer {dealer}, expected none")

    def _check(self, indices: range, counts: Mapping[int, int]) -> None:
        if not 0 <= indices.start <= indices.stop <= 2**64:
            raise ValueError(f"keystream: got index {indices.start}, expected 64 bits, unsigned")
        for site, count in counts.items():
            if not (0 <= site < 2**32 and 0 <= count <= MAX_KEYSTREAM_BYTES):
                expected = f"32 bits, and at most {MAX_KEYSTREAM_BYTES} bytes"
                raise ValueError(f"keystream: got site {site}, {count} bytes, expected {expected}")


def derive_key(key: bytes, info: bytes, salt: bytes | None = None) -> bytes:
    """Return 32 bytes by HKDF-SHA256; another `info` or `salt` gives an unrelated key."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(key)


def counting(key: bytes) -> CipherContext:
    """Return AES in counter mode, from 0 on. Raises ValueError for a key of another length."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"randomness: key: got {len(key)} bytes, expected {KEY_BYTES}")
    return Cipher(algorithms.AES(key), modes.CTR(bytes(BLOCK_BYTES))).encryptor()
