"""The service's weights: what is in memory is what is in the file, of a model or for a mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_side.provision import PROVISION_FILE, Holds, Provision, read_provision, write_provision
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import ModelError
from protocol.messages import FUSED_MODULES
from protocol.model.quantized import quantize_rows
from tests.kit.model import SIZES, make_model
from tests.kit.rows import each_row

CPU = torch.device("cpu")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GOOD = {"version": 1, "mask": "feature-rotation", "provision_id": "5a" * 32}


def _load(directory: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> ServiceWeights:
    return load_weights(directory, device=CPU, dtype=dtype, **settings)


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def _assert_equals_file(weights: ServiceWeights, tensors: dict[str, torch.Tensor]) -> int:
    """Compare every fused row with the file's own tensor; return how many biases there are."""
    assert weights.linears is not None
    assert list(weights.linears) == list(range(SIZES["num_hidden_layers"]))
    biases = 0
    for layer, operators in weights.linears.items():
        assert set(operators) == set(FUSED_MODULES)
        for operator, linear in operators.items():
            assert tuple(linear.rows) == FUSED_MODULES[operator]
            assert linear.weight.shape[0] == sum(s.stop - s.start for s in linear.rows.values())
            for module, rows in linear.rows.items():
                block = "self_attn" if module in ATTENTION else "mlp"
                name = f"model.layers.{layer}.{block}.{module}"
                stored = tensors[f"{name}.weight"]
                assert torch.equal(linear.weight[rows], stored.to(weights.dtype)), name
                if weights.integers is not None:
                    # From the file, and not from floats that were rounded.
                    integers, scale = quantize_rows(stored)
                    held = weights.integers[layer][operator]
                    assert torch.equal(held.weight[rows], integers), name
                    assert torch.equal(held.scale[rows], scale), name
                if (bias := tensors.get(f"{name}.bias")) is not None:
                    assert linear.bias is not None
                    assert torch.equal(linear.bias[rows], bias), name
                    biases += 1
                else:
                    assert linear.bias is None or not linear.bias[rows].any()
    return biases


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model(directory)
    return directory


@each_row(
    ("kind", "overrides", "dtype", "biases"),
    [
        ("llama", {}, torch.float32, 0),
        ("llama", {}, torch.bfloat16, 0),
        ("qwen2", {"tie_word_embeddings": True}, torch.float32, 9),
        ("llama", {"mlp_bias": True, "attention_bias": True}, torch.float32, 21),
    ],
)
def test_what_is_held_is_what_is_in_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    overrides: dict[str, Any],
    dtype: torch.dtype,
    biases: int,
) -> None:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, kind, **overrides)
    weights, tensors = _load(directory, dtype), _tensors(directory)
    assert _assert_equals_file(weights, tensors) == biases
    embedding = tensors["model.embed_tokens.weight"].to(dtype)
    head = tensors.get("lm_head.weight", embedding).to(dtype)
    assert weights.embedding is not None
    assert weights.lm_head is not None
    assert torch.equal(weights.embedding, embedding)
    assert torch.equal(weights.lm_head, head)
    assert (weights.lm_head is weights.embedding) == ("tie_word_embeddings" in overrides)
    assert {weights.embedding.dtype, weights.lm_head.dtype} == {dtype}
    # Norms are float32 under the names of the wire.
    expected = {"final_norm": tensors["model.norm.weight"]}
    for layer in range(SIZES["num_hidden_layers"]):
        for short in ("input_layernorm", "post_attention_layernorm"):
            expected[f"layer_{layer}_{short}"] = tensors[f"model.layers.{layer}.{short}.weight"]
    assert weights.norms.keys() == expected.keys()
    assert all(torch.equal(norm, expected[name]) for name, norm in weights.norms.items())
    assert {norm.dtype for norm in weights.norms.values()} == {torch.float32}


# ---------------------------------------------------------------- directories that a mask has made


def _provision(directory: Path, kind: str = "llama") -> Provision:
    """Make a directory as the TEE side provisions it: only config.json, linears and the marker."""
    make_model(directory, kind)
    linears = {name: t.clone() for name, t in _tensors(directory).items() if "_proj." in name}
    save_file(linears, directory / "model.safetensors")
    provision = Provision(mask="feature-rotation", provision_id="5a" * 32)
    write_provision(directory, provision)
    return provision


def test_a_damaged_provisioned_directory_is_refused(tmp_path: Path) -> None:
    _provision(tmp_path)
    with pytest.raises(ModelError, match="mask feature-rotation: got arithmetic int8, expected fl"):
        _load(tmp_path, arithmetic=("int8",))
    tensors, path = _tensors(tmp_path), tmp_path / "model.safetensors"
    up = "model.layers.1.mlp.up_proj"
    for changed in (
        {name: t for name, t in tensors.items() if name != f"{up}.weight"},
        tensors | {f"{up}.bias": torch.ones(96)},
    ):
        save_file(changed, path)
        with pytest.raises(ModelError, match="up_proj"):
            _load(tmp_path)
    save_file(tensors, path)
    _load(tmp_path)
    (tmp_path / PROVISION_FILE).unlink()
    with pytest.raises(ModelError, match=r"embed_tokens\.weight: got no such tensor"):
        _load(tmp_path)


def test_a_marker_is_read_as_it_was_written_and_never_overwritten(tmp_path: Path) -> None:
    assert read_provision(tmp_path) is None
    for holds in get_args(Holds):
        (tmp_path / PROVISION_FILE).unlink(missing_ok=True)
        provision = Provision(mask="a", provision_id="ab" * 32, holds=holds)
        write_provision(tmp_path, provision)
        assert read_provision(tmp_path) == provision
    with pytest.raises(FileExistsError):
        write_provision(tmp_path, Provision(mask="x", provision_id="cd" * 32))
    assert read_provision(tmp_path) == provision
    (tmp_path / PROVISION_FILE).write_text(json.dumps(GOOD))
    found = read_provision(tmp_path)
    assert found == Provision(mask="feature-rotation", provision_id="5a" * 32, holds="linears")
    (tmp_path / PROVISION_FILE).unlink()
    (tmp_path / PROVISION_FILE).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no such file"):
        read_provision(tmp_path)


@each_row(
    ("change", "field"),
    [
        *((text, "") for text in ("", "{", "[]", "null")),
        *(({"version": value}, "version") for value in (..., 2, True, "1", 1.0)),
        *(({"mask": value}, "mask") for value in (..., "", "a b", None)),
        *(({"provision_id": value}, "provision_id") for value in (..., "0F" * 32, "0f" * 31, 5)),
        *(({"holds": value}, "holds") for value in ("everything", None)),
        ({"key": "canary"}, "key"),
    ],
)
def test_a_damaged_marker_is_refused(tmp_path: Path, change: Any, field: str) -> None:
    """`...` stands for a field that is not there."""
    path = tmp_path / PROVISION_FILE
    if isinstance(change, str):
        path.write_text(change)
    else:
        fields = {name: value for name, value in (GOOD | change).items() if value is not ...}
        path.write_text(json.dumps(fields))
    with pytest.raises(ModelError) as info:
        read_provision(tmp_path)
    assert info.value.where == (f"{path}: {field}" if field else str(path))
