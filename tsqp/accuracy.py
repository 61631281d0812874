"""Says how good a model is in integers: its next tokens beside those of float32.

Everything happens in the TEE, and no service is asked. All tokens go through the model side by
side, as several sequences of one step: first in float32, then in integers. Each weight is read when
its operator is called, and dropped. Memory is that of one operator in floats and in integers, the
embedding, the LM head in both, and activations.

Each row of inputs has up to 16 bits under a scale of its own, so what is lost is the rounding of
the weights to int8, under one scale for each output. Weights with large outliers lose much, and
that must not go unseen: a model that does not reach the bounds below is better run in floats, in
the TEE alone (`tee-only`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn.functional import embedding, kl_div, linear, nll_loss

from protocol.errors import ModelError, PromptError
from protocol.integer import check_kernels
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import (
    EMBEDDING,
    Checkpoint,
    light_tensors,
    linear_tensors,
)
from protocol.model.config import ModelConfig
from protocol.model.forward import Call, staying
from protocol.model.weights import CPU, FusedLinear, load_linear, load_quantized, load_tensor
from tee_side.chat.template import ChatTemplate, Conversation
from tee_side.engine.tokenizer import Tokenizer
from tee_side.model.batch import Batch, Chunk, KVCache
from tee_side.model.operators import (
    LocalOperators,
    Operators,
    Product,
    attend,
    forward,
    integer_product,
    load_tee_model,
    logits,
    not_here,
)
from tee_side.protect.sites import IntegerSite, largest_input, load_biases
from tee_side.remote.call import run
from tee_side.words import Operator, Site

# Of SmolLM2-135M, Q8_0 of llama.cpp, emulated, loses 0.004 to 0.006 nats, and 0.5 to 0.9 % of
# perplexity: benchmarks/results/accuracy_smollm2.json.
MAX_KL_NATS = 0.01
MAX_PERPLEXITY_RATIO = 1.01

MAX_CHUNK_TOKENS = 512

# Rows whose logits are compared at a time; and a median of errors over so many is good enough.
_ROWS = 64
_CHAT_WORDS = 60
_NUMBER = re.compile("[0-9]{1,18}")

# Told how many sites are done, and how many there are, over both passes.
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class Score:
    """Next tokens under some logits, beside those of float32, summed over `tokens` predictions.

    `nats`, `exact`: negative log-likelihoods of what came next, ours and float32's; `divergence`:
    Kullback-Leibler, in nats; `same`: predictions whose likeliest token is the same.
    """

    tokens: int = 0
    nats: float = 0.0
    exact: float = 0.0
    divergence: float = 0.0
    same: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.tokens + other.tokens,
            self.nats + other.nats,
            self.exact + other.exact,
            self.divergence + other.divergence,
            self.same + other.same,
        )

    @property
    def perplexity(self) -> float:
        """Of our logits."""
        return math.exp(self.nats / self.tokens)

    @property
    def perplexity_ratio(self) -> float:
        """Ours over float32's."""
        return math.exp((self.nats - self.exact) / self.tokens)

    @property
    def agreement(self) -> float:
        """The share of predictions whose likeliest token is the same."""
        return self.same / self.tokens

    @property
    def kl_nats(self) -> float:
        """Mean Kullback-Leibler divergence from float32."""
        return self.divergence / self.tokens


@dataclass(frozen=True)
class Accuracy:
    """What integers cost a model.

    `worst`: of the layers' linear operators, the one with the largest error of a product; `error`:
    that error, relative.
    """

    score: Score
    worst: Site
    error: float

    @property
    def is_good(self) -> bool:
        """Whether both bounds hold."""
        score = self.score
        # A comparison with NaN is false.
        return score.kl_nats <= MAX_KL_NATS and score.perplexity_ratio <= MAX_PERPLEXITY_RATIO


def compare(found_TV: torch.Tensor, reference_TV: torch.Tensor, following: Sequence[int]) -> Score:
    """Compare logits with those of float32. `following`: the token that came after each row."""
    ours, right = (one.double().log_softmax(-1) for one in (found_TV, reference_TV))
    wanted = torch.tensor(following)
    return Score(
        tokens=len(following),
        nats=nll_loss(ours, wanted, reduction="sum").item(),
        exact=nll_loss(right, wanted, reduction="sum").item(),
        divergence=kl_div(ours, right, reduction="sum", log_target=True).item(),
        same=int((ours.argmax(-1) == right.argmax(-1)).sum()),
    )


def default_text() -> str:
    """Return a text of many registers, in English, that ships with us."""
    return Path(__file__).with_name("accuracy_text.txt").read_text(encoding="utf-8")


