"""Every answer has a receipt of its own bytes, where the server signs them, and none else."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from protocol.errors import EndpointError
from tee_side.attest.receipts import Receipt, verify
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
    call,
    engine_stats,
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
    (COMPLETIONS, {"prompt": ["Hello", "a cat", "b"], "n": 2, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "Hello", "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": MESSAGES, "n": 2, "logprobs": True, "stop": "cat"}),
    (EMBEDDINGS, {"input": ["Hello", "a cat"], "encoding_format": "base64"}),
]
FORMS = [(path, body, False) for path, body in ASKED if "stream_options" not in body]
FORMS += [(path, body, True) for path, body in ASKED if path != EMBEDDINGS]


def signing(engine: FakeEngine | None = None, **changes: Any) -> Serving:
    chain = ReceiptChain(KEY, MODEL, POLICY, lambda: NOW)
    return serving(engine, **({"receipts": chain} | changes))


def post(served: Serving, path: str, body: dict[str, Any], **more: Any) -> Reply:
    return call(served, "POST", path, body, **more)


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


@each_row(("path", "body", "stream"), FORMS)
def test_a_receipt_is_of_the_bytes_that_were_sent_and_received(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    # With blanks that another writer of JSON would not have.
    content = json.dumps(body | {"stream": stream} if path != EMBEDDINGS else body, indent=3)
    sent, kind = f"\n {content} \n".encode(), {"content-type": "application/json"}
    plain, reply = (
        call(served, "POST", path, sent, kind, chunk=7) for served in (serving(), signing())
    )
    answer, signed = split(reply)
    found = verify(signed, PUBLIC)
    assert (found.request, found.response) == (sha256(sent), sha256(answer))
    assert (found.model, found.policy, found.time) == (MODEL, POLICY, NOW)
    assert (found.sequence, found.previous) == (0, bytes(32))
    assert ("tsqp-receipt" in reply.headers) is not stream
    # Where the server signs none there is none.
    assert "tsqp-receipt" not in str(plain.headers) + plain.text
    if stream:
        *_, comment, done, end = reply.text.split("\n\n")
        assert (comment[: len(LINE)].encode(), done, end) == (LINE, "data: [DONE]", "")
    else:
        assert reply.headers["content-length"] == str(len(answer))


def test_counts_and_sampling_are_told_as_the_answer_has_them() -> None:
    body = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 3}
    for served, counts in ((signing(), (3, 12)), (signing(round_usage=10), (10, 20))):
        reply = post(served, COMPLETIONS, body)
        usage, found = reply.json()["usage"], receipt_of(reply)
        assert (found.prompt_tokens, found.completion_tokens) == counts
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == counts
    body = {"prompt": [5], "top_k": -1, "top_p": 0.5, "n": 2, "seed": 9, "max_tokens": 10**6}
    found = receipt_of(post(signing(), COMPLETIONS, body | {"logit_bias": {"7": 1}}))
    unused = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    used = {"temperature": 1.0, "top_k": 0, "top_p": 0.5, "repetition_penalty": 1.0}
    assert found.sampling == unused | used | {"n": 2, "max_tokens": 511, "logit_bias": 1}
    assert found.seed == 9
    assert receipt_of(post(signing(), EMBEDDINGS, {"input": "a"})).sampling == {}


def test_a_stream_that_breaks_off_with_an_error_has_one_for_what_it_says() -> None:
    watch = FakeWatch()
    served = signing(FakeEngine(error=GONE, fail_after=2), watch=watch)
    reply = post(served, COMPLETIONS, {"prompt": [5, 6], "stream": True})
    answer, signed = split(reply)
    found = verify(signed, PUBLIC)
    assert b'data: {"error"' in answer.split(b"\n\n")[-2]
    assert (found.response, found.completion_tokens) == (sha256(answer), 2)
    assert watch.receipts == [sha256(signed)]


@each_row("stream", [False, True])
def test_what_is_refused_or_asks_nothing_of_the_model_has_none_and_leaves_no_gap(
    stream: bool,
) -> None:
    served = signing(FakeEngine(error=GONE))
    reply = post(served, COMPLETIONS, {"prompt": [5], "stream": stream})
    assert reply.status == 503
    assert "tsqp-receipt" not in str(reply.headers) + reply.text
    mended = replace(served, engine=FakeEngine())
    assert receipt_of(post(mended, COMPLETIONS, {"prompt": [5]})).sequence == 0
    assert "tsqp-receipt" not in post(signing(), "/tokenize", {"prompt": "a"}).headers


def test_the_log_has_the_digest_of_each_receipt(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "audit.log", bytes(32)) as audit:
        watch = Watch(Limits(lambda _: None), Metrics("demo", engine_stats), audit, "shielded")
        served, body = signing(watch=watch), {"prompt": [5]}
        signed = [
            split(post(served, COMPLETIONS, body | {"stream": stream}))[1]
            for stream in (False, True)
        ]
        post(serving(watch=watch), COMPLETIONS, body)
    with open_log(tmp_path / "audit.log") as file:
        records = list(AuditReader(file, bytes(32), "log"))
    assert [record.get("receipt") for record in records] == [*map(sha256, signed), None]
    assert "receipt" not in records[-1]


def test_a_model_that_writes_a_receipt_writes_text() -> None:
    """Neither a prompt nor a token can end a line of the stream."""
    said = f"\n\n{LINE.decode()}QUJD\n\ndata: [DONE]\n\n"
    engine = FakeEngine(says=tokenizer().encode(said)[1:])
    body = {"prompt": said, "echo": True, "stream": True}
    answer, signed = split(post(signing(engine), COMPLETIONS, body))
    assert verify(signed, PUBLIC).response == sha256(answer)
    assert answer.count(b"\n") == 2 * answer.count(b"data: {")
