"""Integer policies compute, at every site, what int64 arithmetic does; and nothing ever wraps."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from protocol.messages import FUSED_MODULES, Request, Response, RingLinearRequest, TensorReply
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.weights import QuantizedLinear, load_quantized
from protocol.tensors import to_torch
from tee_side.words import Site
from tests.kit.model import LoopbackChannel, Models, assemble, token_ids


class Watched(LoopbackChannel):
    """Compares every product with int64, in which nothing wraps."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        config, checkpoint = read_config(directory), Checkpoint(directory)
        self.weights: dict[Site, QuantizedLinear] = {
            (layer, operator): load_quantized(checkpoint, config, layer, operator)
            for layer in range(config.num_hidden_layers)
            for operator in FUSED_MODULES
        }
        self.seen: set[Site] = set()
        self.largest = 0

    def answer(self, request: Request) -> Response:
        reply = super().answer(request)
        assert isinstance(request, RingLinearRequest)
        assert isinstance(reply, TensorReply)
        (operator,) = (o for o, modules in FUSED_MODULES.items() if modules == request.module_names)
        site = request.layer_idx, operator
        exact = to_torch(request.elements).long() @ self.weights[site].weight.long().t()
        assert torch.equal(to_torch(reply.output), exact.to(torch.int32))
        assert int(exact.abs().max()) < 2**31
        self.largest = max(self.largest, int(exact.abs().max()))
        self.seen.add(site)
        return reply


OUTLIERS = [3, 17, 29, 41]


def test_outlier_channels_a_thousand_times_the_median_do_not_wrap(
    saved_model: Models, tmp_path: Path
) -> None:
    given, directory = saved_model("llama").directory, tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_bytes((given / "config.json").read_bytes())
    tensors = load_file(given / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[OUTLIERS] *= 1000
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    channel = Watched(directory)
    assemble(directory, "quantized-clear", channel=channel).logits(token_ids(48, seed=3))
    assert channel.seen == channel.weights.keys()
    # The outliers make large sums, and the other channels still have steps of their own.
    assert channel.largest > 2**21
    others = [channel_ for channel_ in range(48) if channel_ not in OUTLIERS]
    for request in channel.requests:
        assert isinstance(request, RingLinearRequest)
        if "q_proj" in request.module_names:
            assert int(to_torch(request.elements)[:, others].abs().median()) >= 4