def measure(
    model: Path,
    text: str | None = None,
    tokens: int = 2048,
    progress: Progress | None = None,
    *,
    chunks: Sequence[list[int]] | None = None,
) -> Accuracy:
    """Run `tokens` tokens of a text through a model directory, in float32 and in integers.

    `text`: None for `default_text()`; a shorter one is run as a whole. `chunks`: token ids instead
    of a text, each a sequence of its own, of which the first `tokens` are run; the model then needs
    no tokenizer. Raises ModelError, PromptError for a text without a next token or ids that the
    model has not, and ActivationRangeError for activations that are not finite.
    """
    config, checkpoint = Checkpoint.open(model)
    ModelError.unless(config.generates, str(model), "a model without an LM head", "one with it")
    checkpoint.require(light_tensors(config) | linear_tensors(config))
    checkpoint.refuse_extra(config)
    if chunks is None:
        content = default_text() if text is None else text
        chunks = sequences(Tokenizer(model), content, tokens, config.context_length)
    else:
        check_ids(chunks, config)
        chunks = _first(chunks, tokens, min(MAX_CHUNK_TOKENS, config.context_length))
    chunks = [ids for ids in chunks if len(ids) > 1]
    PromptError.unless(chunks, "text", "no token with another behind it", "two tokens at least")
    check_kernels(CPU)
    with torch.inference_mode():
        return _compared(config, checkpoint, chunks, progress or (lambda _done, _total: None))


