"""What the orchestrator tells the process that measures, and what that answers, line by line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from protocol.messages import FloatDtype
from tsqp.bench.model import Case, Generation, Timeline


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Plan(_Line):
    """Which cases to measure, and how often.

    `prefill`: prompt lengths; `decode`: (context, sequences); `generation`: (prompt, new tokens).
    """

    prefill: tuple[int, ...] = (1, 128, 512)
    decode: tuple[tuple[int, int], ...] = ((128, 1), (128, 8), (512, 1))
    generation: tuple[int, int] | None = (128, 32)
    repeats: int = 5
    decode_steps: int = 24

    @property
    def longest(self) -> int:
        """Tokens that a sequence may become."""
        contexts = [*self.prefill, *(context for context, _ in self.decode)]
        contexts += [sum(self.generation)] if self.generation else []
        return max(contexts, default=1) + 3 * self.decode_steps + 8

    @property
    def sequences(self) -> int:
        """Sequences that run together at most."""
        return max((batch for _, batch in self.decode), default=1)


class Job(_Line):
    """One policy's measurements, by one process."""

    model: Path
    policy: str
    endpoints: tuple[str, ...]
    service_pids: tuple[int, ...]
    key: Path | None
    bank: Path | None
    threads: int
    step_tokens: int
    micro_batches: int
    spin_us: float
    link_gbps: float | None
    link_rtt_us: float
    dtype: FloatDtype | None
    plan: Plan


class Progress(_Line):
    """What is being measured now."""

    kind: Literal["progress"] = "progress"
    doing: str


class Measured(_Line):
    """A case that is done, with its timeline if one was kept."""

    kind: Literal["measured"] = "measured"
    case: Case | None = None
    timeline: Timeline | None = None
    generation: Generation | None = None


class Finished(_Line):
    """The last line: what is known once everything is measured."""

    kind: Literal["finished"] = "finished"
    peak_bytes: int
    kv_bytes: int
    vocabulary_bytes: int


class Failed(_Line):
    """What ended the process early."""

    kind: Literal["failed"] = "failed"
    error: str


Answer = Progress | Measured | Finished | Failed
