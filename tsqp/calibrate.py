"""Chooses the activation scales of a model, from what its linear operators see on a text.

Everything happens in the TEE, in float32. All tokens go through the model side by side, as several
sequences of one step, so each weight is read once and dropped: memory is that of one linear
operator, plus activations, plus the embedding.

The rule for a site, in units of one integer step of its inputs:

- A *typical* input is `STEPS` steps: finer adds nothing that int8 weights let through.
- The largest row seen, times `HEADROOM`, stays in the ring; where it would not, steps are coarser.
- A typical input that is left with fewer than `MIN_STEPS` is refused: the ring is too small.

Both sizes are rounded to powers of 2^(1/4) first, so that the file holds the exact size of no row
of a private text.

Typical is the 90th percentile of |x| in a row, and of all rows the median. Neither a mean nor the
largest would do: a few outlier channels of 1,000 times the others dominate both, and the others
would be rounded away. Nor would the median of |x|: inputs of down_proj are products of which most
are near zero, and precision for those is precision for nothing. The numbers were chosen by
`benchmarks/accuracy.py`: with this many steps at every site of the demo model, top-1 agreement with
float32 is 99.7 % from 32 steps on, where all of the loss is the weights' own, 99.4 % at 16, 98.9 %
at 8 and 97.8 % at 4.

Last, the integer product of some rows is compared with the float one: int8 weights with one scale
per output cannot hold a model whose outliers were moved into them, and that must not go unseen.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save
from torch.nn.functional import embedding, linear

from protocol.errors import CalibrationError, ModelError, PromptError
from protocol.integer import check_kernels, ring_product
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import (
    EMBEDDING,
    Checkpoint,
    light_tensors,
    linear_digest,
    linear_tensors,
    model_digest,
)
from protocol.model.config import ModelConfig, read_config
from protocol.model.forward import Call, staying
from protocol.model.weights import CPU, load_linear, load_quantized, load_tensor
from tee_side.engine.tokenizer import Tokenizer
from tee_side.model.batch import Batch, KVCache
from tee_side.model.operators import (
    LocalOperators,
    Operators,
    attend,
    forward,
    load_tee_model,
    not_here,
)
from tee_side.protect.calibration import (
    FORMAT,
    HEADROOM,
    TABLES,
    Calibration,
    SiteScales,
    norm_limit,
    weight_scale_name,
)
from tee_side.protect.sites import IntegerSite
from tee_side.remote.call import run
from tee_side.words import Operator, Site

STEPS = 128
MIN_STEPS = 8

# Int8 weights cost 0.5 % here, and inputs of `MIN_STEPS` steps 6 %.
MAX_ERROR = 0.1

MAX_CHUNK_TOKENS = 512

# Medians over this many rows are good enough, and the rows of all tokens are slow to order.
_ERROR_ROWS = 64
_TYPICAL_ROWS = 256
_CHAT_WORDS = 60
_NUMBER = re.compile("[0-9]{1,18}")


# Told of a site whose scales are chosen, of the relative error of its integer product of a row
# (median over a sample of rows), and how many sites there are.
Progress: TypeAlias = Callable[[Site, float, int], None]


def default_text() -> str:
    """Return a text of many registers, in English, that ships with us."""
    return Path(__file__).with_name("calibration_text.txt").read_text(encoding="utf-8")


def calibrate(
    model: Path,
    text: str | None = None,
    tokens: int = 2048,
    progress: Progress | None = None,
    *,
    chunks: Sequence[list[int]] | None = None,
) -> Calibration:
    """Run `tokens` tokens of a text through a model directory and choose its scales.

    `text`: None for ours; where it is shorter, less is run. `chunks`: token ids instead of a text,
    each a sequence of its own, of which the first `tokens` are run; the model then needs no
    tokenizer. `progress` is told about every site. Raises ModelError, PromptError for an empty text
    or ids that the model has not, and CalibrationError for a model that these integers cannot hold.
    """
    config, checkpoint = read_config(model), Checkpoint(model)
    checkpoint.require(light_tensors(config) | linear_tensors(config))
    checkpoint.refuse_extra(config)
    if chunks is None:
        content = default_text() if text is None else text
        chunks = sequences(Tokenizer(model), content, tokens, config.context_length)
    else:
        check_ids(chunks, config)
        chunks = _first(chunks, tokens, min(MAX_CHUNK_TOKENS, config.context_length))
    return calibrate_on(config, checkpoint, chunks, progress)


def parse_ids(content: str, where: str) -> list[list[Any]]:
    """Read token ids: a JSON list of lists, or one sequence of numbers between spaces and lines.

    What is no number of these stays as it is, for `calibrate` to refuse. Raises PromptError for a
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


