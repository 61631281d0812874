"""What the process that measures is told; it answers with one `Measured`, or `Failed`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from protocol.errors import PolicyError
from protocol.messages import FloatDtype
from tee_side.policy.placement import Policy
from tsqp.lab.bench.model import PadMaking
from tsqp.lab.plan.model import Step


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Job(_Line):
    """Measure a policy as it is in one layer, on a model of which all layers are alike.

    `prompt_tokens`: of the prompt; `context`: behind each token that is decoded, of `batch`
    sequences together.
    """

    model: Path
    policy: str
    layer: int
    endpoints: tuple[str, ...]
    bank: Path | None
    threads: int
    step_tokens: int
    micro_batches: int
    spin_us: float
    dtype: FloatDtype | None
    prompt_tokens: int
    context: int
    batch: int


class Measured(_Line):
    """All steps of one prompt, a decode step, and the making of pads where they need any."""

    kind: Literal["measured"] = "measured"
    prefill: tuple[Step, ...]
    decode: Step
    pads: PadMaking | None = None


class Failed(_Line):
    """What ended the process early."""

    kind: Literal["failed"] = "failed"
    error: str


Answer = Measured | Failed


def as_in_layer(policy: Policy, layer: int) -> Policy:
    """Return a policy that does in every layer what `policy` does in one. Raises PolicyError."""
    operators = {
        operator: tuple(
            placement.model_copy(update={"layers": None})
            for placement in placements
            if placement.layers is None or layer in placement.layers
        )
        for operator, placements in policy.operators.items()
    }
    if not all(operators.values()):
        raise PolicyError(
            f"policy {policy.name}", got=f"nothing for layer {layer}", expected="placements"
        )
    return policy.model_copy(update={"operators": operators})
