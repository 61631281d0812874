"""An observer is told what each operator costs, stage by stage, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise, product, repeat
from typing import Any, cast

import torch

from protocol.native import AUTO, choice
from protocol.prepared import Exchange
from tee_side.observer import AnyOperator, Observer, StageClock, timed
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.masks.mask import Pad
from tee_side.protect.randomness import Randomness
from tee_side.words import PRODUCTS, Operator, PadsFrom, Place, TeeStage
from tests.kit.kernels import using_kernels
from tests.kit.model import Models, token_ids
from tests.kit.rows import each_row

# In the clear, by module, under a row mask, under a feature mask, with pads, with dealt pads.
NAMES = (
    "tee-only",
    "published",
    "attention-in-tee",
    "cloak",
    "quantized-clear",
    "shielded-prefill",
    "dealt",
)
LAYERS = 3


@dataclass
class Notes:
    """What one micro-batch told, in order; `lanes` are those of all, `parts` those that ran."""

    lanes: list[Notes] = field(default_factory=list)
    calls: list[tuple[AnyOperator, int | None, Place]] = field(default_factory=list)
    spans: list[tuple[AnyOperator, int | None, TeeStage]] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)
    trips: list[tuple[Operator, int | None, int]] = field(default_factory=list)

    def __call__(self, index: int) -> Notes:
        assert index == len(self.lanes)
        self.lanes.append(Notes())
        return self.lanes[-1]

    @property
    def parts(self) -> list[Notes]:
        return [lane for lane in self.lanes if lane.calls]

    def called(self, operator: AnyOperator, layer: int | None, place: Place) -> None:
        self.calls.append((operator, layer, place))

    def spent(
        self,
        operator: AnyOperator,
        layer: int | None,
        stage: TeeStage,
        started_ns: int,
        ended_ns: int,
    ) -> None:
        self.spans.append((operator, layer, stage))
        self.times.append((started_ns, ended_ns))

    def exchanged(
        self, operator: Operator, layer: int | None, exchanges: Sequence[Exchange]
    ) -> None:
        self.trips.append((operator, layer, len(exchanges)))


LAYER: tuple[Any, ...] = (
    *("rms_norm", "qkv_proj", "rope", "kv_cache", "attention", "o_proj", "residual"),
    *("rms_norm", "gate_up_proj", "silu_mul", "down_proj", "residual"),
)


def _expected(policy: Policy, *, logits: bool = True) -> Notes:
    notes, leaving = Notes(), {operator for operator, _ in policy.leaving()}
    layer = list(LAYER)
    if leaving.intersection(PRODUCTS):
        layer[4:5] = ["attn_scores", "softmax", "attn_values"]
    said: list[Any] = [("embedding", None), *product(layer, range(LAYERS))]
    said[1:] = sorted(said[1:], key=lambda one: one[1])  # a stable sort
    modules = {"qkv_proj": 3, "gate_up_proj": 2} if policy.one_rpc_per_module else {}
    for operator, number in said + [("rms_norm", None), ("lm_head", None)] * logits:
        stages = ["tee"]
        if operator in leaving:
            asked = modules.get(operator, 1)
            # The form of each reply before, the numbers of the result after it was unmasked.
            stages += ["mask", *["verify"] * asked, "unmask", *["verify"] * policy.verified, "tee"]
            if choice().compiled and any(type(p.mask) is Pad for p in policy.operators[operator]):
                stages = ["mask", "verify", "unmask"]  # compiled: one pass before, one after
            notes.trips += [(operator, number, policy.services)] * asked
        notes.called(operator, number, "gpu" if operator in leaving else "tee")
        notes.spans += [(operator, number, cast("TeeStage", stage)) for stage in stages]
    return notes


@each_row(
    ("name", "micro_batches", "kernels"),
    # Without compiled kernels, masking and checks are stages of their own.
    [*zip(NAMES, cycle((1, 2)), repeat(AUTO)), ("shielded-prefill", 1, "torch")],
)
def test_each_micro_batch_tells_of_every_operator_with_its_layer_and_stages(
    saved_model: Models, name: str, micro_batches: int, kernels: str
) -> None:
    """The first tells of what is done once for both: logits, but where each draws pads for them."""
    with using_kernels(kernels):
        _check_observed(saved_model, name, micro_batches)


def _check_observed(saved_model: Models, name: str, micro_batches: int) -> None:
    model, policy, notes = saved_model("llama"), load_policy(name), Notes()
    observed, alone = (
        model.tee(
            policy, observer=told, randomness=Randomness(bytes(32)), micro_batches=micro_batches
        )
        for told in (notes, None)
    )
    pads: PadsFrom = "dealers" if policy.dealt else "stock"
    logits = observed.logits(token_ids(13), pads=pads)
    assert torch.equal(logits, alone.logits(token_ids(13), pads=pads))
    assert len(notes.parts) == micro_batches
    apart = observed.lanes[0].tables["prefill", pads].head_apart
    for index, part in enumerate(notes.parts):
        expected = _expected(policy, logits=apart or index == 0)
        assert part.calls == expected.calls
        assert part.spans == expected.spans
        assert part.trips == expected.trips
    asked = sum(len(channel.requests) for channel in observed.channels)
    assert asked == sum(services for part in notes.parts for *_, services in part.trips)
    # Nothing is counted twice.
    together = sorted(times for part in notes.parts for times in part.times)
    assert all(one[0] < one[1] <= two[0] for one, two in pairwise(together))


def test_the_last_stage_of_a_call_that_failed_is_not_told_of() -> None:
    notes = Notes()
    clock = StageClock(cast("Observer", notes), "o_proj", 1)
    clock.called()
    clock.mark("mask")
    clock.called()
    clock.mark("tee")
    clock.mark(None)
    assert notes.spans == [("o_proj", 1, "tee")]
    assert timed(max, None, "softmax", 0) is max
