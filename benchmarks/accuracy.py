"""What integer arithmetic costs in accuracy: a model beside itself in float32.

    python -m benchmarks.accuracy [--model demo|DIR] [--documents N] [--sweep] [--json FILE]

Of the demo model, on its validation text, each document on its own; of any other one
(`benchmarks.real` makes a real one), on the three files of benchmarks/texts, each whole. Against
float32, over all predicted tokens: perplexity, how often the likeliest next token is the same, and
the mean of the Kullback-Leibler divergence, in nats.

`quantized-clear`, against a gpu-service process, and `tee-only-int8` are policies as a runner puts
them together. `Q8_0, emulated` is what people run otherwise: weights and inputs in blocks of 32
under a float16 scale, as llama.cpp has them. The other variants say where the loss comes from:
int8 weights under float inputs, the linear operators alone, the LM head alone with an input of 16
bits or of 8. `--sweep` makes the inputs of all linear operators coarser, with rows of integers up
to less and less: what bits of activations are worth. The exit status is 1 where the demo model
misses its target.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import embedding

from benchmarks.harness import Fields, Found, Options, Place, main, say
from benchmarks.train_demo import VALIDATION_FILE
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import EMBEDDING, LM_HEAD, Checkpoint
from protocol.model.weights import (
    CPU,
    INT8_MAX,
    FusedLinear,
    load_bias,
    load_linear,
    load_quantized,
    load_tensor,
)
from protocol.transport import open_channel
from tee_side.assembly import Assembly, MaskSettings
from tee_side.engine.tokenizer import Tokenizer
from tee_side.model.batch import Batch, Chunk, KVCache
from tee_side.model.operators import (
    LocalOperators,
    Operators,
    Product,
    TeeModel,
    forward,
    integer_product,
    load_tee_model,
    logits,
)
from tee_side.policy.placement import load_policy
from tee_side.protect.sites import MAX_SUM, IntegerSite, largest_input
from tee_side.remote.call import run
from tee_side.words import Site
from tsqp.accuracy import Score, compare, operators_here
from tsqp.run.settings import model_directory

Rounding = Callable[[torch.Tensor], torch.Tensor]
# What is done to floats before a product is taken: to weights, and to inputs.
Change = tuple[Rounding, Rounding]

TEXTS = Path(__file__).parent / "texts"
MAX_PERPLEXITY_RATIO = 1.005
MIN_AGREEMENT = 0.99
# What a row's largest element becomes at most: 13, 10 and 8 bits.
SWEEP = (4095, 511, INT8_MAX)
# Of a block of Q8_0.
_BLOCK = 32

# Of each document, its logits [T, V].
Logits = list[torch.Tensor]


class Mixture:
    """A model in float32 and in integers, put together in any mixture.

    `documents`: token ids of each text, by the text's name.
    """

    def __init__(self, directory: Path, most: int | None) -> None:
        self.directory = directory
        self.config, self.checkpoint = Checkpoint.open(directory)
        self.model: TeeModel = load_tee_model(self.config, self.checkpoint, torch.float32)
        tokenizer = Tokenizer(directory)
        texts = {file.stem: [file.read_text("utf-8")] for file in sorted(TEXTS.glob("*.txt"))}
        validation = directory / VALIDATION_FILE
        if validation.is_file():
            texts = {"validation": validation.read_text("utf-8").splitlines()[:most]}
        self.documents = {
            name: [
                tokenizer.encode(text, add_special_tokens=False)[: self.config.context_length]
                for text in some
            ]
            for name, some in texts.items()
        }
        self._embedding = self._table(EMBEDDING)
        self._sites: list[Site] = [
            (layer, operator)
            for layer in range(self.config.num_hidden_layers)
            for operator in FUSED_MODULES
        ]

    def run(self, ops: Operators, text: str) -> Logits:
        """Return the logits of every document of a text, each run on its own."""
        found = []
        for ids in self.documents[text]:
            cache = KVCache(self.config, len(ids), torch.float32)
            chunk = Chunk(cache, slice(0, len(ids)), len(ids))
            batch = Batch(torch.tensor(ids), (chunk,), tuple(range(len(ids))))
            with torch.inference_mode():
                h_TD = run(forward(batch, self.model, ops))
                found.append(run(logits(h_TD, self.model, ops)))
        return found

    def compare(self, found: Logits, reference: Logits, text: str) -> dict[str, float]:
        """Compare the logits of a text with those of float32."""
        documents = zip(self.documents[text], found, reference, strict=True)
        score = sum(
            (compare(ours[:-1], right[:-1], ids[1:]) for ids, ours, right in documents),
            start=Score(),
        )
        return {
            "perplexity": score.perplexity,
            "perplexity_ratio": score.perplexity_ratio,
            "top_1_agreement": score.agreement,
            "kl_nats": score.kl_nats,
        }

    def operators(self, linears: dict[Site, Product], lm_head: Product) -> Operators:
        """Return operators that run here."""
        look_up = partial(embedding, weight=self._embedding)
        local: LocalOperators = {(None, "lm_head"): lm_head, (None, "embedding"): look_up}
        local.update(linears.items())
        return operators_here(local, self.config.num_hidden_layers)

    def float_linears(self, change: Change | None = None) -> dict[Site, Product]:
        """Linear operators in float32. `change`: of their weights, and of their inputs."""
        return {
            site: _changed(
                load_linear(self.checkpoint, self.config, *site, dtype=torch.float32, device=CPU),
                change,
            )
            for site in self._sites
        }

    def integer_linears(self, most: int = MAX_SUM) -> dict[Site, Product]:
        """Linear operators in integers. `most`: see `integers`."""
        return {site: self.integers(site, most) for site in self._sites}

    def integers(self, site: Site, most: int = MAX_SUM) -> Product:
        """Return a linear operator or the LM head in integers.

        `most`: what a row's largest element becomes, if the weights allow as much.
        """
        weights = load_quantized(self.checkpoint, self.config, *site)
        bias_O = load_bias(self.checkpoint, self.config, *site, dtype=torch.float32)
        largest = min(most, largest_input(weights.max_row_sum()))
        return partial(
            integer_product, weights, IntegerSite(weights.scale, bias_O, torch.float32, largest)
        )

    def float_head(self, change: Change | None = None) -> Product:
        """LM head in float32. `change`: as of `float_linears`."""
        tied = self.config.tie_word_embeddings
        weight = self._embedding if tied else self._table(LM_HEAD)
        return _changed(FusedLinear(weight, None, {}), change)

    def _table(self, name: str) -> torch.Tensor:
        vocabulary = (self.config.vocab_size, self.config.hidden_size)
        return load_tensor(self.checkpoint, name, vocabulary, dtype=torch.float32)


def _changed(float_linear: FusedLinear, change: Change | None) -> Product:
    if change is None:
        return float_linear
    weights, inputs = change
    changed = replace(float_linear, weight=weights(float_linear.weight))
    return lambda x_TI: changed(inputs(x_TI))


def rounded_to_rows(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return weights as int8 under one scale a row holds them."""
    scale_O1 = weight_OI.abs().amax(-1, keepdim=True) / 127
    return (weight_OI / scale_O1).round() * scale_O1