def _compared(
    config: ModelConfig, checkpoint: Checkpoint, chunks: Sequence[list[int]], progress: Progress
) -> Accuracy:
    """Run both passes, the floats first, and compare the logits of a sequence at a time."""
    layers = config.num_hidden_layers
    sites: list[Site] = [(layer, name) for layer in range(layers) for name in FUSED_MODULES]
    head: Site = (layers - 1, "lm_head")
    biases = load_biases(checkpoint, config, list(FUSED_MODULES), torch.float32)
    model = load_tee_model(config, checkpoint, torch.float32)
    vocabulary = (config.vocab_size, config.hidden_size)
    weight = load_tensor(checkpoint, EMBEDDING, vocabulary, dtype=torch.float32)
    errors: dict[Site, float] = {}
    finished: list[Site] = []

    def floats(site: Site) -> FusedLinear:
        return load_linear(checkpoint, config, *site, dtype=torch.float32, device=CPU)

    def integers(site: Site, bias_O: torch.Tensor | None) -> Product:
        weights = load_quantized(checkpoint, config, *site)
        largest = largest_input(weights.max_row_sum())
        own = IntegerSite(weights.scale, bias_O, torch.float32, largest, f"{site_name(site)}: ")
        return partial(integer_product, weights, own)

    def tell(site: Site) -> None:
        finished.append(site)
        progress(len(finished), 2 * len(sites))

    def in_floats(site: Site, x_TI: torch.Tensor) -> torch.Tensor:
        operator = floats(site)
        # Of some rows the error of the integer product, too.
        sample_SI = x_TI[:: max(1, len(x_TI) // _ROWS)]
        expected_SO = linear(sample_SI, operator.weight)
        found_SO = integers(site, None)(sample_SI)
        # Module by module: large values next to q and k would hide what those have lost.
        errors[site] = max(
            relative_error(found_SO[:, rows], expected_SO[:, rows])
            for rows in operator.rows.values()
        )
        tell(site)
        return operator(x_TI)

    def in_integers(site: Site, x_TI: torch.Tensor) -> torch.Tensor:
        tell(site)
        return integers(site, biases.get(site))(x_TI)

    def hidden(product: Callable[[Site, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the last hidden state [N, D] of every token that another follows."""
        local: LocalOperators = {site: partial(product, site) for site in sites}
        local[None, "embedding"] = partial(embedding, weight=weight)
        return run(forward(_batch(config, chunks), model, operators_here(local, layers)))

    def next_tokens(h_ND: torch.Tensor, lm_head: Product) -> torch.Tensor:
        return run(logits(h_ND, model, operators_here({(None, "lm_head"): lm_head}, layers)))

    right_ND, found_ND = hidden(in_floats), hidden(in_integers)
    right_head, found_head = floats(head), integers(head, None)
    score, start = Score(), 0
    for ids in chunks:
        # The logits of all tokens could take more memory than the model.
        for first in range(1, len(ids), _ROWS):
            following = ids[first : first + _ROWS]
            rows = slice(start, start + len(following))
            right_TV = next_tokens(right_ND[rows], right_head)
            score += compare(next_tokens(found_ND[rows], found_head), right_TV, following)
            start = rows.stop
    worst = max(errors, key=lambda site: errors[site])
    return Accuracy(score, worst, errors[worst])


def _batch(config: ModelConfig, chunks: Sequence[list[int]]) -> Batch:
    """Return one step of all sequences, whose outputs are wanted but for each last one."""
    parts: list[Chunk] = []
    wanted: list[int] = []
    start = 0
    for ids in chunks:
        rows = slice(start, start + len(ids))
        parts.append(Chunk(KVCache(config, len(ids), torch.float32), rows, len(ids)))
        wanted += range(start, rows.stop - 1)
        start = rows.stop
    every = [one for ids in chunks for one in ids]
    return Batch(torch.tensor(every), tuple(parts), tuple(wanted))


def parse_ids(content: str, where: str) -> list[list[Any]]:
    """Read token ids: a JSON list of lists, or one sequence of numbers between spaces and lines.

    What is no number of these stays as it is, for `check_ids` to refuse. Raises PromptError for a
    file of another form, and quotes nothing of it.
    """
    if content.lstrip().startswith("["):
        try:
            chunks = TypeAdapter(list[list[Any]]).validate_json(content)
        except ValidationError:
            chunks = []
    else:
        chunks = [[int(word) if _NUMBER.fullmatch(word) else word for word in content.split()]]
    PromptError.unless(
        any(chunks), where, "no token ids", "numbers, or a JSON list of lists of numbers"
    )
    return chunks


def check_ids(chunks: Sequence[list[int]], config: ModelConfig) -> None:
    """Check that a model has these tokens. Raises PromptError with the place of the first other."""
    for row, chunk in enumerate(chunks):
        for column, token in enumerate(chunk):
            PromptError.unless(
                type(token) is int and 0 <= token < config.vocab_size,
                f"token ids: sequence {row}, position {column}",
                "a number that is no token" if type(token) is int else "no whole number",
                f"0 .. {config.vocab_size - 1}: a vocabulary of {config.vocab_size}",
            )


def _first(chunks: Sequence[list[int]], tokens: int, size: int) -> list[list[int]]:
    """Return the first `tokens` ids, in sequences of at most `size`."""
    cut: list[list[int]] = []
    for chunk in chunks:
        for start in range(0, len(chunk), size):
            if tokens > 0:
                cut.append(chunk[start : start + min(size, tokens)])
                tokens -= len(cut[-1])
    return cut


def operators_here(local: LocalOperators, layers: int) -> Operators:
    """Return the table of a model that runs in the TEE as a whole."""

    def call(layer: int | None, operator: Operator) -> Call:
        return staying(local.get((layer, operator), not_here))

    calls: dict[str, Any] = {
        name: [call(layer, name) for layer in range(layers)] for name in FUSED_MODULES
    }
    return Operators(
        embedding=call(None, "embedding"),
        **calls,
        attention=partial(attend, [None] * layers),
        lm_head=call(None, "lm_head"),
    )


def relative_error(found_SO: torch.Tensor, expected_SO: torch.Tensor) -> float:
    """Return ||found - expected|| / ||expected|| of a row, median over rows [S, O]."""
    difference_S = (found_SO - expected_SO).norm(dim=1)
    return float((difference_S / expected_SO.norm(dim=1).clamp_min(1e-30)).median())


def site_name(site: Site) -> str:
    """Return `down_proj in layer 3`."""
    layer, operator = site
    return f"{operator} in layer {layer}"


def sequences(tokenizer: Tokenizer, text: str, tokens: int, context: int) -> list[list[int]]:
    """Cut a text into sequences as a model gets them, `tokens` in all or as many as there are.

    Each starts with what the tokenizer puts before a text. The first is a conversation where the
    model has a chat template: its special tokens occur in no text. Raises PromptError for a text
    without tokens.
    """
    start = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)
    PromptError.unless(ids, "text", "no tokens", "some text")
    size = min(MAX_CHUNK_TOKENS, context, tokens)
    cut: list[list[int]] = []
    try:
        opening = " ".join(text.split()[:_CHAT_WORDS])
        said = Conversation(messages=[{"role": "user", "content": opening}])
        cut.append(ChatTemplate(tokenizer).encode(said)[:size])
    except (ModelError, PromptError):
        pass  # not a model for conversations
    # At least one, or a context as short as `start` would never end.
    each = max(1, size - len(start))
    parts = [[*start, *ids[at : at + each]][:size] for at in range(0, len(ids), each)]
    return cut + _first(parts, tokens - sum(map(len, cut)), size)
