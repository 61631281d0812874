"""Bad messages to a real gpu-service: each gets a code, and others go on. And the fuzz row."""

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
    short=300,
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


DATA = bytes(HIDDEN_BYTES)
GOOD = inline("Linear", linear_body())
BIG = 2**31 - 1


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
REFUSED: dict[str, list[list[bytes]]] = {
    "MALFORMED_MESSAGE": [
        *([b""], [b"\xff" * 1000], [GOOD[:-1]], [GOOD + b"\0"], [b"\x91" * 100_000]),
        *([b"\xdd\x00\x2f\xff\xff" + b"\x90" * 0x2FFFFF], [inline(1, {})]),
        *([GOOD] * 20, [header()[:-3], DATA], [header()] + [b""] * 100),
        *([header(version=...), DATA], [header(), DATA, DATA], [header(request={}), DATA]),
    ],
    "UNKNOWN_METHOD": [[inline("__init__", {})], [header(method="Shutdown"), DATA]],
    "INVALID_FIELD": [
        [inline("Linear", linear_body(layer_idx=3))],
        [inline("Embedding", embedding_body([320]))],
        [inline("Matmul", matmul_body([2, 3], [2, 3]))],
        *([header(request_id=-1), DATA], [header(timeout_ms=0), DATA], [header(), DATA[:-1]]),
        [framed_linear(layer_idx=3), DATA],
    ],
    "LIMIT_EXCEEDED": [
        [inline("Linear", linear_body(shape=[BIG] * 4))],
        [inline("Matmul", matmul_body([2**16, 1], [1, 2**16]))],
        [b"\0" * 70_000, DATA],
    ],
    "UNSUPPORTED_VERSION": [[header(version=2), DATA]],
}


@each_row("code", REFUSED)
def test_a_bad_message_is_refused_by_its_code(endpoint: str, code: str) -> None:
    wrong = []
    for place, frames in enumerate(REFUSED[code]):
        kind = zmq.REQ if len(frames) == 1 else zmq.DEALER
        answer, *more = exchange(kind, endpoint, frames)
        refusal = msgpack.unpackb(answer)
        if (refusal["status"], refusal["error"], more) != ("error", code, []):
            wrong.append((place, refusal))
    assert not wrong


@each_row("linger_ms", [0, 5000])
def test_a_client_that_vanishes_before_its_reply(endpoint: str, linger_ms: int) -> None:
    for _ in range(10):
        with connected(zmq.DEALER, endpoint, linger_ms) as client:
            client.send_multipart([header(), DATA])
    # And between two of them.
    with connected(zmq.DEALER, endpoint) as client:
        for request_id in range(1, 6):
            client.send_multipart([header(request_id=request_id), DATA])
        assert msgpack.unpackb(client.recv_multipart()[0])["request_id"] == 1
