"""One request with its reply, and the totals of a channel's exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.messages import Response, Timing

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Exchange:
    """One request with its reply, and what it cost; not frozen, as that takes a microsecond more.

    Bytes count every frame, header included. `elapsed_ns` runs from handing the request to the
    transport to having received the reply; `timing` is the service's own claim. `sent_ns` is when
    the request was handed over, on the clock of `time.perf_counter_ns`, `encode_ns` after its
    encoding began. `endpoint`: of the service that answered. `output`: in place of `response`,
    where the reply to a prepared request is exactly the expected one: its tensor.
    """

    response: Response | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    encode_ns: int = 0
    elapsed_ns: int = 0
    decode_ns: int = 0
    timing: Timing | None = None
    sent_ns: int = 0
    endpoint: str = ""
    output: torch.Tensor | None = None


@dataclass(slots=True)
class Traffic:
    """Running totals of a channel: finished round trips, and bytes of all frames."""

    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
