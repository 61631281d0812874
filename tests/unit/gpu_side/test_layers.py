"""A service that holds a range of layers: what it loads, says and answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_side.devices import NullDevice
from gpu_side.handler import RequestHandler
from gpu_side.kernels import NullWeights
from gpu_side.queues import QueueLimits
from gpu_side.served_model import read_served_model
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import ErrorCode, EvidenceError, ProtocolError, SettingsError
from protocol.messages import (
    EmbeddingRequest,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    RingLinearRequest,
    RingLMHeadRequest,
    TensorReply,
)
from protocol.tensors import from_torch
from tests.kit.model import SIZES, make_model
from tests.kit.rows import each_row

CPU = torch.device("cpu")
LIMIT = 2**20
LAST = SIZES["num_hidden_layers"] - 1
HIDDEN = from_torch(torch.ones(1, SIZES["hidden_size"]))
EMBEDDING = EmbeddingRequest(input_ids=from_torch(torch.tensor([1])), dtype="float32")
LM_HEAD = LMHeadRequest(hidden_states=HIDDEN)
MATMUL = MatmulRequest(a=HIDDEN, b=from_torch(torch.ones(SIZES["hidden_size"], 1)))
RANGES = [(0, 0), (0, LAST - 1), (1, 1), (1, LAST), (LAST, LAST), (0, LAST), None]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_model(made, tie_word_embeddings=request.param)
    return made


def _weights(directory: Path, layers: tuple[int, int] | None) -> ServiceWeights:
    return load_weights(directory, device=CPU, dtype=torch.float32, layers=layers)


def _null(directory: Path, layers: tuple[int, int] | None) -> NullWeights:
    held, _ = read_served_model(directory, weights=False, layers=layers)
    return NullWeights(held, NullDevice(), torch.float32)


def _linear(layer: int) -> LinearRequest:
    return LinearRequest(layer_idx=layer, module_names=("q_proj",), hidden_states=HIDDEN)


def _ring(layer: int) -> RingLinearRequest:
    elements = from_torch(torch.ones(1, SIZES["hidden_size"], dtype=torch.int32))
    return RingLinearRequest(layer_idx=layer, module_names=("q_proj",), elements=elements)


RING_LM_HEAD = RingLMHeadRequest(
    elements=from_torch(torch.ones(1, SIZES["hidden_size"], dtype=torch.int32))
)


def _code(operators: RequestHandler, request: object) -> ErrorCode | None:
    try:
        assert isinstance(operators.apply(request)[0], TensorReply)  # type: ignore[arg-type]
    except ProtocolError as error:
        return error.code
    return None


@pytest.mark.parametrize("layers", RANGES)
@pytest.mark.parametrize("make", [_weights, _null])
def test_what_is_not_held_is_unavailable(
    directory: Path, layers: tuple[int, int] | None, make: type
) -> None:
    operators = RequestHandler(make(directory, layers), LIMIT)
    first, last = layers or (0, LAST)
    for layer in range(LAST + 1):
        expected = None if first <= layer <= last else ErrorCode.UNAVAILABLE
        assert _code(operators, _linear(layer)) is expected
        assert _code(operators, _ring(layer)) is expected
    assert _code(operators, EMBEDDING) is (None if first == 0 else ErrorCode.UNAVAILABLE)
    assert _code(operators, LM_HEAD) is (None if last == LAST else ErrorCode.UNAVAILABLE)
    assert _code(operators, RING_LM_HEAD) is _code(operators, LM_HEAD)
    assert _code(operators, MATMUL) is None
    # Not of this model at all: that is another mistake.
    assert _code(operators, _linear(LAST + 1)) is ErrorCode.INVALID_FIELD


@pytest.fixture(scope="module")
def whole(directory: Path) -> ServiceWeights:
    return _weights(directory, None)


@each_row("layers", RANGES)
def test_only_what_is_held_is_loaded(
    directory: Path, whole: ServiceWeights, layers: tuple[int, int] | None
) -> None:
    done: list[tuple[int, int]] = []
    weights = load_weights(
        directory,
        device=CPU,
        dtype=torch.float32,
        layers=layers,
        progress=lambda *both: done.append(both),
    )
    first, last = layers or (0, LAST)
    count = last - first + 1
    assert done == [(n, count) for n in range(1, count + 1)]
    for held, full in ((weights.linears, whole.linears), (weights.integers, whole.integers)):
        assert held is not None
        assert full is not None
        assert list(held) == list(range(first, last + 1))
        for layer, operators in held.items():
            for operator, linear in operators.items():
                assert torch.equal(linear.weight, full[layer][operator].weight)
    assert (weights.embedding is not None) is (first == 0)
    assert (weights.lm_head is not None) is (last == LAST)
    if weights.lm_head is not None:
        assert whole.lm_head is not None
        assert torch.equal(weights.lm_head, whole.lm_head)
    assert (weights.lm_head_int8 is not None) is (last == LAST)
    if weights.lm_head_int8 is not None:
        assert whole.lm_head_int8 is not None
        assert torch.equal(weights.lm_head_int8.weight, whole.lm_head_int8.weight)
    a_layer = whole.weight_bytes - _vocabulary_bytes(whole)
    assert weights.weight_bytes == _vocabulary_bytes(weights) + a_layer // (LAST + 1) * count


def _vocabulary_bytes(weights: ServiceWeights) -> int:
    tensors = {id(t): t for t in (weights.embedding, weights.lm_head) if t is not None}
    head = weights.lm_head_int8
    integers = 0 if head is None else head.weight.nbytes + head.scale.nbytes
    return sum(tensor.nbytes for tensor in tensors.values()) + integers


@each_row("layers", RANGES)
def test_init_says_which_layers_and_how_much_may_wait(
    directory: Path, layers: tuple[int, int] | None
) -> None:
    limits = QueueLimits(requests=7, bytes=8, total_requests=9, total_bytes=10)
    reply = RequestHandler(_null(directory, layers), LIMIT, limits).apply(InitRequest())[0]
    assert isinstance(reply, InitReply)
    assert reply.layers == (layers or (0, LAST))
    assert (reply.max_queued_requests, reply.max_queued_bytes) == (7, 8)
    # It is the same model, whatever part of it is held here.
    whole = read_served_model(directory)[0]
    assert (reply.model_digest, reply.linear_digest) == (whole.model_digest, whole.linear_digest)
    assert reply.norm_weights.keys() == whole.norms.keys()


def test_init_states_what_the_service_is_for_a_nonce(directory: Path) -> None:
    held = _null(directory, None)

    def attest(nonce: bytes, digest: str) -> bytes:
        assert digest == held.model.model_digest
        if nonce == bytes(32):
            raise EvidenceError("device", got="nothing", expected="evidence")
        return b"stated " + nonce

    handler = RequestHandler(held, LIMIT, attest=attest)
    for asked, by, stated in (
        (b"", handler, b""),
        (b"nonce", handler, b"stated nonce"),
        (b"nonce", RequestHandler(held, LIMIT), b""),
    ):
        reply = by.apply(InitRequest(nonce=asked))[0]
        assert isinstance(reply, InitReply)
        assert reply.statement == stated
    with pytest.raises(ProtocolError, match="device: got nothing") as refused:
        handler.apply(InitRequest(nonce=bytes(32)))
    assert refused.value.code == ErrorCode.UNAVAILABLE


def test_evidence_takes_a_third_of_the_time_at_most(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0

    def attest(_nonce: bytes, _digest: str) -> bytes:
        nonlocal now
        now += 3.0
        return b"stated"

    monkeypatch.setattr("gpu_side.handler.time.monotonic", lambda: now)
    handler = RequestHandler(_null(directory, None), LIMIT, attest=attest)
    handler.apply(InitRequest(nonce=b"n"))
    now += 5.9
    with pytest.raises(ProtocolError) as refused:
        handler.apply(InitRequest(nonce=b"n"))
    assert refused.value.code == ErrorCode.QUEUE_FULL
    handler.apply(InitRequest())
    now += 0.1
    handler.apply(InitRequest(nonce=b"n"))


@each_row("layers", [(0, LAST + 1), (LAST + 1, LAST + 1), (2, 1), (-1, 0)])
def test_layers_that_the_model_has_not_are_refused(
    directory: Path, layers: tuple[int, int]
) -> None:
    with pytest.raises(SettingsError, match=f"expected a range within 0-{LAST}"):
        read_served_model(directory, layers=layers)
