"""What a service holds, and when it does not start."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Literal

import pytest
import torch
import zmq

from gpu_side.queues import QueueLimits
from gpu_side.request_loop import RequestLoop
from gpu_side.service import ServiceSettings, _arithmetic, serve
from gpu_side.stop_signal import StopSignal
from gpu_side.transport.acceptor import Acceptor
from gpu_side.transport.listener import Listener
from gpu_side.transport.zap import ZapHandler
from protocol.errors import EndpointError, KernelError, SettingsError
from protocol.model.config import read_config
from tests.kit.model import SavedModel
from tsqp.cli.gpu_service import command
from tsqp.key_files import new_key_pair


def _inexact(rows: torch.Tensor, weight: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    return (rows.float() @ weight.float()).clamp(-30000, 30000).to(torch.int32)


def test_the_command_line_has_the_defaults_of_the_settings() -> None:
    """Some are written twice, as what says them takes long to import."""
    shown = {parameter.name: parameter.default for parameter in command.params}
    settings = {
        field.name: field.default
        for field in fields(ServiceSettings)
        if field.name in shown
        and isinstance(field.default, str | float | int)
        and field.default is not False  # which a flag does not say
    }
    assert "heartbeat_timeout_s" in settings
    assert {name: shown[name] for name in settings} == settings
    assert shown["max_message_mib"] * MIB == ServiceSettings.max_message_bytes


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


def test_a_service_may_have_as_many_connections_as_the_system_lets_it(
    saved_model: Callable[..., SavedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(torch, "_int_mm", _inexact)
    settings = ServiceSettings(saved_model().directory, f"ipc://{tmp_path}/s", arithmetic="int8")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], before[1] - 1), before[1]))
        with pytest.raises(KernelError):
            serve(settings)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_stream_on_which_nobody_is_let_in_any_more_is_the_services_end(
    saved_model: Callable[..., SavedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def fail(_: Acceptor) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Acceptor, "_attend_all", fail)
    settings = ServiceSettings(saved_model().directory, f"unix://{tmp_path}/s")
    with pytest.raises(EndpointError, match="got no thread that lets clients in"):
        serve(settings)
    assert "acceptor_failed" in caplog.messages


def test_keys_that_nobody_looks_at_any_more_are_the_services_end(
    saved_model: Callable[..., SavedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    public, secret = zmq.curve_keypair()
    identity, _, service = new_key_pair(tmp_path / "service")
    (tmp_path / "allow").write_bytes(public)

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ZapHandler, "_answer", fail)
    settings = ServiceSettings(
        saved_model().directory,
        f"ipc://{tmp_path}/s",
        identity=identity,
        allow=tmp_path / "allow",
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.curve_publickey, client.curve_secretkey = public, secret
        client.curve_serverkey = service.encode()
        client.connect(settings.bind)
        with pytest.raises(EndpointError, match="got no thread that lets clients in"):
            serve(settings)
    assert "zap_handler_failed" in caplog.messages


def test_what_others_can_have_logged_is_limited_while_it_serves(
    saved_model: Callable[..., SavedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def flooded(*_: object) -> None:
        for _n in range(100):
            logging.getLogger("gpu_service").warning("dropped")

    monkeypatch.setattr(RequestLoop, "run", flooded)
    serve(ServiceSettings(saved_model().directory, f"ipc://{tmp_path}/s"))
    assert caplog.messages.count("dropped") == 50
    # And of everybody's lines only while it serves.
    flooded()
    assert caplog.messages.count("dropped") == 150


def test_what_is_known_of_its_listener(
    saved_model: Callable[..., SavedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    told = []

    def run(loop: RequestLoop, listener: Listener, _stop: StopSignal) -> None:
        told.append(getattr(listener, "on_gone", None) == loop._handler.forget_client)

    monkeypatch.setattr(RequestLoop, "run", run)
    for bind in (f"unix://{tmp_path}/s", "tcp://127.0.0.1:*"):
        with caplog.at_level(logging.INFO, "gpu_service"):
            serve(ServiceSettings(saved_model().directory, bind))
        said = {one.message: vars(one).get("fields", {}) for one in caplog.records}
        assert "*" not in said["stopped"]["endpoint"]
        assert said["stopped"]["endpoint"] == said["bound"]["endpoint"] == said["ready"]["endpoint"]
    assert told == [True, False]


MIB = 2**20


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, QueueLimits(64, 512 * MIB, 1024, 2048 * MIB)),
        ({"max_message_bytes": MIB}, QueueLimits(64, MIB, 1024, 4 * MIB)),
        (
            {"max_message_bytes": MIB, "max_queued_bytes": 3 * MIB, "max_queued_requests": 1024},
            QueueLimits(1024, 3 * MIB, 1024, 12 * MIB),
        ),
        (
            {"max_queued_total_bytes": 512 * MIB, "max_queued_total_requests": 64},
            QueueLimits(64, 512 * MIB, 64, 512 * MIB),
        ),
    ],
)
def test_limits_of_the_queue(settings: dict[str, int], expected: QueueLimits) -> None:
    assert ServiceSettings(Path(), "", **settings).limits == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_queued_bytes": 512 * MIB - 1},
            "--max-queued-mib: got 511.999999, expected at least 512, which is --max-message-mib",
        ),
        (
            {"max_queued_total_bytes": 512 * MIB - 1},
            "--max-queued-total-mib: got 511.999999, expected at least 512, which is --max-queued",
        ),
        (
            {"max_queued_total_requests": 63},
            "--max-queued-total-requests: got 63, expected at least 64, which is --max-queued-req",
        ),
    ],
)
def test_limits_that_contradict_each_other_are_refused(
    settings: dict[str, int], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        _ = ServiceSettings(Path(), "", **settings).limits  # type: ignore[arg-type]


def test_metrics_without_their_library_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "gpu_side.metrics", raising=False)
    settings = ServiceSettings(tmp_path, f"ipc://{tmp_path}/s", metrics="*")
    with pytest.raises(SettingsError, match="got no prometheus_client"):
        serve(settings)
