"""All architectures, under all policies of one operator a request, give transformers' logits."""

import json
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from protocol.model.config import read_config
from protocol.model.forward import rope_frequencies
from tests.equivalence.tolerances import (
    BFLOAT16_ERROR_RATIO,
    BFLOAT16_LOGITS,
    FAMILY_LOGITS,
    FLOAT32_LOGITS,
    ROPE_FREQUENCIES,
)
from tests.kit.model import (
    ARCHITECTURES,
    KINDS,
    POLICIES,
    SIZES,
    Models,
    SavedModel,
    assemble,
    token_ids,
)
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


@each_row("kind", KINDS)
def test_a_family_equals_transformers_and_in_integers_itself(
    saved_model: Models, kind: str
) -> None:
    """In prompts and behind them, beyond the windows that there are."""
    model, ids = saved_model(kind), token_ids(24)
    expected, found = model.logits(ids), assemble(model.directory).logits(ids)
    FAMILY_LOGITS.check(found / expected.abs().max(), expected / expected.abs().max())
    assert assemble(model.directory).greedy(ids, 24) == model.greedy(ids, 24)
    policies = ("quantized-clear", "shielded", "dealt")
    clear, *hidden = (model.tee(policy).logits(ids[:12], chunk=7) for policy in policies)
    assert all(torch.equal(clear, logits) for logits in hidden)


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


CONTEXT = 128
SHORT = [1.0 + 0.1 * i for i in range(8)]
LONG = [2.0 + 0.5 * i for i in range(8)]

WITHIN = {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0} | WITHIN
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG} | WITHIN
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": YARN,
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-betas": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    "yarn-ramp-beyond-the-last-pair": YARN
    | {"rope_theta": 20.0, "original_max_position_embeddings": 64, "beta_slow": 0.1},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-attention-factor": YARN | {"attention_factor": 1.7},
    "longrope": LONGROPE,
    "longrope-factor": LONGROPE | {"factor": 2.0},
    "longrope-attention-factor": LONGROPE | {"attention_factor": 1.3},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0}
    | WITHIN,
}


def with_rope(name: str) -> dict[str, Any]:
    """Settings of a model; a copy, because transformers writes into the dictionary."""
    rope = {"rope_theta": 10000.0, **ROPES[name]}
    return {"rope_parameters": json.loads(json.dumps(rope)), "max_position_embeddings": CONTEXT}


@each_row(("name", "length"), product(ROPES, (32, 33, CONTEXT, 3 * CONTEXT)))
def test_frequencies_equal_transformers(tmp_path: Path, name: str, length: int) -> None:
    reference = transformers.LlamaConfig(
        **{**SIZES, **with_rope(name)}, architectures=["LlamaForCausalLM"]
    )
    reference.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    frequencies, scaling = rope_frequencies(config, config.ropes[0], length)
    rope_type = ROPES[name]["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, 16, 2, dtype=torch.float32) / 16
        expected, expected_scaling = 1.0 / (5000.0**exponents), 1.0
    else:
        compute = ROPE_INIT_FUNCTIONS[rope_type]
        expected, expected_scaling = compute(reference, torch.device("cpu"), seq_len=length)
    ROPE_FREQUENCIES.check(frequencies, expected)
    assert scaling == expected_scaling


@each_row(
    ("name", "length"),
    [
        *product(("default", "yarn-attention-factor", "longrope", "llama3"), (40,)),
        ("dynamic", CONTEXT + 20),
    ],
    slow=product(ROPES, (30, 100, CONTEXT + 60)),
)
def test_logits_within_and_beyond_the_context_equal_transformers(
    saved_model: Models, name: str, length: int
) -> None:
    model, ids = saved_model("llama", num_hidden_layers=1, **with_rope(name)), token_ids(length)
    FLOAT32_LOGITS.check(assemble(model.directory).logits(ids), model.logits(ids))


@each_row("name", ["dynamic", "longrope"])
def test_decoding_across_the_length_limit_equals_generate(saved_model: Models, name: str) -> None:
    """What is cached keeps the rotation it was written with, as in transformers."""
    limit = 32 if name == "longrope" else CONTEXT
    model = saved_model("llama", num_hidden_layers=1, **with_rope(name))
    prompt, continuation = token_ids(limit - 3), token_ids(6, seed=5)
    tee = assemble(model.directory)
    with torch.inference_mode():
        first = model.reference(torch.tensor([prompt]), use_cache=True)
        expected, cache = [first.logits[0]], first.past_key_values
        for token_id in continuation:
            step = model.reference(torch.tensor([[token_id]]), past_key_values=cache)
            expected.append(step.logits[0])
    own = tee.cache(len(prompt) + len(continuation))
    steps = [prompt, *([token_id] for token_id in continuation)]
    actual = torch.cat([tee.step_logits(own, ids) for ids in steps])
    FLOAT32_LOGITS.check(actual, torch.cat(expected))


@each_row("inside", [None, 16])
def test_original_context_beside_the_rope_parameters_counts_as_in_transformers(
    tmp_path: Path, inside: int | None
) -> None:
    """Phi-3 style; transformers lets the outer value win over the inner one."""
    rope = {**with_rope("longrope")["rope_parameters"], "original_max_position_embeddings": inside}
    if inside is None:
        del rope["original_max_position_embeddings"]
        rope["type"] = rope.pop("rope_type")  # as it was once called
    raw = {
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": CONTEXT,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rope_scaling": rope,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    reference = transformers.LlamaConfig.from_pretrained(tmp_path)
    expected = ROPE_INIT_FUNCTIONS["longrope"](reference, torch.device("cpu"), seq_len=50)
    config = read_config(tmp_path)
    frequencies, scaling = rope_frequencies(config, config.ropes[0], 50)
    ROPE_FREQUENCIES.check(frequencies, expected[0])
    assert scaling == expected[1]
    assert config.ropes[0].original_max_position_embeddings == 64
