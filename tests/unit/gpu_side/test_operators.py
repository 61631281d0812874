"""What the service computes, and everything that it refuses to compute."""

from unittest.mock import Mock

import msgpack
import pytest
import torch
from torch.nn.functional import linear

from gpu_side.encoding import encode_reply
from gpu_side.handler import RequestHandler
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import ErrorCode, EvidenceError, ProtocolError
from protocol.keystream import seeded
from protocol.messages import InitReply, InitRequest, ModuleName, Request, TensorReply
from protocol.tensors import MAX_TENSOR_BYTES, WireTensor, to_torch
from tests.kit import ask
from tests.kit.model import SIZES, Models, SavedModel
from tests.kit.rows import each_row

LIMIT = 2**26
VOCAB, HIDDEN = SIZES["vocab_size"], SIZES["hidden_size"]


@pytest.fixture(scope="module")
def model(saved_model: Models) -> SavedModel:
    return saved_model(attention_bias=True)


@pytest.fixture(scope="module")
def weights(model: SavedModel) -> ServiceWeights:
    return load_weights(model.directory, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def operators(weights: ServiceWeights) -> RequestHandler:
    return RequestHandler(weights, LIMIT)


def _refused(operators: RequestHandler, request: Request) -> ProtocolError:
    with pytest.raises(ProtocolError) as info:
        operators.apply(request)
    return info.value


@each_row("names", [("k_proj",), ("o_proj",), ("down_proj",), ask.QKV, ask.GATE_UP])
def test_linear_equals_torch(
    operators: RequestHandler, model: SavedModel, names: tuple[ModuleName, ...]
) -> None:
    """Fused modules stand side by side."""
    block = model.reference.model.layers[1]
    modules = [getattr(block.self_attn, name, None) or getattr(block.mlp, name) for name in names]
    for dtype, close in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        for bias in (True, False):
            hidden = torch.randn(2, 3, modules[0].in_features).to(dtype)
            request = ask.linear(hidden, *names).model_copy(update={"bias": bias})
            rows = hidden.float()
            parts = [linear(rows, m.weight, m.bias if bias else None) for m in modules]
            found = ask.answer(operators, request)
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), torch.cat(parts, -1), rtol=close, atol=close)


def test_a_seed_is_computed_as_the_elements_that_it_stands_for(operators: RequestHandler) -> None:
    kernel = operators.prepare(ask.seeded(3, HIDDEN, *ask.GATE_UP))
    for seed in (bytes(range(32)), bytes(reversed(range(32)))):
        drawn = seeded([seed], 3, HIDDEN).elements()
        # The one kernel of a header computes every seed that comes under it.
        reply, _ = kernel(ask.seeded(3, HIDDEN, *ask.GATE_UP, seed=seed), None)
        assert isinstance(reply, TensorReply)
        assert torch.equal(
            to_torch(reply.output), ask.answer(operators, ask.ring(drawn, *ask.GATE_UP))
        )


