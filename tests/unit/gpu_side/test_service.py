"""What a service holds, when it does not start, and what signals do to it."""

import logging
import os
import resource
import select
import signal
import threading
import urllib.request
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import zmq
from prometheus_client.parser import text_string_to_metric_families

from gpu_side import access
from gpu_side.access import ServiceKeys, rereads_list
from gpu_side.event_log import MAX_REASONS, REASONS, LineFilter, limited
from gpu_side.handler import QueueLimits, ServiceState
from gpu_side.metrics import parse_address, serving_metrics
from gpu_side.ranks.worker import RankJob
from gpu_side.request_loop import RequestLoop, StopSignal
from gpu_side.service import ServiceSettings, _settled, _stop_signals, serve
from gpu_side.sessions import SessionSettings
from gpu_side.transport.listener import Incoming, Listener
from gpu_side.transport.zmq_listener import ZmqListener
from protocol.errors import KernelError, SettingsError
from tests.kit.model import Models
from tests.kit.rows import each_row
from tests.kit.service import until

MIB = 2**20
SECRET = zmq.curve_keypair()[1]
FRIEND, OTHER = (zmq.curve_keypair()[0] for _ in range(2))


@pytest.fixture
def model(saved_model: Models) -> Path:
    return saved_model().directory


def test_a_service_that_cannot_hold_what_it_is_told_to_does_not_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    exact = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda *rows, **_: exact(*rows).clamp(-30000, 30000))
    settings = ServiceSettings(RankJob(model=model, arithmetic=("int8",)), f"unix://{tmp_path}/s")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], before[1] - 1), before[1]))
        # The second time the address is free again.
        for _ in range(2):
            with pytest.raises(KernelError, match="int8 products on cpu: got wrong numbers"):
                serve(settings)
        # A service may have as many connections as the system lets it.
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    # One that is not told so holds floats, and says why.
    caplog.clear()
    assert _settled(RankJob(model=model), torch.device("cpu")).arithmetic == ("float",)
    assert caplog.messages == ["no_int8"]


