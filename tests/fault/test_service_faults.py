"""Faults that a client can cause in a real gpu-service: each gets a code, and others go on."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from tests.kit.model import make_model
from tests.kit.service import Service, running_service
from tests.kit.wire import (
    HIDDEN,
    HIDDEN_BYTES,
    connected,
    embedding_body,
    exchange,
    framed_linear,
    header,
    inline,
    is_healthy,
    linear_body,
    matmul_body,
)

DATA = bytes(HIDDEN_BYTES)
GOOD = inline("Linear", linear_body())
BIG = 2**31 - 1
MALFORMED, INVALID, LIMIT = "MALFORMED_MESSAGE", "INVALID_FIELD", "LIMIT_EXCEEDED"
UNKNOWN, VERSION = "UNKNOWN_METHOD", "UNSUPPORTED_VERSION"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    with running_service(directory, "tcp://127.0.0.1:*", "--threads", "1") as running:
        # Nobody reads the log while the tests run: some 50 kB, which its pipe must hold.
        assert running.process.stderr is not None
        fcntl.fcntl(running.process.stderr, fcntl.F_SETPIPE_SZ, 2**20)
        yield running


@pytest.fixture
def endpoint(service: Service) -> Iterator[str]:
    """Yield the endpoint, and require afterwards that the service is as well as before."""
    yield service.endpoint
    assert service.process.poll() is None
    assert is_healthy(service.endpoint)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b""], MALFORMED),
        ([b"garbage"], MALFORMED),
        ([bytes(1000)], MALFORMED),
        ([b"\xff" * 1000], MALFORMED),
        ([GOOD[:-1]], MALFORMED),
        ([GOOD[:20]], MALFORMED),
        ([GOOD + b"\0"], MALFORMED),
        ([GOOD, GOOD], MALFORMED),
        ([b"", GOOD], MALFORMED),
        ([GOOD] * 20, MALFORMED),
        ([b"\x91" * 100_000], MALFORMED),
        ([b"\x81\xa1a" * 100_000], MALFORMED),
        ([b"\xdd\x00\x2f\xff\xff" + b"\x90" * 0x2FFFFF], MALFORMED),
        ([b"\xdf\xff\xff\xff\xff"], MALFORMED),
        ([b"\x81\xc4\x01a\xc0"], MALFORMED),
        ([b"\x82\xc4\x06method\xc0\xa7request\x80"], MALFORMED),
        ([b"\x81\xa1a\xd4\x00x"], MALFORMED),
        ([msgpack.packb([])], MALFORMED),
        ([msgpack.packb({})], MALFORMED),
        ([msgpack.packb({"method": "Init"})], MALFORMED),
        ([inline("Init", {}, trace=True)], MALFORMED),
        ([inline("Init", None)], MALFORMED),
        ([inline(1, {})], MALFORMED),
        ([inline(b"Init", {})], MALFORMED),
        ([inline("Shutdown", {})], UNKNOWN),
        ([inline("__init__", {})], UNKNOWN),
        ([inline("Init", {"x": 1})], INVALID),
        ([inline("Linear", {})], INVALID),
        ([inline("Linear", linear_body(shape=...))], INVALID),
        ([inline("Linear", linear_body(dtype=...))], INVALID),
        ([inline("Linear", linear_body(layer_idx=...))], INVALID),
        ([inline("Linear", linear_body(extra=1))], INVALID),
        ([inline("Linear", linear_body(layer_idx=3))], INVALID),
        ([inline("Linear", linear_body(layer_idx=-1))], INVALID),
        ([inline("Linear", linear_body(layer_idx=2**63))], INVALID),
        ([inline("Linear", linear_body(layer_idx="0"))], INVALID),
        ([inline("Linear", linear_body(layer_idx=0.5))], INVALID),
        ([inline("Linear", linear_body(module_name="lm_head"))], INVALID),
        ([inline("Linear", linear_body(module_name="down_proj"))], INVALID),
        ([inline("Linear", linear_body(module_name=b"q_proj"))], INVALID),
        ([inline("Linear", linear_body(hidden_states="0" * HIDDEN_BYTES))], INVALID),
        ([inline("Linear", linear_body(hidden_states=[0.0] * HIDDEN))], INVALID),
        ([inline("Linear", linear_body(hidden_states=DATA[:-1]))], INVALID),
        ([inline("Linear", linear_body(hidden_states=b""))], INVALID),
        ([inline("Linear", linear_body(shape=[HIDDEN]))], None),
        ([inline("Linear", linear_body(shape=[2, 24]))], INVALID),
        ([inline("Linear", linear_body(shape=[-1, HIDDEN]))], INVALID),
        ([inline("Linear", linear_body(shape=[0, HIDDEN]))], INVALID),
        ([inline("Linear", linear_body(shape=[1, 1, 1, 1, HIDDEN]))], INVALID),
        ([inline("Linear", linear_body(shape=[1.0, HIDDEN]))], INVALID),
        ([inline("Linear", linear_body(shape=HIDDEN))], INVALID),
        ([inline("Linear", linear_body(shape=[BIG] * 4))], LIMIT),
        ([inline("Linear", linear_body(shape=[2**63, HIDDEN]))], INVALID),
        ([inline("Linear", linear_body(dtype="torch.int64"))], INVALID),
        ([inline("Linear", linear_body(dtype="torch.float64"))], INVALID),
        ([inline("Linear", linear_body(dtype="torch.float16"))], INVALID),
        ([inline("Embedding", embedding_body([0, 319]))], None),
        ([inline("Embedding", embedding_body([0, 320]))], INVALID),
        ([inline("Embedding", embedding_body([-1]))], INVALID),
        ([inline("Embedding", embedding_body([2**63 - 1]))], INVALID),
        ([inline("Embedding", embedding_body([1], input_ids=[1]))], INVALID),
        ([inline("Matmul", matmul_body([2, 3], [3, 2]))], None),
        ([inline("Matmul", matmul_body([2, 3], [2, 3]))], INVALID),
        ([inline("Matmul", matmul_body([3], [3]))], INVALID),
        ([inline("Matmul", matmul_body([2, 1, 1], [3, 1, 1]))], INVALID),
        ([inline("Matmul", matmul_body([2**16, 1], [1, 2**16]))], LIMIT),
        ([inline("LMHead", matmul_body([2, 3], [3, 2]))], INVALID),
    ],
)
def test_inline_message(endpoint: str, frames: list[bytes], code: str | None) -> None:
    reply = exchange(zmq.REQ, endpoint, frames)
    if len(frames) == 1 and code is None:
        assert msgpack.unpackb(reply[0])["status"] == "success"
        return
    assert len(reply) == 1
    answer = msgpack.unpackb(reply[0])
    # What has several frames is taken for our own form, whose replies have an envelope.
    envelope = {"version": 1, "request_id": 0, "method": ""} if len(frames) > 1 else {}
    assert answer == {"status": "error", "error": code, **envelope}


@pytest.mark.parametrize(
    ("frames", "code", "request_id", "method"),
    [
        ([header(), DATA], None, 7, "Linear"),
        ([b"garbage", DATA], MALFORMED, 0, ""),
        ([header()[:-3], DATA], MALFORMED, 0, ""),
        ([b"\0" * 70_000, DATA], LIMIT, 0, ""),
        ([header(version=2), DATA], VERSION, 7, ""),
        ([header(version="1"), DATA], VERSION, 7, ""),
        ([header(version=...), DATA], MALFORMED, 7, ""),
        ([header(method="Init", request={}, version=2)], VERSION, 7, ""),
        ([header(request_id=-1), DATA], INVALID, 0, ""),
        ([header(request_id=2**63), DATA], INVALID, 0, ""),
        ([header(request_id=...), DATA], INVALID, 0, ""),
        ([header(timeout_ms=0), DATA], INVALID, 7, ""),
        ([header(priority=9), DATA], INVALID, 7, ""),
        ([header(), DATA, DATA], MALFORMED, 7, "Linear"),
        ([header(), DATA, DATA, DATA, DATA], MALFORMED, 0, ""),
        ([header()] + [b""] * 100, MALFORMED, 0, ""),
        ([header(), DATA[:-1]], INVALID, 7, "Linear"),
        ([header(), b""], INVALID, 7, "Linear"),
        ([header()], INVALID, 7, "Linear"),
        ([header(method="Shutdown"), DATA], UNKNOWN, 7, "Shutdown"),
        ([header(method="Init"), DATA], INVALID, 7, "Init"),
        ([header(request={}), DATA], MALFORMED, 7, "Linear"),
        ([framed_linear(layer_idx=3), DATA], INVALID, 7, "Linear"),
        ([framed_linear(layer_idx=-1), DATA], INVALID, 7, "Linear"),
        ([framed_linear(layer_idx=...), DATA], INVALID, 7, "Linear"),
        ([framed_linear(extra=None), DATA], INVALID, 7, "Linear"),
        ([framed_linear(module_names=["lm_head"]), DATA], INVALID, 7, "Linear"),
        ([framed_linear(module_names=["q_proj", "k_proj"]), DATA], INVALID, 7, "Linear"),
        ([framed_linear(module_names=["q_proj"] * 4), DATA], INVALID, 7, "Linear"),
        ([framed_linear(hidden_states=DATA)], INVALID, 7, "Linear"),
    ]
    + [
        (
            [framed_linear(hidden_states={"dtype": dtype, "shape": shape, "frame": frame}), DATA],
            code,
            7,
            "Linear",
        )
        for dtype, shape, frame, code in [
            ("float32", [1, HIDDEN], 0, INVALID),
            ("float32", [1, HIDDEN], 2, INVALID),
            ("float32", [1, HIDDEN], -1, INVALID),
            ("float32", [-1, HIDDEN], 1, INVALID),
            ("float32", [2, HIDDEN], 1, INVALID),
            ("float32", [BIG] * 4, 1, LIMIT),
            ("int64", [HIDDEN // 2], 1, INVALID),
            ("str", [1, HIDDEN], 1, INVALID),
        ]
    ],
)
def test_framed_message(
    endpoint: str, frames: list[bytes], code: str | None, request_id: int, method: str
) -> None:
    reply = exchange(zmq.DEALER, endpoint, frames)
    answer: dict[str, Any] = msgpack.unpackb(reply[0])
    assert (answer["request_id"], answer["method"]) == (request_id, method)
    if code is None:
        assert answer["status"] == "success"
        assert len(reply) == 2
        return
    assert len(reply) == 1
    assert answer == {
        "version": 1,
        "request_id": request_id,
        "method": method,
        "status": "error",
        "error": code,
    }


@pytest.mark.parametrize("frames", [[b""], [b"", b""], [b"", b"", b""]])
def test_empty_frames_from_a_dealer(endpoint: str, frames: list[bytes]) -> None:
    reply = exchange(zmq.DEALER, endpoint, frames)
    assert msgpack.unpackb(reply[-1])["error"] == MALFORMED


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
@pytest.mark.parametrize("linger_ms", [0, 5000])
def test_client_that_vanishes_before_its_reply(endpoint: str, kind: int, linger_ms: int) -> None:
    request = inline("Matmul", matmul_body([64, 64], [64, 64]))
    frames = [request] if kind == zmq.REQ else [header(), DATA]
    for _ in range(20):
        with connected(kind, endpoint, linger_ms) as client:
            client.send_multipart(frames)


def test_client_that_vanishes_between_two_replies(endpoint: str) -> None:
    for _ in range(10):
        with connected(zmq.DEALER, endpoint) as client:
            for request_id in range(1, 6):
                client.send_multipart([header(request_id=request_id), DATA])
            assert msgpack.unpackb(client.recv_multipart()[0])["request_id"] == 1


def test_both_kinds_of_client_at_once(endpoint: str) -> None:
    with connected(zmq.DEALER, endpoint) as dealer, connected(zmq.REQ, endpoint) as req:
        for request_id in range(1, 41):
            dealer.send_multipart([header(request_id=request_id), DATA])
            if request_id % 10 == 0:
                req.send(inline("Embedding", embedding_body([request_id])))
                answer = msgpack.unpackb(req.recv())
                assert answer["response"]["shape"] == [1, 1, HIDDEN]
        answers = [msgpack.unpackb(dealer.recv_multipart()[0]) for _ in range(40)]
    assert [answer["request_id"] for answer in answers] == list(range(1, 41))
    assert {answer["status"] for answer in answers} == {"success"}
