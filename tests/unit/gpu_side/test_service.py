"""What a service holds, and when it does not start."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Literal
from unittest.mock import MagicMock

import pytest
import torch

from gpu_side.queues import QueueLimits
from gpu_side.service import ServiceSettings, _arithmetic, serve
from protocol.errors import KernelError, SettingsError
from protocol.model.config import read_config
from tests.support import SavedModel
from tsqp.cli.gpu_service import _layers, command


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
            "limit of queued bytes of one client: got 536870911, expected at least 536870912, the"
            " largest message",
        ),
        (
            {"max_queued_total_bytes": 512 * MIB - 1},
            "limit of queued bytes: got 536870911, expected at least 536870912, what one client",
        ),
        (
            {"max_queued_total_requests": 63},
            "limit of queued requests: got 63, expected at least 64, what one client",
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


@pytest.mark.parametrize(
    ("text", "layers"), [("0-7", (0, 7)), ("3-3", (3, 3)), ("0-4095", (0, 4095))]
)
def test_layers_on_the_command_line(text: str, layers: tuple[int, int]) -> None:
    assert _layers(MagicMock(), MagicMock(), text) == layers
    assert _layers(MagicMock(), MagicMock(), None) is None


@pytest.mark.parametrize("text", ["", "1", "2-1", "0-1,2", "-1-2", "0-99999", "a-b", "0 - 1", "0-"])
def test_what_is_no_range_of_layers_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--layers: got .*, expected FIRST-LAST"):
        _layers(MagicMock(), MagicMock(), text)
