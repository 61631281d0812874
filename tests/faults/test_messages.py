"""Bad messages to a real gpu-service: each gets a code, and others go on. And the fuzz row."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgpack
import pytest
import zmq

from tests.faults.row import Found, Row, note
from tests.fuzz.engine import MAX_BYTES, MAX_SECONDS, Fuzzer, Report
from tests.fuzz.targets import TARGETS, count_executions, fuzz, merge, read_executions, shares
from tests.kit.model import make_model
from tests.kit.rows import each_row
from tests.kit.service import Service, Workers
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


@Row(
    "fuzz",
    "frame fuzzing",
    "executions of every decoder, in both directions",
    "valid message or ProtocolError only (files: InputError; evidence: EvidenceError; handshake"
    " also: ReplyError, ServiceError, ModelMismatchError); <= 50 ms; <= 64 MiB",
    short=1_000,
    long=10_000_000,
    minutes=11,
)
def fuzzing(count: int, full: bool) -> Found:
    """Execute so many cases; the long run also adds to the corpus and to the sum of all runs."""
    began, report = time.monotonic(), Report()
    if full:
        # Another seed each time: what was executed before is.
        *_, report = fuzz(count, 2, sum(read_executions().values()))
        cumulative = count_executions(report)
    else:
        for name, share in shares(count).items():
            (target,) = (target for target in TARGETS if target.name == name)
            fuzzer = Fuzzer(target, 3, timed=False)
            fuzzer.run(share)
            merge(report, fuzzer.report)
        cumulative = sum(read_executions().values())
    for finding in report.findings:
        note(str(finding))
    executions = sum(report.executions.values())
    return Found(
        {
            "executions": executions,
            "cumulative": cumulative,
            "per second": executions / (time.monotonic() - began),
            "decoders": len(TARGETS),
            "kept": sum(len(target.found()) for target in TARGETS),
            "wrong": len(report.findings),
            "slowest ms": report.slowest_s * 1000,
            "largest KiB": report.largest_bytes // 1024,
        },
        {
            "none wrong": not report.findings,
            "every decoder": all(report.executions.get(target.name, 0) for target in TARGETS),
            # The sum of all runs may be spread over many.
            "enough": executions >= count and (not full or cumulative >= count),
            "memory": max(report.largest_bytes, report.peak_bytes) <= MAX_BYTES,
        },
        {"time": report.slowest_s <= MAX_SECONDS},
    )


# ------------------------------------------------------------------------------- a real service

DATA = bytes(HIDDEN_BYTES)
GOOD = inline("Linear", linear_body())
BIG = 2**31 - 1
MALFORMED, INVALID, LIMIT = "MALFORMED_MESSAGE", "INVALID_FIELD", "LIMIT_EXCEEDED"
UNKNOWN, VERSION = "UNKNOWN_METHOD", "UNSUPPORTED_VERSION"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    with Workers() as workers:
        bind = ("--bind", "tcp://127.0.0.1:*", "--dtype", "float32", "--threads", "1")
        yield workers.start(str(directory), *bind)


@pytest.fixture
def endpoint(service: Service) -> Iterator[str]:
    """Yield the endpoint, and require afterwards that the service is as well as before."""
    yield service.endpoint
    assert service.is_running
    assert is_healthy(service.endpoint)


# One or a few of each code: every value that a message or an operator refuses is a row of
# tests/unit/protocol/test_messages.py and tests/unit/gpu_side/test_operators.py.
INLINE: dict[str, list[bytes]] = {
    "": [
        inline("Linear", linear_body(shape=[HIDDEN])),
        inline("Embedding", embedding_body([0, 319])),
        inline("Matmul", matmul_body([2, 3], [3, 2])),
    ],
    MALFORMED: [
        *(b"", b"garbage", b"\xff" * 1000, GOOD[:-1], GOOD + b"\0", b"\x91" * 100_000),
        b"\xdd\x00\x2f\xff\xff" + b"\x90" * 0x2FFFFF,
        *(msgpack.packb([]), inline("Init", None), inline(1, {})),
    ],
    UNKNOWN: [inline("Shutdown", {}), inline("__init__", {})],
    INVALID: [
        *(inline("Linear", {}), inline("Linear", linear_body(layer_idx=3))),
        *(inline("Linear", linear_body(shape=shape)) for shape in ([2, 24], [0, HIDDEN])),
        inline("Embedding", embedding_body([320])),
        inline("Matmul", matmul_body([2, 3], [2, 3])),
    ],
    LIMIT: [
        inline("Linear", linear_body(shape=[BIG] * 4)),
        inline("Matmul", matmul_body([2**16, 1], [1, 2**16])),
    ],
}


@each_row("code", INLINE)
def test_inline_message(endpoint: str, code: str) -> None:
    right = {"status": "error", "error": code}
    found = [msgpack.unpackb(exchange(zmq.REQ, endpoint, [one])[0]) for one in INLINE[code]]
    wrong = [
        (place, answer)
        for place, answer in enumerate(found)
        if (answer != right if code else answer["status"] != "success")
    ]
    assert not wrong


def hidden(shape: list[int]) -> list[bytes]:
    tensor = {"dtype": "float32", "shape": shape, "frame": 1}
    return [framed_linear(hidden_states=tensor), DATA]


# By the code, and by the id and the method that the answer has.
FRAMED: dict[tuple[str, int, str], list[list[bytes]]] = {
    ("", 7, "Linear"): [[header(), DATA]],
    (MALFORMED, 0, ""): [[GOOD] * 20, [header()[:-3], DATA], [header()] + [b""] * 100],
    (LIMIT, 0, ""): [[b"\0" * 70_000, DATA]],
    (VERSION, 7, ""): [[header(version=2), DATA], [header(method="Init", request={}, version=2)]],
    (MALFORMED, 7, ""): [[header(version=...), DATA]],
    (INVALID, 0, ""): [[header(request_id=-1), DATA]],
    (INVALID, 7, ""): [[header(timeout_ms=0), DATA]],
    (MALFORMED, 7, "Linear"): [[header(), DATA, DATA], [header(request={}), DATA]],
    (UNKNOWN, 7, "Shutdown"): [[header(method="Shutdown"), DATA]],
    (INVALID, 7, "Init"): [[header(method="Init"), DATA]],
    (INVALID, 7, "Linear"): [
        *([header(), DATA[:-1]], [header()], [framed_linear(layer_idx=3), DATA]),
        hidden([2, HIDDEN]),
    ],
    (LIMIT, 7, "Linear"): [hidden([BIG] * 4)],
}


@each_row("about", FRAMED)
def test_framed_message(endpoint: str, about: tuple[str, int, str]) -> None:
    code, request_id, method = about
    envelope = {"version": 1, "request_id": request_id, "method": method}
    wrong = []
    for place, frames in enumerate(FRAMED[about]):
        reply = exchange(zmq.DEALER, endpoint, frames)
        answer = msgpack.unpackb(reply[0])
        if code:
            is_right = answer == envelope | {"status": "error", "error": code} and len(reply) == 1
        else:
            is_right = answer["status"] == "success" and len(reply) == 2
        wrong += [] if is_right else [(place, answer)]
    assert not wrong


@each_row("linger_ms", [0, 5000])
def test_a_client_that_vanishes_before_its_reply(endpoint: str, linger_ms: int) -> None:
    asked = [inline("Matmul", matmul_body([64, 64], [64, 64]))], [header(), DATA]
    for kind, frames in zip((zmq.REQ, zmq.DEALER), asked, strict=True):
        for _ in range(10):
            with connected(kind, endpoint, linger_ms) as client:
                client.send_multipart(frames)
    # And between two of them.
    with connected(zmq.DEALER, endpoint) as client:
        for request_id in range(1, 6):
            client.send_multipart([header(request_id=request_id), DATA])
        assert msgpack.unpackb(client.recv_multipart()[0])["request_id"] == 1
