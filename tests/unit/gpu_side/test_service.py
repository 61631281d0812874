"""Tests of the request loop with messages that the test hands it, without sockets or clocks."""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgpack
import pytest
import torch

from gpu_side.service import (
    MAX_QUEUED_REQUESTS,
    ServiceSettings,
    _arithmetic,
    _Service,
    _StopSignal,
    serve,
)
from protocol.channel import Incoming
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, encode_request
from protocol.errors import KernelError
from protocol.messages import MatmulRequest, Request, TensorReply
from protocol.model.config import read_config
from protocol.tensors import Buffer, WireTensor, from_torch
from tests.support import SavedModel

REQUEST = MatmulRequest(a=from_torch(torch.ones(1, 1)), b=from_torch(torch.ones(1, 1)))
RESULT = TensorReply(output=from_torch(torch.ones(1, 1)))


class Listener:
    """Stands in for the socket: hands out messages, keeps replies."""

    def __init__(self, incoming: list[Incoming], *, gone: bool = False) -> None:
        self.incoming, self.gone = deque(incoming), gone
        self.sent: list[dict[str, Any]] = []

    def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
        return bool(self.incoming)

    def receive(self) -> Incoming | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        self.sent.append(msgpack.unpackb(frames[0]))
        return not self.gone


class Operators:
    """Stands in for the weights: answers by a function of the test's."""

    def __init__(self, answer: Callable[[Request], TensorReply]) -> None:
        self.apply = answer


def _incoming(request_id: int, timeout_ms: int = 60_000, age_s: float = 0.0) -> Incoming:
    frames = [memoryview(bytes(f)) for f in encode_request(REQUEST, request_id, timeout_ms)]
    return Incoming((b"peer",), frames, time.perf_counter_ns() - int(age_s * 1e9))


def _run(listener: Listener, answer: Callable[[Request], TensorReply]) -> None:
    stop = _StopSignal()
    try:
        service: Any = _Service(Operators(answer), DEFAULT_MAX_MESSAGE_BYTES)  # type: ignore[arg-type]
        service.run(listener, stop)
    finally:
        stop.reader.close()
        stop.writer.close()


def _errors(listener: Listener) -> list[tuple[int, str | None]]:
    return [(reply["request_id"], reply.get("error")) for reply in listener.sent]


def test_good_request_has_a_result_and_its_timing() -> None:
    listener = Listener([_incoming(1, age_s=2.0)])
    _run(listener, lambda request: RESULT)
    (reply,) = listener.sent
    assert (reply["status"], reply["request_id"], reply["method"]) == ("success", 1, "Matmul")
    assert reply["timing"]["queue_us"] >= 2_000_000
    assert reply["timing"]["compute_us"] >= 0


def test_request_that_waited_past_its_deadline_is_not_computed() -> None:
    computed = []
    listener = Listener([_incoming(1, timeout_ms=1000, age_s=1.5), _incoming(2, timeout_ms=60_000)])
    _run(listener, lambda request: computed.append(request) or RESULT)  # type: ignore[func-returns-value]
    assert _errors(listener) == [(1, "DEADLINE_EXCEEDED"), (2, None)]
    assert len(computed) == 1


