"""What the service computes, and everything that it refuses to compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import linear

from gpu_side.devices import NullDevice
from gpu_side.handler import RequestHandler
from gpu_side.kernels import NullWeights
from gpu_side.queues import QueueLimits
from gpu_side.served_model import read_served_model
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import ErrorCode, EvidenceError, ProtocolError
from protocol.messages import (
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

CPU = torch.device("cpu")
# By dtype how close a result is.
FLOATS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
QKV: tuple[ModuleName, ...] = ("q_proj", "k_proj", "v_proj")
GATE_UP: tuple[ModuleName, ...] = ("gate_proj", "up_proj")
SINGLE: tuple[ModuleName, ...] = (*QKV, "o_proj", *GATE_UP, "down_proj")
MODULES: list[tuple[ModuleName, ...]] = [*((name,) for name in SINGLE), QKV, GATE_UP]
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
    return load_weights(directory, device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def operators(weights: ServiceWeights) -> RequestHandler:
    return RequestHandler(weights, LIMIT)


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def _apply(operators: RequestHandler, request: Request) -> torch.Tensor:
    reply = operators.apply(request)[0]
    assert isinstance(reply, TensorReply)
    return to_torch(reply.output)


def _refused(operators: RequestHandler, request: Request) -> ProtocolError:
    with pytest.raises(ProtocolError) as info:
        operators.apply(request)
    return info.value


def _assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    tolerance = FLOATS[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


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


def _head(hidden: torch.Tensor) -> LMHeadRequest:
    return LMHeadRequest(hidden_states=from_torch(hidden))


def _embedding(ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> EmbeddingRequest:
    return EmbeddingRequest.model_validate(
        {"input_ids": from_torch(ids), "dtype": short_name(dtype)}
    )


def _matmul(a: torch.Tensor, b: torch.Tensor) -> MatmulRequest:
    return MatmulRequest(a=from_torch(a), b=from_torch(b))


# ----------------------------------------------------------------------------- what is computed


def _modules(
    model: transformers.PreTrainedModel, layer: int, names: Sequence[str]
) -> list[torch.nn.Linear]:
    block = model.model.layers[layer]
    return [getattr(block.self_attn, name, None) or getattr(block.mlp, name) for name in names]


@each_row("names", MODULES)
def test_linear_equals_torch(
    operators: RequestHandler, model: transformers.PreTrainedModel, names: tuple[ModuleName, ...]
) -> None:
    modules = _modules(model, 1, names)
    for dtype in FLOATS:
        for bias in (True, False):
            hidden = torch.randn(2, 3, modules[0].in_features).to(dtype)
            request = _linear(hidden, *names).model_copy(update={"bias": bias})
            rows = hidden.float()
            parts = [linear(rows, m.weight, m.bias if bias else None) for m in modules]
            # Fused modules stand side by side.
            _assert_close(_apply(operators, request), torch.cat(parts, dim=-1), dtype)


def _assert_exact(product: torch.Tensor, elements: torch.Tensor, weight: torch.Tensor) -> None:
    exact = elements.long() @ weight.long().t()
    assert product.dtype == torch.int32
    assert torch.equal(product, ((exact + 2**31) % 2**32 - 2**31).to(torch.int32))


def _uniform(*shape: int) -> torch.Tensor:
    """Elements as a pad leaves them."""
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


@each_row("names", MODULES)
def test_ring_linear_is_the_product_modulo_the_ring(
    operators: RequestHandler, model: transformers.PreTrainedModel, names: tuple[ModuleName, ...]
) -> None:
    weight = torch.cat([quantize_rows(module.weight)[0] for module in _modules(model, 2, names)])
    for shape in ((), (1,), (5,), (2, 3), (2, 1, 3)):
        elements = _uniform(*shape, weight.shape[1])
        _assert_exact(_apply(operators, _ring(elements, *names, layer=2)), elements, weight)


@each_row("tied", [False, True])
def test_ring_lm_head_is_the_product_modulo_the_ring(tmp_path: Path, tied: bool) -> None:
    weight = make_model(tmp_path, tie_word_embeddings=tied).lm_head.weight.detach()
    held = load_weights(tmp_path, device=CPU, dtype=torch.float32, arithmetic=("int8",))
    for shape in ((), (1,), (2, 3)):
        elements = _uniform(*shape, HIDDEN)
        product = _apply(RequestHandler(held, LIMIT), _ring_head(elements))
        _assert_exact(product, elements, quantize_rows(weight)[0])


def test_a_seed_is_computed_as_the_elements_that_it_stands_for(operators: RequestHandler) -> None:
    kernel = operators.prepare(_seeded(3, HIDDEN, *GATE_UP))
    for seed in (bytes(range(32)), bytes(reversed(range(32)))):
        drawn = torch.frombuffer(expand(seed, 3 * HIDDEN), dtype=torch.int32).view(3, HIDDEN)
        # The one kernel of a header computes every seed that comes under it.
        reply, _ = kernel(_seeded(3, HIDDEN, *GATE_UP, seed=seed), None)
        assert isinstance(reply, TensorReply)
        assert torch.equal(to_torch(reply.output), _apply(operators, _ring(drawn, *GATE_UP)))


@each_row("dtype", FLOATS)
def test_embedding_and_lm_head_equal_torch(
    operators: RequestHandler, model: transformers.PreTrainedModel, dtype: torch.dtype
) -> None:
    for shape in ((4,), (1, 4), (2, 3)):
        ids = torch.randint(0, VOCAB, shape)
        ids.view(-1)[0], ids.view(-1)[-1] = 0, VOCAB - 1
        output = _apply(operators, _embedding(ids, dtype))
        assert torch.equal(output, model.model.embed_tokens(ids).to(dtype))
    hidden = torch.randn(2, 3, HIDDEN).to(dtype)
    _assert_close(_apply(operators, _head(hidden)), model.lm_head(hidden.float()), dtype)


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
    operators: RequestHandler, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    for dtype in FLOATS:
        left, right = torch.randn(a).to(dtype), torch.randn(b).to(dtype)
        expected = torch.matmul(left.float(), right.float())
        output = _apply(operators, _matmul(left, right))
        assert output.shape == expected.shape
        _assert_close(output, expected.to(dtype), dtype)


@each_row("shape", [(), (1,), (1, 1), (2,)])
def test_one_row_gives_the_same_whether_or_not_it_is_multiplied_twice(
    directory: Path, operators: RequestHandler, shape: tuple[int, ...]
) -> None:
    hidden = torch.randn(*shape, HIDDEN).bfloat16()
    requests = (_linear(hidden, *GATE_UP), _head(hidden))
    for dtype, has_bf16, twice in (
        (torch.bfloat16, True, True),
        (torch.bfloat16, False, False),
        (torch.float32, True, False),
    ):
        counted: list[int] = []

        def count(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            counted.append(hidden.numel() // HIDDEN)  # noqa: B023 - called within the turn
            return linear(hidden, *rest)

        with pytest.MonkeyPatch.context() as patch:
            able = {"avx512_bf16": has_bf16}
            patch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)  # noqa: B023
            held = RequestHandler(load_weights(directory, device=CPU, dtype=dtype), LIMIT)
            patch.setattr("gpu_side.kernels.linear", count)
            outputs = [_apply(held, request) for request in requests]
        assert counted == [2 if twice or shape == (2,) else 1] * 2
        for output, request in zip(outputs, requests, strict=True):
            expected = _apply(operators, request).float()
            torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=5e-2)


# --------------------------------------------------------------------------------- what is said


def test_init_says_what_is_there(
    directory: Path, operators: RequestHandler, model: transformers.PreTrainedModel
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
    assert (reply.arithmetic, reply.provision_id) == (("float", "int8"), None)
    assert (reply.layers, reply.columns, reply.ranks) == ((0, 2), (0, 1), 1)
    limits = QueueLimits(requests=7, bytes=8, total_requests=9, total_bytes=10)
    reply = RequestHandler(_null(directory), 1234, limits).apply(InitRequest())[0]
    assert isinstance(reply, InitReply)
    told = reply.max_message_bytes, reply.max_queued_requests, reply.max_queued_bytes
    assert told == (1234, 7, 8)


def _null(directory: Path) -> NullWeights:
    held, _ = read_served_model(directory, weights=False)
    return NullWeights(held, NullDevice(), torch.float32)


def test_init_states_what_the_service_is_for_a_nonce(
    directory: Path, model: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, held = 100.0, _null(directory)

    def attest(nonce: bytes, digest: str) -> bytes:
        nonlocal now
        assert digest == held.model.model_digest
        now += 3.0
        if nonce == bytes(32):
            raise EvidenceError("device", got="nothing", expected="evidence")
        return b"stated " + nonce

    def stated(handler: RequestHandler, nonce: bytes) -> bytes:
        reply = handler.apply(InitRequest(nonce=nonce))[0]
        assert isinstance(reply, InitReply)
        return reply.statement

    monkeypatch.setattr("gpu_side.handler.time.monotonic", lambda: now)
    handler = RequestHandler(held, LIMIT, attest=attest)
    assert stated(RequestHandler(held, LIMIT), b"nonce") == b""
    assert stated(handler, b"nonce") == b"stated nonce"
    # Evidence takes a third of the time at most.
    now += 5.9
    assert _refused(handler, InitRequest(nonce=b"nonce")).code is ErrorCode.QUEUE_FULL
    assert stated(handler, b"") == b""
    now += 0.1
    failed = _refused(handler, InitRequest(nonce=bytes(32)))
    assert (failed.where, failed.code) == ("device", ErrorCode.UNAVAILABLE)
    now += 6.0
    assert stated(handler, b"n") == b"stated n"


# ------------------------------------------------------------------------------ what is refused

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


@each_row(
    "case",
    [
        _embedding(torch.zeros(6, dtype=torch.int64)),
        _linear(torch.zeros(3, HIDDEN), "q_proj"),
        _linear(torch.zeros(1, HIDDEN), *QKV, layer=0),
        _linear(torch.zeros(2, HIDDEN), *GATE_UP),
        _ring(_RING, "q_proj"),
        _ring(_RING, *GATE_UP),
        _seeded(2, HIDDEN, *GATE_UP),
        _head(torch.zeros(1, HIDDEN)),
        _matmul(torch.zeros(16, 1), torch.zeros(1, 16)),
        _matmul(torch.zeros(16, 1, 1), torch.zeros(16, 1, 1, 1)),
    ],
)
def test_output_over_the_limit_is_refused(
    operators: RequestHandler, weights: ServiceWeights, case: Request
) -> None:
    size = _apply(operators, case).nbytes
    assert _apply(RequestHandler(weights, size), case).nbytes == size
    error = _refused(RequestHandler(weights, size - 1), case)
    assert error.code is ErrorCode.LIMIT_EXCEEDED
    assert str(error).endswith(f"expected at most {size - 1}")


@each_row(
    ("case", "limit", "where", "size"),
    [
        # Of a seed the elements count, which are larger than the reply here.
        *(
            (_seeded(rows, 96, "down_proj"), rows * 192, "SeededRingLinear.rows", rows * 384 + 16)
            for rows in (2, 2**14)
        ),
        # torch.matmul writes broadcast operands out: here 64 times the inputs and the output.
        (
            _matmul(torch.zeros(64, 1, 1, 64), torch.zeros(1, 64, 64, 1)),
            *(64 * 64 * 4, "Matmul.shape", 64**3 * 4),
        ),
        (_matmul(torch.zeros(2**16, 1), torch.zeros(1, 2**16)), LIMIT, "Matmul.shape", 2**34),
    ],
)
def test_nothing_is_allocated_for_what_is_too_large(
    weights: ServiceWeights, case: Request, limit: int, where: str, size: int
) -> None:
    def never(seed: bytes, count: int) -> bytearray:
        raise AssertionError("expanded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protocol.messages.expand", never)
        error = _refused(RequestHandler(weights, limit), case)
    assert (error.where, error.code) == (where, ErrorCode.LIMIT_EXCEEDED)
    assert (f"of {size} bytes" in error.got, error.expected) == (True, f"at most {limit}")
