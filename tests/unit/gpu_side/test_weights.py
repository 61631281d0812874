"""Tests of the service's weights: what is in memory is what is in the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_side.provision import PROVISION_FILE, Provision, write_provision
from gpu_side.weights import ServiceWeights, check_integers, load_weights
from protocol.errors import KernelError, ModelError
from protocol.integer import MAX_IN_FEATURES
from protocol.messages import FUSED_MODULES, Arithmetic, LinearOperator
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.identity import linear_digest
from protocol.model.quantized import quantize_rows
from protocol.model.weights import FusedLinear
from tests.kit.model import SIZES, make_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _load(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    arithmetic: tuple[Arithmetic, ...] = ("float",),
) -> ServiceWeights:
    return load_weights(directory, device=torch.device("cpu"), dtype=dtype, arithmetic=arithmetic)


def _float(weights: ServiceWeights) -> dict[int, dict[LinearOperator, FusedLinear]]:
    assert weights.linears is not None
    return weights.linears


def _assert_equals_file(weights: ServiceWeights, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Compare every fused row with the file's own tensor; return the names compared."""
    seen = set()
    for layer, operators in _float(weights).items():
        assert set(operators) == set(FUSED_MODULES)
        for operator, linear in operators.items():
            assert tuple(linear.rows) == FUSED_MODULES[operator]
            total = 0
            for module, rows in linear.rows.items():
                block = "self_attn" if module in ATTENTION else "mlp"
                name = f"model.layers.{layer}.{block}.{module}"
                expected = tensors[f"{name}.weight"].to(weights.dtype)
                assert torch.equal(linear.weight[rows], expected), name
                seen.add(f"{name}.weight")
                total += expected.shape[0]
                if f"{name}.bias" in tensors:
                    assert linear.bias is not None
                    assert torch.equal(linear.bias[rows], tensors[f"{name}.bias"])
                    seen.add(f"{name}.bias")
                elif linear.bias is not None:
                    assert not linear.bias[rows].any()
            assert linear.weight.shape[0] == total
    return seen


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model(directory)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_rows_equal_the_files_tensors(llama: Path, dtype: torch.dtype) -> None:
    tensors = load_file(llama / "model.safetensors")
    weights = _load(llama, dtype)
    seen = _assert_equals_file(weights, tensors)
    assert len(seen) == 7 * SIZES["num_hidden_layers"]
    assert weights.embedding is not None
    assert weights.lm_head is not None
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(weights.lm_head, tensors["lm_head.weight"].to(dtype))
    assert weights.lm_head is not weights.embedding
    assert {weights.embedding.dtype, _float(weights)[0]["o_proj"].weight.dtype} == {dtype}


