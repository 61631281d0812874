"""An OpenAI client behind a proxy that ends TLS: the proxy reads and changes no word of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.requests import Request

from tee_side.serve.app import create_app
from tee_side.serve.errors import ApiError
from tee_side.serve.hpke_key import HpkeKey
from tee_side.serve.receipt_chain import ReceiptChain
from tee_side.serve.sealing import Sealing
from tests.kit.http_proxy import HttpProxy, tls_ending_proxy
from tests.kit.serve import SAID, FakeEngine, serving
from tsqp.client.sealing import SealedTransport, UnsealedError

API_KEY = "tsqp-canary-of-the-key"
PROMPT = "The canary of the prompt"
CHAT: Any = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}


class Side:
    """A server, and the proxy in front of it."""

    def __init__(self, key: HpkeKey, engine: FakeEngine, proxy: HttpProxy) -> None:
        self.key, self.engine, self.proxy = key, engine, proxy

    @contextmanager
    def client(self, sealed: bool = True) -> Iterator[openai.OpenAI]:
        assert self.proxy.trusting is not None
        inner: httpx2.BaseTransport = httpx2.HTTPTransport(verify=self.proxy.trusting)
        transport = SealedTransport(inner, self.key.suite, self.key.public) if sealed else inner
        with openai.OpenAI(
            base_url=f"{self.proxy.url}/v1",
            api_key=API_KEY,
            max_retries=0,
            http_client=httpx2.Client(transport=transport),
        ) as client:
            yield client


def _authorise(request: Request) -> str:
    if request.headers.get("authorization") != f"Bearer {API_KEY}":
        raise ApiError(401, "a key is needed", headers={"www-authenticate": "Bearer"})
    return "alice"


@pytest.fixture(params=[True, False], ids=["hybrid", "x25519"])
def key(request: pytest.FixtureRequest) -> HpkeKey:
    return HpkeKey(hybrid=request.param)


@pytest.fixture
def side(key: HpkeKey, tmp_path: Path) -> Iterator[Side]:
    engine = FakeEngine()
    receipts = ReceiptChain(Ed25519PrivateKey.generate(), bytes(32), bytes(32))
    app = Sealing(create_app(serving(engine, authorise=_authorise, receipts=receipts)), key)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound.dup()]})
        thread.start()
        try:
            with tls_ending_proxy(bound.getsockname(), tmp_path) as proxy:
                yield Side(key, engine, proxy)
        finally:
            server.should_exit = True
            thread.join()


def spoken(client: openai.OpenAI) -> str:
    chunks = client.chat.completions.create(**CHAT, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_client_gets_what_it_gets_without_a_seal_and_the_proxy_reads_no_word(side: Side) -> None:
    words = [API_KEY, PROMPT, "canary", "demo", "choices", "role", "tsqp-receipt", "text/event"]
    words += [word for word in SAID.replace(",", " ").split() if len(word) > 3]
    for sealed in (False, True):
        side.proxy.requests.clear()
        side.proxy.answers.clear()
        with side.client(sealed=sealed) as client:
            assert spoken(client) == SAID
            whole = client.chat.completions.with_raw_response.create(**CHAT)
            assert whole.parse().choices[0].message.content == SAID
            assert whole.headers["tsqp-receipt"]
            assert [model.id for model in client.models.list()] == ["demo"]
            embedded = client.embeddings.create(model="demo", input=PROMPT, encoding_format="float")
            assert len(embedded.data[0].embedding) == 3
        seen = side.proxy.seen
        # Each is there where nothing is sealed: the test would find it.
        assert [word for word in words if word.encode() in seen] == ([] if sealed else words)
    paths = ["/v1/chat/completions", "/v1/chat/completions", "/v1/models", "/v1/embeddings"]
    assert [request[:2] for request in side.proxy.requests] == [("POST", path) for path in paths]
    for _, _, headers, _ in side.proxy.requests:
        names = {"host", "accept", "accept-encoding", "content-type", "content-length"}
        assert headers.keys() == names


def test_a_request_that_the_proxy_changed_moved_or_sends_again_is_not_run(side: Side) -> None:
    def refused(client: openai.OpenAI) -> int:
        with pytest.raises(openai.APIConnectionError) as error:
            client.chat.completions.create(**CHAT)
        assert isinstance(error.value.__cause__, UnsealedError)
        return error.value.__cause__.status

    with side.client() as client:
        side.proxy.path_of = lambda _path: "/v1/completions"
        assert refused(client) == 400
        side.proxy.path_of = lambda path: path + "?a=b"
        assert refused(client) == 400
        side.proxy.path_of = str
        side.proxy.change = lambda body: bytes([*body[:-1], body[-1] ^ 1])
        # The answer is sealed where the head came by itself, and was opened before.
        with pytest.raises((openai.BadRequestError, openai.APIConnectionError)):
            client.chat.completions.create(**CHAT)
        side.proxy.change = lambda body: body[:20]
        assert refused(client) == 400
        side.proxy.change = bytes
        assert side.engine.requests == []
        assert spoken(client) == SAID
    captured = side.proxy.requests[-1]
    answers = {side.proxy.send(*captured) for _ in range(3)}
    assert len(side.engine.requests) == 1
    # Sealed, each with another key, and short: they say that it was sent before.
    assert len(answers) == 3
    assert max(map(len, answers)) < 400
