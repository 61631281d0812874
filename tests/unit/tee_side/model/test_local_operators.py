"""Operators in the TEE: with the weights that the policy keeps, in floats or in exact integers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol import integer
from protocol.errors import ReplyError
from protocol.integer import int8_product
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import model_digest
from tee_side.model.forward import logits
from tee_side.model.local_operators import LocalOperators, load_local_operators, sites_here
from tee_side.model.operators import Operators, place
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.calibration import Calibration
from tee_side.protect.sites import IntegerSites, load_biases
from tee_side.remote.overlap import run
from tee_side.remote.registered import RunParts
from tee_side.words import PHASES, Phase
from tests.kit.model import CLEAR, Models, SavedModel, policy_of
from tests.kit.rows import each_row

PAD = CLEAR | {"mask": "pad"}
TEE = {"place": "tee"}


def _local(model: SavedModel, policy: Policy, dtype: torch.dtype = torch.float32) -> LocalOperators:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    integers = None
    if policy.arithmetic == "int8":
        calibration = Calibration.load(model.calibration, config, model_digest(config, checkpoint))
        biases = load_biases(checkpoint, config, FUSED_MODULES, dtype)
        integers = IntegerSites(calibration, biases, dtype)
    sites = sites_here(policy, config.num_hidden_layers)
    parts = RunParts(policy, config, checkpoint, dtype)
    return load_local_operators(parts, sites=sites, integers=integers, held={})


def test_sites_are_those_that_stay_in_some_phase_of_some_layer(saved_model: Models) -> None:
    config = read_config(saved_model("llama").directory)
    policy = policy_of(
        {
            "qkv_proj": [TEE | {"layers": 0}, CLEAR | {"layers": "1-"}],
            "o_proj": [TEE | {"phase": "prefill"}, CLEAR | {"phase": "decode"}],
            "gate_up_proj": CLEAR,
            "down_proj": CLEAR,
        }
    )
    assert set(sites_here(policy, config.num_hidden_layers)) == {
        (0, "qkv_proj"),
        *((layer, "o_proj") for layer in range(3)),
    }
    assert sites_here(load_policy("shielded-prefill"), config.num_hidden_layers) == []
    assert not _local(saved_model("llama"), load_policy("tsqp"))
    assert len(sites_here(load_policy("shielded"), config.num_hidden_layers)) == 12 + 1


@pytest.mark.usefixtures("torch_kernels")
def test_the_digits_of_a_product_are_those_of_the_calibration_whatever_the_input_is(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer for a small input would tell by the time how large its numbers are."""
    local = _local(saved_model("llama"), load_policy("shielded"))
    rows: list[int] = []

    def counted(part: torch.Tensor, *arguments: Any) -> torch.Tensor:
        rows.append(len(part))
        return int8_product(part, *arguments)

    monkeypatch.setattr(integer, "int8_product", counted)
    for size in (0.0, 1e-3, 1.0, 10.0):
        local[1, "o_proj"](torch.full((5, 96), size))
    assert len(rows) == 4
    assert len(set(rows)) == 1
    assert rows[0] > 5  # more than a small input needs


def test_the_integer_lm_head_is_close_to_the_float_one_row_by_row(saved_model: Models) -> None:
    """At any size, whatever its neighbours are; and what is no number is no plausible logit."""
    model = saved_model("llama")
    local, weight = _local(model, policy_of(arithmetic="int8")), model.reference.lm_head.weight
    lm_head, h = local[None, "lm_head"], torch.randn(7, 48) * torch.logspace(-20, 20, 7)[:, None]
    expected = (h.double() @ weight.double().t()).detach()
    together = lm_head(h)
    error = (together.double() - expected).norm(dim=1) / expected.norm(dim=1)
    # Eight bits of weight and of input: about half a percent each.
    assert error.max() < 0.02
    for row in range(7):
        assert torch.equal(lm_head(h[row : row + 1])[0], together[row])
    assert torch.equal(lm_head(torch.zeros(1, 48)), torch.zeros(1, 320))
    for value in (float("nan"), float("inf"), -float("inf")):
        h[3, 7] = value
        logits = lm_head(h)
        assert not logits[3].isfinite().any()
        assert torch.equal(logits[4:], together[4:])


@each_row("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    """A service may send anything, and half precision may overflow."""
    ops: Any = SimpleNamespace(head_in_segment=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits_NV = torch.full((2, 5), 60000.0).to(dtype)
        assert run(logits(logits_NV, None, ops)) is logits_NV  # type: ignore[arg-type]
        logits_NV[1, 3] = value
        with pytest.raises(ReplyError, match="logits: got values that are not finite"):
            run(logits(logits_NV, None, ops))  # type: ignore[arg-type]


def _placed(operators: dict[str, Any], *, withheld: bool = False) -> Mapping[Phase, Operators]:
    call: Any = lambda *_: lambda x: x  # noqa: E731
    return place(policy_of(operators, arithmetic="int8"), 4, call, call, withheld=withheld)


def test_pads_are_drawn_in_their_own_phase_and_not_where_they_are_withheld() -> None:
    leaves, stays = (
        _placed({"lm_head": PAD, "o_proj": PAD}, withheld=withheld)["decode"]
        for withheld in (False, True)
    )
    assert [[mask.name for mask in table.masks] for table in (leaves, stays)] == [["pad"], []]
    assert (leaves.head_apart, stays.head_apart) == (True, False)
    phases = _placed({"o_proj": [TEE | {"phase": "prefill"}, PAD | {"phase": "decode"}]})
    assert [bool(phases[phase].masks) for phase in PHASES] == [False, True]
