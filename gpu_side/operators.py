"""What the service answers: one message for each request.

A request is checked, then computed, in the same way whatever computes it.
"""

from __future__ import annotations

import secrets

from gpu_side.answers import Answer
from gpu_side.holdings import Holdings
from gpu_side.kernels import Kernels, NullWeights, TorchKernels
from gpu_side.plans import Computed, Planner
from gpu_side.queues import QueueLimits
from gpu_side.weights import ServiceWeights
from protocol.messages import InitRequest


class Operators:
    """Answers requests from weights, or from the null device that is there instead of them.

    Stateless between requests. `limits`: what Init says of the queue, which is the loop's. Call it
    under `torch.inference_mode`, which costs more than some requests do.
    """

    def __init__(
        self,
        weights: ServiceWeights | NullWeights,
        max_message_bytes: int,
        limits: QueueLimits | None = None,
    ) -> None:
        self._held: Holdings
        self._kernels: Kernels
        if isinstance(weights, NullWeights):
            self._held, self._kernels = weights.held, weights.kernels
        else:
            self._held, self._kernels = weights, TorchKernels(weights)
        self._planner = Planner(self._held, max_message_bytes)
        self._max_message_bytes = max_message_bytes
        self._limits = limits or QueueLimits()
        self._instance_id = secrets.token_hex(16)

    def apply(self, request: InitRequest | Computed) -> Answer:
        """Return the reply to a decoded request. Raises ProtocolError where it does not fit.

        Health is not for us: the loop knows what waits.
        """
        if isinstance(request, InitRequest):
            return Answer(
                self._held.init_reply(self._max_message_bytes, self._limits, self._instance_id)
            )
        return self._kernels.compute(request, self._planner.plan(request))
