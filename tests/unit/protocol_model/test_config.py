"""config.json: what is read from it, and that every refusal names the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.errors import ModelError
from protocol.model.config import (
    ARCHITECTURES,
    MAX_JSON_BYTES,
    ModelConfig,
    RopeParameters,
    read_config,
)
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
ABSENT = object()


def _write(directory: Path, **changes: Any) -> Path:
    fields = {k: v for k, v in {**BASE, **changes}.items() if v is not ABSENT}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def _read(directory: Path, **changes: Any) -> ModelConfig:
    return read_config(_write(directory, **changes))


def _refusal(directory: Path, **changes: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        _read(directory, **changes)
    assert caught.value.where.startswith(str(directory / "config.json"))
    return caught.value


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path / "missing")
    assert caught.value.where == str(tmp_path / "missing")
    assert caught.value.got == "no such directory"


def test_a_file_instead_of_a_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelError, match="no such directory"):
        read_config(path)


def test_an_empty_directory_has_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert (caught.value.where, caught.value.got) == (str(tmp_path), "no config.json")


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"", "JSONDecodeError"),
        (b"{", "JSONDecodeError"),
        (b"[]", "[]"),
        (b"null", "None"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (MAX_JSON_BYTES + 1), f"{MAX_JSON_BYTES + 1} bytes"),
    ],
    ids=["empty", "cut off", "a list", "null", "not UTF-8", "nested too deeply", "too large"],
)
def test_bad_json_is_refused_by_file(tmp_path: Path, content: bytes, got: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert caught.value.where == str(tmp_path / "config.json")
    assert caught.value.got.startswith(got)


def test_a_config_that_is_a_directory_is_refused_by_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json: got a directory, expected a"):
        read_config(tmp_path)


@each_row(
    ("architectures", "got"),
    [
        (["GPT2LMHeadModel"], "'GPT2LMHeadModel'"),
        (["MixtralForCausalLM"], "'MixtralForCausalLM'"),
        (["LlamaModel"], "'LlamaModel'"),
        ([], "[]"),
        (None, "None"),
        (ABSENT, "nothing"),
        ([["LlamaForCausalLM"]], "a value of type list"),
        ({"a": 1}, "a value of type dict"),
    ],
)
def test_an_unsupported_architecture_is_refused_by_name(
    tmp_path: Path, architectures: Any, got: str
) -> None:
    error = _refusal(tmp_path, architectures=architectures)
    assert error.where.endswith(": architectures")
    assert error.got == got
    if architectures is not ABSENT:
        assert all(name in error.expected for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("hidden_act", "gelu"),
        ("hidden_act", None),
        ("pretraining_tp", 2),
    ],
)
def test_what_we_cannot_compute_is_refused_by_field(tmp_path: Path, field: str, value: Any) -> None:
    assert _refusal(tmp_path, **{field: value}).where.endswith(f": {field}")


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
@each_row("value", [0, -1, 2**40, 2**70, "48", 48.5, None, ABSENT, [48], True])
def test_a_size_that_is_absurd_or_missing_is_refused_by_field(
    tmp_path: Path, field: str, value: Any
) -> None:
    error = _refusal(tmp_path, **{field: value})
    assert error.where.split(": ")[-1] == field


@pytest.mark.parametrize("value", [-2, 0, False, "", 2**40, "2", 2.5])
def test_absurd_key_value_heads_are_refused(tmp_path: Path, value: Any) -> None:
    assert "num_key_value_heads" in str(_refusal(tmp_path, num_key_value_heads=value))


@each_row("value", [0, False, "", 1, 7, 2048, 2**40, -16, "16"])
def test_an_absurd_head_dim_is_refused(tmp_path: Path, value: Any) -> None:
    assert _refusal(tmp_path, head_dim=value).where.endswith(": head_dim")


@pytest.mark.parametrize("value", [0, -1e-6, "small", float("nan"), float("inf")])
def test_an_absurd_epsilon_is_refused(tmp_path: Path, value: Any) -> None:
    assert _refusal(tmp_path, rms_norm_eps=value).where.endswith(": rms_norm_eps")


def test_heads_that_do_not_divide_are_refused_with_both_numbers(tmp_path: Path) -> None:
    text = str(_refusal(tmp_path, num_key_value_heads=4))
    assert "num_key_value_heads (4) must divide num_attention_heads (6)" in text


@pytest.mark.parametrize("value", ["int8", "float64", "auto", 16, 0, "", ["float32"]])
def test_an_unknown_dtype_is_refused(tmp_path: Path, value: Any) -> None:
    assert _refusal(tmp_path, dtype=value).where.endswith(": dtype")


@each_row(
    ("rope", "field"),
    [
        ({"rope_type": "su", "factor": 2.0}, "rope_type"),
        ({"type": "mrope", "factor": 2.0}, "rope_type"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "linear"}, "linear needs factor"),
        ({"rope_type": "dynamic"}, "dynamic needs factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "longrope needs long_factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "llama3 needs low_freq_factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": -1.0}, "factor"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_parameters_that_we_cannot_compute_are_refused_by_field(
    tmp_path: Path, key: str, rope: dict[str, Any], field: str
) -> None:
    error = _refusal(tmp_path, **{key: rope})
    assert "rope_parameters" in error.where
    assert field in str(error)


@pytest.mark.parametrize("value", ["linear", [1.0], 3, 0, False, "", []])
def test_rope_parameters_that_are_no_object_are_refused(tmp_path: Path, value: Any) -> None:
    assert _refusal(tmp_path, rope_scaling=value).where.endswith(": rope_scaling")


@pytest.mark.parametrize(
    ("rope", "changes"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, {"head_dim": 2}),
        (
            {
                "rope_type": "longrope",
                "factor": 2.0,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 4,
            },
            {"head_dim": 8, "original_max_position_embeddings": 1},
        ),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, {}),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320}, {}),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": -7.2}, {}),
    ],
    ids=["dynamic", "longrope", "theta", "beta", "mscale"],
)
def test_rope_that_would_divide_by_zero_or_overflow_is_refused(
    tmp_path: Path, rope: dict[str, Any], changes: dict[str, Any]
) -> None:
    _refusal(tmp_path, rope_scaling=rope, **changes)


def test_of_many_faults_in_a_list_one_is_gathered() -> None:
    """Pydantic takes kilobytes for each, and a configuration may have a million items."""
    for field in ("short_factor", "long_factor"):
        with pytest.raises(ValidationError) as caught:
            RopeParameters.model_validate({field: ["x"] * 1000})
        assert caught.value.error_count() == 1


def test_a_key_twice_is_refused_by_file_and_key(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text()[:-1] + ', "hidden_size": 64}')
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert caught.value.where == f"{path}: hidden_size"
    assert caught.value.got == "this key twice"


def test_longrope_factors_must_have_one_entry_per_pair_of_dimensions(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}
    text = str(_refusal(tmp_path, rope_scaling=rope))
    assert "long_factor has 3 entries, head_dim / 2 is 4" in text


@each_row(
    "layer_types",
    [
        ["full_attention"],
        ["full_attention"] * 4,
        ["full_attention", "full_attention", "linear_attention"],
        ["full_attention", "full_attention", 3],
        ["full_attention", "full_attention", ["sliding_attention"]],
        "full_attention",
        {"0": "full_attention"},
        [],
    ],
)
def test_malformed_layer_types_are_refused(tmp_path: Path, layer_types: Any) -> None:
    error = _refusal(
        tmp_path,
        architectures=["Qwen2ForCausalLM"],
        use_sliding_window=True,
        sliding_window=8,
        layer_types=layer_types,
    )
    assert error.where.endswith(": layer_types")
    assert error.expected.startswith("3 times sliding_attention or full_attention")


@pytest.mark.parametrize("window", [0, -5, 2**40, "8", 4.5])
def test_an_absurd_sliding_window_is_refused(tmp_path: Path, window: Any) -> None:
    error = _refusal(tmp_path, architectures=["MistralForCausalLM"], sliding_window=window)
    assert "sliding_window" in error.where


@pytest.mark.parametrize("first", ["2", 1.5, None, [1], -1])
def test_a_malformed_max_window_layers_is_refused(tmp_path: Path, first: Any) -> None:
    error = _refusal(
        tmp_path,
        architectures=["Qwen3ForCausalLM"],
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=first,
    )
    assert error.where.endswith(": max_window_layers")


@each_row("field", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", ["maybe", 7, [0]])
def test_a_switch_that_is_no_boolean_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    assert _refusal(tmp_path, **{field: value}).where.endswith(f": {field}")


@pytest.mark.parametrize("value", ["2", [1, "2"], -1, 1.5, [[1]], {"id": 2}, True])
def test_malformed_eos_ids_are_refused_by_the_file_that_has_them(
    tmp_path: Path, value: Any
) -> None:
    error = _refusal(tmp_path, eos_token_id=value)
    # The index where it is one of several.
    assert error.where.rpartition(": ")[2].startswith("eos_token_id")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        _read(tmp_path, eos_token_id=1)


def test_a_damaged_generation_config_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, set()),
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (2, [5, 6], {5, 6}),
        (2, {}, {2}),
    ],
)
def test_eos_ids_of_the_generation_config_come_first(
    tmp_path: Path, config: Any, generation: Any, expected: set[int]
) -> None:
    if generation is not None:
        content = {} if generation == {} else {"eos_token_id": generation}
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert _read(tmp_path, eos_token_id=config).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
    ],
)
def test_dtype_is_read_under_its_new_and_its_old_name(
    tmp_path: Path, changes: dict[str, str], expected: str
) -> None:
    assert _read(tmp_path, **changes).dtype == expected


def test_settings_that_are_left_out_take_the_values_of_transformers(tmp_path: Path) -> None:
    config = _read(tmp_path, num_key_value_heads=ABSENT, rms_norm_eps=ABSENT, rope_theta=ABSENT)
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (6, 8, 1e-6)
    assert (config.rope.rope_type, config.rope.rope_theta) == ("default", 10000.0)
    assert not config.tie_word_embeddings
    qwen3 = _read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)


@each_row(
    ("architecture", "changes", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None)),
        ("MistralForCausalLM", {"sliding_window": 8}, (8, 8, 8)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("MistralForCausalLM", {}, (4096, 4096, 4096)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (None,) * 3),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_sliding_windows_are_known_per_layer(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    config = _read(tmp_path, architectures=[architecture], **changes)
    assert config.sliding_windows == expected


def test_keys_that_do_not_change_the_forward_pass_are_skipped(tmp_path: Path) -> None:
    plain = _read(tmp_path)
    extra = {"initializer_range": 0.02, "use_cache": True, "_name_or_path": "x", "auto_map": {}}
    assert _read(tmp_path, **extra) == plain
