"""What `tsqp bench` is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from protocol.messages import FloatDtype
from tee_side.engine.engine import DEFAULT_STEP_TOKENS
from tee_side.policy.placement import Policy
from tsqp.lab.bench.job import Plan

TRANSPORTS = ("tcp", "ipc", "unix", "shm")


@dataclass(frozen=True)
class BenchSettings:
    """One run of the benchmark.

    `model`: a directory, or `shape`: the name of one whose weights are made at random. `endpoints`:
    of services that run already, in place of those that are started with `device` over `transport`.
    `policies`: with the name or path that each was given by. `baselines`: whether to measure the
    others, too. `command`: as it was typed, for the report. `default_prefill`, `default_context`:
    whether the plan's lengths are defaults, so that they may give way to a short context.
    `shares_in_the_clear`: whether `endpoints` may get shares over links without keys.
    """

    command: str
    policies: tuple[tuple[str, Policy], ...]
    model: Path | None = None
    shape: str | None = None
    endpoints: tuple[str, ...] = ()
    device: str = "null"
    transport: str = "tcp"
    kernels: str = "auto"
    threads: int = 1
    gpu_threads: int = 1
    dtype: FloatDtype | None = None
    step_tokens: int = DEFAULT_STEP_TOKENS
    micro_batches: int = 1
    spin_us: float = 0.0
    link_gbps: float | None = None
    link_rtt_us: float = 0.0
    key: Path | None = None
    server_model: Path | None = None
    baselines: bool = True
    plan: Plan = field(default_factory=Plan)
    default_prefill: bool = False
    default_context: bool = False
    shares_in_the_clear: bool = False

    @property
    def computes(self) -> bool:
        """Whether the services really compute, so that what they answer is right."""
        # Services that run already are taken for real ones.
        return bool(self.endpoints) or not (
            self.device == "null" or self.device.startswith("model:")
        )

    @property
    def link(self) -> str | None:
        """The modelled link, for people."""
        if self.link_gbps is None and self.link_rtt_us == 0:
            return None
        rate = f"{self.link_gbps:g} Gbit/s" if self.link_gbps is not None else "unbounded rate"
        return f"{rate}, {self.link_rtt_us:g} us round trip"
