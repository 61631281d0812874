"""Costs of a section as they might be measured, in microseconds."""

from __future__ import annotations

from typing import Any

from gpu_side.tasks import LinearWork, Task
from tsqp.lab.link import Link
from tsqp.lab.plan.model import Asked, Rpc, Section, Segment

WORK = LinearWork(1, 2048, 2048, False)
PLAN = Task((1, 2048), "bfloat16", WORK, 4096)
NO_LINK = Link(None, 0.0)


def rpc(**numbers: Any) -> Rpc:
    given: dict[str, Any] = {
        "service": 0,
        "asked": Asked(shape=PLAN.shape, dtype=PLAN.dtype, work=WORK, input_bytes=4096),
        "bytes_sent": 4200,
        "bytes_received": 4300,
        "encode_us": 1.0,
        "send_us": 2.0,
        "wire_us": 40.0,
        "service_us": 10.0,
        "receive_us": 0.0,
        "decode_us": 3.0,
    }
    return Rpc(**{**given, **numbers})


def section(work_us: float, *rpcs: Rpc, after_us: float = 0.0, **shares: float) -> Section:
    segments = (Segment(work_us=work_us, rpcs=rpcs),) if rpcs else ()
    return Section(segments=segments, after_us=after_us if rpcs else work_us, **shares)
