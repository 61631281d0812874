"""Tests of what the service computes, and of everything that it refuses to compute."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gpu_side.handler import RequestHandler
from gpu_side.provision import Provision, write_provision
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    Arithmetic,
    EmbeddingRequest,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    RingLinearRequest,
    RingLMHeadRequest,
    SeededRingLinearRequest,
    TensorReply,
)
from protocol.model.quantized import quantize_rows
from protocol.seed import expand
from protocol.tensors import ITEMSIZE, WireTensor, from_torch, short_name, to_torch
from tests.kit.model import SIZES, make_model
from tests.kit.rows import each_row

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SINGLE: tuple[ModuleName, ...] = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
LIMIT = 2**26
VOCAB, HIDDEN = SIZES["vocab_size"], SIZES["hidden_size"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(directory: Path) -> transformers.PreTrainedModel:
    return make_model(directory, attention_bias=True)


@pytest.fixture(scope="module")
def weights(directory: Path, model: transformers.PreTrainedModel) -> ServiceWeights:
    return load_weights(directory, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def operators(weights: ServiceWeights) -> RequestHandler:
    return RequestHandler(weights, LIMIT)


def _apply(operators: RequestHandler, request: Request) -> torch.Tensor:
    reply = operators.apply(request)[0]
    assert isinstance(reply, TensorReply)
    return to_torch(reply.output)


def _refused(operators: RequestHandler, request: Request) -> ProtocolError:
    with pytest.raises(ProtocolError) as info:
        operators.apply(request)
    return info.value


def _linear(hidden: torch.Tensor, *modules: ModuleName, layer: int = 1) -> LinearRequest:
    return LinearRequest(layer_idx=layer, module_names=modules, hidden_states=from_torch(hidden))


def _ring(elements: torch.Tensor, *modules: ModuleName, layer: int = 1) -> RingLinearRequest:
    return RingLinearRequest(layer_idx=layer, module_names=modules, elements=from_torch(elements))


def _seeded(
    rows: int = 2,
    columns: int = HIDDEN,
    *modules: ModuleName,
    seed: bytes = bytes(32),
    dtype: str = "int32",
) -> SeededRingLinearRequest:
    return SeededRingLinearRequest(
        layer_idx=1,
        module_names=modules or ("q_proj",),
        rows=rows,
        columns=columns,
        seed=WireTensor(dtype, (len(seed) // ITEMSIZE[dtype],), seed),
    )


def _ring_head(elements: torch.Tensor) -> RingLMHeadRequest:
    return RingLMHeadRequest(elements=from_torch(elements))


def _uniform(*shape: int) -> torch.Tensor:
    """Elements as a pad leaves them."""
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def _module(model: transformers.PreTrainedModel, layer: int, name: str) -> torch.nn.Module:
    block = model.model.layers[layer]
    return getattr(block.self_attn, name, None) or getattr(block.mlp, name)


def _embedding(ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> EmbeddingRequest:
    return EmbeddingRequest.model_validate(
        {"input_ids": from_torch(ids), "dtype": short_name(dtype)}
    )


def _matmul(a: torch.Tensor, b: torch.Tensor) -> MatmulRequest:
    return MatmulRequest(a=from_torch(a), b=from_torch(b))


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]


@torch.no_grad()
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SINGLE)
def test_one_module_equals_torch(
    operators: RequestHandler,
    model: transformers.PreTrainedModel,
    name: ModuleName,
    dtype: torch.dtype,
) -> None:
    module = _module(model, 1, name)
    hidden = torch.randn(2, 3, module.in_features).to(dtype)
    output = _apply(operators, _linear(hidden, name))
    assert output.dtype == dtype
    torch.testing.assert_close(
        output.float(), module(hidden.float()), rtol=_tolerance(dtype), atol=_tolerance(dtype)
    )


@torch.no_grad()
@pytest.mark.parametrize("names", [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")])
def test_fused_modules_stand_side_by_side(
    operators: RequestHandler,
    model: transformers.PreTrainedModel,
    names: tuple[ModuleName, ...],
) -> None:
    hidden = torch.randn(5, HIDDEN)
    output = _apply(operators, _linear(hidden, *names, layer=2))
    expected = torch.cat([_module(model, 2, name)(hidden) for name in names], dim=-1)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("names", [("q_proj",), ("o_proj",), ("q_proj", "k_proj", "v_proj")])
def test_linear_without_bias(
    operators: RequestHandler,
    model: transformers.PreTrainedModel,
    names: tuple[ModuleName, ...],
) -> None:
    modules = [_module(model, 1, name) for name in names]
    hidden = torch.randn(3, modules[0].in_features)
    request = _linear(hidden, *names).model_copy(update={"bias": False})
    expected = torch.cat([torch.nn.functional.linear(hidden, m.weight) for m in modules], dim=-1)
    torch.testing.assert_close(_apply(operators, request), expected, rtol=1e-5, atol=1e-5)
    with_bias = _apply(operators, _linear(hidden, *names))
    biases = torch.cat([m.bias for m in modules])
    torch.testing.assert_close(with_bias, expected + biases, rtol=1e-5, atol=1e-5)


RING_MODULES: list[tuple[ModuleName, ...]] = [
    *[(name,) for name in SINGLE],
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
]


@torch.no_grad()
@pytest.mark.each_value
@pytest.mark.parametrize("names", RING_MODULES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 1, 3)])
def test_ring_linear_is_the_product_modulo_the_ring(
    operators: RequestHandler,
    model: transformers.PreTrainedModel,
    names: tuple[ModuleName, ...],
    shape: tuple[int, ...],
) -> None:
    weight = torch.cat([quantize_rows(_module(model, 2, name).weight)[0] for name in names])
    elements = _uniform(*shape, weight.shape[1])
    product = _apply(operators, _ring(elements, *names, layer=2))
    exact = elements.long() @ weight.long().t()
    assert product.dtype == torch.int32
    assert torch.equal(product, ((exact + 2**31) % 2**32 - 2**31).to(torch.int32))


def test_ring_linear_is_linear_in_the_ring(operators: RequestHandler) -> None:
    """What every mask of the ring relies on: the pad comes off, whatever wrapped on the way."""
    value, pad = _uniform(4, HIDDEN) // 2**14, _uniform(4, HIDDEN)
    names: tuple[ModuleName, ...] = ("gate_proj", "up_proj")
    masked = _apply(operators, _ring(value - pad, *names))
    unmasked = masked + _apply(operators, _ring(pad, *names))
    assert torch.equal(unmasked, _apply(operators, _ring(value, *names)))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_ring_lm_head_is_the_product_modulo_the_ring(
    tmp_path: Path, shape: tuple[int, ...], tied: bool
) -> None:
    model = make_model(tmp_path, tie_word_embeddings=tied)
    served = RequestHandler(
        load_weights(
            tmp_path, device=torch.device("cpu"), dtype=torch.float32, arithmetic=("int8",)
        ),
        LIMIT,
    )
    elements = _uniform(*shape, HIDDEN)
    product = _apply(served, _ring_head(elements))
    exact = elements.long() @ quantize_rows(model.lm_head.weight.detach())[0].long().t()
    assert product.dtype == torch.int32
    assert torch.equal(product, ((exact + 2**31) % 2**32 - 2**31).to(torch.int32))


@torch.no_grad()
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 3)])
def test_embedding_equals_torch(
    operators: RequestHandler,
    model: transformers.PreTrainedModel,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    ids = torch.randint(0, VOCAB, shape)
    ids.view(-1)[0], ids.view(-1)[-1] = 0, VOCAB - 1
    output = _apply(operators, _embedding(ids, dtype))
    assert torch.equal(output, model.model.embed_tokens(ids).to(dtype))


@torch.no_grad()
@pytest.mark.parametrize("dtype", FLOATS)
def test_lm_head_equals_torch(
    operators: RequestHandler, model: transformers.PreTrainedModel, dtype: torch.dtype
) -> None:
    hidden = torch.randn(2, 3, HIDDEN).to(dtype)
    output = _apply(operators, LMHeadRequest(hidden_states=from_torch(hidden)))
    assert output.dtype == dtype
    torch.testing.assert_close(
        output.float(),
        model.lm_head(hidden.float()),
        rtol=_tolerance(dtype),
        atol=_tolerance(dtype),
    )


@pytest.mark.parametrize("dtype", FLOATS)
@each_row(
    ("a", "b"),
    [
        ((2, 3), (3, 4)),
        ((5, 2, 3), (5, 3, 4)),
        ((1, 6, 2, 3), (1, 6, 3, 4)),
        ((5, 2, 3), (3, 4)),
        ((2, 3), (5, 3, 4)),
        ((2, 1, 2, 3), (1, 6, 3, 4)),
        ((7, 2, 3), (2, 1, 3, 4)),
        ((1, 1), (1, 1)),
    ],
)
def test_matmul_broadcasts_like_torch(
    operators: RequestHandler, a: tuple[int, ...], b: tuple[int, ...], dtype: torch.dtype
) -> None:
    left, right = torch.randn(a).to(dtype), torch.randn(b).to(dtype)
    output = _apply(operators, _matmul(left, right))
    expected = torch.matmul(left.float(), right.float()).to(dtype)
    assert (output.dtype, output.shape) == (dtype, expected.shape)
    torch.testing.assert_close(output, expected, rtol=_tolerance(dtype), atol=_tolerance(dtype))


@torch.no_grad()
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,)])
def test_one_row_gives_the_same_whether_or_not_it_is_multiplied_twice(
    directory: Path,
    model: transformers.PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    twice: bool,
) -> None:
    capabilities = {"avx512_bf16": twice}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    counted: list[int] = []
    held = load_weights(directory, device=torch.device("cpu"), dtype=torch.bfloat16)
    operators = RequestHandler(held, LIMIT)

    def count(hidden: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        counted.append(hidden.numel() // HIDDEN)
        return torch.nn.functional.linear(hidden, *rest)

    monkeypatch.setattr("gpu_side.kernels.linear", count)
    hidden = torch.randn(*shape, HIDDEN).bfloat16()
    output = _apply(operators, _linear(hidden, "gate_proj", "up_proj"))
    head = _apply(operators, LMHeadRequest(hidden_states=from_torch(hidden)))
    assert (output.shape, head.shape) == ((*shape, 192), (*shape, VOCAB))
    assert counted == ([2, 2] if twice or shape == (2,) else [1, 1])
    block = model.model.layers[1].mlp
    expected = torch.cat([block.gate_proj(hidden.float()), block.up_proj(hidden.float())], dim=-1)
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(head.float(), model.lm_head(hidden.float()), rtol=2e-2, atol=5e-2)


def test_one_row_of_float32_is_multiplied_once(
    operators: RequestHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Size] = []

    def look(hidden: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        seen.append(hidden.shape)
        return torch.nn.functional.linear(hidden, *rest)

    monkeypatch.setattr("gpu_side.kernels.linear", look)
    _apply(operators, _linear(torch.randn(1, HIDDEN), "q_proj"))
    assert seen == [(1, HIDDEN)]


def test_init_says_what_is_there(
    operators: RequestHandler, model: transformers.PreTrainedModel
) -> None:
    reply = operators.apply(InitRequest())[0]
    assert isinstance(reply, InitReply)
    assert reply.config.model_dump() == {
        "num_layers": 3,
        "hidden_size": 48,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    rotary = model.model.rotary_emb
    torch.testing.assert_close(to_torch(reply.rotary_emb_params.inv_freq), rotary.inv_freq)
    assert reply.rotary_emb_params.attention_scaling == rotary.attention_scaling
    assert len(reply.norm_weights) == 2 * 3 + 1
    final = reply.norm_weights["final_norm"]
    assert torch.equal(to_torch(final.weight), model.model.norm.weight)
    assert final.eps == model.config.rms_norm_eps
    assert reply.arithmetic == ("float", "int8")
    assert reply.provision_id is None


@pytest.mark.parametrize("arithmetic", [("float",), ("int8",), ("float", "int8")])
def test_what_is_not_held_is_unavailable(
    directory: Path, model: transformers.PreTrainedModel, arithmetic: tuple[Arithmetic, ...]
) -> None:
    held = load_weights(
        directory, device=torch.device("cpu"), dtype=torch.float32, arithmetic=arithmetic
    )
    operators = RequestHandler(held, LIMIT)
    reply = operators.apply(InitRequest())[0]
    assert isinstance(reply, InitReply)
    assert reply.arithmetic == arithmetic
    cases: list[tuple[Arithmetic, Request, str]] = [
        ("float", _linear(torch.zeros(1, HIDDEN), "q_proj"), "float weights"),
        ("int8", _ring(_uniform(1, HIDDEN), "q_proj"), "int8 weights"),
        ("int8", _ring_head(_uniform(1, HIDDEN)), "int8 weights"),
    ]
    for kind, request, needed in cases:
        if kind in arithmetic:
            _apply(operators, request)
            continue
        error = _refused(operators, request)
        assert error.code is ErrorCode.UNAVAILABLE
        assert str(error) == (
            f"{request.method}: got a request that needs {needed}, expected one that"
            f" {arithmetic[0]} linear weights can answer"
        )
    # These two are float whatever the linears are.
    _apply(operators, _embedding(torch.tensor([1])))
    _apply(operators, LMHeadRequest(hidden_states=from_torch(torch.zeros(1, HIDDEN))))


@pytest.fixture(scope="module")
def provisioned(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> RequestHandler:
    copy = tmp_path_factory.mktemp("provisioned")
    shutil.copy(directory / "config.json", copy)
    tensors = load_file(directory / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "_proj." in n}, copy / "model.safetensors")
    write_provision(copy, Provision(mask="feature-rotation", provision_id="5a" * 32))
    held = load_weights(copy, device=torch.device("cpu"), dtype=torch.float32)
    return RequestHandler(held, LIMIT)


def test_init_of_a_provisioned_directory(
    model: transformers.PreTrainedModel, operators: RequestHandler, provisioned: RequestHandler
) -> None:
    reply = provisioned.apply(InitRequest())[0]
    own = operators.apply(InitRequest())[0]
    assert isinstance(reply, InitReply)
    assert isinstance(own, InitReply)
    assert (reply.model_digest, reply.provision_id) == ("5a" * 32, "5a" * 32)
    assert reply.norm_weights == {}
    assert reply.arithmetic == ("float",)
    assert reply.config == own.config
    # The same tensors here; a transform would change them.
    assert reply.linear_digest == own.linear_digest


def test_a_provisioned_directory_answers_linears_alone(
    model: transformers.PreTrainedModel, operators: RequestHandler, provisioned: RequestHandler
) -> None:
    hidden = torch.randn(2, HIDDEN)
    request = _linear(hidden, "q_proj", "k_proj", "v_proj")
    assert torch.equal(_apply(provisioned, request), _apply(operators, request))
    _apply(provisioned, _matmul(hidden, hidden.t()))
    cases: list[tuple[Request, str]] = [
        (_embedding(torch.tensor([1])), "an embedding"),
        (LMHeadRequest(hidden_states=from_torch(hidden)), "an LM head"),
        (_ring(_uniform(2, HIDDEN), "q_proj"), "int8 weights"),
        (_ring_head(_uniform(2, HIDDEN)), "an LM head"),
    ]
    for case, needed in cases:
        error = _refused(provisioned, case)
        assert error.code is ErrorCode.UNAVAILABLE
        assert error.got == f"a request that needs {needed}"
        assert "the mask feature-rotation alone" in error.expected


_HIDDEN = torch.zeros(2, HIDDEN)
_RING = torch.zeros(2, HIDDEN, dtype=torch.int32)


@each_row(
    ("case", "text"),
    [
        (_linear(_HIDDEN, "q_proj", layer=3), "Linear.layer_idx: got 3, expected 0 to 2"),
        (_linear(_HIDDEN, "q_proj", layer=4095), "got 4095, expected 0 to 2"),
        (_linear(torch.zeros(2, HIDDEN + 1), "q_proj"), "got shape [2, 49], expected 48 on the"),
        (_linear(torch.zeros(HIDDEN, 2), "q_proj"), "got shape [48, 2]"),
        (_linear(_HIDDEN, "down_proj"), "expected 96 on the last axis"),
        (_linear(_HIDDEN.long(), "q_proj"), "hidden_states: got int64, expected a float dtype"),
        (_linear(_HIDDEN, "q_proj", "k_proj"), "got q_proj k_proj, expected one module"),
        (_linear(_HIDDEN, "v_proj", "k_proj", "q_proj"), "got v_proj k_proj q_proj"),
        (_linear(_HIDDEN, "q_proj", "q_proj", "q_proj"), "got q_proj q_proj q_proj"),
        (_linear(_HIDDEN, "up_proj", "gate_proj"), "got up_proj gate_proj"),
        (_linear(_HIDDEN, "o_proj", "o_proj"), "got o_proj o_proj"),
        (_linear(_HIDDEN, "q_proj", "gate_proj"), "got q_proj gate_proj"),
        (_linear(_HIDDEN.int(), "q_proj"), "hidden_states: got int32, expected a float dtype"),
        (_ring(_RING, "q_proj", layer=3), "RingLinear.layer_idx: got 3, expected 0 to 2"),
        (_ring(_HIDDEN, "q_proj"), "RingLinear.elements: got float32, expected int32"),
        (_ring(_HIDDEN.long(), "q_proj"), "RingLinear.elements: got int64, expected int32"),
        (_ring(_RING[:, 1:], "q_proj"), "elements: got shape [2, 47], expected 48 on the last"),
        (_ring(_RING, "down_proj"), "expected 96 on the last axis"),
        (_ring(_RING, "q_proj", "k_proj"), "RingLinear.module_names: got q_proj k_proj, expected"),
        (_ring(_RING, "up_proj", "gate_proj"), "got up_proj gate_proj"),
        (_seeded(2, 47), "SeededRingLinear.elements: got shape [2, 47], expected 48 on the last"),
        (_seeded(2**31 - 1, 1), "got shape [2147483647, 1], expected 48 on the last"),
        (_seeded(seed=bytes(28)), "SeededRingLinear.seed: got int32 [7], expected int32 [8]"),
        (_seeded(seed=bytes(36)), "SeededRingLinear.seed: got int32 [9], expected int32 [8]"),
        (_seeded(seed=bytes(32), dtype="int64"), "seed: got int64 [4], expected int32 [8]"),
        (_seeded(seed=bytes(32), dtype="float32"), "seed: got float32 [8], expected int32 [8]"),
        (_seeded(2, HIDDEN, "down_proj"), "expected 96 on the last axis"),
        (_seeded(2, HIDDEN, "q_proj", "k_proj"), "module_names: got q_proj k_proj, expected"),
        (_ring_head(_HIDDEN), "RingLMHead.elements: got float32, expected int32"),
        (_ring_head(_RING[:, 1:]), "elements: got shape [2, 47], expected 48 on the last"),
        (_embedding(torch.tensor([0, VOCAB])), "expected 0 to 319"),
        (_embedding(torch.tensor([-1])), "expected 0 to 319"),
        (_embedding(torch.tensor([2**62])), "got an id outside the vocabulary"),
        (_embedding(torch.zeros(3)), "input_ids: got float32, expected int64"),
        (LMHeadRequest(hidden_states=from_torch(torch.zeros(47))), "got shape [47]"),
        (LMHeadRequest(hidden_states=from_torch(_HIDDEN.long())), "got int64"),
        (_matmul(torch.zeros(3), torch.zeros(3, 2)), "got [3] @ [3, 2], expected [..., M, K]"),
        (_matmul(torch.zeros(2, 3), torch.zeros(3)), "got [2, 3] @ [3]"),
        (_matmul(torch.zeros(2, 3), torch.zeros(2, 3)), "got [2, 3] @ [2, 3]"),
        (_matmul(torch.zeros(2, 1, 1), torch.zeros(3, 1, 1)), "expected leading dimensions that"),
        (_matmul(torch.zeros(2, 2), torch.zeros(2, 2).half()), "got float32 and float16"),
        (_matmul(_HIDDEN.long(), _HIDDEN.T.long()), "got int64 and int64, expected one float"),
    ],
)
def test_request_that_does_not_fit_is_refused(
    operators: RequestHandler, case: Request, text: str
) -> None:
    error = _refused(operators, case)
    assert error.code is ErrorCode.INVALID_FIELD
    assert text in str(error)
    assert error.where.startswith(case.method)


def test_ids_that_change_are_neither_checked_nor_used(
    operators: RequestHandler,
    model: transformers.PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a client can change them in shared memory: one beyond the table would read any memory."""
    ids = torch.tensor([3, 5])
    check = operators._checker.check_ids

    def changed_before(tensor: WireTensor) -> None:
        ids.fill_(VOCAB)
        check(tensor)

    monkeypatch.setattr(operators._checker, "check_ids", changed_before)
    output = _apply(operators, _embedding(ids))
    assert torch.equal(output, model.model.embed_tokens(torch.tensor([3, 5])))


