"""A service that answers at once, with zeros: what is left is the trusted side's own cost.

    python -m benchmarks.at_once MODEL ENDPOINT

On a machine without a GPU the service's products take milliseconds, in which the runner's core
forgets what it was doing; a real accelerator answers in a fraction of one. Init is answered as
`gpu-service` would. Prints `ready` and runs until it is terminated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgpack
import torch
import zmq

from gpu_side.operators import Operators
from gpu_side.weights import BOTH, load_weights
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, Form, encode_reply
from protocol.messages import PROTOCOL_VERSION, InitReply, InitRequest
from protocol.model.config import ModelConfig, read_config
from protocol.tensors import ITEMSIZE, Buffer, torch_dtype


class AtOnce:
    """Answers Init like a service, and linear operators with zeros of the right shape.

    Nothing is checked and as little as possible is done: the header is read for what it asks, and
    the zeros of each shape are made once.
    """

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
        self._zeros: dict[tuple[object, ...], tuple[dict[str, object], bytes]] = {}

    def answer(self, frames: list[bytes]) -> Sequence[Buffer]:
        """Return the frames of the reply to Init, Linear or RingLinear."""
        header = msgpack.unpackb(frames[0])
        request_id, method, body = header["request_id"], header["method"], header["request"]
        if method == "Init":
            return encode_reply(Form.FRAMED, request_id, method, self._init)
        tensor = body["hidden_states" if method == "Linear" else "elements"]
        key = (tensor["dtype"], *tensor["shape"], *body["module_names"])
        if key not in self._zeros:
            size = sum(self._config.module_shape(name)[0] for name in body["module_names"])
            shape = [*tensor["shape"][:-1], size]
            output = {"dtype": tensor["dtype"], "shape": shape, "frame": 1}
            data = bytes(math.prod(shape) * ITEMSIZE[tensor["dtype"]])
            self._zeros[key] = {"output": output}, data
        response, data = self._zeros[key]
        reply = {
            "version": PROTOCOL_VERSION,
            "request_id": request_id,
            "method": method,
            "status": "success",
            "response": response,
            "timing": {"queue_us": 0, "compute_us": 0},
        }
        return [msgpack.packb(reply), data]


def main() -> None:
    """Serve."""
    model, endpoint = Path(sys.argv[1]), sys.argv[2]
    service = AtOnce(model)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    print("ready", flush=True)
    while True:
        client, *frames = socket.recv_multipart()
        socket.send_multipart([client, *service.answer(frames)])


if __name__ == "__main__":
    main()
