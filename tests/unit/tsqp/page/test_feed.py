"""The feed shows a page what crossed for its own last answer: so much, and of no other's."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from protocol.channel import Channel, Exchange, Traffic
from protocol.messages import InitRequest, LinearRequest, LMHeadRequest, Request, RingLinearRequest
from protocol.prepared import PreparedRequest
from protocol.tensors import from_torch
from tsqp.page import feed as feed_module
from tsqp.page.feed import MAX_PAGES, Feed

MINE, OTHERS = "a" * 32, "b" * 32
QKV = ("q_proj", "k_proj", "v_proj")


class Wire(Channel):
    """A channel that answers nothing and writes down what it is asked for."""

    endpoint = "wire"

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.asked: list[tuple[Any, ...]] = []

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        self.asked.append(("submit", request, timeout_s))
        return len(self.asked)

    def start(
        self, prepared: PreparedRequest, payload: torch.Tensor, timeout_s: float | None = None
    ) -> int:
        self.asked.append(("start", prepared, payload, timeout_s))
        return len(self.asked)

    def wait(self, request_id: int) -> Exchange:
        return Exchange(endpoint=str(request_id))

    def abandon(self, request_id: int) -> None:
        self.asked.append(("abandon", request_id))

    def distrust(self, exchange: Exchange, error: Any) -> None:
        self.asked.append(("distrust", exchange, error))

    def close(self) -> None:
        self.asked.append(("close",))


def linear(rows: torch.Tensor, layer: int = 0, modules: tuple[Any, ...] = QKV) -> LinearRequest:
    return LinearRequest(layer_idx=layer, module_names=modules, hidden_states=from_torch(rows))


def shown(feed: Feed, page: str = MINE, since: int = 0) -> dict[str, Any]:
    found = feed.described(page, since)
    assert found is not None
    return found


def test_each_request_is_shown_as_it_was_sent() -> None:
    feed = Feed()
    channel = feed(Wire(), 1.0)
    rows = torch.arange(80, dtype=torch.float32).reshape(2, 40)
    with feed.answering(MINE):
        channel.submit(linear(rows, layer=3))
        channel.submit(LMHeadRequest(hidden_states=from_torch(torch.ones(1, 4))))
        assert shown(feed)["running"]
    first, second = shown(feed)["samples"]
    assert first.pop("ms") >= 0
    head = bytes.fromhex(first.pop("head"))
    assert head == rows.numpy().tobytes()[:64]
    assert first == {
        "number": 1,
        "operator": "qkv_proj",
        "layer": 3,
        "rows": 2,
        "width": 40,
        "dtype": "float32",
    }
    assert (second["operator"], second["layer"], second["head"]) == (
        "lm_head",
        None,
        4 * "0000803f",
    )
    assert [one["number"] for one in shown(feed, since=1)["samples"]] == [2]
    assert not shown(feed)["running"]


def test_a_prepared_request_is_shown_with_its_payload_and_passed_on_as_it_is() -> None:
    feed, wire = Feed(), Wire()
    channel = feed(wire, 1.0)
    payload = torch.tensor([[7, 8]], dtype=torch.int32)
    message = RingLinearRequest(
        layer_idx=0, module_names=QKV, elements=from_torch(torch.zeros_like(payload))
    )
    prepared = PreparedRequest(message, (1, 6), "int32")
    with feed.answering(MINE):
        request_id = channel.start(prepared, payload, 2.0)
    assert wire.asked == [("start", prepared, payload, 2.0)]
    assert wire.asked[0][2] is payload
    assert channel.wait(request_id).endpoint == "1"
    assert shown(feed)["samples"][0]["head"] == "0700000008000000"
    (rows,) = feed.inputs(MINE)
    assert rows.tolist() == [[7, 8]]
    payload.zero_()  # what is kept is a copy
    assert rows.tolist() == [[7, 8]]


def test_the_rest_is_the_channels() -> None:
    wire = Wire()
    channel = Feed()(wire, 1.0)
    assert (channel.endpoint, channel.traffic) == ("wire", wire.traffic)
    exchange, error = Exchange(), ValueError()
    channel.abandon(3)
    channel.distrust(exchange, error)  # type: ignore[arg-type]
    channel.close()
    assert wire.asked == [("abandon", 3), ("distrust", exchange, error), ("close",)]


def test_every_byte_counts_in_the_histogram() -> None:
    feed = Feed()
    channel = feed(Wire(), 1.0)
    assert feed.described(MINE, 0) is None
    with feed.answering(MINE):
        assert shown(feed)["bytes"] is None
        for _ in range(100):
            channel.submit(linear(torch.full((1, 16), 1.0), modules=("o_proj",)))
    found = shown(feed)
    counts = {value: count for value, count in enumerate(found["histogram"]) if count}
    assert counts == {0x00: 3200, 0x80: 1600, 0x3F: 1600}
    assert found["bytes"]["total"] == 6400
    assert found["bytes"]["values"] == 3
    assert not found["bytes"]["even"]
    assert found["requests"] == 100


def test_samples_and_rows_are_bounded_and_the_counts_go_on() -> None:
    feed = Feed()
    channel = feed(Wire(), 1.0)
    with feed.answering(MINE):
        for _ in range(50):
            channel.submit(linear(torch.ones(50, 4)))
    found = shown(feed)
    assert [one["number"] for one in found["samples"]] == list(range(19, 51))
    assert found["requests"] == 50
    assert found["rows"] == 2500
    assert sum(map(len, feed.inputs(MINE))) == 1024
    assert sum(found["histogram"]) == 50 * 50 * 16


def test_only_the_last_pages_are_kept() -> None:
    feed = Feed()
    pages = [f"{number:032x}" for number in range(MAX_PAGES + 2)]
    for page in pages:
        with feed.answering(page):
            pass
    assert [page for page in pages if feed.described(page, 0) is None] == pages[:2]


def test_the_next_answer_of_a_page_takes_the_place_of_the_last() -> None:
    feed = Feed()
    channel = feed(Wire(), 1.0)
    with feed.answering(MINE) as complete:
        channel.submit(linear(torch.ones(1, 4)))
        complete()
    first = shown(feed)["answer"]
    with feed.answering(MINE):
        found = shown(feed)
        assert found["answer"] > first
        assert (found["requests"], found["samples"]) == (0, [])
        assert feed.inputs(MINE) == []


@pytest.mark.parametrize("other", [OTHERS, None])
def test_what_crosses_while_others_are_answered_is_counted_and_not_shown(other: str | None) -> None:
    feed = Feed()
    channel = feed(Wire(), 1.0)
    with feed.answering(MINE):
        channel.submit(linear(torch.ones(1, 4)))
        with feed.answering(other) as complete:
            channel.submit(linear(torch.ones(1, 4)))
            channel.submit(linear(torch.ones(1, 4)))
            complete()
        channel.submit(linear(torch.ones(1, 4)))
    found = shown(feed)
    assert (found["requests"], found["others"], len(found["samples"])) == (2, 2, 2)
    if other is not None:
        assert shown(feed, other)["requests"] == 0
        assert feed.inputs(other) == []


def test_after_an_answer_was_broken_off_others_steps_may_still_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    feed = Feed()
    channel = feed(Wire(), 1.0)
    with feed.answering(OTHERS):
        pass
    with feed.answering(MINE):
        channel.submit(linear(torch.ones(1, 4)))
        now += feed_module._SETTLING_S
        channel.submit(linear(torch.ones(1, 4)))
    assert (shown(feed)["others"], shown(feed)["requests"]) == (1, 1)


def test_what_is_no_answer_and_no_tensor_is_not_shown() -> None:
    feed = Feed()
    channel = feed(Wire(), 1.0)
    channel.submit(linear(torch.ones(1, 4)))
    with feed.answering(MINE) as complete:
        channel.submit(InitRequest())
        complete()
    channel.submit(linear(torch.ones(1, 4)))
    assert (shown(feed)["requests"], shown(feed)["others"]) == (0, 0)