def test_refusal_does_not_quote_the_token_ids(operators: RequestHandler) -> None:
    assert "7654321" not in str(_refused(operators, _embedding(torch.tensor([7654321]))))


@each_row(
    "case",
    [
        _embedding(torch.zeros(6, dtype=torch.int64)),
        _linear(torch.zeros(3, HIDDEN), "q_proj"),
        _linear(torch.zeros(1, HIDDEN), "q_proj", "k_proj", "v_proj", layer=0),
        _linear(torch.zeros(2, HIDDEN), "gate_proj", "up_proj"),
        _ring(_RING, "q_proj"),
        _ring(_RING, "gate_proj", "up_proj"),
        _seeded(2, HIDDEN, "gate_proj", "up_proj"),
        LMHeadRequest(hidden_states=from_torch(torch.zeros(1, HIDDEN))),
        _matmul(torch.zeros(16, 1), torch.zeros(1, 16)),
        _matmul(torch.zeros(16, 1, 1), torch.zeros(16, 1, 1, 1)),
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_output_over_the_limit_is_refused(
    operators: RequestHandler, weights: ServiceWeights, case: Request, allowed: bool
) -> None:
    size = _apply(operators, case).nbytes
    if allowed:
        assert _apply(RequestHandler(weights, size), case).nbytes == size
        return
    error = _refused(RequestHandler(weights, size - 1), case)
    assert error.code is ErrorCode.LIMIT_EXCEEDED
    assert str(error).endswith(f"expected at most {size - 1}")


def test_a_seed_is_computed_as_the_elements_that_it_stands_for(operators: RequestHandler) -> None:
    modules: tuple[ModuleName, ...] = ("gate_proj", "up_proj")
    kernel = operators.prepare(_seeded(3, HIDDEN, *modules))
    for seed in (bytes(range(32)), bytes(reversed(range(32)))):
        drawn = torch.frombuffer(expand(seed, 3 * HIDDEN), dtype=torch.int32).view(3, HIDDEN)
        # The one kernel of a header computes every seed that comes under it.
        reply, _ = kernel(_seeded(3, HIDDEN, *modules, seed=seed), None)
        assert isinstance(reply, TensorReply)
        assert torch.equal(to_torch(reply.output), _apply(operators, _ring(drawn, *modules)))


@pytest.mark.parametrize("rows", [2, 2**14])
def test_no_elements_are_made_of_a_seed_that_is_refused(
    weights: ServiceWeights, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    def never(seed: bytes, count: int) -> bytearray:
        raise AssertionError("expanded")

    monkeypatch.setattr("protocol.messages.expand", never)
    # A reply would be as large as this allows, and the elements are twice as large.
    narrow = _seeded(rows, 96, "down_proj")
    error = _refused(RequestHandler(weights, rows * HIDDEN * 4), narrow)
    assert error.code is ErrorCode.LIMIT_EXCEEDED
    assert error.where == "SeededRingLinear.rows"
    assert error.got == f"elements of {rows * 384 + 16} bytes"
    assert error.expected == f"at most {rows * 192}"


def test_matmul_whose_operands_grow_by_broadcasting_is_refused(weights: ServiceWeights) -> None:
    # torch.matmul writes broadcast operands out: here 64 times the inputs and the output.
    request = _matmul(torch.zeros(64, 1, 1, 64), torch.zeros(1, 64, 64, 1))
    assert _refused(RequestHandler(weights, 64 * 64 * 4), request).code is ErrorCode.LIMIT_EXCEEDED


def test_real_output_bomb_is_refused_before_it_is_allocated(operators: RequestHandler) -> None:
    error = _refused(operators, _matmul(torch.zeros(2**16, 1), torch.zeros(1, 2**16)))
    assert error.code is ErrorCode.LIMIT_EXCEEDED
    assert str(error) == (f"Matmul.shape: got an output of {2**34} bytes, expected at most {LIMIT}")
