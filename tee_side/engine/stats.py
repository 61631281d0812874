"""Numbers of a run that go on while it lasts."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.prepared import Traffic
from tee_side.engine.generation import PadTotals


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How the engine stands, and what it has done since its start.

    `kv_usage`: 0 to 1. Prefix queries and hits, drafts, what was accepted of them, and pads: in
    tokens; but steps waited for pads, or were computed in the TEE. `pads_ready`: None where no
    operator is under pads.
    """

    running: int
    waiting: int
    kv_usage: float
    steps: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    draft_tokens: int
    accepted_tokens: int
    pads_ready: int | None
    pads_made: int
    pads_used: int
    pads_waited: int
    pads_in_tee: int
    round_trips: int
    bytes_sent: int
    bytes_received: int
    services: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What the rest of the run has done: see `EngineStats`."""

    traffic: Traffic = field(default_factory=Traffic)
    pads: PadTotals | None = None
    pads_made: int = 0
    pads_used: int = 0
    services: int = 0