def calibrate_on(
    config: ModelConfig,
    checkpoint: Checkpoint,
    chunks: Sequence[list[int]],
    progress: Progress | None = None,
) -> Calibration:
    """Choose scales from token ids, each chunk a sequence of its own; see `calibrate`."""
    check_kernels(CPU)
    sites: list[Site] = [
        (layer, operator) for layer in range(config.num_hidden_layers) for operator in FUSED_MODULES
    ]
    found: dict[Site, SiteScales] = {}

    def product(site: Site, x_TI: torch.Tensor) -> torch.Tensor:
        """Compute the operator of a site, whose weights are held as long, and find its scales."""
        weights = load_linear(checkpoint, config, *site, dtype=torch.float32, device=CPU)
        y_TO = weights(x_TI)
        sample_SI = _sample(x_TI, _ERROR_ROWS)
        expected_SO = linear(sample_SI, weights.weight)
        del weights
        quantized = load_quantized(checkpoint, config, *site)
        found[site] = scales = choose_scales(x_TI, quantized.scale, quantized.max_row_norm(), site)
        encoded = IntegerSite(scales)
        product_SO = ring_product(encoded.encode(sample_SI), quantized.weight, encoded.digits)
        found_SO = product_SO * scales.factor_N
        # Module by module: large values next to q and k would hide what those have lost.
        error = max(
            relative_error(found_SO[:, rows], expected_SO[:, rows])
            for rows in quantized.rows.values()
        )
        check_error(error, site)
        if progress is not None:
            progress(site, error, len(sites))
        return y_TO

    weight = load_tensor(
        checkpoint, EMBEDDING, (config.vocab_size, config.hidden_size), dtype=torch.float32
    )
    local: LocalOperators = {site: partial(product, site) for site in sites}
    local[None, "embedding"] = partial(embedding, weight=weight)
    # One token is left for a later step: calibration needs no logits.
    parts = [(KVCache(config, len(ids), torch.float32), ids, 1) for ids in chunks]
    model = load_tee_model(config, checkpoint, torch.float32)
    with torch.inference_mode():
        run(forward(Batch.of(parts), model, operators_here(local, config.num_hidden_layers)))
    calibration = Calibration(
        found,
        model_digest(config, checkpoint),
        linear_digest(config, checkpoint) or "",
        sum(map(len, chunks)),
    )
    calibration.check_ring()
    return calibration


