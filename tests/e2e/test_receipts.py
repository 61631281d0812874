"""What clients of OpenAI's API do with an answer that has a receipt: as much as without one."""

from __future__ import annotations

import base64
import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from openai.lib.streaming.chat import ContentDeltaEvent

from tee_side.attest.receipts import Receipt, verify
from tee_side.serve.app import create_app
from tee_side.serve.receipt_chain import ReceiptChain
from tee_side.serve.serving import Serving
from tests.kit.serve import SAID, FakeEngine, serving

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
CHAT: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}


@contextmanager
def listening(served: Serving) -> Iterator[str]:
    """Serve on a free port from a thread; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(
            uvicorn.Config(create_app(served), log_level="critical", lifespan="off")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound.dup()]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


def signing(engine: FakeEngine | None = None) -> Serving:
    return serving(engine, receipts=ReceiptChain(KEY, bytes(32), bytes(32)))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(signing()) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


def checked(signed: bytes, request: bytes, response: bytes) -> Receipt:
    """Check a receipt as `tsqp receipt verify` does."""
    receipt = verify(signed, PUBLIC)
    digests = [hashlib.sha256(content).digest() for content in (request, response)]
    assert [receipt.request, receipt.response] == digests
    return receipt


def test_a_whole_answer_has_its_receipt_in_a_header(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT, seed=4)
    signed = base64.b64decode(raw.headers["tsqp-receipt"], validate=True)
    assert raw.parse().choices[0].message.content == SAID
    receipt = checked(signed, raw.http_request.content, raw.content)
    assert receipt.seed == 4
    usage = raw.parse().usage
    assert usage is not None
    counts = (receipt.prompt_tokens, receipt.completion_tokens)
    assert counts == (usage.prompt_tokens, usage.completion_tokens)


def test_a_stream_is_read_to_its_end_and_nothing_of_it_is_the_receipt(
    client: openai.OpenAI,
) -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    assert chunks[-1].choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**CHAT) as stream:
        deltas = [event.delta for event in stream if isinstance(event, ContentDeltaEvent)]
    assert "".join(deltas) == SAID
