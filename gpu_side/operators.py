"""What the service answers: one message for each request.

A request is checked, then computed, in the same way whatever computes it.
"""

from __future__ import annotations

import secrets

from gpu_side.answers import Answer
from gpu_side.holdings import Holdings
from gpu_side.kernels import Kernels, NullWeights, TorchKernels
from gpu_side.plans import Planner
from gpu_side.weights import ServiceWeights
from protocol.messages import InitRequest, Request


class Operators:
    """Answers requests from weights, or from the null device that is there instead of them.

    Stateless between requests. Call it under `torch.inference_mode`, which costs more than some
    requests do.
    """

    def __init__(self, weights: ServiceWeights | NullWeights, max_message_bytes: int) -> None:
        self._held: Holdings
        self._kernels: Kernels
        if isinstance(weights, NullWeights):
            self._held, self._kernels = weights.held, weights.kernels
        else:
            self._held, self._kernels = weights, TorchKernels(weights)
        self._planner = Planner(self._held, max_message_bytes)
        self._max_message_bytes = max_message_bytes
        self._instance_id = secrets.token_hex(16)

    def apply(self, request: Request) -> Answer:
        """Return the reply to a decoded request. Raises ProtocolError where it does not fit."""
        if isinstance(request, InitRequest):
            return Answer(self._held.init_reply(self._max_message_bytes, self._instance_id))
        return self._kernels.compute(request, self._planner.plan(request))
