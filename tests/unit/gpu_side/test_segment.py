"""Whole layers at the service give what transformers gives, however a sequence is cut.

Every architecture, bfloat16 and steps of a batch are compared in tests/equivalence/test_segments.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_side import segment_kernels, session_cache, sessions
from gpu_side.handler import RequestHandler
from gpu_side.sessions import SessionSettings
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import ErrorCode, ProtocolError
from tests.equivalence.test_architectures import with_rope
from tests.equivalence.tolerances import FLOAT32_LOGITS
from tests.kit.model import SIZES, Models, SavedModel
from tests.kit.rows import each_row
from tests.kit.wire import Client, part, segment

CPU = torch.device("cpu")
LIMIT = 2**26
LAST = SIZES["num_hidden_layers"] - 1
WHOLE = (0, LAST)
TOKENS = 24


@cache
def _weights(directory: Path) -> ServiceWeights:
    """Load what all clients of a model share: a service changes none."""
    return load_weights(directory, device=CPU, dtype=torch.float32)


def _embedded(model: SavedModel, ids: torch.Tensor) -> torch.Tensor:
    return model.reference.model.embed_tokens(ids).detach()


def _client(model: SavedModel) -> Client:
    settings = SessionSettings(bytes=2**24)
    return Client(RequestHandler(_weights(model.directory), LIMIT, sessions=settings))


def _ids(count: int = TOKENS, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (count,), generator=generator)


@pytest.fixture(scope="module")
def model(saved_model: Models) -> SavedModel:
    return saved_model()


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one block of rows, by both ways to compute one."""
    monkeypatch.setattr(segment_kernels, "_BLOCK_ROWS", 5)
    monkeypatch.setattr(segment_kernels, "_FEW_ROWS", 4)


def _in_chunks(client: Client, h_TD: torch.Tensor, *ends: int, **fields: Any) -> torch.Tensor:
    """Run a sequence a chunk after the other, and return the logits of all rows."""
    fields = {"lm_head": True} | fields
    found, start = [], 0
    for end in ends:
        numbers = [part(1, start, end - start, length=len(h_TD))]
        found.append(client.ask(segment(h_TD[start:end], numbers, WHOLE, **fields)))
        start = end
    return torch.cat(found)


@pytest.mark.usefixtures("_small_blocks")
@each_row(
    ("kind", "overrides"),
    [("llama", {"num_key_value_heads": 1}), ("mistral", {"sliding_window": 7})],
)
def test_logits_equal_transformers_however_a_prompt_is_cut(
    saved_model: Models, kind: str, overrides: dict[str, Any]
) -> None:
    model = saved_model(kind, **overrides)
    ids = _ids()
    expected, h_TD, client = model.logits(ids.tolist()), _embedded(model, ids), _client(model)
    for ends in ([TOKENS], [11, TOKENS], [9, 10, 11, 19, TOKENS]):
        FLOAT32_LOGITS.check(_in_chunks(client, h_TD, *ends), expected)


@each_row("name", ["llama3", "dynamic", "longrope"])
def test_rope_that_depends_on_the_length(saved_model: Models, name: str) -> None:
    model = saved_model(**with_rope(name))
    # The whole at once, as transformers has it: longer than the model was trained with, or not.
    for count in (30, 40):
        ids = _ids(count)
        found = _in_chunks(_client(model), _embedded(model, ids), 7, count)
        FLOAT32_LOGITS.check(found, model.logits(ids.tolist()))


def _with_window(model: SavedModel, ids: torch.Tensor, sinks: int, recent: int) -> torch.Tensor:
    """Return transformers' logits with a mask of ours: absolute positions, what is seen written."""
    back = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
    seen = (back >= 0) & ((back < recent) | (torch.arange(len(ids)) < sinks))
    bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    with torch.no_grad():
        return model.reference(ids[None], attention_mask=bias[None, None]).logits[0]


@pytest.fixture
def _dropped_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_cache, "_DROPPED_TOKENS", 4)
    monkeypatch.setattr(sessions, "GROWTH_TOKENS", 4)


@pytest.mark.usefixtures("_small_blocks", "_dropped_soon")
@each_row(("sinks", "recent"), [(2, 6), (0, 5), (4, 1)])
def test_a_token_attends_to_sinks_and_recent_ones(
    model: SavedModel, sinks: int, recent: int
) -> None:
    ids = _ids(32)
    expected, h_TD = _with_window(model, ids, sinks, recent), _embedded(model, ids)
    for ends in ([32], [9, 20, *range(21, 33)]):
        found = _in_chunks(_client(model), h_TD, *ends, sinks=sinks, recent=recent)
        FLOAT32_LOGITS.check(found, expected)
    assert (expected - model.logits(ids.tolist())).abs().max() > 0.1


