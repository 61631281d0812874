"""The TEE's forward pass: what it has of a model, over operators that a policy has placed.

A `TeeLayer` has the light operators of one layer, bound to its norms, which never leave. Of the
others the TEE has those that a policy keeps, and no weights besides.

`Operators` is the table of one phase: where each operator of each layer runs was decided when the
run was assembled, so that a call costs nothing more than the call. Shape suffixes as in
`protocol.model.forward`.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from itertools import product
from typing import Any, TypeAlias, get_args

import torch
from torch.nn.functional import embedding, linear

from protocol.errors import ReplyError
from protocol.integer import ring_product
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import (
    EMBEDDING,
    Checkpoint,
    lm_head_name,
)
from protocol.model.config import ModelConfig
from protocol.model.forward import Call, Layer, Norm, Ops, Rope, bound, capped, staying
from protocol.model.forward import forward as run_layers
from protocol.model.weights import (
    CPU,
    INT8_MAX,
    LightWeights,
    NormTensors,
    QuantizedLinear,
    load_bias,
    load_final_norm,
    load_light,
    load_linear,
    load_quantized,
    load_tensor,
)
from protocol.native import compiled_for
from tee_side.model.batch import Batch
from tee_side.native import kernels
from tee_side.observer import Observer, timed
from tee_side.policy.placement import Policy, Segment
from tee_side.protect.masks.mask import AdditiveMask, Mask
from tee_side.protect.pads.source import PadLane
from tee_side.protect.sites import IntegerSite, IntegerSites
from tee_side.remote.call import RunParts, turn
from tee_side.words import (
    LAYERLESS,
    PHASES,
    PRODUCTS,
    LightOperator,
    Operator,
    PadsFrom,
    Phase,
    Site,
    layer_of,
)

Tensor: TypeAlias = torch.Tensor

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

# What computes an operator in the TEE, biases included, by layer (None: no layer has it).
LocalOperators: TypeAlias = dict[tuple[int | None, Operator], Product]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeeLayer(Layer):
    """The local operators of one layer, timed where there is an observer.

    `kv_cache`, `attention`: `append` and `attention` of `tee_side.model.local_ops`.
    `window`: how many tokens back a token may look, itself included; None for all.
    """

    kv_cache: Callable[[torch.Tensor, torch.Tensor, Batch], None]
    attention: Callable[[torch.Tensor, Batch], torch.Tensor]
    window: int | None


@dataclass(eq=False)
class TeeModel:
    """The part of a model that is needed whatever the placement is.

    `light`, `final_norm`: the weights; `layers`, `norm`: what the forward pass calls.
    `observer`: told of every local operator.
    """

    config: ModelConfig
    dtype: torch.dtype
    light: list[LightWeights]
    final_norm: NormTensors
    rope: Rope
    observer: Observer | None = None
    layers: tuple[TeeLayer, ...] = field(init=False)
    norm: Norm = field(init=False)

    def __post_init__(self) -> None:
        # One of the two is imported: a run does not trust the code of the other.
        found = "native.kernels" if compiled_for(self.dtype) else "model.local_ops"
        ops: Any = import_module(f"tee_side.{found}")
        self.layers = tuple(self._layer(index, ops) for index in range(len(self.light)))
        kind: LightOperator = "rms_norm" if self.config.table.norm == "rms" else "layer_norm"
        norm = partial(getattr(ops, kind), norm=self.final_norm, eps=self.config.norm_eps)
        self.norm = timed(norm, self.observer, kind, None)

    def _layer(self, index: int, ops: Any) -> TeeLayer:
        def told(function: Callable[..., Any], name: Any) -> Callable[..., Any]:
            return timed(function, self.observer, name, index)

        config, window = self.config, self.config.sliding_windows[index]
        seen = {"window": window, "scale": config.score_scale, "cap": config.score_cap}
        return TeeLayer(
            **bound(self.light[index], config, index, ops, told),
            kv_cache=told(partial(ops.append, layer=index), "kv_cache"),
            attention=told(partial(ops.attention, layer=index, **seen), "attention"),
            window=window,
        )


def load_tee_model(config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> TeeModel:
    """Read the light weights, for which the checkpoint was checked. Raises ModelError."""
    read = partial(load_tensor, checkpoint, dtype=dtype)
    light = [load_light(config, layer, read) for layer in range(config.num_hidden_layers)]
    return TeeModel(config, dtype, light, load_final_norm(config, read), Rope(config, dtype))


def load_local_operators(
    parts: RunParts,
    *,
    sites: Iterable[Site],
    integers: IntegerSites | None,
) -> LocalOperators:
    """Read the weights of `sites`, and what else the policy keeps.

    `integers` is given for policies with int8 arithmetic, and only for them; it holds those of
    every site from now on, for who else computes with them. Raises ModelError.
    """
    policy, config, checkpoint = parts.policy, parts.config, parts.checkpoint
    dtype, local = parts.dtype, LocalOperators()
    kept = {o for o, placed in policy.operators.items() if any(p.place == "tee" for p in placed)}
    vocabulary = (config.vocab_size, config.hidden_size)
    weight: torch.Tensor | None = None
    if "embedding" in kept:
        weight = load_tensor(checkpoint, EMBEDDING, vocabulary, dtype=dtype)
        local[None, "embedding"] = partial(embedding, weight=weight)
    if "lm_head" in kept and policy.arithmetic == "float":
        if weight is None or not config.tie_word_embeddings:
            weight = load_tensor(checkpoint, lm_head_name(config), vocabulary, dtype=dtype)
        local[None, "lm_head"] = partial(linear, weight=weight)
    for site in sites:
        local[layer_of(site), site[1]] = load_site(parts, site, integers)
    return local


def load_site(parts: RunParts, site: Site, integers: IntegerSites | None) -> Product:
    """Read the weights of one site; integers are held from now on. Raises ModelError."""
    config, checkpoint, dtype = parts.config, parts.checkpoint, parts.dtype
    if parts.policy.arithmetic == "float":
        return load_linear(checkpoint, config, *site, dtype=dtype, device=CPU)
    if integers is not None:
        return partial(integer_product, integers.hold(site), integers[site])
    weights = load_quantized(checkpoint, config, *site)
    bias_O = load_bias(checkpoint, config, *site, dtype=dtype)
    return partial(integer_product, weights, IntegerSite(weights.scale, bias_O, dtype, INT8_MAX))


def not_here(_x: torch.Tensor) -> torch.Tensor:
    """Stand where an operator would, whose weights the TEE does not hold. Raises LookupError."""
    raise LookupError("an operator was called in the TEE that the policy placed on the GPU")


def integer_product(
    weights: QuantizedLinear, site: IntegerSite, x_TI: torch.Tensor
) -> torch.Tensor:
    """Compute with the integers that a service would get without a mask; no sum can wrap.

    In as many digits as the site's bound needs: the time is the same for every input.
    """
    if site.compiled:  # without integers in memory between
        of_site = weights.weight, weights.scale, site.bias_O
        y_TO, is_finite = kernels.linear(x_TI, site.largest, site.digits, *of_site)
        # What one digit makes of a row that is not finite is not finite, as among floats.
        return y_TO if is_finite or site.digits == 1 else site.refuse()
    elements_TI, scale_T1 = site.encode(x_TI)
    return site.decode(ring_product(elements_TI, weights.weight, site.digits), scale_T1)


# Attention of a layer of which at least one product leaves the TEE: of q [T, H, C], the last T rows
# of a sequence, and k and v [K, S, C] of all; [T, H * C], as `local_ops.attention` returns.
RemoteAttention: TypeAlias = Callable[[TeeLayer, Tensor, Tensor, Tensor], Awaitable[Tensor]]

# Whole layers at a service, whose KV cache is there: [T, D] of a batch to the same, or behind the
# last layer to what is wanted of it alone: [N + R, D], or the logits [N, V].
RemoteSegment: TypeAlias = Callable[[Tensor, Batch], Awaitable[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators(Ops[TeeLayer, Batch]):
    """What a forward pass calls in one phase.

    `lm_head`: [N, D] -> [N, V]. `masks`: whose pads come from the stock. `head_apart`: whether each
    micro-batch asks for its own logits, because it draws pads for them. `head_in_segment`: whether
    the last segment gives logits.
    """

    lm_head: Call
    masks: frozenset[Mask] = frozenset()
    head_apart: bool = False
    head_in_segment: bool = False


# The tables by phase, and by where rows have their pads from. With none, what is under them stays,
# to the same bits, and the LM head of a segment.
Tables: TypeAlias = Mapping[tuple[Phase, PadsFrom], Operators]


async def attend(
    remotes: Sequence[RemoteAttention | None],
    layer: TeeLayer,
    q_THC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    batch: Batch,
) -> Tensor:
    """Write each sequence's new keys and values, and attend to its whole cache: [T, H * C].

    `remotes`: of each layer the attention whose products leave, None where both stay.
    """
    remote = remotes[layer.index]
    before = None
    for chunk in batch.chunks:
        # Rows of the same sequence in an earlier micro-batch: it is seldom behind, but may be.
        while chunk.cache is not before and not chunk.follows(layer.index):
            await turn()
        before = chunk.cache
    for chunk in batch.chunks:  # all at once, as those in other micro-batches look at what follows
        chunk.cache.reserve(layer.index, chunk.tokens, chunk.behind)
    layer.kv_cache(k_TKC, v_TKC, batch)
    if remote is None:
        return layer.attention(q_THC, batch)
    attended = batch.attended(layer.index)
    return torch.cat([await remote(layer, q_THC[rows], k, v) for rows, k, v in attended])


@dataclass(frozen=True, slots=True)
class MicroBatchOperators:
    """What one micro-batch of a step runs on.

    `model`: with the observer of this micro-batch. `tables`: see `place`. `pads`: what the
    operators draw from, by mask. `spare`: only for a step with rows of several tables, which run
    side by side.
    """

    model: TeeModel
    tables: Tables
    pads: Mapping[Mask, PadLane]
    spare: bool = False


def place(
    policy: Policy,
    layers: int,
    stays: Callable[[Operator, int | None], Callable[[Tensor], Tensor]],
    leaves: Callable[[Operator, int, Phase, PadsFrom], Callable[..., Any]],
    segments: Sequence[tuple[Segment, Callable[[Segment], RemoteSegment]]] = (),
) -> Tables:
    """Build the tables of prefill and decode, by the source of pads, one for rows that run alike.

    `stays`: returns how an operator of a layer, or of none, is called where it stays; `leaves`:
    where it leaves; `segments`: each all at one service, and what returns how it is called. The
    service of layer 0 has the embedding, that of the last layer the LM head.
    """
    head = any(one.head for one, _ in segments)
    apart = head or any(isinstance(mask, AdditiveMask) for mask in policy.masks)

    known = {"stock", *["none"] * apart, *["dealers"] * policy.dealt}

    @cache
    def table(phase: Phase, source: PadsFrom) -> Operators:
        drawn: set[Mask] = set()
        withheld = source == "none"
        calls_at: dict[int, RemoteSegment] = {}
        for one, called in segments:
            calls_at |= dict.fromkeys(range(one.first, one.last + 1), _done)
            calls_at[one.first] = called(one._replace(head=one.head and not withheld))
        # Rows for which the TEE computes much, while others' are under way.
        wrap = yielding if withheld or (phase == "prefill" and policy.splits_phases) else staying

        def call(operator: Operator, layer: int) -> Call:
            alone = operator in LAYERLESS
            if not alone and layer in calls_at:
                return staying(not_here)
            if operator == "lm_head" and head:
                # For what the TEE reads of a prompt: of the rest it is the segment's.
                return staying(stays(operator, None))
            placed = policy.at(operator, 0 if alone else layer, phase)
            padded = isinstance(placed.mask, AdditiveMask)
            if placed.leaves and not (padded and withheld):
                if isinstance(placed.mask, AdditiveMask) and placed.mask.made(source):
                    drawn.add(placed.mask)
                return leaves(operator, layer, phase, source)
            return wrap(stays(operator, None if alone else layer))

        def products(layer: int) -> RemoteAttention | None:
            places = {policy.at(name, layer, phase).place for name in PRODUCTS}
            stay = layer in calls_at or places == {"tee"}
            return None if stay else leaves("attn_scores", layer, phase, source)

        calls: dict[str, Any] = {
            name: [call(name, layer) for layer in range(layers)] for name in FUSED_MODULES
        }
        at_head = policy.at("lm_head", 0, phase).mask
        head_apart = isinstance(at_head, AdditiveMask) and at_head.made(source)
        return Operators(
            embedding=call("embedding", 0),
            **calls,
            attention=partial(attend, [products(layer) for layer in range(layers)]),
            segments=calls_at,
            lm_head=call("lm_head", layers - 1),
            masks=frozenset(drawn),
            head_apart=head_apart and not withheld,
            head_in_segment=head and not withheld,
        )

    return {
        (phase, source): table(
            phase if policy.splits_phases else "decode", source if source in known else "stock"
        )
        for phase, source in product(PHASES, get_args(PadsFrom))
    }


async def _done(h_TD: Tensor, _batch: Batch) -> Tensor:
    """Stand at a layer that the call for an earlier one has computed."""
    return h_TD


def yielding(function: Callable[[Tensor], Tensor]) -> Call:
    """Return the same, for rows beside which others are under way: they have their turn first."""

    async def call(x: Tensor) -> Tensor:
        await turn()
        return function(x)

    return call


def forward(batch: Batch, model: TeeModel, ops: Operators) -> Coroutine[Any, Any, torch.Tensor]:
    """Run the layers of one step, or of a micro-batch of it; return [N + R, D].

    The hidden states of `batch.wanted_rows`, for `logits`; these themselves, [N, V], where the LM
    head is part of a segment. The caches hold the new rows but do not count them before the caller
    commits the batch. Errors of `ops` pass through.
    """
    # Positions, to the last that its row can look at, which is itself.
    parts = [(one.start, one.start + one.tokens, one.known_length) for one in batch.chunks]
    # A segment that ends with the last layer returns the wanted rows alone.
    wanted = None if len(model.layers) - 1 in ops.segments else batch.wanted_rows
    # No coroutine of its own: each resumption would enter one frame more.
    scale, ropes = model.config.embedding_scale, model.rope.of(parts)
    return run_layers(batch.token_ids_T, model.layers, ropes, ops, batch, wanted, scale)


async def logits(h_ND: torch.Tensor, model: TeeModel, ops: Operators) -> torch.Tensor:
    """Return the logits [N, V] of rows behind the last layer; ReplyError if they are not finite."""
    if not h_ND.shape[0]:
        return h_ND.new_empty(0, 0)
    logits_NV = h_ND if ops.head_in_segment else await ops.lm_head(model.norm(h_ND))
    # Of bfloat16 in its own range, which is float32's: a copy of that would cost more than the sum.
    wide = logits_NV.dtype if logits_NV.dtype == torch.bfloat16 else torch.float32
    if not logits_NV.sum(dtype=wide).isfinite():
        # A service may send anything, and float16 may overflow. A sum is a tenth of the work of
        # looking at each. It refuses finite logits, too, whose sum overflows float32; those are
        # larger than 1e33 on average, and no model's.
        raise ReplyError("logits", "values that are not finite", "finite numbers")
    return capped(logits_NV, model.config.logit_scale, model.config.logit_cap)
