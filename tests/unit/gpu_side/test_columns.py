"""A service that holds a part of every weight's output columns: what it loads, says and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_side.devices import NullDevice
from gpu_side.handler import RequestHandler
from gpu_side.kernels import NullWeights
from gpu_side.provision import Provision, write_provision
from gpu_side.queues import QueueLimits
from gpu_side.served_model import read_served_model
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import ErrorCode, ProtocolError, SettingsError
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    Request,
    RingLinearRequest,
    RingLMHeadRequest,
    SeededRingLinearRequest,
    TensorReply,
)
from protocol.model.columns import Columns, part_of
from protocol.seed import SEED_SHAPE
from protocol.tensors import WireTensor, from_torch, to_torch
from tests.kit.model import SIZES, make_model
from tests.kit.rows import each_row

MIB = 2**20
HIDDEN, VOCAB = SIZES["hidden_size"], SIZES["vocab_size"]

# Sizes that three parts do not divide, and those of a model with biases, or one embedding for both.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "biased": {"kind": "llama", "mlp_bias": True, "attention_bias": True},
    "uneven": {"kind": "llama", "vocab_size": 331, "intermediate_size": 97},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, settings in MODELS.items():
        found[name] = tmp_path_factory.mktemp(name)
        make_model(found[name], **{"kind": name, **settings})
    return found


def _load(directory: Path, columns: Columns = (0, 1), **settings: Any) -> ServiceWeights:
    device = torch.device("cpu")
    return load_weights(directory, device=device, dtype=torch.float32, columns=columns, **settings)


def _output(handler: RequestHandler, request: Request) -> torch.Tensor:
    with torch.inference_mode():
        reply, work = handler.apply(request)
    assert isinstance(reply, TensorReply)
    assert work is None
    return to_torch(reply.output)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_every_weight_are_the_weight(
    models: dict[str, Path], name: str, parts: int
) -> None:
    whole = _load(models[name])
    some = [_load(models[name], (part, parts)) for part in range(parts)]
    assert whole.linears
    assert whole.integers
    assert whole.lm_head_int8
    for layer in whole.held_layers:
        for operator, names in FUSED_MODULES.items():
            fused, integers = whole.linears[layer][operator], whole.integers[layer][operator]
            for module in names:
                rows = fused.rows[module]
                theirs = [one.linears[layer][operator] for one in some if one.linears]
                assert torch.equal(
                    torch.cat([one.weight[one.rows[module]] for one in theirs]), fused.weight[rows]
                )
                biases = [one.bias[one.rows[module]] for one in theirs if one.bias is not None]
                assert len(biases) == (0 if fused.bias is None else parts)
                if fused.bias is not None:
                    assert torch.equal(torch.cat(biases), fused.bias[rows])
                ints = [one.integers[layer][operator] for one in some if one.integers]
                assert torch.equal(
                    torch.cat([one.weight[one.rows[module]] for one in ints]), integers.weight[rows]
                )
                assert torch.equal(
                    torch.cat([one.scale[one.rows[module]] for one in ints]), integers.scale[rows]
                )
    heads = [one.lm_head_int8 for one in some if one.lm_head_int8]
    assert torch.equal(torch.cat([head.weight for head in heads]), whole.lm_head_int8.weight)
    assert torch.equal(torch.cat([head.scale for head in heads]), whole.lm_head_int8.scale)
    for tensor in ("embedding", "lm_head"):
        found = [getattr(one, tensor) for one in some]
        assert torch.equal(torch.cat(found), getattr(whole, tensor))
    for one in some:
        assert (one.model_digest, one.linear_digest) == (whole.model_digest, whole.linear_digest)
        assert (one.lm_head is one.embedding) == whole.config.tie_word_embeddings


@each_row("tied", [False, True])
def test_a_part_takes_its_part_of_the_memory(tmp_path: Path, tied: bool) -> None:
    make_model(tmp_path / str(tied), tie_word_embeddings=tied)
    whole = _load(tmp_path / str(tied)).weight_bytes
    some = [_load(tmp_path / str(tied), (part, 2)).weight_bytes for part in range(2)]
    assert sum(some) == whole
    assert max(some) <= whole * (0.5 + 0.05)


def _requests() -> list[tuple[Request, tuple[int, ...]]]:
    """Return requests that a part answers, and the sizes of the modules in their outputs."""
    floats, ring = torch.randn(3, HIDDEN), torch.randint(-(2**31), 2**31, (3, HIDDEN))
    rows, elements = from_torch(floats), from_torch(ring.to(torch.int32))
    seed = WireTensor("int32", SEED_SHAPE, bytes(range(32)))
    qkv, gate_up = FUSED_MODULES["qkv_proj"], FUSED_MODULES["gate_up_proj"]
    down = from_torch(torch.randn(1, 96))
    kv_proj = 32
    return [
        (
            LinearRequest(layer_idx=1, module_names=qkv, hidden_states=rows),
            (96, kv_proj, kv_proj),
        ),
        (LinearRequest(layer_idx=0, module_names=gate_up, hidden_states=rows), (96, 96)),
        (LinearRequest(layer_idx=2, module_names=("down_proj",), hidden_states=down), (HIDDEN,)),
        (LinearRequest(layer_idx=2, module_names=("k_proj",), hidden_states=rows), (kv_proj,)),
        (
            RingLinearRequest(layer_idx=1, module_names=qkv, elements=elements),
            (96, kv_proj, kv_proj),
        ),
        (LMHeadRequest(hidden_states=rows), (VOCAB,)),
        (RingLMHeadRequest(elements=elements), (VOCAB,)),
        (
            SeededRingLinearRequest(
                layer_idx=0, module_names=gate_up, rows=2, columns=HIDDEN, seed=seed
            ),
            (96, 96),
        ),
    ]


@pytest.mark.parametrize("parts", [2, 3])
def test_a_part_answers_its_columns_of_each_module(models: dict[str, Path], parts: int) -> None:
    whole = RequestHandler(_load(models["llama"]), MIB)
    some = [RequestHandler(_load(models["llama"], (part, parts)), MIB) for part in range(parts)]
    for request, sizes in _requests():
        expected = _output(whole, request).split(sizes, dim=-1)
        for part, handler in enumerate(some):
            columns = [e[..., part_of(e.shape[-1], part, parts)] for e in expected]
            found = _output(handler, request)
            assert found.shape == (*found.shape[:-1], sum(c.shape[-1] for c in columns))
            if found.dtype == torch.int32:
                assert torch.equal(found, torch.cat(columns, dim=-1))
            else:
                torch.testing.assert_close(found, torch.cat(columns, dim=-1))


def test_rows_of_the_embedding_add_up(models: dict[str, Path]) -> None:
    parts = 3
    ids = from_torch(torch.tensor([[0, VOCAB - 1, VOCAB // 3], [VOCAB // 3 - 1, 7, 200]]))
    request = EmbeddingRequest(input_ids=ids, dtype="float32")
    expected = _output(RequestHandler(_load(models["llama"]), MIB), request)
    found = []
    for part in range(parts):
        handler = RequestHandler(_load(models["llama"], (part, parts)), MIB)
        found.append(_output(handler, request))
        inside = part_of(VOCAB, part, parts)
        elsewhere = [not inside.start <= one < inside.stop for one in to_torch(ids).flatten()]
        assert not found[-1].view(-1, HIDDEN)[elsewhere].any()
        outside = EmbeddingRequest(input_ids=from_torch(torch.tensor([VOCAB])), dtype="float32")
        with pytest.raises(ProtocolError, match="outside the vocabulary"):
            handler.apply(outside)
    assert torch.equal(sum(found[1:], found[0]), expected)


def test_a_part_answers_what_needs_no_weight_as_a_whole(models: dict[str, Path]) -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    handler = RequestHandler(_load(models["llama"], (1, 2)), MIB)
    found = _output(handler, MatmulRequest(a=from_torch(a), b=from_torch(b)))
    torch.testing.assert_close(found, a @ b)


def test_a_part_says_which_it_is(models: dict[str, Path]) -> None:
    for columns in [(0, 1), (1, 2)]:
        reply, _ = RequestHandler(_load(models["llama"], columns), MIB).apply(InitRequest())
        assert isinstance(reply, InitReply)
        assert (reply.columns, reply.ranks) == (columns, 1)
        assert reply.config.hidden_size == HIDDEN


def test_a_null_device_answers_the_part_of_it(models: dict[str, Path]) -> None:
    held, _ = read_served_model(models["llama"], weights=False, columns=(2, 3))
    handler = RequestHandler(NullWeights(held, NullDevice(), torch.float32), MIB, QueueLimits())
    for request, sizes in _requests():
        parts = [part_of(size, 2, 3) for size in sizes]
        assert _output(handler, request).shape[-1] == sum(part.stop - part.start for part in parts)


def test_a_part_of_a_provisioned_directory(tmp_path: Path) -> None:
    make_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    linears = {name: t.clone() for name, t in tensors.items() if "_proj." in name}
    save_file(linears, tmp_path / "model.safetensors")
    write_provision(tmp_path, Provision(mask="feature-rotation", provision_id="5a" * 32))
    request, sizes = _requests()[0]
    expected = _output(RequestHandler(_load(tmp_path), MIB), request).split(sizes, dim=-1)
    for part in range(2):
        weights = _load(tmp_path, (part, 2))
        assert weights.provision is not None
        found = _output(RequestHandler(weights, MIB), request)
        columns = [e[..., part_of(e.shape[-1], part, 2)] for e in expected]
        torch.testing.assert_close(found, torch.cat(columns, dim=-1))
        with pytest.raises(ProtocolError) as refused:
            RequestHandler(weights, MIB).apply(_requests()[5][0])
        assert refused.value.code is ErrorCode.UNAVAILABLE


def test_layers_and_columns_together(models: dict[str, Path]) -> None:
    whole, part = (
        _load(models["llama"], layers=(1, 1)),
        _load(models["llama"], (1, 2), layers=(1, 1)),
    )
    assert part.linears
    assert whole.linears
    assert set(part.linears) == {1}
    assert (part.embedding, part.lm_head) == (None, None)
    assert abs(part.weight_bytes - whole.weight_bytes / 2) <= whole.weight_bytes * 0.05


@each_row(
    ("columns", "text"),
    [
        ((2, 2), "columns to hold: got part 2 of 2, expected 0 to 1"),
        ((-1, 2), "columns to hold: got part -1 of 2, expected 0 to 1"),
        ((0, 0), "columns to hold: got 0 parts, expected 1 to 32"),
        # As many as k_proj has outputs.
        ((0, 33), "columns to hold: got 33 parts, expected 1 to 32"),
    ],
)
def test_parts_that_there_are_not(models: dict[str, Path], columns: Columns, text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        _load(models["llama"], columns)
    assert str(refused.value) == text
