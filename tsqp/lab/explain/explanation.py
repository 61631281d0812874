"""What a policy means for a model, operator by operator: what crosses, and under which mask."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.messages import Arithmetic
from protocol.model.config import ModelConfig, read_config
from protocol.tensors import torch_dtype
from tee_side.policy.leakage_summary import SEEN
from tee_side.policy.placement import AttentionWindow, Placement, Policy
from tee_side.protect.masks.mask import Kind, Mask
from tee_side.protect.pads.bank_format import MAX_GROUP, slot_bytes
from tee_side.words import (
    LAYERLESS,
    OPERATORS,
    PHASES,
    Attested,
    LayerRange,
    Operator,
    Phase,
    Place,
    Verify,
    is_linear,
)
from tsqp.lab.bench.model import Document
from tsqp.lab.bench.pads import pad_layouts, pad_phases
from tsqp.lab.explain.traffic import Cost, Headers, PhaseCost, StepTraffic
from tsqp.lab.research.feature_masks import RotationMask

# Bound how long `explain` takes on models with long contexts: a step's tensors are really made.
MAX_TOKENS = 2**20


class OperatorRow(Document):
    """One operator in some layers (None: it belongs to none) and one phase, or both (None).

    `sees`: None where nothing leaves the TEE; `verify`: how results are checked; `window`: of a
    segment's attention, None: all tokens; `decode`, `prefill`: None where the row is not about that
    phase, or nothing leaves.
    """

    operator: Operator
    layers: str | None
    phase: Phase | None
    place: Place
    sees: str | None
    mask: str | None
    verify: Verify
    window: AttentionWindow | None
    decode: PhaseCost | None
    prefill: PhaseCost | None


class MaskUse(Document):
    """A mask with the options that the policy gives it, and what its class says of it."""

    name: str
    kind: Kind
    options: dict[str, Any]
    hides: str
    known_break: str
    broken: bool
    # What its noise guarantees, where it has any.
    noise: str | None


class PadsNeeded(Document):
    """Pads that an additive mask uses up: one for each token of these phases.

    `memory_bytes`, `bank_bytes`: of one, in memory and in a bank on disk (None: no bank can hold
    it). `left_to_decode`: see `Policy.left_to_decode`.
    """

    mask: str
    phases: tuple[Phase, ...]
    sites: int
    memory_bytes: int
    bank_bytes: int | None
    left_to_decode: float | None = None


class Needs(Document):
    """What a policy needs beside the model: `key`: the feature mask that wants one."""

    services: int
    attested: Attested
    arithmetic: Arithmetic
    calibration: bool
    key: str | None
    pads: tuple[PadsNeeded, ...]


class Explanation(Document):
    """All that `tsqp explain` says. `decode`: of one token, the last of `context` tokens."""

    model: str
    architecture: str
    num_hidden_layers: int
    dtype: str
    policy: str
    summary: str
    leakage_summary: str | None
    context: int
    prompt_tokens: int
    step_tokens: int
    operators: tuple[OperatorRow, ...]
    masks: tuple[MaskUse, ...]
    decode: Cost
    prefill: Cost
    needs: Needs


def explain(
    directory: Path,
    policy: Policy,
    *,
    context: int,
    prompt_tokens: int,
    step_tokens: int,
    dtype: str | None = None,
    headers: Headers | None = None,
) -> Explanation:
    """Explain a policy for the model of a directory, of which only config.json is read.

    `context`: tokens that the decoded token can look at, itself included; `prompt_tokens`: of a
    prompt that is run in steps of `step_tokens` at most; `dtype`: None for the model's own.
    Raises ModelError, PolicyError (a policy that does not fit the model) and SettingsError (more
    tokens than the model's context).
    """
    config = read_config(directory)
    policy.check(config.num_hidden_layers)
    for name, tokens in (("--context", context), ("--prompt-tokens", prompt_tokens)):
        _check_tokens(name, tokens, config)
    chosen = dtype or config.dtype
    measured = StepTraffic(policy, config, torch_dtype(chosen), headers or Headers())
    measured.decode(context)
    measured.prefill(prompt_tokens, step_tokens)
    return Explanation(
        model=str(directory),
        architecture=config.architecture,
        num_hidden_layers=config.num_hidden_layers,
        dtype=chosen,
        policy=policy.name,
        summary=policy.summary,
        leakage_summary=policy.leakage_summary(),
        context=context,
        prompt_tokens=prompt_tokens,
        step_tokens=step_tokens,
        operators=tuple(_rows(policy, config.num_hidden_layers, measured)),
        masks=tuple(_mask_use(mask, config) for mask in policy.masks),
        decode=measured.total("decode"),
        prefill=measured.total("prefill"),
        needs=_needs(policy, config),
    )


def with_options(name: str, options: dict[str, Any]) -> str:
    """Render a mask's name with its options: `row-rotation(shield_rows=8)`."""
    given = ", ".join(f"{option}={value}" for option, value in options.items())
    return f"{name}({given})" if given else name


def _check_tokens(name: str, tokens: int, config: ModelConfig) -> None:
    limit = min(config.context_length, MAX_TOKENS)
    if not 1 <= tokens <= limit:
        raise SettingsError(name, got=str(tokens), expected=f"1 to {limit}, the model's context")


def _rows(policy: Policy, layers: int, measured: StepTraffic) -> Iterator[OperatorRow]:
    """Yield a row for each operator, range of layers and phase that is placed in its own way."""
    segments = policy.segments(layers)
    within = {layer for one in segments for layer in range(one.first, one.last + 1)}
    for operator in OPERATORS:
        for one in segments if operator == "qkv_proj" else ():
            yield _row(policy, "segment", range(one.first, one.last + 1), None, measured)
        count = 1 if operator in LAYERLESS else layers
        for found in _ranges(policy, operator, count, within):
            if operator not in LAYERLESS and found.start in within:
                continue
            prefill, decode = (policy.at(operator, found.start, phase) for phase in PHASES)
            if _alike(prefill, decode):
                yield _row(policy, operator, found, None, measured)
            else:
                for phase in PHASES:
                    yield _row(policy, operator, found, phase, measured)


def _ranges(
    policy: Policy, operator: Operator, count: int, within: Container[int]
) -> Iterator[range]:
    """Yield runs of layers with the same placements in both phases, all within segments or none."""

    def placed(layer: int) -> object:
        placements = (policy.at(operator, layer, phase) for phase in PHASES)
        return layer in within, *((one.place, one.mask, one.verify) for one in placements)

    for _, alike in groupby(range(count), key=placed):
        first, *others = alike
        yield range(first, (others or [first])[-1] + 1)


def _alike(one: Placement, other: Placement) -> bool:
    return (one.place, one.mask, one.verify) == (other.place, other.mask, other.verify)


def _row(
    policy: Policy, operator: Operator, layers: range, phase: Phase | None, measured: StepTraffic
) -> OperatorRow:
    placement = policy.at(operator, layers.start, phase or "decode")
    leaves = placement.leaves
    costs = {
        name: measured.phase_cost(name, operator, layers)
        for name in PHASES
        if phase in (None, name) and measured.asks(name, operator, layers.start)
    }
    mask = placement.mask
    return OperatorRow(
        operator=operator,
        layers=None if operator in LAYERLESS else str(LayerRange(layers.start, layers.stop - 1)),
        phase=phase,
        place=placement.place,
        sees=_sees(policy, operator, mask) if leaves else None,
        mask=_named(mask) if mask else None,
        verify=placement.verify,
        window=placement.window,
        decode=costs.get("decode"),
        prefill=costs.get("prefill"),
    )


def _sees(policy: Policy, operator: Operator, mask: Mask | None) -> str:
    what = SEEN[operator]
    if mask is not None:
        # One mask with two sets of options: the name would not say which.
        alone = sum(other.name == mask.name for other in policy.masks) == 1
        return f"{what} under {mask.name if alone else _named(mask)}"
    whole = policy.arithmetic == "int8" and is_linear(operator)
    return f"{what} in the clear" + (", as integers" if whole else "")


def _named(mask: Mask) -> str:
    return with_options(mask.name, mask.model_dump(mode="json"))


def _mask_use(mask: Mask, config: ModelConfig) -> MaskUse:
    return MaskUse(
        name=mask.name,
        kind=mask.kind,
        options=mask.model_dump(mode="json"),
        hides=mask.hides,
        known_break=mask.known_break,
        broken=mask.broken,
        noise=_noise(mask, config),
    )


def _noise(mask: Mask, config: ModelConfig) -> str | None:
    """Say what the noise of a mask guarantees; None without noise.

    For that of segments as far as a configuration tells: it has no lengths of embedding rows.
    """
    if not isinstance(mask, RotationMask) or mask.sigma == 0:
        return None
    says = mask.statement(mask.longest_row(config, lambda: 1.0))
    if mask.kind == "segment":
        says += (
            "; all this for embedding rows at most 1 long, for rows up to L divide sigma by L"
            " (tsqp provision states it for the model)"
        )
    return says


def _needs(policy: Policy, config: ModelConfig) -> Needs:
    pads = []
    for mask, layout in pad_layouts(policy, config).items():
        on_disk = slot_bytes(layout, MAX_GROUP) // MAX_GROUP if mask.arithmetic == "int8" else None
        pads.append(
            PadsNeeded(
                mask=mask.name,
                phases=pad_phases(policy, mask),
                sites=len(layout.sites),
                memory_bytes=layout.token_bytes,
                bank_bytes=on_disk,
                left_to_decode=policy.left_to_decode,
            )
        )
    feature = policy.feature_mask
    return Needs(
        services=policy.services,
        attested=policy.service.attested,
        arithmetic=policy.served_arithmetic,
        calibration=policy.arithmetic == "int8",
        key=feature.name if feature else None,
        pads=tuple(pads),
    )
