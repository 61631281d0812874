"""A service that answers at once, with zeros: what is left is the trusted side's own cost.

    python -m benchmarks.at_once MODEL ENDPOINT

On a machine without a GPU the service's products take milliseconds, in which the runner's core
forgets what it was doing; a real accelerator answers in a fraction of one. Init is answered as
`gpu-service` would. Prints `ready` and runs until it is terminated.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

from gpu_side.operators import Operators
from gpu_side.weights import BOTH, load_weights
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, encode_reply, open_request, read_request
from protocol.messages import (
    InitReply,
    InitRequest,
    LinearRequest,
    ModuleName,
    Request,
    Response,
    RingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.model.config import ModelConfig, read_config
from protocol.tensors import from_torch, torch_dtype
from protocol.zmq_channel import ZmqListener


class AtOnce:
    """Answers Init like a service, and linear operators with zeros of the right shape."""

    def __init__(self, model: Path) -> None:
        self._config: ModelConfig = read_config(model)
        weights = load_weights(
            model,
            device=torch.device("cpu"),
            dtype=torch_dtype(self._config.dtype),
            arithmetic=("float",),
        )
        reply = Operators(weights, DEFAULT_MAX_MESSAGE_BYTES).apply(InitRequest())
        if not isinstance(reply, InitReply):
            raise TypeError(f"Init: got {type(reply).__name__}, expected InitReply")
        self._init = reply.model_copy(update={"arithmetic": BOTH})

    def answer(self, request: Request) -> Response:
        """Return the reply to Init, Linear or RingLinear."""
        match request:
            case InitRequest():
                return self._init
            case LinearRequest():
                return self._zeros(request.hidden_states.shape, request.module_names, "bfloat16")
            case RingLinearRequest():
                return self._zeros(request.elements.shape, request.module_names, "int32")
        raise ValueError(f"got {request.method}, expected a linear operator")

    @functools.cache  # noqa: B019 - one instance, for the life of the process
    def _zeros(
        self, shape: tuple[int, ...], modules: tuple[ModuleName, ...], dtype: str
    ) -> TensorReply:
        size = sum(self._config.module_shape(module)[0] for module in modules)
        element = torch.int32 if dtype == "int32" else torch_dtype(dtype)
        return TensorReply(output=from_torch(torch.zeros(*shape[:-1], size, dtype=element)))


def main() -> None:
    """Serve."""
    model, endpoint = Path(sys.argv[1]), sys.argv[2]
    service = AtOnce(model)
    listener = ZmqListener(endpoint, max_message_bytes=DEFAULT_MAX_MESSAGE_BYTES)
    print("ready", flush=True)
    while True:
        listener.wait()
        while incoming := listener.receive():
            opened = open_request(incoming.frames, DEFAULT_MAX_MESSAGE_BYTES)
            reply = service.answer(read_request(opened))
            timing = Timing(queue_us=0, compute_us=0)
            frames = encode_reply(opened.form, opened.request_id, opened.method, reply, timing)
            listener.send(incoming.route, frames)


if __name__ == "__main__":
    main()
