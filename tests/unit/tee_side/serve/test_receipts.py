"""Every answer has a receipt of its own bytes, where the server signs them, and none else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import EndpointError, LimitError
from tee_side.attest.receipts import Receipt, verify
from tee_side.engine.request import Delivery, NewToken, PromptRead
from tee_side.serve.app import create_app
from tee_side.serve.audit_log import AuditLog, AuditReader, open_log
from tee_side.serve.limits import Limits
from tee_side.serve.metrics import Metrics
from tee_side.serve.receipt_chain import ReceiptChain
from tee_side.serve.serving import Serving
from tee_side.serve.watch import Watch
from tests.kit.rows import each_row
from tests.kit.serve import (
    FakeEngine,
    FakeWatch,
    Reply,
    Stats,
    ask,
    call,
    connected,
    serving,
    tokenizer,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
MODEL, POLICY, NOW = b"m" * 32, b"p" * 32, 1_764_000_000
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "Hello"}]
GONE = EndpointError("ipc:///tmp/gpu", got="nothing", expected="a reply")
DONE = b"data: [DONE]\n\n"
LINE = b": tsqp-receipt "

# Every form of an answer; each is asked for whole and, but for embeddings, as a stream.
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Hello"}),
    (COMPLETIONS, {"prompt": "Hello", "n": 3, "seed": 5}),
    (COMPLETIONS, {"prompt": ["Hello", "a cat", "b"], "n": 2, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "Hello", "echo": True, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": "a " * 200, "max_tokens": 1}),
    (CHAT, {"messages": MESSAGES}),
    (CHAT, {"messages": MESSAGES, "n": 2, "logprobs": True, "stop": "cat"}),
    (EMBEDDINGS, {"input": "Hello"}),
    (EMBEDDINGS, {"input": ["Hello", "a cat"], "encoding_format": "base64"}),
]
FORMS = [(path, body, False) for path, body in ASKED]
FORMS += [(path, body, True) for path, body in ASKED if path != EMBEDDINGS]


def chain() -> ReceiptChain:
    return ReceiptChain(KEY, MODEL, POLICY, lambda: NOW)


def signing(engine: FakeEngine | None = None, **changes: Any) -> Serving:
    return serving(engine, **({"receipts": chain()} | changes))


def sent(body: dict[str, Any], stream: bool) -> bytes:
    """Write a body with blanks that another writer of JSON would not have."""
    text = json.dumps(body | ({"stream": True} if stream else {}), indent=3)
    return f"\n {text} \n".encode()


def post(app: Any, path: str, content: bytes, **more: Any) -> Reply:
    return call(app, "POST", path, content, {"content-type": "application/json"}, **more)


def split(reply: Reply) -> tuple[bytes, bytes]:
    """Return the bytes of an answer up to its receipt, and the receipt."""
    content = b"".join(reply.writes)
    if "tsqp-receipt" in reply.headers:
        return content, base64.b64decode(reply.headers["tsqp-receipt"], validate=True)
    # It begins a line: an answer may have its words within one.
    before, _, after = content.partition(b"\n\n" + LINE)
    text, end, rest = after.partition(b"\n\n")
    assert (end, rest) in ((b"\n\n", DONE), (b"\n\n", b""))
    return before + b"\n\n", base64.b64decode(text, validate=True)


def receipt_of(reply: Reply) -> Receipt:
    return verify(split(reply)[1], PUBLIC)


def sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def follow(chain: Sequence[bytes]) -> bool:
    before = [bytes(32), *map(sha256, chain[:-1])]
    return [verify(signed, PUBLIC).previous for signed in chain] == before


@each_row(("path", "body", "stream"), FORMS)
def test_a_receipt_is_of_the_bytes_that_were_sent_and_received(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    content = sent(body, stream)
    reply = post(signing(), path, content, chunk=7)
    answer, signed = split(reply)
    found = verify(signed, PUBLIC)
    assert reply.status == 200
    assert (found.request, found.response) == (sha256(content), sha256(answer))
    assert (found.model, found.policy, found.time) == (MODEL, POLICY, NOW)
    assert (found.sequence, found.previous) == (0, bytes(32))
    assert ("tsqp-receipt" in reply.headers) is not stream
    for changed in (answer[:-1], answer + b"\n", answer.replace(b'"', b"'", 1), answer + LINE):
        assert sha256(changed) != found.response
    assert sha256(content.replace(b"   ", b"  ", 1)) != found.request


@each_row(("path", "body", "stream"), FORMS)
def test_an_answer_is_the_same_without_its_receipt(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    content = sent({"seed": 1, **body} if path != EMBEDDINGS else body, stream)
    plain = post(serving(), path, content)
    reply = post(signing(), path, content)
    assert set(reply.headers) - set(plain.headers) <= {"tsqp-receipt"}
    assert "tsqp-receipt" not in plain.headers
    assert LINE not in b"".join(plain.writes)

    def shown(text: bytes) -> bytes:
        # Ids and times differ.
        events = [line.removeprefix(b"data: ") for line in text.split(b"\n\n") if line]
        found = [event if event == b"[DONE]" else json.loads(event) for event in events]
        for event in found:
            if isinstance(event, dict):
                event["id"] = event["created"] = None
        return json.dumps(found, default=bytes.decode).encode()

    answer, _ = split(reply)
    assert shown(answer + (DONE if stream else b"")) == shown(b"".join(plain.writes))
    if not stream:
        assert reply.headers["content-length"] == str(len(answer))


def test_a_receipt_of_a_stream_is_a_comment_before_done_and_behind_the_counts() -> None:
    body = {"prompt": "Hello", "stream": True, "stream_options": {"include_usage": True}}
    *events, comment, done, end = call(signing(), "POST", COMPLETIONS, body).text.split("\n\n")
    assert comment.startswith(": tsqp-receipt ")
    assert "\n" not in comment
    assert all(event.startswith("data: {") for event in events)
    assert json.loads(events[-1].removeprefix("data: "))["usage"] is not None
    assert (done, end) == ("data: [DONE]", "")


def test_counts_are_told_as_the_answer_tells_them() -> None:
    body = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 3}
    exact, rounded = signing(), signing(round_usage=10)
    for served, counts in ((exact, (3, 12)), (rounded, (10, 20))):
        reply = call(served, "POST", COMPLETIONS, body)
        usage, found = reply.json()["usage"], receipt_of(reply)
        assert (found.prompt_tokens, found.completion_tokens) == counts
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == counts


def test_sampling_is_told_as_it_was_done() -> None:
    body = {"prompt": [5], "top_k": -1, "top_p": 0.5, "n": 2, "seed": 9, "max_tokens": 10**6}
    found = receipt_of(call(signing(), "POST", COMPLETIONS, body | {"logit_bias": {"7": 1}}))
    assert found.seed == 9
    assert found.sampling == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 0.5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "n": 2,
        "max_tokens": 511,
        "logit_bias": 1,
    }
    assert receipt_of(call(signing(), "POST", COMPLETIONS, {"prompt": [5]})).seed is None
    for path, nothing in ((EMBEDDINGS, {"input": "a"}), (COMPLETIONS, ASKED[3][1])):
        assert receipt_of(call(signing(), "POST", path, nothing)).sampling == {}


def test_receipts_of_a_server_are_a_chain_in_which_one_that_is_missing_shows() -> None:
    served = signing()
    app = create_app(served)

    async def run() -> list[Reply]:
        found = []
        for path, body, stream in FORMS[:4] + FORMS[-4:]:
            # What is refused is no link of it.
            assert (await ask(app, "POST", path, {"prompt": 1})).status == 400
            found.append(await ask(app, "POST", path, body | {"stream": stream}))
        return found

    signed = [split(reply)[1] for reply in asyncio.run(run())]
    assert [verify(one, PUBLIC).sequence for one in signed] == list(range(8))
    assert follow(signed)
    for at in range(8):
        assert follow(signed[:at] + signed[at + 1 :]) is (at == 7)


def test_answers_at_once_are_signed_in_the_order_of_their_ends() -> None:
    async def run() -> list[Reply]:
        app = create_app(signing(FakeEngine(says=[300, 301, 302])))
        asked = [(at % 2 == 0, 3 - at % 3) for at in range(9)]
        bodies = [{"prompt": [5], "stream": stream, "max_tokens": most} for stream, most in asked]
        return await asyncio.gather(*(ask(app, "POST", COMPLETIONS, body) for body in bodies))

    signed = {verify(one, PUBLIC).sequence: one for _, one in map(split, asyncio.run(run()))}
    assert sorted(signed) == list(range(9))
    assert follow([signed[at] for at in range(9)])


def test_a_stream_that_breaks_off_with_an_error_has_one_for_what_it_says() -> None:
    watch = FakeWatch()
    served = signing(FakeEngine(error=GONE, fail_after=2), watch=watch)
    content = sent({"prompt": [5, 6]}, stream=True)
    reply = post(served, COMPLETIONS, content)
    answer, signed = split(reply)
    found = verify(signed, PUBLIC)
    assert b'data: {"error"' in answer.split(b"\n\n")[-2]
    assert b"[DONE]" not in b"".join(reply.writes)
    assert (found.request, found.response) == (sha256(content), sha256(answer))
    assert found.completion_tokens == 2
    assert watch.receipts == [sha256(signed)]


@each_row("stream", [False, True])
def test_what_is_refused_or_fails_before_its_first_byte_has_none(stream: bool) -> None:
    full = LimitError("requests", got="2", expected="1")
    told = [
        (signing(FakeEngine(error=GONE)), 503),
        (signing(watch=FakeWatch(refusal=full)), 503),
        (signing(FakeEngine(state="starting")), 503),
    ]
    for served, status in told:
        reply = call(served, "POST", COMPLETIONS, {"prompt": [5], "stream": stream})
        assert reply.status == status
        assert "tsqp-receipt" not in str(reply.headers) + reply.text
        mended = replace(served, engine=FakeEngine(), watch=FakeWatch())
        assert receipt_of(call(mended, "POST", COMPLETIONS, {"prompt": [5]})).sequence == 0


def test_a_client_that_left_has_none_and_leaves_no_gap() -> None:
    async def run() -> tuple[Reply, list[bytes | None]]:
        engine, watch = FakeEngine(hold=True), FakeWatch()
        app = create_app(signing(engine, watch=watch))
        async with connected(app, "POST", COMPLETIONS, {"prompt": [5], "stream": True}) as asked:
            await engine.submitted.wait()
            engine.step(Delivery((NewToken(0, 300, None, None),), PromptRead()))
            await asked.changed.wait()
        engine.hold = False
        reply = await ask(app, "POST", COMPLETIONS, {"prompt": [5]})
        assert LINE not in b"".join(asked.reply.writes)
        return reply, watch.receipts

    reply, noted = asyncio.run(run())
    found = receipt_of(reply)
    assert (found.sequence, found.previous) == (0, bytes(32))
    assert noted == [None, sha256(split(reply)[1])]


def test_the_log_has_the_digest_of_each_receipt(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with AuditLog(path, bytes(32)) as audit:
        watch = Watch(Limits(lambda _: None), Metrics("demo", Stats), audit, "shielded")
        app = create_app(signing(watch=watch))
        bodies = [{"prompt": [5], "stream": stream} for stream in (False, True)]
        signed = [split(call(app, "POST", COMPLETIONS, body))[1] for body in bodies]
        plain = create_app(serving(watch=watch))
        call(plain, "POST", COMPLETIONS, {"prompt": [5]})
    with open_log(path) as file:
        records = list(AuditReader(file, bytes(32), "log"))
    assert [record.get("receipt") for record in records] == [*map(sha256, signed), None]
    assert "receipt" not in records[-1]


@each_row("path", ["/tokenize", "/detokenize"])
def test_what_asks_nothing_of_the_model_has_none(path: str) -> None:
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [5]}
    reply = call(signing(), "POST", path, body)
    assert (reply.status, reply.headers.get("tsqp-receipt")) == (200, None)


def test_a_model_that_writes_a_receipt_writes_text() -> None:
    """Neither a prompt nor a token can end a line of the stream."""
    said = f"\n\n{LINE.decode()}QUJD\n\ndata: [DONE]\n\n"
    engine = FakeEngine(says=tokenizer().encode(said)[1:])
    body = {"prompt": said, "echo": True, "stream": True}
    answer, signed = split(call(signing(engine), "POST", COMPLETIONS, body))
    assert verify(signed, PUBLIC).response == sha256(answer)
    assert answer.count(b"\n") == 2 * answer.count(b"data: {")