def test_init_states_what_the_service_is_for_a_nonce(
    weights: ServiceWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, held = 100.0, weights

    def attest(nonce: bytes, digest: str) -> bytes:
        nonlocal now
        assert digest == held.model_digest
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


def test_init_in_the_published_form_has_no_fields_of_ours(operators: RequestHandler) -> None:
    """A strict client of the published schema refuses keys that it does not know."""
    stated = operators.apply(InitRequest())[0]
    (reply,) = encode_reply("inline", 0, "Init", stated)
    published = {"config", "rotary_emb_params", "norm_weights"}
    assert set(msgpack.unpackb(reply)["response"]) == published


ROWS, INTS = torch.zeros(2, HIDDEN), torch.zeros(2, HIDDEN, dtype=torch.int32)
WRONG_SEEDS = {"int32 [7]": 28, "int32 [9]": 36, "int64 [4]": 32, "float32 [8]": 32}
TOGETHER = ["v_proj k_proj q_proj", "q_proj q_proj q_proj", "up_proj gate_proj", "o_proj o_proj"]


@each_row(
    ("case", "text"),
    [
        *((ask.linear(ROWS, "q_proj", layer=n), f"got {n}, expected 0 to 2") for n in (3, 4095)),
        (ask.ring(INTS, "q_proj", layer=3), "RingLinear.layer_idx: got 3, expected 0 to 2"),
        (ask.linear(torch.zeros(2, 49), "q_proj"), "got shape [2, 49], expected 48 on the last"),
        (ask.linear(torch.zeros(HIDDEN, 2), "q_proj"), "got shape [48, 2]"),
        (ask.linear(ROWS, "down_proj"), "expected 96 on the last axis"),
        (ask.ring(INTS[:, 1:], "q_proj"), "elements: got shape [2, 47], expected 48 on the last"),
        (ask.ring(INTS, "down_proj"), "expected 96 on the last axis"),
        (ask.seeded(2, 47, "q_proj"), "elements: got shape [2, 47], expected 48 on the last"),
        (ask.seeded(2**31 - 1, 1, "q_proj"), "got shape [2147483647, 1], expected 48 on the"),
        (ask.seeded(2, HIDDEN, "down_proj"), "expected 96 on the last axis"),
        (ask.ring_head(INTS[:, 1:]), "elements: got shape [2, 47], expected 48 on the last"),
        (ask.head(torch.zeros(47)), "got shape [47]"),
        *(
            (kind(rows, *str.split(names)), f"module_names: got {names}, expected one module, or")
            for kind, rows in ((ask.linear, ROWS), (ask.ring, INTS))
            for names in ("q_proj k_proj", "q_proj gate_proj", *TOGETHER)
        ),
        (ask.seeded(2, HIDDEN, "q_proj", "k_proj"), "module_names: got q_proj k_proj, expected"),
        (ask.linear(ROWS.long(), "q_proj"), "hidden_states: got int64, expected a float dtype"),
        (ask.head(ROWS.long()), "got int64"),
        (ask.ring(ROWS, "q_proj"), "RingLinear.elements: got float32, expected int32"),
        (ask.ring_head(ROWS), "RingLMHead.elements: got float32, expected int32"),
        *(
            (
                ask.seeded(2, HIDDEN, "q_proj", seed=bytes(size), dtype=said.split()[0]),
                f"SeededRingLinear.seed: got {said}, expected int32 [8]",
            )
            for said, size in WRONG_SEEDS.items()
        ),
        # The ids themselves are not quoted.
        *(
            (ask.embedding(torch.tensor([0, n])), "got an id outside the vocabulary, expected 0 to")
            for n in (VOCAB, -1, 2**62)
        ),
        (ask.embedding(torch.zeros(3)), "input_ids: got float32, expected int64"),
        (ask.embedding(torch.tensor([[[0]]])), "input_shape: got [1, 1, 1], expected [T]"),
        (ask.matmul(torch.zeros(3), torch.zeros(3, 2)), "got [3] @ [3, 2], expected [..., M, K]"),
        (ask.matmul(torch.zeros(2, 3), torch.zeros(3)), "got [2, 3] @ [3]"),
        (ask.matmul(torch.zeros(2, 3), torch.zeros(2, 3)), "got [2, 3] @ [2, 3]"),
        (ask.matmul(torch.zeros(2, 1, 1), torch.zeros(3, 1, 1)), "dimensions that broadcast"),
        (ask.matmul(ROWS, ROWS.T.half()), "got float32 and float16"),
        (ask.matmul(ROWS.long(), ROWS.T.long()), "got int64 and int64, expected one float"),
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
    operators: RequestHandler, model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client can change them in shared memory: one beyond the table would read any memory."""
    ids = torch.tensor([3, 5])
    check = operators._checker.check_ids

    def changed_before(tensor: WireTensor) -> None:
        ids.fill_(VOCAB)
        check(tensor)

    monkeypatch.setattr(operators._checker, "check_ids", changed_before)
    output = ask.answer(operators, ask.embedding(ids))
    assert torch.equal(output, model.reference.model.embed_tokens(torch.tensor([3, 5])))


@each_row(
    ("case", "size"),
    [
        *((ask.embedding(torch.zeros(n, dtype=torch.int64)), 192 * n) for n in (1, 6)),
        (ask.linear(torch.zeros(3, HIDDEN), "q_proj"), 3 * 96 * 4),
        (ask.linear(torch.zeros(1, HIDDEN), *ask.QKV, layer=0), 160 * 4),
        (ask.ring(INTS, *ask.GATE_UP), 2 * 192 * 4),
        (ask.head(torch.zeros(1, HIDDEN)), VOCAB * 4),
        (ask.matmul(torch.zeros(16, 1, 1), torch.zeros(16, 1, 1, 1)), 16 * 16 * 4),
        # Of a seed the elements count, too, where they are larger than the reply.
        (ask.seeded(2, HIDDEN, *ask.GATE_UP), 2 * 192 * 4),
        *((ask.seeded(rows, 96, "down_proj"), rows * 96 * 4) for rows in (2, 2**14)),
        # torch.matmul writes broadcast operands out: here 64 times the inputs and the output.
        (ask.matmul(torch.zeros(64, 1, 1, 64), torch.zeros(1, 64, 64, 1)), 64**3 * 4),
        (ask.matmul(torch.zeros(2**16, 1), torch.zeros(1, 2**16)), 2**34),
    ],
)
def test_what_would_be_over_the_limit_is_refused_before_it_is_allocated(
    weights: ServiceWeights, case: Request, size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protocol.keystream.seeded", Mock(side_effect=AssertionError("expanded")))
        error = _refused(RequestHandler(weights, size - 1), case)
    assert error.code is ErrorCode.LIMIT_EXCEEDED
    most = min(size - 1, MAX_TENSOR_BYTES)
    assert (f"of {size} bytes" in error.got, error.expected) == (True, f"at most {most}")
    if size < LIMIT:
        assert ask.answer(RequestHandler(weights, size), case).nbytes <= size
