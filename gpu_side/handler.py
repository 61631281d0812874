"""What the service answers: for each request what computes it.

A request is checked, then computed, in the same way whatever computes it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from gpu_side.cuda.products import device_kernels
from gpu_side.kernels import Kernel, Kernels, NullKernels, Result
from gpu_side.segment_kernels import SegmentKernels, TorchSegments, null_segments
from gpu_side.served_model import ServedModel
from gpu_side.sessions import SessionSettings, SessionStore, free_bytes
from gpu_side.state import ServiceState
from gpu_side.tasks import RequestChecker
from gpu_side.transport.listener import Incoming
from gpu_side.weights import ServiceWeights
from protocol.errors import ErrorCode, EvidenceError, ProtocolError
from protocol.messages import (
    EmbeddingRequest,
    HealthRequest,
    InitRequest,
    Request,
    SeededRingLinearRequest,
    SegmentRequest,
)

# Hardware takes its time for evidence, and everything waits for it: a third of the time at most.
_PAUSES = 2
Attest: TypeAlias = Callable[[bytes, str], bytes]


@dataclass(frozen=True)
class Served:
    """What answers the requests of a service, with weights, or with what is there instead.

    `model`: what it says that it holds; `kernels`: what computes. `segments`: makes what runs
    Segments on sessions, where there are whole layers; None: there are none. `device`: where
    sessions take their memory; None: nowhere.
    """

    model: ServedModel
    kernels: Kernels
    segments: Callable[[SessionStore], SegmentKernels] | None = None
    device: torch.device | None = None


def served_zeros(model: ServedModel, kernels: NullKernels) -> Served:
    """Return a null device in the place of weights. `model`: what it says that it holds."""
    return Served(model, kernels, partial(null_segments, model.config, kernels))


class RequestHandler:
    """Answers requests from weights, or from what is there instead of them.

    Stateless between requests, but for the sessions of Segments, of which `sessions` says how many
    are kept. `state`: of the service, for Init and Health; the loop keeps it.
    `spin_us`: how long to ask a GPU without a pause whether it is done. `attest`: returns what the
    service states of itself, with evidence, for a nonce and the digest of what it serves; None: it
    gives no evidence. Call it under `torch.inference_mode`, which costs more than some requests do.
    """

    def __init__(
        self,
        weights: ServiceWeights | Served,
        max_message_bytes: int,
        state: ServiceState | None = None,
        spin_us: float = 0.0,
        attest: Attest | None = None,
        sessions: SessionSettings | None = None,
    ) -> None:
        # Weights that this process holds alone, unless it is said what serves them.
        served = (
            weights
            if isinstance(weights, Served)
            else Served(
                weights,
                device_kernels(weights, spin_us),
                partial(TorchSegments, weights, spin_us=spin_us),
                weights.device,
            )
        )
        self._model, self._kernels = served.model, served.kernels
        self.max_message_bytes = max_message_bytes
        self._checker = RequestChecker(self._model, max_message_bytes)
        self.state = state or ServiceState()
        # The same for every client, but for what it is told about one nonce.
        self._init_reply = self._model.init_reply(
            max_message_bytes, self.state.queue.limits, instance_id=secrets.token_hex(16)
        )
        self._attest, self._attest_from_s = attest, 0.0
        # Empty where there are no whole layers.
        self.sessions = SessionStore(sessions or SessionSettings(), free_bytes(served.device))
        segments = served.segments if self._model.has_segments else None
        self._segments = None if segments is None else segments(self.sessions)

    def prepare(self, request: Request) -> Kernel:
        """Return what computes all requests that have this one's header.

        Raises ProtocolError where it does not fit; so does the kernel, for token ids.
        """
        if isinstance(request, InitRequest):
            return self._init
        if isinstance(request, HealthRequest):
            return lambda _request, _incoming: (self.state.health(), None)
        # Nothing is allocated for what the check refuses.
        task = self._checker.check(request)
        if isinstance(request, SegmentRequest):
            if self._segments is None:
                raise RuntimeError("a Segment without whole layers got through the checks")
            return self._segments.prepare(request, task)
        if isinstance(request, SeededRingLinearRequest):
            of_elements = self._kernels.prepare(request.standing_for(), task)

            def expanded(request: Any, incoming: Incoming | None) -> Result:
                return of_elements(request.expanded(), incoming)

            return expanded
        kernel = self._kernels.prepare(request, task)
        return self._checks_ids(kernel) if isinstance(request, EmbeddingRequest) else kernel

    def apply(self, request: Request) -> Result:
        """Compute one request. Raises ProtocolError."""
        return self.prepare(request)(request, None)

    def _checks_ids(self, kernel: Kernel) -> Kernel:
        def checked(request: Any, incoming: Incoming | None) -> Result:
            # What is checked must be what is used, and a client may change memory that it shares.
            ids = replace(request.input_ids, data=bytearray(request.input_ids.data))
            self._checker.check_ids(ids)
            return kernel(request.model_copy(update={"input_ids": ids}), incoming)

        return checked

    def _init(self, request: Any, _incoming: Incoming | None) -> Result:
        if not request.nonce or self._attest is None:
            return self._init_reply, None
        began_s = time.monotonic()
        ProtocolError.unless(
            began_s >= self._attest_from_s,
            "evidence",
            "one soon after another",
            "a pause, in which others are answered",
            code=ErrorCode.QUEUE_FULL,
        )
        try:
            statement = self._attest(request.nonce, self._model.model_digest)
        except EvidenceError as error:
            raise ProtocolError(
                error.where,
                got=error.got,
                expected=error.expected,
                code=ErrorCode.UNAVAILABLE,
            ) from None
        finally:
            ended_s = time.monotonic()
            self._attest_from_s = ended_s + _PAUSES * (ended_s - began_s)
        return self._init_reply.model_copy(update={"statement": statement}), None
