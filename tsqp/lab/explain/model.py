"""What `tsqp explain` says: the document that it prints, with `--json` as it is."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from protocol.messages import Arithmetic
from tee_side.policy.placement import AttentionWindow
from tee_side.protect.masks.mask import Kind
from tee_side.words import Attested, Operator, Phase, Place, Verify


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cost(_Model):
    """RPCs, and bytes of all their frames, header included."""

    rpcs: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            rpcs=self.rpcs + other.rpcs,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_received=self.bytes_received + other.bytes_received,
        )


class Message(_Model):
    """One RPC. `service`: 1, or 2 for the second one; `modules`: of a linear operator.

    `sent`, `received`: dtype and shape of each tensor as it crosses, dummy rows included.
    """

    service: int
    method: str
    modules: tuple[str, ...]
    sent: tuple[str, ...]
    received: str


class PhaseCost(_Model):
    """What an operator costs in a phase: in all its layers together.

    `messages`: of one layer; of the first step, where a prompt takes several.
    """

    messages: tuple[Message, ...]
    cost: Cost


class OperatorRow(_Model):
    """One operator in some layers (None: it belongs to none) and one phase, or both (None).

    `sees`: None where nothing leaves the TEE; `verify`: how results are checked; `window`: of a
    segment's attention, None: all tokens; `decode`, `prefill`: None where the row is not about that
    phase, or nothing leaves.
    """

    operator: Operator
    layers: str | None
    phase: Phase | None
    place: Place
    sees: str | None
    mask: str | None
    verify: Verify
    window: AttentionWindow | None
    decode: PhaseCost | None
    prefill: PhaseCost | None


class MaskUse(_Model):
    """A mask with the options that the policy gives it, and what its class says of it."""

    name: str
    kind: Kind
    options: dict[str, Any]
    hides: str
    known_break: str
    broken: bool
    # What its noise guarantees, where it has any.
    noise: str | None


class PadsNeeded(_Model):
    """Pads that an additive mask uses up: one for each token of these phases.

    `memory_bytes`, `bank_bytes`: of one, in memory and in a bank on disk (None: no bank can hold
    it). `left_to_decode`: see `Policy.left_to_decode`.
    """

    mask: str
    phases: tuple[Phase, ...]
    sites: int
    memory_bytes: int
    bank_bytes: int | None
    left_to_decode: float | None = None


class Needs(_Model):
    """What a policy needs beside the model: `key`: the feature mask that wants one."""

    services: int
    attested: Attested
    arithmetic: Arithmetic
    calibration: bool
    key: str | None
    pads: tuple[PadsNeeded, ...]


class Explanation(_Model):
    """All that `tsqp explain` says. `decode`: of one token, the last of `context` tokens."""

    model: str
    architecture: str
    num_hidden_layers: int
    dtype: str
    policy: str
    summary: str
    leakage_summary: str | None
    context: int
    prompt_tokens: int
    step_tokens: int
    operators: tuple[OperatorRow, ...]
    masks: tuple[MaskUse, ...]
    decode: Cost
    prefill: Cost
    needs: Needs