def choose_scales(
    x_TI: torch.Tensor, weight_scale_N: torch.Tensor, max_weight_norm: float, site: Site
) -> SiteScales:
    """Choose the scales of a site by the rule above.

    `x_TI`: float32 inputs of many tokens; `max_weight_norm`: largest Euclidean norm of a row of
    the int8 weights. Raises CalibrationError where the ring is too small for these inputs.
    """
    where = site_name(site)
    # In float64: a float32 sum of squares could overflow, and the rule should not round.
    norms_T = torch.linalg.vector_norm(x_TI, dim=1, dtype=torch.float64)
    largest = coarse(float(norms_T.max()))
    CalibrationError.unless(
        0 < largest < float("inf"),
        f"{where}: largest norm of an input row",
        f"{largest:g}",
        "a positive finite number",
    )
    limit = norm_limit(max_weight_norm)
    typical = coarse(typical_input(x_TI), up=False)
    # Rounded up to float32, in which inputs are divided by it, so that the headroom is kept.
    coarsest = _float32_above(HEADROOM * largest / limit)
    scale = max(_float32_above(typical / STEPS), coarsest)
    CalibrationError.unless(
        typical >= MIN_STEPS * scale,
        f"{where}: ring too small: typical input (90th percentile) beside the largest row",
        f"{typical:.4g} beside {largest:.4g}, which leaves it {typical / scale:.2g} steps",
        f"at least {MIN_STEPS} steps of {scale:.4g}",
    )
    return SiteScales(scale, weight_scale_N, limit, largest)


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write the file, whole or not at all, its norms rounded up by `coarse`. Raises OSError."""
    layers = 1 + max(layer for layer, _ in calibration.sites)
    columns: dict[str, Callable[[Site], float]] = {
        "input_scale": lambda site: calibration.sites[site].input_scale,
        "norm_limit": lambda site: calibration.sites[site].norm_limit,
        "max_norm": lambda site: coarse(calibration.sites[site].max_norm),
    }
    tensors = {
        name: torch.tensor(
            [[columns[name]((layer, op)) for op in FUSED_MODULES] for layer in range(layers)],
            dtype=torch.float64,
        )
        for name in TABLES
    }
    for site, scales in calibration.sites.items():
        tensors[weight_scale_name(site)] = scales.weight_scale.contiguous()
    metadata = FORMAT | {
        "model_digest": calibration.model_digest,
        "linear_digest": calibration.linear_digest,
        "tokens": str(calibration.tokens),
    }
    # One name per process: of two writers the later wins, and neither writes into the other's.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(save(tensors, metadata))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def coarse(size: float, *, up: bool = True) -> float:
    """Round a size, at least 0, up or down to a power of 2^(1/4); 0 stays 0.

    An exact one is that of one row of the text, and identifies its token by a dictionary.
    """
    if not 0 < size < math.inf:
        return size
    step = round(4 * math.log2(size))
    while up and math.pow(2, step / 4) < size:
        step += 1
    while not up and math.pow(2, step / 4) > size:
        step -= 1
    return math.pow(2, step / 4)


def typical_input(x_TI: torch.Tensor) -> float:
    """Return the 90th percentile of |x| in a row, median over (a sample of) rows [T, I]."""
    kth = max(1, round(0.9 * x_TI.shape[1]))
    sample_SI = _sample(x_TI, _TYPICAL_ROWS)
    return float(sample_SI.abs().kthvalue(kth, dim=1).values.median())


def relative_error(found_SO: torch.Tensor, expected_SO: torch.Tensor) -> float:
    """Return ||found - expected|| / ||expected|| of a row, median over rows [S, O]."""
    difference_S = (found_SO - expected_SO).norm(dim=1)
    return float((difference_S / expected_SO.norm(dim=1).clamp_min(1e-30)).median())


def check_error(error: float, site: Site) -> None:
    """Raise CalibrationError for a site whose integer products are not near the float ones."""
    CalibrationError.unless(
        error <= MAX_ERROR,
        f"{site_name(site)}: error of the integer product",
        f"{error:.1%}",
        f"at most {MAX_ERROR:.0%} (outliers in its weights or inputs; use a policy"
        " with float arithmetic)",
    )


def site_name(site: Site) -> str:
    """Return `down_proj in layer 3`."""
    layer, operator = site
    return f"{operator} in layer {layer}"


def _sample(x_TI: torch.Tensor, rows: int) -> torch.Tensor:
    """Return evenly spaced rows: `rows` of them, up to twice as many, or all if there are fewer."""
    return x_TI[:: max(1, len(x_TI) // rows)]


def _float32_above(value: float) -> float:
    """Return the least float32 that is not below a positive number."""
    nearest = torch.tensor(value, dtype=torch.float32)
    if nearest.item() < value:
        nearest = nearest.nextafter(torch.tensor(float("inf")))
    return float(nearest)


def sequences(tokenizer: Tokenizer, text: str, tokens: int, context: int) -> list[list[int]]:
    """Cut a text into sequences as a model gets them, `tokens` in all or as many as there are.

    Each starts with what the tokenizer puts before a text: models have their largest activations
    at the first token. The first is a conversation, where the model knows them, because the
    special tokens of a chat occur in no text. Raises PromptError for a text without tokens.
    """
    start = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)
    PromptError.unless(ids, "calibration text", "no tokens", "some text")
    size = min(MAX_CHUNK_TOKENS, context, tokens)
    cut: list[list[int]] = []
    try:
        opening = " ".join(text.split()[:_CHAT_WORDS])
        cut.append(tokenizer.apply_chat_template([{"role": "user", "content": opening}])[:size])
    except (ModelError, PromptError):
        pass  # not a model for conversations
    # At least one, or a context as short as `start` would never end.
    each = max(1, size - len(start))
    parts = [[*start, *ids[at : at + each]][:size] for at in range(0, len(ids), each)]
    return cut + _first(parts, tokens - sum(map(len, cut)), size)
