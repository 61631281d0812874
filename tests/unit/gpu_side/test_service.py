"""What a service holds, and when it does not start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch

from gpu_side.service import ServiceSettings, _arithmetic, serve
from protocol.errors import KernelError
from protocol.model.config import read_config
from tests.support import SavedModel


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