def rounded_to_blocks(x_TI: torch.Tensor) -> torch.Tensor:
    """Return floats as Q8_0 holds them: int8 in blocks of 32, each under a float16 scale."""
    blocks = x_TI.unflatten(-1, (-1, _BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    rounded: torch.Tensor = (blocks / scale).round() * scale.half().float()
    return rounded.reshape(x_TI.shape)


Q8_0: Change = (rounded_to_blocks, rounded_to_blocks)
WEIGHTS_ALONE: Change = (rounded_to_rows, lambda x_TI: x_TI)


def policy_operators(bench: Mixture, place: Place, name: str) -> Operators:
    """Return a policy's operators as a runner puts them together, over a real service."""
    policy = load_policy(name)
    assembly = Assembly(
        policy,
        bench.config,
        bench.checkpoint,
        bench.model,
        MaskSettings(),
        step_tokens=bench.config.context_length,
    )
    place.callback(assembly.close)
    channels = [
        place.enter_context(open_channel(place.service(bench.directory, transport="tcp")))
        for _ in range(policy.services)
    ]
    return assembly.lanes(lambda _layer: channels)[0].tables["prefill", "stock"]


def measure(options: Options, place: Place) -> Found:
    """Score the policies, their parts, Q8_0, and coarser inputs, beside float32."""
    bench = Mixture(model_directory(options.model), options.documents or None)
    floats, float_head = bench.float_linears(), bench.float_head()
    integers = bench.integer_linears()
    head: Site = (-1, "lm_head")
    head_16, head_8 = bench.integers(head), bench.integers(head, INT8_MAX)
    parts = {
        "Q8_0, emulated": (bench.float_linears(Q8_0), bench.float_head(Q8_0)),
        "int8 weights, float inputs": (
            bench.float_linears(WEIGHTS_ALONE),
            bench.float_head(WEIGHTS_ALONE),
        ),
        "linear operators only": (integers, float_head),
        "LM head only, 16-bit input": (floats, head_16),
        "LM head only, 8-bit input": (floats, head_8),
        "all, LM head with 8-bit input": (integers, head_8),
    }
    for most in SWEEP if options.sweep else ():
        parts[f"linear operators only, up to {most}"] = (bench.integer_linears(most), float_head)
    variants = {
        "quantized-clear": policy_operators(bench, place, "quantized-clear"),
        "tee-only-int8": policy_operators(bench, place, "tee-only-int8"),
        **{name: bench.operators(*part) for name, part in parts.items()},
    }
    float32 = bench.operators(floats, float_head)
    texts: Fields = {}
    for text, documents in bench.documents.items():
        reference = bench.run(float32, text)
        found = {
            name: bench.compare(bench.run(ops, text), reference, text)
            for name, ops in variants.items()
        }
        for name, row in found.items():
            say(f"{text}, {name}: {row}")
        texts[text] = {"tokens": sum(len(ids) - 1 for ids in documents), "variants": found}
    ours = [one["variants"]["quantized-clear"] for one in texts.values()]
    reached = options.model != "demo" or all(
        row["perplexity_ratio"] <= MAX_PERPLEXITY_RATIO and row["top_1_agreement"] >= MIN_AGREEMENT
        for row in ours
    )
    return {"model": bench.directory.name, "texts": texts}, reached


if __name__ == "__main__":
    main(__doc__, measure, model="demo", documents=0, sweep=False)
