"""An OpenAI client behind a proxy that ends TLS: the proxy reads and changes no word of it."""

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
from tee_side.serve.identity import ReceiptChain, Sealing
from tee_side.serve.sealed import HpkeKey
from tests.kit.http_proxy import HttpProxy, http_proxy
from tests.kit.rows import each_row
from tests.kit.serve import SAID, FakeEngine, serving
from tsqp.client.transports import SealedTransport

API_KEY = "tsqp-canary-of-the-key"
PROMPT = "The canary of the prompt"
CHAT: Any = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}]}


def _authorise(request: Request) -> str:
    if request.headers.get("authorization") != f"Bearer {API_KEY}":
        raise ApiError(401, "a key is needed", headers={"www-authenticate": "Bearer"})
    return "alice"


@contextmanager
def served(key: HpkeKey, engine: FakeEngine, folder: Path) -> Iterator[HttpProxy]:
    """Run a server, and the proxy in front of it."""
    receipts = ReceiptChain(Ed25519PrivateKey.generate(), bytes(32), bytes(32))
    app = Sealing(create_app(serving(engine, authorise=_authorise, receipts=receipts)), key)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound.dup()]})
        thread.start()
        try:
            with http_proxy(bound.getsockname()[1], folder) as proxy:
                yield proxy
        finally:
            server.should_exit = True
            thread.join()


def spoken(client: openai.OpenAI) -> str:
    chunks = client.chat.completions.create(**CHAT, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@each_row("hybrid", [True, False])
def test_a_client_gets_what_it_gets_without_a_seal_and_the_proxy_reads_no_word(
    tmp_path_factory: pytest.TempPathFactory, hybrid: bool
) -> None:
    words = [API_KEY, PROMPT, "canary", "demo", "choices", "role", "tsqp-receipt", "text/event"]
    words += [word for word in SAID.replace(",", " ").split() if len(word) > 3]
    key, engine = HpkeKey(hybrid=hybrid), FakeEngine()
    with served(key, engine, tmp_path_factory.mktemp("proxy")) as proxy:
        assert proxy.trusting is not None
        plain: httpx2.BaseTransport = httpx2.HTTPTransport(verify=proxy.trusting)
        for transport in (plain, SealedTransport(plain, key.suite, key.public)):
            proxy.requests.clear()
            proxy.answers.clear()
            with openai.OpenAI(
                base_url=f"{proxy.url}/v1",
                api_key=API_KEY,
                max_retries=0,
                http_client=httpx2.Client(transport=transport),
            ) as client:
                assert spoken(client) == SAID
                whole = client.chat.completions.with_raw_response.create(**CHAT)
                assert whole.parse().choices[0].message.content == SAID
                assert whole.headers["tsqp-receipt"]
                assert [model.id for model in client.models.list()] == ["demo"]
                embedded = client.embeddings.create(
                    model="demo", input=PROMPT, encoding_format="float"
                )
                assert len(embedded.data[0].embedding) == 3
            # Each is there where nothing is sealed: the test would find it.
            found = [word for word in words if word.encode() in proxy.seen]
            assert found == (words if transport is plain else [])
        paths = ["/v1/chat/completions", "/v1/chat/completions", "/v1/models", "/v1/embeddings"]
        assert [request[:2] for request in proxy.requests] == [("POST", path) for path in paths]
        for _, _, headers, _ in proxy.requests:
            names = {"host", "accept", "accept-encoding", "content-type", "content-length"}
            assert headers.keys() == names
        # Sent again, it is not run; each refusal is sealed, with another key, and short.
        before = len(engine.requests)
        answers = {proxy.send(*proxy.requests[0]) for _ in range(3)}
        assert (len(engine.requests), len(answers)) == (before, 3)
        assert max(map(len, answers)) < 400
