"""The page's own paths: what it may load, and who gets what from the feed."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from protocol.model.config import read_config
from tee_side.engine.generation import PadTotals
from tee_side.policy.placement import load_policy
from tests.unit.tsqp.page.test_feed import MINE, OTHERS, Wire, linear
from tsqp.cli.program import model_directory
from tsqp.page import routes
from tsqp.page.feed import Feed
from tsqp.page.routes import PAGE_HEADER, PageRequests, Tee, page_headers, page_routes

DEMO = model_directory("demo")
PAGE = (Path(routes.__file__).parent / "page.html").read_text(encoding="utf-8")
TEE = Tee(
    DEMO,
    load_policy("shielded"),
    read_config(DEMO),
    torch.float32,
    lambda: PadTotals(available=5, waited=0, in_tee=1),
)


@pytest.fixture
def feed() -> Feed:
    return Feed()


@pytest.fixture
def client(feed: Feed) -> Iterator[TestClient]:
    channel = feed(Wire(), 1.0)

    def complete(_: Request) -> Response:
        channel.submit(linear(torch.ones(3, 192)))
        return PlainTextResponse("answer")

    completing = Route("/v1/complete", complete, methods=["GET", "POST"])
    other = Route("/other", complete, methods=["POST"])
    app = Starlette(
        routes=[completing, other, *page_routes(feed, TEE)],
        middleware=[Middleware(PageRequests, feed=feed)],
    )
    with TestClient(app) as made:
        yield made


def test_the_page_may_run_what_it_brings_and_load_nothing(client: TestClient) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert response.text == PAGE
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"].split("; ")
    directives = {name: values for name, *values in map(str.split, policy)}
    assert directives["default-src"] == ["'none'"]
    assert directives["connect-src"] == ["'self'"]
    for tag in ("script", "style"):
        content = response.text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert directives[f"{tag}-src"] == [f"'sha256-{digest}'"]
    assert "unsafe" not in response.headers["content-security-policy"]


def test_the_hashes_are_those_of_the_content() -> None:
    changed = PAGE.replace("'use strict'", "'use  strict'")
    assert changed != PAGE
    assert page_headers(changed) != page_headers(PAGE)
    with pytest.raises(ValueError, match="unpack"):  # a second script would have no hash
        page_headers(PAGE.replace("</body>", "<script>1</script></body>"))


def test_the_page_names_no_address_and_no_markup_of_its_own_makes_script() -> None:
    addresses = re.findall(r"https?://[^'\"\s]+", PAGE)
    assert addresses == ["http://www.w3.org/2000/svg"]  # the name of a namespace
    assert not re.search(r"<(link|img|iframe|script src|base)\b|\burl\(|@import", PAGE)
    assert not re.search(r"\bon[a-z]+=|\bstyle=|innerHTML|insertAdjacent|\beval\b", PAGE)
    assert "A page cannot vouch for the server that served it." in PAGE


def test_a_page_gets_what_crossed_for_its_own_request(client: TestClient) -> None:
    mine = {PAGE_HEADER: MINE}
    assert client.post("/v1/complete", headers=mine).text == "answer"
    found = client.get("/page/feed", headers=mine)
    assert found.headers["cache-control"] == "no-store"
    sent, tee = found.json()["sent"], found.json()["tee"]
    assert (sent["requests"], sent["rows"], sent["running"]) == (1, 3, False)
    assert tee["policy"] == "shielded"
    assert tee["operators"]["qkv_proj"] == ["prefill tee", "decode gpu under pad verified"]
    assert tee["pads"] == {"available": 5, "waited": 0, "in_tee": 1}
    assert tee["kv_bytes_per_token"] == 2 * 5 * TEE.config.num_key_value_heads * 4 * (
        TEE.config.head_dim
    )
    assert client.get("/page/feed?since=1", headers=mine).json()["sent"]["samples"] == []
    assert client.get("/page/feed", headers={PAGE_HEADER: OTHERS}).json()["sent"] is None


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("POST", "/v1/complete", {}),
        ("POST", "/v1/complete", {PAGE_HEADER: OTHERS}),
        ("POST", "/v1/complete", {PAGE_HEADER: MINE.upper()}),
        ("GET", "/v1/complete", {PAGE_HEADER: MINE}),
        ("POST", "/other", {PAGE_HEADER: MINE}),
    ],
)
def test_what_is_not_a_pages_completion_is_not_shown_to_it(
    client: TestClient, method: str, path: str, headers: dict[str, str]
) -> None:
    assert client.request(method, path, headers=headers).status_code == 200
    assert client.get("/page/feed", headers={PAGE_HEADER: MINE}).json()["sent"] is None


@pytest.mark.parametrize(
    ("page", "since"), [(None, "0"), ("", "0"), ("A" * 32, "0"), (MINE, "-1"), (MINE, "1" * 10)]
)
def test_a_feed_without_a_page_is_refused(client: TestClient, page: str | None, since: str) -> None:
    headers = {} if page is None else {PAGE_HEADER: page}
    response = client.get(f"/page/feed?since={since}", headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body", [b"", b"secret", b"[]", b'{"messages": "secret", "answer": ""}', b'{"messages": []}']
)
def test_a_refused_body_is_not_quoted(client: TestClient, body: bytes) -> None:
    response = client.post("/page/read", content=body, headers={PAGE_HEADER: MINE})
    assert response.status_code == 400
    assert "secret" not in response.text


def test_the_attack_reads_the_pages_own_rows(client: TestClient) -> None:
    said = {"messages": [{"role": "user", "content": "Once upon a time"}], "answer": "there was"}
    before = client.post("/page/read", json=said, headers={PAGE_HEADER: MINE}).json()
    assert before["read"] is None
    assert len(before["prompt_ids"]) > 5
    client.post("/v1/complete", headers={PAGE_HEADER: MINE})
    after = client.post("/page/read", json=said, headers={PAGE_HEADER: MINE}).json()
    assert after["prompt_ids"] == before["prompt_ids"]
    assert after["read"]["rows"] == 3
    assert not after["read"]["better"]
    others = client.post("/page/read", json=said, headers={PAGE_HEADER: OTHERS}).json()
    assert others["read"] is None
    without = client.post("/page/read", json=said)
    assert without.status_code == 400


def test_an_answer_that_fails_leaves_nothing_running(feed: Feed) -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        TestClient(PageRequests(failing, feed)).post("/v1/complete", headers={PAGE_HEADER: MINE})
    found = feed.described(MINE, 0)
    assert found is not None
    assert not found["running"]
