"""Whose rows a Segment has: the numbers in its tensors, read and checked each time.

They are copied first: a client may change memory that it shares with us.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import SegmentRequest

NO_SESSION = bytes(16)
PART_NUMBERS = 7
_PART = struct.Struct("<16s3q16s")


class Part(NamedTuple):
    """`rows` of one session, the first of which has the position `start`.

    `session`, `parent`: 128 bits. `length`: of the sequence once all that is pending has run.
    `rows` 0: the session is to be forgotten.
    """

    session: bytes
    start: int
    rows: int
    length: int
    parent: bytes = NO_SESSION


def read_parts(request: SegmentRequest, context_length: int) -> list[Part]:
    """Read and check `parts`, whose shape has been checked. Raises ProtocolError."""
    parts = [Part(*numbers) for numbers in _PART.iter_unpack(bytes(request.parts.data))]
    ends: dict[bytes, int] = {}
    for part in parts:
        session, start, rows, length, _ = part
        if session == NO_SESSION:
            raise _refuse("parts", "the session 0", "another one, which the client has drawn")
        if rows == 0:
            if session in ends:
                raise _refuse("parts", "rows of a session to forget", "one or the other")
            ends[session] = -1
            continue
        if min(start, rows) < 0 or not start + rows <= length <= context_length:
            raise _refuse(
                "parts",
                f"a part of rows {start} + {rows} of {length}",
                f"numbers that add up, within {context_length} tokens",
            )
        if ends.setdefault(session, start) != start:
            raise _refuse("parts", f"a part from {start}", "one that follows its session's last")
        ends[session] = start + rows
    rows, total = request.hidden_states.shape[0], sum(part.rows for part in parts)
    if total != rows:
        raise _refuse("parts", f"{total} rows", f"{rows}, as hidden_states has")
    return parts


def read_outputs(request: SegmentRequest) -> Sequence[int] | None:
    """Read and check `outputs`; None where all rows are wanted. Raises ProtocolError."""
    rows = request.hidden_states.shape[0]
    wanted = memoryview(bytes(request.outputs.data)).cast("q").tolist()
    rising = all(first < second for first, second in pairwise(wanted))
    if not rising or wanted[0] < 0 or wanted[-1] >= rows:
        raise _refuse("outputs", "other numbers", f"rising ones, from 0 to {rows - 1}")
    return None if len(wanted) == rows else wanted


def _refuse(field: str, got: str, expected: str) -> ProtocolError:
    return ProtocolError(
        f"Segment.{field}", got=got, expected=expected, code=ErrorCode.INVALID_FIELD
    )
