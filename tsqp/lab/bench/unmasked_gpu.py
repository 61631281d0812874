"""The same shape on the accelerator alone: a bfloat16 decode step, nothing masked, no service.

    python -m tsqp.lab.bench.unmasked_gpu MODEL [--device cuda] [--context 128] [--steps 50]
        [--json FILE]

What a token costs where the GPU side may see everything. MODEL: a directory, of which only
config.json is read; weights are random. On CUDA a step is one graph, replayed; elsewhere, for
tests, it is run as it is. Prints a list of `tsqp.lab.bench.results.Baseline` as JSON.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from gpu_side.segment_kernels import TorchMaths, finish
from protocol.messages import FUSED_MODULES, LinearOperator
from protocol.model.config import ModelConfig, read_config
from protocol.model.forward import Call, Layer, Ops, Rope, bound, forward, staying
from protocol.model.weights import NormTensors, load_final_norm, load_light
from tsqp.lab.bench.results import Baseline, Spread
from tsqp.lab.measure import elapsed_us, script, write_results

DTYPE = torch.bfloat16
_WARM_UP = 3


class _Maths(TorchMaths):
    """A service's operators, with the one kernel that torch has for a norm."""

    @staticmethod
    def rms_norm(x: torch.Tensor, norm: NormTensors, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis."""
        return rms_norm(x, norm.weight.shape, norm.weight, eps)


class Decoder:
    """One sequence of a model of random weights, with `context` tokens in its cache."""

    def __init__(self, config: ModelConfig, context: int, device: torch.device) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=DTYPE, device=device).normal_(std=0.02)

        def product(operator: LinearOperator) -> Call:
            return staying(partial(linear, weight=random(*config.row_layout(operator)[1])))

        layers, (_, K, C) = range(config.num_hidden_layers), config.heads
        self._caches = [random(2, 1, K, context + 1, C) for _ in layers]
        self._embedding = random(config.vocab_size, config.hidden_size)
        ones = partial(torch.ones, dtype=DTYPE, device=device)
        light = [load_light(config, layer, lambda _name, shape: ones(shape)) for layer in layers]
        maths = _Maths()
        self._layers = [Layer(**bound(light[layer], config, layer, maths)) for layer in layers]
        final = load_final_norm(config, lambda _name, shape: ones(shape))
        kind = getattr(maths, f"{config.table.norm}_norm")
        self._norm = partial(kind, norm=final, eps=config.norm_eps)
        calls: dict[str, Any] = {name: [product(name) for _ in layers] for name in FUSED_MODULES}
        embedding = staying(lambda ids_T: self._embedding[ids_T])
        self._ops: Ops[Layer, None] = Ops(embedding=embedding, attention=self._attention, **calls)
        self._rope = Rope(config, DTYPE, device).of([(context, context + 1, context + 1)])
        # Where each step writes its keys and values: the last place, again and again.
        self._place = torch.tensor([context], device=device)
        self._token = torch.zeros(1, dtype=torch.int64, device=device)

    def step(self) -> torch.Tensor:
        """Decode one token, and return its id [1]; the same work each time."""
        h_TD = finish(forward(self._token, self._layers, self._rope, self._ops, None))
        return linear(self._norm(h_TD), self._embedding).argmax(-1)

    async def _attention(
        self, layer: Layer, q_THC: torch.Tensor, k_TKC: torch.Tensor, v_TKC: torch.Tensor, _: None
    ) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THC, k_TKC, v_TKC))
        keys, values = self._caches[layer.index]
        keys.index_copy_(2, self._place, k)
        values.index_copy_(2, self._place, v)
        return scaled_dot_product_attention(q, keys, values, enable_gqa=True).view(1, -1)


def captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return what replays a step on CUDA as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token = step()

    def replayed() -> torch.Tensor:
        graph.replay()
        return token

    return replayed


@torch.inference_mode()
def measure(config: ModelConfig, context: int, steps: int, device: torch.device) -> Baseline:
    """Time decode steps, each until its token is on the host."""
    on_cuda = device.type == "cuda"
    step = Decoder(config, context, device).step
    step = captured(step) if on_cuda else step
    times_ms = [elapsed_us(lambda: step().item()) / 1e3 for _ in range(_WARM_UP + steps)][_WARM_UP:]
    how = "one CUDA graph a step" if on_cuda else "on the CPU in place of a GPU"
    return Baseline(
        name="unmasked",
        description=f"the model on the GPU side alone, unmasked, {how}",
        phase="decode",
        tokens=context,
        new_tokens=1,
        dtype="bfloat16",
        against="none",
        step_ms=Spread.of(times_ms),
    )


def measure_all(options: Any) -> list[Baseline]:
    """Measure what the command line asks for."""
    config, device = read_config(Path(options.model)), torch.device(options.device)
    return [measure(config, context, options.steps, device) for context in options.context]


if __name__ == "__main__":
    write_results(*script(__doc__, measure_all, "model", device="cuda", context=(128,), steps=50))
