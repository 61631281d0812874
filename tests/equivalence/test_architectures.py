"""All architectures, under all policies of one operator a request, give transformers' logits."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch

from tests.equivalence.tolerances import BFLOAT16_ERROR_RATIO, BFLOAT16_LOGITS, FLOAT32_LOGITS
from tests.kit.model import ARCHITECTURES, POLICIES, Models, SavedModel, assemble, token_ids
from tests.kit.rows import each_row

QWEN2_SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

# Each differs from the plain model in one thing that the forward pass must do differently.
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {}),
    ("llama-mlp-bias", "llama", {"mlp_bias": True}),
    ("llama-all-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama-mha", "llama", {"num_key_value_heads": 6}),
    ("llama-mqa", "llama", {"num_key_value_heads": 1}),
    ("llama-tied", "llama", {"tie_word_embeddings": True}),
    ("llama-head-dim-of-hidden", "llama", {"head_dim": None, "hidden_size": 48}),
    ("llama-eps", "llama", {"rms_norm_eps": 0.1}),
    ("llama-one-layer", "llama", {"num_hidden_layers": 1}),
    ("mistral-window-7", "mistral", {"sliding_window": 7}),
    ("mistral-window-1", "mistral", {"sliding_window": 1}),
    ("mistral-window-beyond", "mistral", {"sliding_window": 1000}),
    ("mistral-no-window", "mistral", {"sliding_window": None}),
    ("qwen2", "qwen2", {}),
    ("qwen2-window-unused", "qwen2", {"use_sliding_window": False, "sliding_window": 5}),
    ("qwen2-window-upper-layers", "qwen2", QWEN2_SLIDING),
    (
        "qwen2-layer-types",
        "qwen2",
        {
            **QWEN2_SLIDING,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("qwen3", "qwen3", {}),
    ("qwen3-attention-bias", "qwen3", {"attention_bias": True}),
    ("qwen3-window", "qwen3", QWEN2_SLIDING),
    ("qwen3-tied", "qwen3", {"tie_word_embeddings": True}),
]


@each_row(
    ("variant", "policy"),
    [*zip(VARIANTS, cycle(POLICIES)), *product(VARIANTS[:1], POLICIES[1:])],
    ids=lambda row: f"{row[0][0]}, {row[1]}",
    slow=product(VARIANTS, POLICIES),
)
def test_logits_equal_transformers_at_every_position(
    saved_model: Models, variant: tuple[str, str, dict[str, Any]], policy: str
) -> None:
    _, kind, overrides = variant
    model, ids = saved_model(kind, **overrides), token_ids(24)
    FLOAT32_LOGITS.check(assemble(model.directory, policy).logits(ids), model.logits(ids))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_bfloat16_logits_are_close_to_transformers(saved_model: Models, kind: str) -> None:
    model, ids = saved_model(kind), token_ids(48)
    loaded = type(model.reference).from_pretrained(model.directory, dtype=torch.bfloat16).eval()
    exact, reference = model.logits(ids), SavedModel(model.directory, loaded).logits(ids).float()
    for policy in POLICIES:
        actual = assemble(model.directory, policy, "bfloat16").logits(ids)
        assert actual.dtype == torch.bfloat16
        BFLOAT16_LOGITS.check(actual.float(), reference)
        ours, theirs = (actual.float() - exact).abs().mean(), (reference - exact).abs().mean()
        assert ours <= BFLOAT16_ERROR_RATIO * theirs
