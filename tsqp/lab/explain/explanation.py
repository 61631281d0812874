"""What a policy means for a model, operator by operator: what crosses, and under which mask.

`explain` works it out, and `show` prints it.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from protocol.errors import SettingsError
from protocol.messages import Arithmetic
from protocol.model.config import ModelConfig, read_config
from protocol.tensors import torch_dtype
from tee_side.policy.placement import AttentionWindow, Policy
from tee_side.protect.masks.mask import Kind, Mask
from tee_side.protect.pads.bank_files import MAX_GROUP, slot_bytes
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
from tsqp.lab.bench.job import pad_phases
from tsqp.lab.bench.results import Document
from tsqp.lab.explain.traffic import Cost, Crossing, Headers, PhaseCost, StepTraffic
from tsqp.lab.research.feature_masks import noise_of
from tsqp.leakage_summary import SEEN, leakage_summary
from tsqp.run.bank import pad_layouts
from tsqp.run.process import bytes_for_people
from tsqp.tables import definitions, table

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
    limit = min(config.context_length, MAX_TOKENS)
    for name, tokens in (("--context", context), ("--prompt-tokens", prompt_tokens)):
        SettingsError.unless(
            1 <= tokens <= limit, name, str(tokens), f"1 to {limit}, the model's context"
        )
    chosen = dtype or config.dtype
    measured = StepTraffic(
        policy,
        config,
        torch_dtype(chosen),
        headers or Headers(),
        context=context,
        prompt_tokens=prompt_tokens,
        step_tokens=step_tokens,
    )
    feature = policy.feature_mask
    needs = Needs(
        services=policy.services,
        attested=policy.service.attested,
        arithmetic=policy.served_arithmetic,
        key=feature.name if feature else None,
        pads=tuple(
            PadsNeeded(
                mask=mask.name,
                phases=pad_phases(policy, mask),
                sites=len(layout.sites),
                memory_bytes=layout.token_bytes,
                bank_bytes=(
                    slot_bytes(layout, MAX_GROUP) // MAX_GROUP
                    if mask.arithmetic == "int8"
                    else None
                ),
                left_to_decode=policy.left_to_decode,
            )
            for mask, layout in pad_layouts(policy, config).items()
        ),
    )
    return Explanation(
        model=str(directory),
        architecture=config.architecture,
        num_hidden_layers=config.num_hidden_layers,
        dtype=chosen,
        policy=policy.name,
        summary=policy.summary,
        leakage_summary=leakage_summary(policy),
        context=context,
        prompt_tokens=prompt_tokens,
        step_tokens=step_tokens,
        operators=tuple(_rows(policy, config.num_hidden_layers, measured)),
        masks=tuple(
            MaskUse(
                name=mask.name,
                kind=mask.kind,
                options=mask.model_dump(mode="json"),
                hides=mask.hides,
                known_break=mask.known_break,
                broken=mask.broken,
                noise=_noise(mask, config),
            )
            for mask in policy.masks
        ),
        decode=measured.total("decode"),
        prefill=measured.total("prefill"),
        needs=needs,
    )


def _with_options(name: str, options: dict[str, Any]) -> str:
    """Render a mask's name with its options: `row-rotation(shield_rows=8)`."""
    given = ", ".join(f"{option}={value}" for option, value in options.items())
    return f"{name}({given})" if given else name


def _rows(policy: Policy, layers: int, measured: StepTraffic) -> Iterator[OperatorRow]:
    """Yield a row for each operator, range of layers and phase that is placed in its own way."""
    segments = policy.segments(layers)
    within = {layer for one in segments for layer in range(one.first, one.last + 1)}

    def way(operator: Operator, layer: int) -> tuple[object, ...]:
        """Return what makes a row of its own: whether it is within, and each phase's way."""
        placed = (policy.at(operator, layer, phase) for phase in PHASES)
        return layer in within, *((one.place, one.mask, one.verify) for one in placed)

    for operator in OPERATORS:
        for one in segments if operator == "qkv_proj" else ():
            yield _row(policy, "segment", range(one.first, one.last + 1), None, measured)
        count = 1 if operator in LAYERLESS else layers
        # Runs of layers with the same placements in both phases, all within segments or none.
        for (is_within, *each), alike in groupby(range(count), key=partial(way, operator)):
            if is_within and operator not in LAYERLESS:
                continue
            first, *others = alike
            found = range(first, (others or [first])[-1] + 1)
            for phase in PHASES if len(set(each)) > 1 else (None,):
                yield _row(policy, operator, found, phase, measured)


