"""Operators in the TEE: with the weights that the policy keeps, in floats or in exact integers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from protocol import integer
from protocol.integer import int8_product
from protocol.messages import FUSED_MODULES, LinearOperator
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import model_digest
from protocol.model.quantized import load_quantized
from tee_side.model.local_operators import (
    LocalOperators,
    load_local_operators,
    not_here,
    sites_here,
)
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.calibration import Calibration
from tee_side.protect.sites import IntegerSites, load_biases
from tee_side.remote.linear import CallSettings
from tee_side.remote.overlap import run
from tee_side.remote.registered import RunParts
from tee_side.words import OPERATORS
from tests.kit.model import CLEAR, SavedModel
from tsqp.lab.research.operators import product_here

Models = Callable[..., SavedModel]

INPUTS: dict[LinearOperator, int] = {
    "qkv_proj": 48,
    "o_proj": 96,
    "gate_up_proj": 48,
    "down_proj": 96,
}


def _policy(operators: dict[str, Any] | None = None, arithmetic: str = "float") -> Policy:
    placed: dict[Any, Any] = {**dict.fromkeys(OPERATORS, "tee"), **(operators or {})}
    return Policy.model_validate(
        {"name": "n", "summary": "s", "arithmetic": arithmetic, "operators": placed}
    )


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


# ----------------------------------------------------------------------- what is held


def test_sites_are_those_that_stay_in_some_phase_of_some_layer(saved_model: Models) -> None:
    config = read_config(saved_model("llama").directory)
    policy = _policy(
        {
            "qkv_proj": [
                {"place": "tee", "layers": 0},
                {"place": "gpu", "layers": "1-", "mask": "none", "verify": "none"},
            ],
            "o_proj": [
                {"place": "tee", "phase": "prefill"},
                {"place": "gpu", "phase": "decode", "mask": "none", "verify": "none"},
            ],
            "gate_up_proj": CLEAR,
            "down_proj": [
                {"place": "gpu", "phase": "prefill", "mask": "none", "verify": "none"},
                {"place": "tee", "phase": "decode"},
            ],
        }
    )
    assert set(sites_here(policy, config.num_hidden_layers)) == {
        (0, "qkv_proj"),
        *((layer, "o_proj") for layer in range(3)),
        *((layer, "down_proj") for layer in range(3)),
    }
    assert sites_here(load_policy("shielded-prefill"), config.num_hidden_layers) == []
    assert len(sites_here(load_policy("shielded"), config.num_hidden_layers)) == 12 + 1


def test_weights_that_the_policy_sends_away_are_not_held(saved_model: Models) -> None:
    local = _local(saved_model("llama"), load_policy("tsqp"))
    assert not local
    with pytest.raises(LookupError, match="placed on the GPU"):
        not_here(torch.ones(1, 96))


@pytest.mark.parametrize("arithmetic", ["float", "int8"])
def test_a_tied_lm_head_may_stay_where_the_embedding_leaves(
    saved_model: Models, arithmetic: str
) -> None:
    model = saved_model("llama", tie_word_embeddings=True)
    local = _local(model, _policy({"embedding": CLEAR}, arithmetic))
    h = torch.randn(4, 48)
    expected = h @ model.reference.get_input_embeddings().weight.t()
    assert (local[None, "lm_head"](h) - expected).norm() < 0.02 * expected.norm()


# ----------------------------------------------------------------------------- integers


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("operator", INPUTS)
def test_integers_are_those_of_int64_at_every_site(
    saved_model: Models, kind: str, rows: int, operator: LinearOperator
) -> None:
    model = saved_model(kind)
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    calibration = Calibration.load(model.calibration, config, model_digest(config, checkpoint))
    biases = load_biases(checkpoint, config, FUSED_MODULES, torch.float32)
    local = _local(model, _policy(arithmetic="int8"))
    for layer in range(config.num_hidden_layers):
        weights, scales = load_quantized(checkpoint, config, layer, operator), calibration.sites
        x = torch.randn(rows, weights.weight.shape[1])
        integers = scales[layer, operator].encode(x)
        exact = integers.long() @ weights.weight.long().t()
        assert exact.abs().max() < 2**31
        expected = exact.float() * (weights.scale * scales[layer, operator].input_scale)
        if (bias := biases.get((layer, operator))) is not None:
            expected = expected + bias
        assert torch.equal(local[layer, operator](x), expected)


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


def test_the_integer_lm_head_is_close_to_the_float_one_at_any_size(saved_model: Models) -> None:
    model = saved_model("llama")
    local, weight = _local(model, _policy(arithmetic="int8")), model.reference.lm_head.weight
    h = torch.randn(7, 48) * torch.logspace(-20, 20, 7)[:, None]
    expected = (h.double() @ weight.double().t()).detach()
    error = (local[None, "lm_head"](h).double() - expected).norm(dim=1) / expected.norm(dim=1)
    # Eight bits of weight and of input: about half a percent each.
    assert error.max() < 0.02


def test_a_row_of_logits_does_not_depend_on_its_neighbours(saved_model: Models) -> None:
    local = _local(saved_model("llama"), _policy(arithmetic="int8"))
    h = torch.randn(6, 48)
    h[2] *= 1000
    h[3] = 0
    together = local[None, "lm_head"](h)
    for row in range(6):
        assert torch.equal(local[None, "lm_head"](h[row : row + 1])[0], together[row])
    assert torch.equal(together[3], torch.zeros(320))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_of_what_is_no_number_are_no_numbers(saved_model: Models, value: float) -> None:
    """Integers have no NaN: it must not come out as a plausible logit."""
    local = _local(saved_model("llama"), _policy(arithmetic="int8"))
    h = torch.randn(2, 48)
    h[0, 7] = value
    logits = local[None, "lm_head"](h)
    assert not logits[0].isfinite().any()
    assert logits[1].isfinite().all()


@pytest.mark.parametrize("arithmetic", ["float", "int8"])
def test_outputs_are_in_the_models_dtype(saved_model: Models, arithmetic: str) -> None:
    local = _local(saved_model("qwen2"), _policy(arithmetic=arithmetic), torch.bfloat16)
    x = torch.randn(3, 48).bfloat16()
    assert local[0, "qkv_proj"](x).dtype == torch.bfloat16
    assert local[None, "lm_head"](x).dtype == torch.bfloat16


# ---------------------------------------------------------------------------- attention


async def _asked(call: Awaitable[torch.Tensor]) -> torch.Tensor:
    return await call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("context", [1, 40, 3000])
def test_attention_products_are_those_of_the_operands(dtype: torch.dtype, context: int) -> None:
    """Short contexts and long ones may take different ways; the result is rounded once."""
    settings = CallSettings(lambda _layer: [], None, None)
    q, k = torch.randn(2, 3, 16).to(dtype), torch.randn(2, context, 16).to(dtype)
    scores = run(_asked(product_here("attn_scores", 0, settings)((q, k.mT))))
    exact = q.double() @ k.double().mT
    assert scores.dtype == dtype
    # One rounding to half precision, or one a product to float32.
    step = max(torch.finfo(dtype).eps, 1e-5)
    assert ((scores.double() - exact).abs() <= step * exact.abs().clamp(min=1)).all()
    values = run(_asked(product_here("attn_values", 0, settings)((scores.softmax(-1), k))))
    assert values.dtype == dtype
    assert values.shape == (2, 3, 16)
    exact = scores.softmax(-1).double() @ k.double()
    assert ((values.double() - exact).abs() <= step * exact.abs().clamp(min=1)).all()
