"""Bad messages to a real gpu-service: each gets a code, and others go on. And the fuzz row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

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


# What a field of a Linear body must not be; `...` leaves it out.
LINEAR: dict[str, tuple[Any, ...]] = {
    "layer_idx": (..., 3, -1, 2**63, "0", 0.5),
    "module_name": ("lm_head", "down_proj", b"q_proj"),
    "hidden_states": ("0" * HIDDEN_BYTES, [0.0] * HIDDEN, DATA[:-1], b""),
    "shape": (
        *(..., [2, 24], [-1, HIDDEN], [0, HIDDEN], [1, 1, 1, 1, HIDDEN], [1.0, HIDDEN]),
        *(HIDDEN, [2**63, HIDDEN]),
    ),
    "dtype": (..., "torch.int64", "torch.float64", "torch.float16"),
    "extra": (1,),
}
INLINE: dict[str, list[bytes]] = {
    "": [
        inline("Linear", linear_body(shape=[HIDDEN])),
        inline("Embedding", embedding_body([0, 319])),
        inline("Matmul", matmul_body([2, 3], [3, 2])),
    ],
    MALFORMED: [
        *(b"", b"garbage", bytes(1000), b"\xff" * 1000, GOOD[:-1], GOOD[:20], GOOD + b"\0"),
        *(b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\xdf\xff\xff\xff\xff"),
        b"\xdd\x00\x2f\xff\xff" + b"\x90" * 0x2FFFFF,
        *(b"\x81\xc4\x01a\xc0", b"\x82\xc4\x06method\xc0\xa7request\x80", b"\x81\xa1a\xd4\x00x"),
        *(msgpack.packb([]), msgpack.packb({}), msgpack.packb({"method": "Init"})),
        *(inline("Init", {}, trace=True), inline("Init", None)),
        *(inline(1, {}), inline(b"Init", {})),
    ],
    UNKNOWN: [inline("Shutdown", {}), inline("__init__", {})],
    INVALID: [
        *(inline("Init", {"x": 1}), inline("Linear", {})),
        *(inline("Linear", linear_body(**{f: v})) for f, values in LINEAR.items() for v in values),
        *(inline("Embedding", embedding_body([token])) for token in (320, -1, 2**63 - 1)),
        inline("Embedding", embedding_body([1], input_ids=[1])),
        inline("Matmul", matmul_body([2, 3], [2, 3])),
        inline("Matmul", matmul_body([3], [3])),
        inline("Matmul", matmul_body([2, 1, 1], [3, 1, 1])),
        inline("LMHead", matmul_body([2, 3], [3, 2])),
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


def hidden(dtype: str, shape: list[int], frame: int) -> list[bytes]:
    return [framed_linear(hidden_states={"dtype": dtype, "shape": shape, "frame": frame}), DATA]


# By the code, and by the id and the method that the answer has.
FRAMED: dict[tuple[str, int, str], list[list[bytes]]] = {
    ("", 7, "Linear"): [[header(), DATA]],
    (MALFORMED, 0, ""): [
        *([GOOD, GOOD], [GOOD] * 20, [b"garbage", DATA], [header()[:-3], DATA]),
        *([header(), DATA, DATA, DATA, DATA], [header()] + [b""] * 100),
    ],
    (LIMIT, 0, ""): [[b"\0" * 70_000, DATA]],
    (VERSION, 7, ""): [
        *([header(version=2), DATA], [header(version="1"), DATA]),
        [header(method="Init", request={}, version=2)],
    ],
    (MALFORMED, 7, ""): [[header(version=...), DATA]],
    (INVALID, 0, ""): [[header(request_id=wrong), DATA] for wrong in (-1, 2**63, ...)],
    (INVALID, 7, ""): [[header(timeout_ms=0), DATA], [header(priority=9), DATA]],
    (MALFORMED, 7, "Linear"): [[header(), DATA, DATA], [header(request={}), DATA]],
    (UNKNOWN, 7, "Shutdown"): [[header(method="Shutdown"), DATA]],
    (INVALID, 7, "Init"): [[header(method="Init"), DATA]],
    (INVALID, 7, "Linear"): [
        *([header(), DATA[:-1]], [header(), b""], [header()]),
        *([framed_linear(layer_idx=wrong), DATA] for wrong in (3, -1, ...)),
        [framed_linear(extra=None), DATA],
        *(
            [framed_linear(module_names=wrong), DATA]
            for wrong in (["lm_head"], ["q_proj", "k_proj"], ["q_proj"] * 4)
        ),
        [framed_linear(hidden_states=DATA)],
        *(hidden("float32", [1, HIDDEN], frame) for frame in (0, 2, -1)),
        *(hidden("float32", [rows, HIDDEN], 1) for rows in (-1, 2)),
        *(hidden("int64", [HIDDEN // 2], 1), hidden("str", [1, HIDDEN], 1)),
    ],
    (LIMIT, 7, "Linear"): [hidden("float32", [BIG] * 4, 1)],
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
