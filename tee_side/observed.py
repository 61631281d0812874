"""The operators once more, with an observer told what each of them costs.

Without an observer none of this is there: a call of an operator then costs the call and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

import torch

from protocol.channel import Channel, Exchange
from protocol.errors import ReplyError
from protocol.messages import LinearOperator
from protocol.model.config import ModelConfig
from tee_side.answers import Asked
from tee_side.light import LightOperators
from tee_side.masks.mask import Masked
from tee_side.observer import AnyOperator, Observer
from tee_side.remote_operators import ChannelsAt, RemoteOperators, RemoteSettings
from tee_side.vocabulary import LAYERLESS, LIGHT_OPERATORS, Operator, TeeStage

T = TypeVar("T")


class ObservedLight(LightOperators):
    """`LightOperators` that are timed."""

    def __init__(self, rms_norm_eps: float, observer: Observer) -> None:
        super().__init__(rms_norm_eps)
        for operator in LIGHT_OPERATORS:
            setattr(self, operator, _timed(getattr(self, operator), operator, observer))


def _timed(method: Callable[..., T], operator: AnyOperator, observer: Observer) -> Callable[..., T]:
    def call(layer: int | None, *arguments: Any) -> T:
        observer.called(operator, layer, "tee")
        started_ns = time.perf_counter_ns()
        result = method(layer, *arguments)
        observer.spent(operator, layer, "tee", started_ns, time.perf_counter_ns())
        return result

    return call


def observed_local(
    method: Callable[..., Any], operator: Operator, observer: Observer
) -> Callable[..., Any]:
    """Return a placed operator that runs in the TEE, timed."""
    layerless = operator in LAYERLESS

    async def call(*arguments: Any) -> Any:
        layer = None if layerless else arguments[0]
        observer.called(operator, layer, "tee")
        started_ns = time.perf_counter_ns()
        # Nothing in the TEE waits: no other micro-batch has its turn in between.
        result = await method(*arguments)
        observer.spent(operator, layer, "tee", started_ns, time.perf_counter_ns())
        return result

    return call


class ObservedRemoteOperators(RemoteOperators):
    """`RemoteOperators` with each of their stages timed."""

    def __init__(
        self,
        channels_at: ChannelsAt,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        observer: Observer,
        **settings: Unpack[RemoteSettings],
    ) -> None:
        super().__init__(channels_at, config, dtype, **settings)
        self._observer = observer

    def _encode(self, layer: int, operator: LinearOperator, x_TI: torch.Tensor) -> torch.Tensor:
        self._observer.called(operator, layer, "gpu")
        return self._time(operator, layer, "tee", super()._encode, layer, operator, x_TI)

    def _mask(self, layer: int, operator: LinearOperator, x_TI: torch.Tensor) -> Masked | None:
        return self._time(operator, layer, "mask", super()._mask, layer, operator, x_TI)

    def _mask_rows(self, operator: Operator, layer: int | None, *arguments: Any) -> Any:
        self._observer.called(operator, layer, "gpu")
        hide = super()._mask_rows
        return self._time(operator, layer, "mask", hide, operator, layer, *arguments)

    async def _compute_here(
        self, layer: int, operator: LinearOperator, x_TI: torch.Tensor
    ) -> torch.Tensor:
        started_ns = time.perf_counter_ns()
        result = await super()._compute_here(layer, operator, x_TI)
        self._observer.spent(operator, layer, "tee", started_ns, time.perf_counter_ns())
        return result

    async def _ask(
        self, asked: Asked, channels: Sequence[Channel], left_s: float | None
    ) -> list[Exchange]:
        exchanges = await super()._ask(asked, channels, left_s)
        self._observer.exchanged(asked.operator, asked.layer, exchanges)
        return exchanges

    def _open(
        self, asked: Asked, channels: Sequence[Channel], exchanges: Sequence[Exchange]
    ) -> list[torch.Tensor] | ReplyError:
        operator, layer = asked.operator, asked.layer
        return self._time(operator, layer, "verify", super()._open, asked, channels, exchanges)

    def _verify(self, operator: Operator, layer: int | None, *arguments: Any) -> Any:
        return self._time(operator, layer, "verify", super()._verify, operator, layer, *arguments)

    def _unmask(self, operator: Operator, layer: int | None, *arguments: Any) -> Any:
        return self._time(operator, layer, "unmask", super()._unmask, operator, layer, *arguments)

    def _decode(self, layer: int, operator: LinearOperator, y_TO: torch.Tensor) -> torch.Tensor:
        return self._time(operator, layer, "tee", super()._decode, layer, operator, y_TO)

    def _time(
        self,
        operator: Operator,
        layer: int | None,
        stage: TeeStage,
        method: Callable[..., T],
        *arguments: Any,
    ) -> T:
        started_ns = time.perf_counter_ns()
        result = method(*arguments)
        self._observer.spent(operator, layer, stage, started_ns, time.perf_counter_ns())
        return result
