"""A message of which all but a few numbers and a tensor is known before, as compiled code has it.

`protocol/native/message.h` says how it is laid out in memory.
"""

from __future__ import annotations

import struct

import numpy

from protocol import native
from protocol.header_numbers import HeaderLayout
from protocol.stream_wire import layout

_SHAPE = struct.Struct("5q")
# A head that is longer is not taken by compiled code (message.h).
_MAX_HEAD_BYTES = 1024


class MessageShape:
    """A header and one tensor. `address`: for compiled code, 0 where there is none for it.

    `total_bytes`: of the message, as it lies in a stream or a slot.
    """

    def __init__(self, numbers: HeaderLayout, template: bytes, payload_bytes: int) -> None:
        header = numbers.header(template, *(0 for _ in numbers.places))
        (first, _), gaps, self.total_bytes = layout((len(header), payload_bytes))
        head = gaps[0] + header + gaps[1]
        places = [first.start + place for place in numbers.places]
        content = _SHAPE.pack(len(head), payload_bytes, *places, *([0] * (3 - len(places)))) + head
        self._kept = numpy.frombuffer(content, numpy.uint8)
        fits = native.library is not None and len(head) <= _MAX_HEAD_BYTES
        self.address: int = self._kept.ctypes.data if fits else 0
