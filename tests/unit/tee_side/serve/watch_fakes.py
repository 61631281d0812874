"""What surrounds a request in these tests: an engine's stats, a clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    """As the engine's, each number another one."""

    running: int = 1
    waiting: int = 2
    kv_usage: float = 0.25
    prompt_tokens: int = 3
    generation_tokens: int = 4
    steps: int = 5
    prefix_queries: int = 6
    prefix_hits: int = 7
    draft_tokens: int = 8
    accepted_tokens: int = 9
    pads_ready: int | None = 10
    pads_made: int = 0
    pads_used: int = 11
    pads_waited: int = 12
    pads_in_tee: int = 13
    round_trips: int = 14
    bytes_sent: int = 15
    bytes_received: int = 16
    services: int = 17


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
