"""An observer is told what each operator costs, stage by stage, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from protocol.channel import Exchange
from protocol.messages import FUSED_MODULES
from tee_side.model.layers import _ops_for
from tee_side.observer import UNTIMED, AnyOperator
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.randomness import Randomness
from tee_side.remote.linear import RemoteLinear
from tee_side.words import LAYERLESS, OPERATORS, PRODUCTS, Operator, Place, TeeStage
from tests.kit.model import SavedModel, token_ids
from tests.kit.rows import each_row

Models = Callable[..., SavedModel]

# In the clear, by module, under a row mask, under a feature mask, with pads, in shares.
NAMES = (
    "tee-only",
    "tsqp",
    "attention-in-tee",
    "tsqp-permuted",
    "cloak",
    "quantized-clear",
    "shielded-prefill",
    "two-server",
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

    def lane(self, index: int) -> Notes:
        """Make one for a micro-batch."""
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


def _expected(policy: Policy, rows_wanted: bool = True) -> Notes:
    """Return what one step of one sequence must tell."""
    notes = Notes()

    def light(operator: AnyOperator, layer: int | None) -> None:
        notes.called(operator, layer, "tee")
        notes.spent(operator, layer, "tee", 0, 0)

    def placed(operator: Operator, layer: int | None) -> None:
        if policy.at(operator, layer or 0, "prefill").place == "tee":
            light(operator, layer)
            return
        notes.called(operator, layer, "gpu")
        modules = {"qkv_proj": 3, "gate_up_proj": 2} if policy.one_rpc_per_module else {}
        stages: list[TeeStage] = ["tee"]
        stages += ["mask", *["verify"] * modules.get(operator, 1), "unmask"]  # type: ignore[list-item]
        # The form of each reply before, the numbers of the result after it was unmasked.
        verified = policy.at(operator, layer or 0, "prefill").verify != "none"
        stages += ["verify"] if verified else []
        stages += ["tee"]
        for stage in stages:
            notes.spent(operator, layer, stage, 0, 0)
        notes.trips += [(operator, layer, policy.services)] * modules.get(operator, 1)

    placed("embedding", None)
    for layer in range(LAYERS):
        light("rms_norm", layer)
        placed("qkv_proj", layer)
        light("rope", layer)
        light("kv_cache", layer)
        if any(policy.at(product, layer, "prefill").place == "gpu" for product in PRODUCTS):
            placed("attn_scores", layer)
            light("softmax", layer)
            placed("attn_values", layer)
        else:
            light("attention", layer)
        placed("o_proj", layer)
        light("residual", layer)
        light("rms_norm", layer)
        placed("gate_up_proj", layer)
        light("silu_mul", layer)
        placed("down_proj", layer)
        light("residual", layer)
    if rows_wanted:
        light("rms_norm", None)
        placed("lm_head", None)
    return notes


@each_row("name", NAMES)
def test_every_operator_is_told_of_with_its_layer_and_its_stages(
    saved_model: Models, name: str
) -> None:
    policy, notes = load_policy(name), Notes()
    saved_model("llama").tee(policy, observer=notes).logits(token_ids(6))
    expected, (found,) = _expected(policy), notes.parts
    assert found.calls == expected.calls
    assert found.spans == expected.spans
    assert found.trips == expected.trips
    # Nothing is told to the whole that was told to a part.
    assert (notes.calls, notes.spans, notes.trips) == ([], [], [])


@each_row("name", NAMES)
def test_each_micro_batch_tells_its_own(saved_model: Models, name: str) -> None:
    """One prompt in two parts; the first also tells of what is done once for both.

    The logits are, unless pads are drawn for them: then the second does, whose row it is.
    """
    policy, notes = load_policy(name), Notes()
    tee = saved_model("llama").tee(policy, observer=notes, micro_batches=2)
    tee.greedy(token_ids(11), 1)
    first, second = notes.parts
    assert (first.calls[-1], first.spans[-1]) == (
        ("sample", None, "tee"),
        ("sample", None, "tee"),
    )
    apart = tee.lanes[0].tables["prefill"].head_apart
    for part, expected in (
        (first, _expected(policy, rows_wanted=not apart)),
        (second, _expected(policy, rows_wanted=apart)),
    ):
        sampled = part is first
        assert part.calls[: len(part.calls) - sampled] == expected.calls
        assert part.spans[: len(part.spans) - sampled] == expected.spans
        assert part.trips == expected.trips


@pytest.mark.each_value
@pytest.mark.parametrize("micro_batches", [2, 1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_stretches_of_time_follow_each_other(
    saved_model: Models, name: str, micro_batches: int
) -> None:
    """Within a micro-batch in the order told, and among all of them: nothing is counted twice."""
    notes = Notes()
    tee = saved_model("llama").tee(name, observer=notes, micro_batches=micro_batches)
    tee.logits(token_ids(13))
    assert len(notes.parts) == micro_batches
    for part in notes.parts:
        assert len(part.times) >= 12 * LAYERS
        assert all(started < ended for started, ended in part.times)
        assert part.times == sorted(part.times)
    together = sorted(times for part in notes.parts for times in part.times)
    assert all(one[1] <= two[0] for one, two in pairwise(together))


def test_what_is_computed_without_pads_is_time_in_the_tee(saved_model: Models) -> None:
    notes = Notes()
    tee = saved_model("llama").tee("shielded-prefill", observer=notes, when_out="tee")
    tee.greedy(token_ids(9), 1)
    expected, (found,) = _expected(load_policy("tee-only")), notes.parts
    assert found.calls == [*expected.calls, ("sample", None, "tee")]
    assert found.spans == [*expected.spans, ("sample", None, "tee")]
    assert found.trips == []


@pytest.mark.each_value
@pytest.mark.parametrize("micro_batches", [2, 1])
@pytest.mark.parametrize("name", NAMES)
def test_an_observer_changes_no_bit(saved_model: Models, name: str, micro_batches: int) -> None:
    model, ids = saved_model("llama"), token_ids(19)
    observed, alone = (
        model.tee(
            name, observer=observer, randomness=Randomness(bytes(32)), micro_batches=micro_batches
        ).logits(ids, chunk=10)
        for observer in (Notes(), None)
    )
    assert torch.equal(observed, alone)


@each_row("name", NAMES)
def test_without_an_observer_nothing_stands_between(saved_model: Models, name: str) -> None:
    """Local operators are the functions themselves, and no clock of a plan runs."""
    tee = saved_model("llama").tee(name, micro_batches=2)
    for lane in tee.lanes:
        assert lane.model.observer is None
        for layer in lane.model.layers:
            assert layer.residual is _ops_for(torch.float32).residual
            assert layer.rope is _ops_for(torch.float32).apply_rope
        calls = [call for name in FUSED_MODULES for call in getattr(lane.tables["decode"], name)]
        remote = [call for call in calls if isinstance(call, RemoteLinear)]
        leaving = {operator for operator, _ in load_policy(name).leaving()}
        assert bool(remote) == ("o_proj" in leaving)
        assert all(call._clock is UNTIMED for call in remote)


def test_layers_that_are_placed_differently_are_told_apart(saved_model: Models) -> None:
    notes = Notes()
    policy = Policy.model_validate(
        {
            "name": "n",
            "summary": "s",
            "operators": {
                **dict.fromkeys(OPERATORS, "tee"),
                "down_proj": [
                    {"place": "tee", "layers": 0},
                    {"place": "gpu", "layers": "1-", "mask": "none", "verify": "none"},
                ],
                "attn_values": [
                    {"place": "tee", "layers": 0},
                    {"place": "gpu", "layers": 1, "mask": "none", "verify": "none"},
                    {"place": "tee", "layers": "2-"},
                ],
            },
        }
    )
    saved_model("llama").tee(policy, observer=notes).logits(token_ids(4))
    (found,) = notes.parts
    calls = [call for call in found.calls if call[0] in ("down_proj", "attn_values", "attention")]
    assert calls == [
        ("attention", 0, "tee"),
        ("down_proj", 0, "tee"),
        ("attn_values", 1, "gpu"),
        ("down_proj", 1, "gpu"),
        ("attention", 2, "tee"),
        ("down_proj", 2, "gpu"),
    ]
    assert {call[:2] for call in found.calls if call[0] in LAYERLESS} == {
        (operator, None) for operator in LAYERLESS
    }
