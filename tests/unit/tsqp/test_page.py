"""The page shows what crossed for its own last answer, and of no other's; it loads nothing."""

import base64
import hashlib
import re
from typing import Any
from unittest import mock

import pytest
import torch
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from protocol.channel import Channel
from protocol.errors import TsqpError
from protocol.model.config import read_config
from protocol.prepared import PreparedRequest, Traffic
from tee_side.engine.generation import Totals
from tee_side.policy.placement import load_policy
from tests.kit.ask import QKV, linear, ring
from tsqp.page.feed import PAGE_HEADER, Feed, PageRequests, page_routes
from tsqp.run.settings import model_directory

MINE, OTHERS = "a" * 32, "b" * 32
DEMO = model_directory("demo")


def rows_of(count: int, width: int = 4) -> tuple[PreparedRequest, torch.Tensor]:
    rows = torch.ones(count, width)
    return PreparedRequest(linear(rows, *QKV, layer=0), (count, 6), "float32"), rows


def made_wire() -> Any:
    return mock.create_autospec(Channel, instance=True, endpoint="wire", traffic=Traffic())


def shown(feed: Feed, page: str = MINE) -> dict[str, Any]:
    found = feed.described(page, 0)
    assert found is not None
    return found


def test_what_the_page_does_not_watch_is_handed_on() -> None:
    wire, error, reply = made_wire(), TsqpError("a", got="b", expected="c"), mock.Mock()
    channel = Feed()(wire, 1.0)
    assert (channel.endpoint, channel.traffic) == (wire.endpoint, wire.traffic)
    assert channel.wait(7) is wire.wait.return_value
    channel.abandon(7)
    channel.distrust(reply, error)
    channel.close()
    assert [name for name, *_ in wire.mock_calls] == ["wait", "abandon", "distrust", "close"]
    assert wire.distrust.call_args.args == (reply, error)


def test_a_request_passes_as_it_is_and_what_is_kept_is_a_bounded_copy() -> None:
    feed, wire = Feed(), made_wire()
    channel = feed(wire, 1.0)
    payload = torch.tensor([[7, 8]], dtype=torch.int32)
    prepared = PreparedRequest(ring(payload * 0, *QKV, layer=0), (1, 6), "int32")
    with feed.answering(MINE):
        assert channel.wait(channel.start(prepared, payload, 2.0)) is wire.wait.return_value
        wire.wait.assert_called_once_with(wire.start.return_value)
        wire.start.assert_called_once_with(prepared, payload, 2.0)  # == of two tensors raises
        payload.zero_()
        assert [rows.tolist() for rows in feed.inputs(MINE)] == [[[7, 8]]]
        assert shown(feed)["samples"][0]["head"] == "0700000008000000"
        asked, rows = rows_of(50)
        for _ in range(50):
            assert channel.start(asked, rows) is wire.start.return_value
    for found in wire.start.call_args_list[1:]:
        assert (found.args[0] is asked, found.args[1] is rows, found.args[2]) == (True, True, None)
    found = shown(feed)
    assert [one["number"] for one in found["samples"]] == list(range(20, 52))
    assert (found["requests"], found["rows"], found["running"]) == (51, 2501, False)
    assert sum(map(len, feed.inputs(MINE))) == 1024
    assert sum(found["histogram"]) == 8 + 50 * 50 * 16


@pytest.mark.parametrize("other", [OTHERS, None])
def test_what_crosses_while_others_are_answered_is_counted_and_not_shown(other: str | None) -> None:
    feed = Feed()
    channel = feed(made_wire(), 1.0)
    channel.start(*rows_of(1))  # for no answer
    with feed.answering(MINE):
        channel.start(*rows_of(1))
        with feed.answering(other) as complete:
            channel.start(*rows_of(1))
            channel.start(*rows_of(1))
            complete()
        channel.start(*rows_of(1))
    found = shown(feed)
    assert (found["requests"], found["others"], len(found["samples"])) == (2, 2, 2)
    assert other is None or shown(feed, other)["requests"] == 0
    assert feed.inputs(OTHERS) == []


@pytest.fixture
def client() -> TestClient:
    feed = Feed()
    channel = feed(made_wire(), 1.0)

    def complete(_: HttpRequest) -> Response:
        channel.start(*rows_of(3, 192))
        return PlainTextResponse("answer")

    totals = mock.Mock(return_value=Totals(pads_ready=5, pads_in_tee=1))
    runner = mock.Mock(settings=mock.Mock(model=DEMO), dtype=torch.float32, totals=totals)
    runner.policy, runner.config = load_policy("shielded"), read_config(DEMO)
    completing = Route("/v1/complete", complete, methods=["GET", "POST"])
    other = Route("/other", complete, methods=["POST"])
    middleware = [Middleware(PageRequests, feed=feed)]
    routes = [completing, other, *page_routes(feed, runner)]
    return TestClient(Starlette(routes=routes, middleware=middleware))


def test_the_page_may_run_what_it_brings_and_load_nothing(client: TestClient) -> None:
    response = client.get("/")
    policy = response.headers["content-security-policy"].split("; ")
    directives = {name: values for name, *values in map(str.split, policy)}
    assert (directives["default-src"], directives["connect-src"]) == (["'none'"], ["'self'"])
    for tag in ("script", "style"):
        content = response.text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert directives[f"{tag}-src"] == [f"'sha256-{digest}'"]
    # The one address is the name of a namespace.
    assert re.findall(r"https?://[^'\"\s]+", response.text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"\bon[a-z]+=|\bstyle=|innerHTML|insertAdjacent|\beval\b", response.text)


def test_a_page_gets_what_crossed_for_its_own_completion(client: TestClient) -> None:
    mine, others = ({PAGE_HEADER: page} for page in (MINE, OTHERS))
    for method, path, headers in (
        ("POST", "/v1/complete", {}),
        ("POST", "/v1/complete", others),
        ("POST", "/v1/complete", {PAGE_HEADER: MINE.upper()}),
        ("GET", "/v1/complete", mine),
        ("POST", "/other", mine),
    ):
        assert client.request(method, path, headers=headers).status_code == 200
        assert client.get("/page/feed", headers=mine).json()["sent"] is None
    said = {"messages": [{"role": "user", "content": "Once upon a time"}], "answer": "there was"}
    assert client.post("/page/read", json=said, headers=mine).json()["read"] is None
    assert client.post("/v1/complete", headers=mine).text == "answer"
    found = client.get("/page/feed", headers=mine)
    assert found.headers["cache-control"] == "no-store"
    sent, tee = found.json()["sent"], found.json()["tee"]
    assert (sent["requests"], sent["rows"], sent["running"]) == (1, 3, False)
    assert tee["operators"]["qkv_proj"] == ["prefill tee", "decode gpu under pad verified"]
    assert client.get("/page/feed?since=1", headers=mine).json()["sent"]["samples"] == []
    read = client.post("/page/read", json=said, headers=mine).json()["read"]
    assert (read["rows"], read["better"]) == (3, False)


def test_what_names_no_page_is_refused_and_a_refused_body_is_not_quoted(client: TestClient) -> None:
    for page, since in (("", "0"), ("A" * 32, "0"), (MINE, "-1"), (MINE, "1" * 10)):
        response = client.get(f"/page/feed?since={since}", headers={PAGE_HEADER: page})
        assert response.status_code == 400, (page, since)
    for body in (b"", b"secret", b"[]", b'{"messages": "secret", "answer": ""}'):
        response = client.post("/page/read", content=body, headers={PAGE_HEADER: MINE})
        assert (response.status_code, "secret" in response.text) == (400, False), body
