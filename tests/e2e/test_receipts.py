"""What clients of OpenAI's API do with an answer that has a receipt: as much as without one."""

from __future__ import annotations

import asyncio
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

from protocol.errors import EndpointError
from tee_side.attest.receipts import Receipt, verify
from tee_side.serve.app import create_app
from tee_side.serve.receipt_chain import ReceiptChain
from tee_side.serve.serving import Serving
from tests.kit.serve import SAID, FakeEngine, serving

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
CHAT: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
LINE, DONE = b": tsqp-receipt ", b"data: [DONE]\n\n"
GONE = EndpointError("ipc:///tmp/gpu", got="nothing", expected="a reply")


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
    listed = client.embeddings.with_raw_response.create(model="demo", input=["Hello", "a"])
    signed = base64.b64decode(listed.headers["tsqp-receipt"], validate=True)
    assert checked(signed, listed.http_request.content, listed.content).sampling == {}
    assert len(listed.parse().data) == 2


def test_a_stream_is_read_to_its_end_and_nothing_of_it_is_the_receipt(
    client: openai.OpenAI,
) -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    assert chunks[-1].choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**CHAT, n=2) as stream:
        deltas = [event.delta for event in stream if isinstance(event, ContentDeltaEvent)]
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [SAID, SAID]
    assert len("".join(deltas)) == 2 * len(SAID)
    counted: Any = {"stream": True, "stream_options": {"include_usage": True}}
    texts = ["Hello", "a cat"]
    completed = list(client.completions.create(model="demo", prompt=texts, echo=True, **counted))
    said = ["", ""]
    for chunk in completed:
        for choice in chunk.choices:
            said[choice.index] += choice.text
    assert said == [text + SAID for text in texts]
    assert completed[-1].usage is not None


def test_the_bytes_of_a_stream_have_its_receipt(client: openai.OpenAI) -> None:
    streamed = client.chat.completions.with_streaming_response
    with streamed.create(**CHAT, stream=True) as raw:
        content = b"".join(raw.iter_bytes())
        request = raw.http_request.content
    answer, _, rest = content.partition(LINE)
    text, _, end = rest.partition(b"\n\n")
    assert end == DONE
    signed = base64.b64decode(text, validate=True)
    checked(signed, request, answer)
    for other in (request + b" ", request.replace(b"Hello", b"Hallo")):
        with pytest.raises(AssertionError):
            checked(signed, other, answer)
    with pytest.raises(AssertionError):
        checked(signed, request, answer.replace(b"stop", b"post"))


def test_the_asynchronous_client_reads_the_same_and_asks_again_on_its_connection(
    url: str,
) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="unused") as client:
            found = []
            for _ in range(3):
                chunks = await client.chat.completions.create(**CHAT, stream=True)
                pieces = [chunk.choices[0].delta.content or "" async for chunk in chunks]
                found.append("".join(pieces))
            return found

    assert asyncio.run(ask()) == [SAID] * 3


def test_an_error_in_a_stream_is_the_sdks_own_still() -> None:
    with (
        listening(signing(FakeEngine(error=GONE, fail_after=2))) as url,
        openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client,
    ):
        chunks, found = client.chat.completions.create(**CHAT, stream=True), []
        with pytest.raises(openai.APIError, match="EndpointError"):
            found += list(chunks)
        with client.chat.completions.with_streaming_response.create(**CHAT, stream=True) as raw:
            content = b"".join(raw.iter_bytes())
            request = raw.http_request.content
    answer, _, text = content.partition(LINE)
    assert text.endswith(b"\n\n")
    checked(base64.b64decode(text.strip(), validate=True), request, answer)
