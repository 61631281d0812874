"""config.json: what is read from it, and that every refusal names the file and the field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelError
from protocol.model.config import ARCHITECTURES, MAX_JSON_BYTES, ModelConfig, read_config
from tests.kit.rows import each_row

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings"),
)


def _read(directory: Path, **changes: Any) -> ModelConfig:
    fields = {k: v for k, v in {**BASE, **changes}.items() if v is not ...}
    (directory / "config.json").write_text(json.dumps(fields))
    return read_config(directory)


def _said(directory: Path, **changes: Any) -> str:
    """Return where a configuration is refused and what of it; nothing for one that is read."""
    try:
        _read(directory, **changes)
    except ModelError as error:
        return str(error).removeprefix(str(directory / "config.json"))
    return ""


def test_a_directory_without_a_good_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, got in (("none", "no such dir"), ("file", "no such dir"), (".", "no config.json")):
        with pytest.raises(ModelError) as caught:
            read_config(tmp_path / path)
        assert caught.value.where == str(tmp_path / path)
        assert caught.value.got.startswith(got)
    for content, said in (
        (json.dumps(BASE).encode()[:-1] + b', "hidden_size": 64}', "hidden_size: got this key"),
        (b" " * (MAX_JSON_BYTES + 1), f"got {MAX_JSON_BYTES + 1} bytes"),
        (b"{", "got JSONDecodeError"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match=rf"config\.json: {said}"):
            read_config(tmp_path)


ABSURD: dict[str, Sequence[Any]] = {
    "architectures": [
        *(["GPT2LMHeadModel"], ["LlamaModel"], [], None, ..., [["LlamaForCausalLM"]], {"a": 1})
    ],
    # What we cannot compute.
    "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    "hidden_act": ["gelu", None],
    "pretraining_tp": [2],
    **dict.fromkeys(SIZES, (0, -1, 2**40, 2**70, "48", 48.5, None, ..., [48], True)),
    "num_key_value_heads": [-2, 0, False, "", 2**40, "2", 2.5],
    "head_dim": [0, False, "", 1, 7, 2048, 2**40, -16, "16"],
    "rms_norm_eps": [0, -1e-6, "small", float("nan"), float("inf")],
    "dtype": ["int8", "float64", "auto", 16],
    "rope_scaling": ["linear", [1.0], 3, False],
    **dict.fromkeys(["tie_word_embeddings", "attention_bias", "mlp_bias"], ("maybe", 7, [0])),
    "eos_token_id": ["2", [1, "2"], -1, 1.5, [[1]], {"id": 2}, True],
}
LAYERS = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
ABSURD_LAYERS: dict[str, Sequence[Any]] = {
    "sliding_window": [0, -5, 2**40, "8", 4.5],
    "max_window_layers": ["2", 1.5, None, [1], -1],
    "layer_types": [
        *(["full_attention"], ["full_attention"] * 4, "full_attention", {"0": "full_attention"}),
        *(["full_attention", "full_attention", last] for last in ("linear_attention", 3, ["x"])),
        [],
    ],
}


def test_an_absurd_value_is_refused_by_its_field(tmp_path: Path) -> None:
    read = []
    for base, table in (({}, ABSURD), (LAYERS, ABSURD_LAYERS)):
        assert _said(tmp_path, **base) == ""
        for field, values in table.items():
            for value in values:
                said = _said(tmp_path, **{**base, field: value})
                if not said.startswith(f": {field}"):
                    read.append((field, value, said))
    assert read == []
    expected = "num_key_value_heads (4) must divide num_attention_heads (6)"
    assert expected in _said(tmp_path, num_key_value_heads=4)
    for value in ABSURD["eos_token_id"]:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert "/generation_config.json: eos_token_id" in _said(tmp_path, eos_token_id=1)
    (tmp_path / "generation_config.json").write_text("{")
    assert "/generation_config.json: got " in _said(tmp_path)


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}


@each_row(
    ("rope", "changes", "said"),
    [
        ({"rope_type": "su", "factor": 2.0}, {}, "rope_type"),
        ({"rope_type": "linear"}, {}, "linear needs factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, {}, "longrope needs long_factor"),
        ({"rope_type": "llama3", "factor": 8.0}, {}, "llama3 needs low_freq_factor"),
        ({"rope_type": "linear", "factor": 0}, {}, "factor"),
        ({"rope_type": "default", "rope_theta": 0}, {}, "rope_theta"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, {}, "partial_rotary_factor"),
        # What would divide by zero, or overflow.
        ({"rope_type": "dynamic", "factor": 2.0}, {"head_dim": 2}, "head_dim of at least 4"),
        (
            {"rope_type": "longrope", "factor": 2.0, **FACTORS},
            {"head_dim": 8, "original_max_position_embeddings": 1},
            "longrope needs original_max_position_embeddings",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, {}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320}, {}, "beta_fast"),
        ({"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": -7.2}, {}, "mscale_all_dim"),
        ({"rope_type": "longrope", **FACTORS, "long_factor": [1.0] * 3}, {}, "has 3 entries"),
    ],
)
def test_rope_that_we_cannot_compute_is_refused(
    tmp_path: Path, rope: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        assert said in _said(tmp_path, **changes, **{key: rope})


@each_row(
    ("config", "generation", "expected"),
    [
        (None, None, set()),
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (2, {"eos_token_id": [5, 6]}, {5, 6}),
        (2, {}, {2}),
    ],
)
def test_eos_ids_of_the_generation_config_come_first(
    tmp_path: Path, config: Any, generation: Any, expected: set[int]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert _read(tmp_path, eos_token_id=config).eos_token_ids == expected


def test_settings_that_are_left_out_take_the_values_of_transformers(tmp_path: Path) -> None:
    config = _read(tmp_path, num_key_value_heads=..., rms_norm_eps=..., rope_theta=...)
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (6, 8, 1e-6)
    assert (config.rope.rope_type, config.rope.rope_theta) == ("default", 10000.0)
    assert (config.dtype, config.tie_word_embeddings) == ("float32", False)
    qwen3 = _read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)
    # dtype has a new and an old name; what does not change the forward pass is skipped.
    assert _read(tmp_path, torch_dtype="float16").dtype == "float16"
    assert _read(tmp_path, dtype="float32", torch_dtype="bfloat16").dtype == "float32"
    assert _read(tmp_path, initializer_range=0.02, auto_map={}) == _read(tmp_path)


def test_biases_are_those_of_the_architecture(tmp_path: Path) -> None:
    qkv, mlp = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj", "down_proj"}
    expected = {"Llama": {*qkv, "o_proj", *mlp}, "Mistral": set(), "Qwen2": qkv}
    expected["Qwen3"] = {*qkv, "o_proj"}
    assert {f"{name}ForCausalLM" for name in expected} == set(ARCHITECTURES)
    for name, modules in expected.items():
        both = {"architectures": [f"{name}ForCausalLM"], "attention_bias": True, "mlp_bias": True}
        assert _read(tmp_path, **both).biased_modules == modules


@each_row(
    ("architecture", "changes", "expected"),
    [
        ("Llama", {"sliding_window": 8}, (None, None, None)),
        ("Mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("Mistral", {"sliding_window": None}, (None, None, None)),
        ("Mistral", {}, (4096, 4096, 4096)),
        ("Qwen2", {"sliding_window": 8}, (None, None, None)),
        ("Qwen2", LAYERS, (None, None, None)),
        ("Qwen2", LAYERS | {"max_window_layers": 2}, (None, None, 8)),
        (
            "Qwen3",
            LAYERS | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, None, 8),
        ),
    ],
)
def test_sliding_windows_are_known_per_layer(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    name = [f"{architecture}ForCausalLM"]
    assert _read(tmp_path, **{**changes, "architectures": name}).sliding_windows == expected
