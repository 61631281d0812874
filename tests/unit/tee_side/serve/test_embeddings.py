"""`/v1/embeddings`."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import pytest

from tests.kit.serve import FakeEngine, Reply, call, model, serving


def _embed(engine: FakeEngine | None = None, **body: Any) -> Reply:
    return call(serving(engine), "POST", "/v1/embeddings", {"input": [5, 6]} | body)


@pytest.mark.parametrize(
    ("given", "count"), [("Hello", 1), (["Hello", "a"], 2), ([5, 6], 1), ([[5], [6, 7], [8]], 3)]
)
def test_an_input_is_a_text_or_ids_or_several_of_either(given: Any, count: int) -> None:
    engine = FakeEngine()
    body = _embed(engine, input=given).json()
    assert [item["index"] for item in body["data"]] == list(range(count))
    for item, request in zip(body["data"], engine.requests, strict=True):
        assert (request.max_new_tokens, request.pooling) == (0, "last")
        state = [len(request.prompt_ids), 2.0, -2.0]
        expected = [value / math.hypot(*state) for value in state]
        assert item["embedding"] == pytest.approx(expected)
    tokens = sum(len(request.prompt_ids) for request in engine.requests)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["object"], body["model"]) == ("list", "demo")


def test_base64_is_the_same_numbers_as_little_endian_float32() -> None:
    numbers = _embed().json()["data"][0]["embedding"]
    text = _embed(encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack("<3f", base64.b64decode(text))) == numbers


def test_pooling_is_the_server_s_unless_the_client_names_another() -> None:
    engine = FakeEngine()
    _embed(engine, pooling="mean")
    assert engine.requests[0].pooling == "mean"
    assert _embed(pooling="max").error()["param"] == "body.pooling"
    call(serving(engine, model=model(pooling="mean")), "POST", "/v1/embeddings", {"input": "a"})
    assert engine.requests[1].pooling == "mean"


def test_dimensions_are_refused_unless_they_are_the_model_s() -> None:
    hidden = model().config.hidden_size
    assert _embed(dimensions=hidden).status == 200
    assert _embed(dimensions=hidden - 1).error()["param"] == "body.dimensions"


@pytest.mark.parametrize("given", [[], [[]], [1024], None, {}])
def test_no_input_and_an_id_beyond_the_vocabulary_are_400(given: Any) -> None:
    reply = _embed(input=given)
    assert reply.status == 400
    assert reply.error()["param"].startswith("body.input")


def test_an_input_may_fill_the_context_and_no_more() -> None:
    context = model().max_model_len
    assert _embed(input=[5] * context).status == 200
    error = _embed(input=[5] * (context + 1)).error()
    assert error["type"] == "exceed_context_size_error"