@pytest.mark.usefixtures("_dropped_soon")
def test_a_cut_to_where_tokens_were_dropped_is_a_session_that_is_lost(model: SavedModel) -> None:
    window: dict[str, Any] = {"sinks": 2, "recent": 8}
    ids = _ids(60)
    h_TD, expected = _embedded(model, ids), _with_window(model, ids, 2, 8)
    whole = model.logits(ids.tolist())
    for session, start, fields, found in (
        # As far as a step goes back, and the same again.
        *[(1, 48, window, expected)] * 2,
        # To within the sinks there is all that is needed, and a fork has what its parent has.
        (1, 2, window, expected),
        (1, 0, {}, whole),
        (2, 2, window, expected),
        (2, 50, window, expected),
        (1, 20, window, None),
        (1, 48, {}, None),
        (1, 48, {"sinks": 2, "recent": 30}, None),
        (1, 48, {"sinks": 3, "recent": 8}, None),
    ):
        client = _client(model)
        _in_chunks(client, h_TD, 30, 48, 49, 50, **window)
        numbers = [part(session, start, 60 - start, parent=session - 1)]
        request = segment(h_TD[start:], numbers, WHOLE, lm_head=True, **fields)
        if found is not None:
            FLOAT32_LOGITS.check(client.ask(request), found[start:])
            continue
        with pytest.raises(ProtocolError) as caught:
            client.ask(request)
        assert caught.value.code is ErrorCode.UNKNOWN_SESSION


HIDDEN = torch.ones(3, SIZES["hidden_size"])
ROWS = [part(1, 0, 3)]
CONTEXT = SIZES["max_position_embeddings"]


@each_row(
    ("parts", "fields", "message"),
    [
        (ROWS, {"hidden": torch.ones(3, 7)}, "hidden_states: got float32 .3, 7."),
        (ROWS, {"hidden": torch.ones(1, 3, 48)}, "hidden_states: got float32 .1, 3, 48."),
        (ROWS, {"hidden": HIDDEN.long()}, "hidden_states: got int64"),
        (ROWS, {"layers": (1, 0)}, "last_layer: got layers 1 to 0"),
        (ROWS, {"layers": (0, 3)}, "last_layer: got layers 0 to 3"),
        (ROWS, {"layers": (0, 1), "lm_head": True}, "lm_head: got an LM head behind layer 1"),
        ([row[:6] for row in ROWS], {}, "parts: got int64 .1, 6."),
        ([[float(n) for n in ROWS[0]]], {}, "parts: got float32 .1, 7."),
        ([part(1, 0, 2)], {}, "parts: got 2 rows"),
        ([part(1, 0, 2), part(2, 0, 2)], {}, "parts: got 4 rows"),
        ([part(0, 0, 3)], {}, "parts: got the session 0"),
        ([part(1, -1, 3)], {}, "parts: got a part of rows -1 . 3 of 2"),
        ([part(2, 0, 4), part(1, 0, -1)], {}, "parts: got a part of rows 0 . -1 of -1"),
        ([part(1, 0, 3, length=2)], {}, "parts: got a part of rows 0 . 3 of 2"),
        ([part(1, 0, 3, length=CONTEXT + 1)], {}, "within 256 tokens"),
        ([part(1, 2**62, 2**62 - 1), part(2, 0, 3)], {}, "within 256 tokens"),
        ([part(1, 0, 2), part(1, 1, 1)], {}, "parts: got a part from 1"),
        ([part(1, 0, 2), part(1, 3, 1)], {}, "parts: got a part from 3"),
        ([part(1, 0, 3), part(1, 0, 0)], {}, "parts: got rows of a session to forget"),
        ([part(1, 0, 0), part(1, 0, 3)], {}, "parts: got a part from 0"),
        (ROWS, {"outputs": torch.tensor([0, 0])}, "outputs: got other numbers"),
        (ROWS, {"outputs": torch.tensor([2, 1])}, "outputs: got other numbers"),
        (ROWS, {"outputs": torch.tensor([-1, 1])}, "outputs: got other numbers"),
        (ROWS, {"outputs": torch.tensor([0, 3])}, "outputs: got other numbers"),
        (ROWS, {"outputs": torch.arange(4)}, "outputs: got int64 .4."),
        (ROWS, {"outputs": torch.tensor([1.0])}, "outputs: got float32"),
        (ROWS, {"outputs": torch.tensor([[1]])}, "outputs: got int64 .1, 1."),
        ([part(n, 0, 0) for n in range(1, 2**12 + 2)], {}, "parts: got 4097 parts"),
    ],
)
def test_a_request_that_does_not_fit_changes_nothing(
    model: SavedModel, parts: list[list[int]], fields: dict[str, Any], message: str
) -> None:
    client = _client(model)
    expected = client.ask(segment(HIDDEN, ROWS, WHOLE))
    given = {"hidden": HIDDEN, "layers": WHOLE} | fields
    with pytest.raises(ProtocolError, match=message) as caught:
        client.ask(segment(given.pop("hidden"), parts, given.pop("layers"), **given))
    assert caught.value.code is ErrorCode.INVALID_FIELD
    # It has the three tokens of before.
    more = client.ask(segment(HIDDEN[:1], [part(1, 3, 1)], WHOLE))
    assert more.isfinite().all()
    assert torch.equal(client.ask(segment(HIDDEN, ROWS, WHOLE)), expected)


def test_what_lies_between_and_the_reply_are_bounded(model: SavedModel) -> None:
    widest = 2 * SIZES["intermediate_size"] * 4
    for limit, rows, outputs in ((4 * widest, 5, 1), (5 * widest, 5, 5)):
        client = Client(RequestHandler(_weights(model.directory), limit))
        hidden = torch.ones(rows, SIZES["hidden_size"])
        wanted = torch.arange(outputs)
        request = segment(hidden, [part(1, 0, rows)], WHOLE, lm_head=True, outputs=wanted)
        with pytest.raises(ProtocolError) as caught:
            client.ask(request)
        assert caught.value.code is ErrorCode.LIMIT_EXCEEDED
    assert client.ask(segment(hidden, [part(1, 0, 5)], WHOLE)).shape == hidden.shape