@pytest.mark.parametrize("error", [RuntimeError("canary"), MemoryError(), KeyError("canary")])
def test_failure_in_an_operator_fails_one_request_only(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([error])

    def answer(request: Request) -> TensorReply:
        for failure in failures:
            raise failure
        return RESULT

    listener = Listener([_incoming(1), _incoming(2)])
    with caplog.at_level(logging.WARNING):
        _run(listener, answer)
    assert _errors(listener) == [(1, "INTERNAL"), (2, None)]
    assert "canary" not in str(listener.sent)
    assert [record.getMessage() for record in caplog.records] == ["failed"]


def test_result_that_cannot_be_encoded_fails_one_request_only() -> None:
    broken = TensorReply(output=WireTensor("float32", (1,), None))  # type: ignore[arg-type]
    answers = iter([broken, RESULT])
    listener = Listener(
        [
            Incoming((b"peer", b""), [memoryview(_inline_matmul())], time.perf_counter_ns()),
            _incoming(2),
        ]
    )
    _run(listener, lambda request: next(answers))
    assert listener.sent[0] == {"status": "error", "error": "INTERNAL"}
    assert listener.sent[1]["status"] == "success"


def _inline_matmul() -> bytes:
    one = {"a_buffer": bytes(4), "a_shape": [1, 1], "b_buffer": bytes(4), "b_shape": [1, 1]}
    return bytes(msgpack.packb({"method": "Matmul", "request": one | {"dtype": "float32"}}))


def test_stop_finishes_one_request_and_refuses_the_others() -> None:
    stop = _StopSignal()
    count = MAX_QUEUED_REQUESTS + 5
    garbage = Incoming((b"peer",), [memoryview(b"\xc1")], time.perf_counter_ns())
    listener = Listener([_incoming(1), garbage, *(_incoming(n) for n in range(3, count + 1))])

    def answer(request: Request) -> TensorReply:
        stop.request(signal.SIGTERM, None)
        return RESULT

    service: Any = _Service(Operators(answer), DEFAULT_MAX_MESSAGE_BYTES)  # type: ignore[arg-type]
    service.run(listener, stop)
    stop.reader.close()
    stop.writer.close()
    refused = [(n, "SHUTTING_DOWN") for n in range(3, count + 1)]
    assert _errors(listener) == [(1, None), *refused]


def test_a_client_that_goes_on_sending_cannot_keep_the_service_from_stopping() -> None:
    stop = _StopSignal()

    class Flood(Listener):
        def receive(self) -> Incoming | None:
            return _incoming(1)

        def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
            return True

    def answer(request: Request) -> TensorReply:
        stop.request(signal.SIGTERM, None)
        return RESULT

    service: Any = _Service(Operators(answer), DEFAULT_MAX_MESSAGE_BYTES)  # type: ignore[arg-type]
    service.run(Flood([]), stop)
    stop.reader.close()
    stop.writer.close()


def test_a_request_is_answered_before_others_are_looked_for() -> None:
    events: list[str] = []

    class Noting(Listener):
        def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
            events.append("wait")
            return super().wait()

        def receive(self) -> Incoming | None:
            incoming = super().receive()
            events.append("nothing" if incoming is None else "message")
            return incoming

        def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
            events.append("send")
            return super().send(route, frames)

    _run(Noting([_incoming(1)]), lambda request: RESULT)
    assert events[:5] == ["wait", "message", "send", "nothing", "wait"]


def test_everything_that_has_arrived_is_picked_up_between_two_requests() -> None:
    listener = Listener([_incoming(n) for n in (1, 2, 3)])
    left: list[int] = []

    def answer(request: Request) -> TensorReply:
        left.append(len(listener.incoming))
        return RESULT

    _run(listener, answer)
    assert left == [2, 0, 0]
    assert [request_id for request_id, _ in _errors(listener)] == [1, 2, 3]


def test_client_that_has_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _run(Listener([_incoming(1)], gone=True), lambda request: RESULT)
    assert [record.getMessage() for record in caplog.records] == ["client_gone"]


def _inexact(rows: torch.Tensor, weight: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    return (rows.float() @ weight.float()).clamp(-30000, 30000).to(torch.int32)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("asked", ["float", "int8", "both"])
def test_what_is_held_where_int8_products_are_exact_and_where_not(
    saved_model: Callable[..., SavedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: Literal["float", "int8", "both"],
    exact: bool,
) -> None:
    directory = saved_model().directory
    if not exact:
        monkeypatch.setattr(torch, "_int_mm", _inexact)
    settings = ServiceSettings(directory, "", arithmetic=asked)
    config, device = read_config(directory), torch.device("cpu")
    if asked == "int8" and not exact:
        with pytest.raises(KernelError, match="int8 products on cpu: got wrong numbers"):
            _arithmetic(settings, config, device)
        return
    expected = {"float": ("float",), "int8": ("int8",), "both": ("float", "int8")}[asked]
    with caplog.at_level(logging.WARNING):
        held = _arithmetic(settings, config, device)
    if asked == "both" and not exact:
        assert held == ("float",)
        (record,) = caplog.records
        assert record.getMessage() == "no_int8"
        assert record.levelno == logging.WARNING
        assert "wrong numbers" in record.fields["detail"]  # type: ignore[attr-defined]
    else:
        assert held == expected
        assert not caplog.records


def test_a_service_that_cannot_hold_what_it_is_told_to_does_not_start(
    saved_model: Callable[..., SavedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "_int_mm", _inexact)
    endpoint = f"ipc://{tmp_path}/s"
    with pytest.raises(KernelError):
        serve(ServiceSettings(saved_model().directory, endpoint, arithmetic="int8"))
    # The address is free again.
    with pytest.raises(KernelError):
        serve(ServiceSettings(saved_model().directory, endpoint, arithmetic="int8"))
