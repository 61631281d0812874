"""Elements of the ring drawn from AES-256 in counter mode: what pads and seeds stand for.

A *stream* is a key and a place in its keystream, and a row of elements the sum of one stream or of
several. Kernels draw them where they are used; until then no element is in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from protocol import native
from protocol.messages import Request, SeededRingLinearRequest
from protocol.native import STREAM, library
from protocol.tensors import Buffer, raw_bytes

# Of AES; a counter is one.
BLOCK_BYTES = 16
WORD_BYTES = 4
# The elements of a seed begin with this counter block, as what AES-GCM makes of zeros does.
FIRST_BLOCK = 2


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """Rows of elements int32, uniform over Z_2^32, as the streams that they are sums of.

    `of`: uint8 [T, parts * bytes of `STREAM`], contiguous; `parts`: how many streams a row is the
    sum of; `features`: its elements.
    """

    # Not in a traceback or a log.
    of: torch.Tensor = field(repr=False)
    parts: int
    features: int

    def elements(self) -> torch.Tensor:
        """Draw them: int32 [T, features]."""
        size = (len(self.of), self.parts, self.features)
        out_TN = torch.from_numpy(numpy.zeros((size[0], self.features), numpy.int32))
        address, own = out_TN.data_ptr(), native.own
        if native.choice().compiled and library.draw(self.of.data_ptr(), *size, address, own.pool):
            return out_TN
        for row, streams in enumerate(self.of.numpy().view(STREAM).tolist()):
            for key, high, low, element in streams:
                block, skipped = divmod(WORD_BYTES * element, BLOCK_BYTES)
                counter = ((high << 64) + low + block).to_bytes(BLOCK_BYTES, "big")
                cipher = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
                cipher.update(bytes(skipped))
                drawn = cipher.update(bytes(WORD_BYTES * self.features))
                out_TN[row].numpy()[:] += numpy.frombuffer(drawn, numpy.int32)
        return out_TN


def seeded(seeds: Sequence[Buffer], rows: int, features: int) -> Streams:
    """Return what seeds of 32 bytes stand for: the sum of one matrix [rows, features] for each.

    Its elements are those of AES-256-CTR under the seed as its key, row after row.
    """
    streams = numpy.zeros((rows, len(seeds)), STREAM)
    streams["key"] = numpy.frombuffer(b"".join(seeds), STREAM["key"])
    streams["low"] = FIRST_BLOCK
    streams["element"] = features * numpy.arange(rows, dtype=numpy.uint64)[:, None]
    return Streams(torch.from_numpy(streams.view(numpy.uint8)), len(seeds), features)


def expanded(request: Request) -> Request:
    """Return the request that one with a seed stands for, and any other as it is.

    Allocates, so `gpu_side.tasks` checks seed and sizes before.
    """
    if not isinstance(request, SeededRingLinearRequest):
        return request
    drawn = seeded([request.seed.data], request.rows, request.columns).elements()
    return request.standing_for(raw_bytes(drawn))