def _row(
    policy: Policy, operator: Operator, layers: range, phase: Phase | None, measured: StepTraffic
) -> OperatorRow:
    placement = policy.at(operator, layers.start, phase or "decode")
    costs = {
        name: measured.phase_cost(name, operator, layers)
        for name in PHASES
        if phase in (None, name)
    }
    mask = placement.mask
    return OperatorRow(
        operator=operator,
        layers=None if operator in LAYERLESS else str(LayerRange(layers.start, layers.stop - 1)),
        phase=phase,
        place=placement.place,
        sees=_sees(policy, operator, mask) if placement.leaves else None,
        mask=_with_options(mask.name, mask.model_dump(mode="json")) if mask else None,
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
        options = {} if alone else mask.model_dump(mode="json")
        return f"{what} under {_with_options(mask.name, options)}"
    whole = policy.arithmetic == "int8" and is_linear(operator)
    return f"{what} in the clear" + (", as integers" if whole else "")


def _noise(mask: Mask, config: ModelConfig) -> str | None:
    """Say what the noise of a mask guarantees; None without noise.

    For that of segments as far as a configuration tells: it has no lengths of embedding rows.
    """
    says = noise_of(mask, config, lambda: 1.0)
    if says and mask.kind == "segment":
        says += (
            "; all this for embedding rows at most 1 long, for rows up to L divide sigma by L"
            " (tsqp provision states it for the model)"
        )
    return says


# ------------------------------------------------------------------------------------ listing


def show(found: Explanation, console: Console, model: str, policy: str) -> None:
    """Print an explanation. `model`, `policy`: as they were named."""
    console.print(
        f"policy {found.policy} for {model}: {found.architecture},"
        f" {found.num_hidden_layers} layers, {found.dtype}"
    )
    console.print(found.summary)
    console.print(found.leakage_summary or f"policy {found.policy}: nothing leaves the TEE")
    console.print()
    names = ("operator", "layers", "phase", "where", "the GPU sees", "results")
    console.print(
        table("Placement", [(name, False) for name in names], map(_placement, found.operators))
    )
    for mask in found.masks:
        verdict = "broken where the weights are public" if mask.broken else "not known to be broken"
        console.print(f"mask {_with_options(mask.name, mask.options)}: {verdict}")
        claims = [("  hides", mask.hides), ("  known break", mask.known_break)]
        claims += [("  noise", mask.noise)] if mask.noise else []
        console.print(definitions(claims))
        console.print()
    if found.needs.services:
        console.print(_costs(f"One decoded token, context {found.context}", found, "decode"))
        steps = -(-found.prompt_tokens // found.step_tokens)
        cut = f" in {steps} steps" if steps > 1 else ""
        if any(pads.left_to_decode is not None for pads in found.needs.pads):
            cut += ", where their pads are in stock"
        console.print(_costs(f"Prefill of {found.prompt_tokens} tokens{cut}", found, "prefill"))
        console.print(
            "RPCs and bytes are those of all layers. Bytes count every frame; request ids and"
            " times in headers can make an RPC a few bytes shorter or longer."
        )
        console.print()
    console.print(definitions(_needs_shown(found, policy)))


def _placement(row: OperatorRow) -> tuple[str, ...]:
    window = f", window {row.window.sinks}+{row.window.recent}" if row.window else ""
    return (
        row.operator,
        row.layers or "-",
        row.phase or "both",
        row.place + window,
        row.sees or "nothing",
        "-" if row.sees is None else "verified" if row.verify != "none" else "believed",
    )


def _costs(title: str, found: Explanation, phase: Phase) -> Table | str:
    total: Cost = getattr(found, phase)
    if total.rpcs == 0:
        return f"{title}: nothing is sent\n"
    rows = [
        (row.operator, row.layers or "-", _tensors(measured.messages), measured.cost)
        for row in found.operators
        if (measured := getattr(row, phase)) is not None
    ]
    return table(
        title,
        [
            *((name, False) for name in ("operator", "layers", "sent in each layer")),
            *((name, True) for name in ("RPCs", "bytes up", "bytes down")),
        ],
        [
            (
                operator,
                layers,
                sent,
                f"{cost.rpcs:,}",
                f"{cost.bytes_sent:,}",
                f"{cost.bytes_received:,}",
            )
            for operator, layers, sent, cost in (*rows, ("total", "", "", total))
        ],
    )


def _tensors(messages: tuple[Crossing, ...]) -> str:
    """Render what crosses: `3 x float32 [1, 192]`, or both operands of a product."""
    counts = Counter(" @ ".join(message.sent) for message in messages)
    return ", ".join(f"{n} x {text}" if n > 1 else text for text, n in counts.items())


def _needs_shown(found: Explanation, given: str) -> Iterator[tuple[str, str]]:
    needs = found.needs
    services = (
        *("none", "1 gpu-service"),
        "1 gpu-service, and a dealer of another owner (--dealer)",
    )[needs.services]
    if needs.services and needs.arithmetic == "int8":
        services += ", with --arithmetic int8 or both"
    if needs.services and needs.attested != "none":
        services += f", by {needs.attested} evidence (gpu-service --attest, --service-appraisal)"
    yield "services", services
    if needs.key:
        yield "key", f"--key FILE, by tsqp provision --mask {needs.key}, and its weights"
    for pads in needs.pads:
        text = (
            f"one a token of {' and '.join(pads.phases)}, at {pads.sites} sites:"
            f" {bytes_for_people(pads.memory_bytes)} in memory"
        )
        if pads.bank_bytes is not None:
            text += f", {pads.bank_bytes:,} bytes in a bank (tee-runner pads make --policy {given})"
        if (share := pads.left_to_decode) is not None:
            text += f"; prompts only while {share:.0%} of those kept ready are left"
        yield "pads", text
    checks = [row.verify != "none" for row in found.operators if row.sees is not None]
    results = "computed in the TEE"
    if any(checks):
        some = "" if all(checks) else "in part "
        results = f"{some}verified against the weights of MODEL (docs/verification.md)"
    elif checks:
        results = "not verified: a service that lies changes the answer"
    yield "results", results
