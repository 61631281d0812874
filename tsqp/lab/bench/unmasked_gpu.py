"""The same shape on the accelerator alone: a bfloat16 decode step, nothing masked, no service.

    python -m tsqp.lab.bench.unmasked_gpu MODEL [--device cuda] [--context 128] [--steps 50]
        [--json FILE]

What a token costs where the GPU side may see everything. MODEL: a directory, of which only
config.json is read; weights are random. On CUDA a step is one graph, replayed; elsewhere, for
tests, it is run as it is. Prints a list of `tsqp.lab.bench.model.Baseline` as JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from protocol.model.config import ModelConfig, read_config
from tsqp.lab.bench.machine import write_results
from tsqp.lab.bench.model import Baseline, Spread

NAME = "unmasked"
DTYPE = torch.bfloat16
_WARM_UP = 3


class _Layer(NamedTuple):
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Decoder:
    """One sequence of a model of random weights, with `context` tokens in its cache."""

    def __init__(self, config: ModelConfig, context: int, device: torch.device) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=DTYPE, device=device).normal_(std=0.02)

        self._config = config
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        heads, pairs = config.num_attention_heads, config.num_key_value_heads
        self._layers = [
            _Layer(
                qkv=random((heads + 2 * pairs) * size, hidden),
                o=random(hidden, heads * size),
                gate_up=random(2 * inner, hidden),
                down=random(hidden, inner),
                keys=random(1, pairs, context + 1, size),
                values=random(1, pairs, context + 1, size),
            )
            for _ in range(config.num_hidden_layers)
        ]
        self._embedding = random(config.vocab_size, hidden)
        self._norm = torch.ones(hidden, dtype=DTYPE, device=device)
        # Where each step writes its keys and values: the last place, again and again.
        self._place = torch.tensor([context], device=device)
        self._cos, self._sin = random(size), random(size)
        self._token = torch.zeros(1, dtype=torch.int64, device=device)

    def step(self) -> torch.Tensor:
        """Decode one token, and return its id [1]; the same work each time."""
        config = self._config
        heads, pairs, size = (
            *(config.num_attention_heads, config.num_key_value_heads),
            config.head_dim,
        )
        h_TD = self._embedding[self._token]
        for layer in self._layers:
            qkv = linear(self._normed(h_TD), layer.qkv).view(1, 1, heads + 2 * pairs, size)
            q, k, v = qkv.transpose(1, 2).split((heads, pairs, pairs), dim=1)
            layer.keys.index_copy_(2, self._place, self._rotated(k))
            layer.values.index_copy_(2, self._place, v)
            z = scaled_dot_product_attention(
                self._rotated(q), layer.keys, layer.values, enable_gqa=True
            )
            h_TD = h_TD + linear(z.transpose(1, 2).reshape(1, heads * size), layer.o)
            gate, up = linear(self._normed(h_TD), layer.gate_up).chunk(2, -1)
            h_TD = h_TD + linear(silu(gate) * up, layer.down)
        return linear(self._normed(h_TD), self._embedding).argmax(-1)

    def _normed(self, h_TD: torch.Tensor) -> torch.Tensor:
        return rms_norm(h_TD, h_TD.shape[-1:], self._norm, self._config.rms_norm_eps)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self._cos + torch.cat((-second, first), -1) * self._sin


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
    times_ms: list[float] = []
    for number in range(_WARM_UP + steps):
        started = time.perf_counter()
        step().item()
        if number >= _WARM_UP:
            times_ms.append((time.perf_counter() - started) * 1e3)
    how = "one CUDA graph a step" if on_cuda else "on the CPU in place of a GPU"
    return Baseline(
        name=NAME,
        description=f"the model on the GPU side alone, unmasked, {how}",
        phase="decode",
        tokens=context,
        new_tokens=1,
        dtype="bfloat16",
        against="none",
        step_ms=Spread(
            median=statistics.median(times_ms),
            low=min(times_ms),
            high=max(times_ms),
            runs=len(times_ms),
        ),
        round_trips=0,
        bytes_sent=0,
        bytes_received=0,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", default="128", help="tokens behind a decoded one, with commas")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the result to this file instead")
    options = parser.parse_args(arguments)
    config, device = read_config(options.model), torch.device(options.device)
    contexts = [int(text) for text in options.context.split(",")]
    found = [measure(config, context, options.steps, device) for context in contexts]
    write_results(found, options.json)


if __name__ == "__main__":
    main()
