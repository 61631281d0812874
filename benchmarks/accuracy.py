"""What integer arithmetic costs in accuracy, on the validation text of the demo model.

    python -m benchmarks.accuracy [--documents N] [--no-sweep] [--json FILE]

Every document is scored on its own, as `benchmarks.train_demo` scored the model: perplexity of its
tokens, and how often the likeliest next token is that of float32. `quantized-clear` is the policy
itself, against a gpu-service process. The other variants run in this process and say where the
loss comes from: linear operators alone, the LM head alone with an input of 16 bits or of 8 (as the
policy has it). The sweep makes the inputs of all linear operators coarser, to as many steps as it
says for a typical input; `tsqp.calibrate` takes its numbers from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, embedding, linear

from benchmarks.harness import Found, Place, main, say
from benchmarks.train_demo import VALIDATION_FILE
from protocol.integer import exact_product
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import EMBEDDING, Checkpoint, linear_digest, model_digest
from protocol.model.config import read_config
from protocol.model.weights import CPU, QuantizedLinear, load_linear, load_quantized, load_tensor
from protocol.transport import open_channel
from tee_side.assembly import Assembly, MaskSettings
from tee_side.engine.tokenizer import Tokenizer
from tee_side.model.batch import Batch, Chunk, KVCache
from tee_side.model.operators import (
    LocalOperators,
    Operators,
    TeeModel,
    forward,
    load_tee_model,
    logits,
)
from tee_side.policy.placement import load_policy
from tee_side.protect.calibration import Calibration, SiteScales, calibration_path
from tee_side.protect.sites import IntegerSite
from tee_side.remote.call import run
from tee_side.words import Site
from tsqp.calibrate import STEPS, operators_here
from tsqp.run.settings import model_directory

Product = Callable[[torch.Tensor], torch.Tensor]

MAX_PERPLEXITY_RATIO = 1.005
MIN_AGREEMENT = 0.99
SWEEP = (64, 32, 16, 8, 4)


@dataclass(frozen=True)
class Losses:
    """Sum of losses, over how many predicted tokens, and the likeliest token at every position."""

    nats: float
    tokens: int
    top: torch.Tensor


class Mixture:
    """The demo model in float32 and in integers, put together in any mixture."""

    def __init__(self, directory: Path, documents: int | None) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self.checkpoint = Checkpoint(directory)
        self.model: TeeModel = load_tee_model(self.config, self.checkpoint, torch.float32)
        self.calibration = Calibration.load(
            calibration_path(directory, None),
            self.config,
            model_digest(self.config, self.checkpoint),
            linear_digest(self.config, self.checkpoint),
        )
        tokenizer = Tokenizer(directory)
        lines = (directory / VALIDATION_FILE).read_text("utf-8").splitlines()[:documents]
        self.documents = [
            tokenizer.encode(line, add_special_tokens=False)[: self.config.context_length]
            for line in lines
        ]
        self._embedding = self._table(EMBEDDING)
        self._head = load_quantized(self.checkpoint, self.config, -1, "lm_head")
        self._sites: list[Site] = [
            (layer, operator)
            for layer in range(self.config.num_hidden_layers)
            for operator in FUSED_MODULES
        ]

    def score(self, ops: Operators) -> Losses:
        """Run every document."""
        nats, tokens, top = 0.0, 0, []
        for ids in self.documents:
            cache = KVCache(self.config, len(ids), torch.float32)
            chunk = Chunk(cache, slice(0, len(ids)), len(ids))
            batch = Batch(torch.tensor(ids), (chunk,), tuple(range(len(ids))))
            with torch.inference_mode():
                h_TD = run(forward(batch, self.model, ops))
                logits_TV = run(logits(h_TD, self.model, ops))
            wanted_T = batch.token_ids_T[1:]
            nats += cross_entropy(logits_TV[:-1].double(), wanted_T, reduction="sum").item()
            tokens += len(wanted_T)
            top.append(logits_TV.argmax(-1))
        return Losses(nats, tokens, torch.cat(top))

    def operators(self, linears: dict[Site, Product], lm_head: Product) -> Operators:
        """Return operators that run here."""
        look_up = partial(embedding, weight=self._embedding)
        local: LocalOperators = {(None, "lm_head"): lm_head, (None, "embedding"): look_up}
        local.update(linears.items())
        return operators_here(local, self.config.num_hidden_layers)

    def float_linears(self) -> dict[Site, Product]:
        """Linear operators in float32."""
        return {
            (layer, operator): load_linear(
                self.checkpoint, self.config, layer, operator, dtype=torch.float32, device=CPU
            )
            for layer, operator in self._sites
        }

    def integer_linears(self, steps: int = STEPS) -> dict[Site, Product]:
        """Linear operators in integers, with `steps` steps for a typical input."""
        linears: dict[Site, Product] = {}
        for site in self._sites:
            scales = self.calibration.sites[site]
            coarser = replace(scales, input_scale=scales.input_scale * STEPS / steps)
            weights = load_quantized(self.checkpoint, self.config, *site)
            linears[site] = _integer_product(coarser, weights)
        return linears

    def float_head(self) -> Product:
        """LM head in float32."""
        tied = self.config.tie_word_embeddings
        return partial(linear, weight=self._embedding if tied else self._table("lm_head.weight"))

    def _table(self, name: str) -> torch.Tensor:
        vocabulary = (self.config.vocab_size, self.config.hidden_size)
        return load_tensor(self.checkpoint, name, vocabulary, dtype=torch.float32)

    def integer_head(self, largest: int) -> Product:
        """LM head in int8 weights, its input scaled per row to integers up to `largest`."""
        head, limit = self._head, (2**31 - 1) / self._head.max_row_norm()

        def product(h_ND: torch.Tensor) -> torch.Tensor:
            scale_N1 = torch.maximum(
                h_ND.abs().amax(-1, keepdim=True) / largest,
                h_ND.norm(dim=-1, keepdim=True) / (0.999 * limit),
            )
            x_ND = (h_ND / scale_N1).round().to(torch.int32)
            return exact_product(x_ND, head.weight) * scale_N1 * head.scale

        return product


def _integer_product(scales: SiteScales, weights: QuantizedLinear) -> Product:
    site = IntegerSite(scales)
    return lambda x_TI: exact_product(site.encode(x_TI), weights.weight) * scales.factor_N


def score_policy(bench: Mixture, place: Place) -> Losses:
    """Score the policy `quantized-clear` as a runner puts it together, over a real service."""
    policy = load_policy("quantized-clear")
    assembly = Assembly(
        policy,
        bench.config,
        bench.checkpoint,
        bench.model,
        MaskSettings(),
        step_tokens=bench.config.context_length,
    )
    place.callback(assembly.close)
    channel = place.enter_context(open_channel(place.service(bench.directory, transport="tcp")))
    return bench.score(assembly.lanes(lambda _layer: [channel])[0].tables["prefill"])


def measure(options: Any, place: Place) -> Found:
    """Score float32, the policy, its parts, and coarser inputs."""
    directory = model_directory("demo")
    bench = Mixture(directory, options.documents or None)
    float_linears, float_head = bench.float_linears(), bench.float_head()
    integer_linears = bench.integer_linears()
    head_16, head_8 = bench.integer_head(127 * 256 + 127), bench.integer_head(127)
    parts = {
        "linear operators only": (integer_linears, float_head),
        "LM head only, 16-bit input": (float_linears, head_16),
        "LM head only, 8-bit input": (float_linears, head_8),
        "all, LM head with 8-bit input": (integer_linears, head_8),
    }
    for steps in () if options.no_sweep else SWEEP:
        coarser = bench.integer_linears(steps)
        parts[f"linear operators only, {steps} steps"] = (coarser, float_head)
    reference = bench.score(bench.operators(float_linears, float_head))
    rows: dict[str, dict[str, float]] = {}
    for name in ("quantized-clear", *parts):
        if name in parts:
            score = bench.score(bench.operators(*parts[name]))
        else:
            score = score_policy(bench, place)
        rows[name] = {
            "perplexity_ratio": math.exp((score.nats - reference.nats) / reference.tokens),
            "top_1_agreement": (score.top == reference.top).double().mean().item(),
        }
        say(f"{name}: {rows[name]}")
    ratio, agreement = rows["quantized-clear"].values()
    reached = ratio <= MAX_PERPLEXITY_RATIO and agreement >= MIN_AGREEMENT
    return {
        "tokens": reference.tokens,
        "float32_perplexity": math.exp(reference.nats / reference.tokens),
        "variants": rows,
        "targets_reached": reached,
    }, True


if __name__ == "__main__":
    main(__doc__, measure, documents=0, no_sweep=False)