def test_what_is_known_of_its_listener_and_logged_while_it_serves(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    told = []

    def flood() -> None:
        for _ in range(100):
            logging.getLogger("gpu_service").warning("dropped")

    def run(loop: RequestLoop, listener: Listener, _stop: StopSignal) -> None:
        flood()
        told.append(getattr(listener, "on_gone", None) == loop._sessions.forget_client)

    monkeypatch.setattr(RequestLoop, "run", run)
    caplog.set_level(logging.INFO, "gpu_service")
    for bind in (f"unix://{tmp_path}/s", "tcp://127.0.0.1:*"):
        caplog.clear()
        serve(ServiceSettings(RankJob(model=model, device="null", arithmetic=("float",)), bind))
        said = {one.message: vars(one).get("fields", {}) for one in caplog.records}
        assert "*" not in said["stopped"]["endpoint"]
        assert said["stopped"]["endpoint"] == said["bound"]["endpoint"] == said["ready"]["endpoint"]
        assert (said["null_device"]["computes"], said["loaded"]["weight_bytes"]) == ("nothing", 0)
        assert caplog.messages.count("dropped") == 50
    assert told == [True, False]
    # Lines that others can cause are limited as long as it serves.
    flood()
    assert caplog.messages.count("dropped") == 150


@each_row(
    ("settings", "expected"),
    [
        ({"queue": QueueLimits(bytes=511 * MIB)}, "--max-queued-mib: got 511, expected at l"),
        ({"queue": QueueLimits(total_bytes=511 * MIB)}, "--max-queued-total-mib: got 511, ex"),
        ({"queue": QueueLimits(total_requests=63)}, "--max-queued-total-requests: got 63, ex"),
        (
            {"job": {"device": "gpu"}},
            "--device: got 'gpu', expected cpu, cuda, cuda:N, null or model",
        ),
        ({"job": {"device": "cuda:999"}}, r"--device: got 'cuda:999' with \d+ CUDA devices here"),
        ({"http_tokens": Path(), "allow_anyone": True}, "keys: got --http-tokens and --allow-any"),
        ({"sessions": SessionSettings(MIB, 2 * MIB)}, "--session-client-mib: got 2, .*at most 1"),
        ({"sessions": SessionSettings(spill_bytes=1)}, "--session-spill-mib: got no directory"),
        ({"sessions": SessionSettings(spill=Path("-"))}, "--session-spill -: got no directory"),
        ({"job": {"place": (0, 2), "device": "null"}}, "--tensor-parallel: got --device null"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    model: Path, settings: dict[str, Any], expected: str
) -> None:
    job = RankJob(model=model, **settings.get("job", {}))
    with pytest.raises(SettingsError, match=expected):
        serve(ServiceSettings(**settings | {"job": job, "bind": "unix:///-/no-folder"}))


def test_the_end_does_not_wait_for_a_list_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be on a disk of the network that hangs."""
    reading, going_on = threading.Event(), threading.Event()

    def hangs(_: Path) -> frozenset[bytes]:
        reading.set()
        going_on.wait()
        return frozenset({FRIEND})

    monkeypatch.setattr(access, "_ENDING_S", 0.0)
    keys = ServiceKeys(SECRET, frozenset({FRIEND}))
    with (
        closing(ZmqListener(f"ipc://{tmp_path}/s", keys=keys)) as listener,
        _stop_signals() as stop,
        rereads_list(listener.allow, Path("allow"), hangs),
    ):
        os.kill(os.getpid(), signal.SIGHUP)
        assert reading.wait(30)
        # It is not our loop's business.
        assert not listener.wait(wakeup=stop.reader, timeout_ms=0)
        # And a second one, which ends a drain.
        for number in (signal.SIGTERM, signal.SIGINT):
            assert not stop.requested
            os.kill(os.getpid(), number)
            assert select.select([stop.reader], [], [], 30)[0]
            assert not listener.wait(wakeup=stop.reader)
            assert stop.requested
            stop.rearm()
    (thread,) = [one for one in threading.enumerate() if one.name == "allow-list"]
    going_on.set()
    thread.join(30)
    assert not thread.is_alive()


def test_a_failure_of_ours_is_told_and_the_next_signal_is_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lists, allowed = [MemoryError(), frozenset({OTHER})], SimpleQueue[frozenset[bytes]]()
    read = Mock(side_effect=lists)
    with _stop_signals(), rereads_list(allowed.put, Path("allow"), read):
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: "allow_list_unchanged" in caplog.messages)
        assert allowed.empty()
        os.kill(os.getpid(), signal.SIGHUP)
        assert allowed.get(timeout=30) == {OTHER}


log = logging.getLogger("gpu_service")


def test_what_was_counted_is_what_is_served() -> None:
    state = ServiceState(QueueLimits(), device="model:h100", clients_refused=lambda: 3)
    linear = state.methods["Linear"]
    for ns in (20_000, 30_000, 10**12):
        linear.outcomes["OK"] += 1
        linear.compute.add(ns)
        linear.queue.add(0)
    state.methods["unknown"].outcomes["UNKNOWN_METHOD"] += 2
    state.received_bytes, state.sent_bytes, state.dropped_replies = 11, 12, 13
    state.queue.put(Incoming((b"canary",), [memoryview(b"canary")], 0))
    state.underway = 2
    expected = {
        "tsqp_refused_clients": 3,
        "tsqp_received_bytes": 11,
        "tsqp_sent_bytes": 12,
        "tsqp_dropped_replies": 13,
        "tsqp_queued_requests": 1,
        "tsqp_queued_bytes": 6,
        "tsqp_queued_requests_limit": 1024,
        "tsqp_queued_bytes_limit": QueueLimits().total_bytes,
        "tsqp_underway_requests": 2,
        "tsqp_sessions": 0,
        "tsqp_session_bytes": 0,
        "tsqp_spilled_sessions": 0,
        "tsqp_spilled_session_bytes": 0,
    }
    with serving_metrics("127.0.0.1:*", state) as url:
        for state.status, ready in (("loading", 0), ("ready", 1), ("draining", 0)):
            with urllib.request.urlopen(url, timeout=30) as answer:
                text = answer.read().decode()
            assert "canary" not in text
            found = {family.name: family for family in text_string_to_metric_families(text)}
            plain = {name: found[name].samples[0].value for name in (*expected, "tsqp_ready")}
            assert plain == expected | {"tsqp_ready": ready}, state.status
    assert found["tsqp_device_info"].samples[0].labels == {"device": "model:h100"}
    samples = found["tsqp_requests"].samples
    requests = {(one.labels["method"], one.labels["code"]): one.value for one in samples}
    assert {labels: value for labels, value in requests.items() if value} == {
        ("Linear", "OK"): 3,
        ("unknown", "UNKNOWN_METHOD"): 2,
    }
    compute, queue = (
        {sample.labels.get("le", sample.name[-5:]): sample.value for sample in found[name].samples}
        for name in ("tsqp_compute_seconds", "tsqp_queue_seconds")
    )
    assert [compute[le] for le in ("2e-05", "5e-05", "100", "+Inf", "count")] == [1, 2, 2, 3, 3]
    assert queue["2e-05"] == 3


@each_row(
    ("text", "expected"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("*", ("127.0.0.1", 0)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("gpu-host.example:65535", ("gpu-host.example", 65535)),
        ("[::1]:9464", ("::1", 9464)),
        *((text, None) for text in ("", "host", "host:", "host:65536", "host:-1", "::1:9464")),
        *((text, None) for text in ("http://host:1", "a b:1")),
    ],
)
def test_an_address(text: str, expected: tuple[str, int] | None) -> None:
    if expected is not None:
        assert parse_address(text) == expected
        return
    with pytest.raises(SettingsError, match=r"metrics address: got .*, expected \[HOST:\]PORT"):
        parse_address(text)


def test_each_event_and_reason_is_limited_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    lines = LineFilter({"refused": (2, 10.0)}, lambda: now)

    def written(event: str, **fields: object) -> bool:
        caplog.clear()
        log.warning(event, extra={"fields": fields})
        return bool(caplog.records)

    log.addFilter(lines)
    try:
        for field in REASONS:
            flood = [written("refused", **{field: "a"}, number=n) for n in range(5)]
            assert flood == [True, True, False, False, False], field
            assert written("refused", **{field: "b"}), field
        assert all(written("other") for _ in range(5))
        now = 110.0
        assert written("refused", reason="a", number=5)
        (record,) = caplog.records
        assert vars(record)["fields"] == {"reason": "a", "number": 5, "left_out": 3}
        # Reasons that are kept apart are bounded.
        count = MAX_REASONS + 50
        assert sum(written("refused", reason=str(number)) for number in range(count)) < count
        assert len(lines._lines) <= MAX_REASONS + 1
    finally:
        log.removeFilter(lines)
    # So are failures of two kinds.
    caplog.clear()
    with limited(log):
        for error in [ValueError] * 60 + [KeyError]:
            try:
                raise error
            except (LookupError, ValueError):
                log.exception("failed")
    failures = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert failures == [ValueError] * 50 + [KeyError]
