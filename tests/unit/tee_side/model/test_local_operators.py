"""Operators in the TEE: with the weights that the policy keeps, in floats or in exact integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protocol import integer
from protocol.integer import int8_product
from protocol.messages import FUSED_MODULES
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
from tee_side.remote.registered import RunParts
from tee_side.words import OPERATORS
from tests.kit.model import CLEAR, SavedModel
from tests.kit.rows import each_row

Models = Callable[..., SavedModel]


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
    assert not _local(saved_model("llama"), load_policy("tsqp"))
    with pytest.raises(LookupError, match="placed on the GPU"):
        not_here(torch.ones(1, 96))
    assert len(sites_here(load_policy("shielded"), config.num_hidden_layers)) == 12 + 1


@each_row("arithmetic", ["float", "int8"])
def test_a_tied_lm_head_may_stay_where_the_embedding_leaves(
    saved_model: Models, arithmetic: str
) -> None:
    model = saved_model("llama", tie_word_embeddings=True)
    local = _local(model, _policy({"embedding": CLEAR}, arithmetic))
    h = torch.randn(4, 48)
    expected = h @ model.reference.get_input_embeddings().weight.t()
    assert (local[None, "lm_head"](h) - expected).norm() < 0.02 * expected.norm()


# ----------------------------------------------------------------------------- integers


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_integers_are_those_of_int64_at_every_site(saved_model: Models, kind: str) -> None:
    model = saved_model(kind)
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    calibration = Calibration.load(model.calibration, config, model_digest(config, checkpoint))
    biases = load_biases(checkpoint, config, FUSED_MODULES, torch.float32)
    local, different = _local(model, _policy(arithmetic="int8")), []
    for (layer, operator), scales in calibration.sites.items():
        weights = load_quantized(checkpoint, config, layer, operator)
        for rows in (1, 5, 33):
            x = torch.randn(rows, weights.weight.shape[1])
            exact = scales.encode(x).long() @ weights.weight.long().t()
            assert exact.abs().max() < 2**31
            expected = exact.float() * (weights.scale * scales.input_scale)
            if (bias := biases.get((layer, operator))) is not None:
                expected = expected + bias
            if not torch.equal(local[layer, operator](x), expected):
                different.append((layer, operator, rows))
    assert different == []
    assert len(calibration.sites) == 4 * config.num_hidden_layers


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
    local, weight = _local(model, _policy(arithmetic="int8")), model.reference.lm_head.weight
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