def test_norms_are_float32_under_the_names_of_the_wire(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    weights = _load(llama, torch.bfloat16)
    expected = {"final_norm": tensors["model.norm.weight"]}
    for layer in range(SIZES["num_hidden_layers"]):
        for short in ("input_layernorm", "post_attention_layernorm"):
            expected[f"layer_{layer}_{short}"] = tensors[f"model.layers.{layer}.{short}.weight"]
    assert set(weights.norms) == set(expected)
    for name, norm in expected.items():
        assert weights.norms[name].dtype == torch.float32
        assert torch.equal(weights.norms[name], norm), name


def test_qwen2_biases_are_loaded(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen2")
    weights = _load(tmp_path)
    seen = _assert_equals_file(weights, load_file(tmp_path / "model.safetensors"))
    assert len([name for name in seen if name.endswith(".bias")]) == 9
    assert _float(weights)[0]["o_proj"].bias is None
    assert _float(weights)[0]["down_proj"].bias is None


def test_partly_biased_group_has_zeros_elsewhere(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", mlp_bias=True, attention_bias=True)
    weights = _load(tmp_path)
    seen = _assert_equals_file(weights, load_file(tmp_path / "model.safetensors"))
    assert len([name for name in seen if name.endswith(".bias")]) == 21


def test_sharded_weights_equal_those_of_one_file(tmp_path: Path, llama: Path) -> None:
    model = make_model(tmp_path / "saved")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    shards = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    weights = _load(tmp_path / "sharded")
    assert len(_assert_equals_file(weights, tensors)) == 21
    assert weights.model_digest == _load(llama).model_digest
    assert weights.linear_digest == _load(llama).linear_digest


def test_tied_embedding_is_one_tensor(tmp_path: Path) -> None:
    make_model(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    weights = _load(tmp_path)
    assert weights.lm_head is weights.embedding


def test_weight_bytes_counts_every_matrix_once(tmp_path: Path, llama: Path) -> None:
    make_model(tmp_path, tie_word_embeddings=True)
    embedding_bytes = SIZES["vocab_size"] * SIZES["hidden_size"] * 4
    tensors = load_file(llama / "model.safetensors")
    matrices = sum(t.nbytes for name, t in tensors.items() if "norm" not in name)
    assert _load(llama).weight_bytes == matrices
    assert _load(llama, torch.float16).weight_bytes == matrices // 2
    assert _load(tmp_path).weight_bytes == matrices - embedding_bytes


def test_weight_bytes_counts_integers_and_their_scales(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    linears = [t for name, t in tensors.items() if "_proj." in name]
    assert len(linears) == 21
    floats = sum(t.nbytes for t in linears)
    # The LM head has integers beside its floats: RingLMHead and LMHead are two methods.
    held = [*linears, tensors["lm_head.weight"]]
    integers = sum(t.numel() + 4 * t.shape[0] for t in held)
    alone = _load(llama).weight_bytes
    assert _load(llama, arithmetic=("int8",)).weight_bytes == alone - floats + integers
    assert _load(llama, arithmetic=("float", "int8")).weight_bytes == alone + integers


@pytest.mark.parametrize("arithmetic", [("float",), ("int8",), ("float", "int8")])
def test_what_is_asked_for_is_held_and_nothing_else(
    llama: Path, arithmetic: tuple[Arithmetic, ...]
) -> None:
    weights = _load(llama, arithmetic=arithmetic)
    assert weights.arithmetic == arithmetic
    assert (weights.linears is not None) is ("float" in arithmetic)
    assert (weights.integers is not None) is ("int8" in arithmetic)
    assert (weights.lm_head_int8 is not None) is ("int8" in arithmetic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_come_from_the_file_and_not_from_rounded_floats(
    llama: Path, dtype: torch.dtype
) -> None:
    tensors = load_file(llama / "model.safetensors")
    weights = _load(llama, dtype, ("float", "int8"))
    assert weights.integers is not None
    assert len(weights.integers) == SIZES["num_hidden_layers"]
    for layer, operators in weights.integers.items():
        assert set(operators) == set(FUSED_MODULES)
        for linear in operators.values():
            for module, rows in linear.rows.items():
                block = "self_attn" if module in ATTENTION else "mlp"
                stored = tensors[f"model.layers.{layer}.{block}.{module}.weight"]
                integers, scale = quantize_rows(stored)
                assert torch.equal(linear.weight[rows], integers)
                assert torch.equal(linear.scale[rows], scale)


def _provision(directory: Path, kind: str = "llama") -> Provision:
    """Make a directory as the TEE side provisions it: only config.json, linears and the marker."""
    make_model(directory, kind)
    tensors = load_file(directory / "model.safetensors")
    linears = {name: t.clone() for name, t in tensors.items() if "_proj." in name}
    save_file(linears, directory / "model.safetensors")
    provision = Provision(mask="feature-rotation", provision_id="5a" * 32)
    write_provision(directory, provision)
    return provision


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("asked", [("float",), ("float", "int8")])
def test_a_provisioned_directory_has_float_linears_and_nothing_else(
    tmp_path: Path, kind: str, asked: tuple[Arithmetic, ...]
) -> None:
    provision = _provision(tmp_path, kind)
    weights = _load(tmp_path, arithmetic=asked)
    _assert_equals_file(weights, load_file(tmp_path / "model.safetensors"))
    assert weights.provision == provision
    assert weights.arithmetic == ("float",)
    assert (weights.embedding, weights.lm_head, weights.integers) == (None, None, None)
    assert weights.lm_head_int8 is None
    assert weights.norms == {}
    assert weights.model_digest == provision.provision_id
    assert weights.linear_digest == linear_digest(read_config(tmp_path), Checkpoint(tmp_path))
    assert weights.weight_bytes == sum(
        t.nbytes for t in load_file(tmp_path / "model.safetensors").values()
    )


def test_integers_of_a_provisioned_directory_are_refused(tmp_path: Path) -> None:
    _provision(tmp_path)
    with pytest.raises(ModelError, match="mask feature-rotation: got arithmetic int8, expected fl"):
        _load(tmp_path, arithmetic=("int8",))


@pytest.mark.parametrize("change", ["missing", "bias", "marker"])
def test_a_damaged_provisioned_directory_is_refused(tmp_path: Path, change: str) -> None:
    _provision(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "bias":
        tensors["model.layers.1.mlp.up_proj.bias"] = torch.ones(96)
    else:
        (tmp_path / PROVISION_FILE).write_text("{}")
    save_file(tensors, path)
    expected = PROVISION_FILE if change == "marker" else "up_proj"
    with pytest.raises(ModelError, match=expected):
        _load(tmp_path)


def test_a_directory_without_embedding_and_without_marker_is_refused(tmp_path: Path) -> None:
    _provision(tmp_path)
    (tmp_path / PROVISION_FILE).unlink()
    with pytest.raises(ModelError, match=r"embed_tokens\.weight: got no such tensor"):
        _load(tmp_path)


def test_a_model_too_wide_for_int8_products_is_refused(llama: Path) -> None:
    config = read_config(llama)
    check_integers(config, torch.device("cpu"))
    wide = config.model_copy(update={"intermediate_size": MAX_IN_FEATURES + 1})
    with pytest.raises(KernelError, match=f"got {MAX_IN_FEATURES + 1} in_features"):
        check_integers(wide, torch.device("cpu"))


def test_weights_do_not_alias_the_file(tmp_path: Path) -> None:
    make_model(tmp_path)
    weights = _load(tmp_path)
    assert weights.embedding is not None
    before = _float(weights)[0]["qkv_proj"].weight.clone(), weights.embedding.clone()
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(_float(weights)[0]["qkv_proj"].weight, before[0])
    assert torch.equal(weights.embedding, before[1])


def test_progress_is_told_after_every_layer(llama: Path) -> None:
    told: list[tuple[int, int]] = []
    load_weights(
        llama,
        device=torch.device("cpu"),
        dtype=torch.float32,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("name", "replacement", "text"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "got no such tensor, expected [96, 48]"),
        ("lm_head.weight", None, "got no such tensor, expected [320, 48]"),
        ("model.norm.weight", None, "got no such tensor, expected [48]"),
        ("model.norm.weight", torch.ones(47), "got shape [47], expected [48]"),
        (
            "model.layers.0.self_attn.q_proj.weight",
            torch.zeros(48, 96),
            "got shape [48, 96], expected [96, 48]",
        ),
        ("model.norm.weight", torch.ones(48, dtype=torch.int64), "dtype: got 'I64'"),
        ("model.layers.0.mlp.up_proj.bias", torch.ones(96), "config.json does not explain"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, replacement: torch.Tensor | None, text: str
) -> None:
    make_model(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    if replacement is not None:
        tensors[name] = replacement
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, path)
    with pytest.raises(ModelError) as info:
        _load(tmp_path)
    assert name in info.value.where
    assert text in str(info.value)


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "..", 5])
def test_index_that_points_elsewhere_is_refused(tmp_path: Path, file: object) -> None:
    model = make_model(tmp_path / "saved")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    path = tmp_path / "sharded" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match="expected the name of a file in the same directory"):
        _load(tmp_path / "sharded")
