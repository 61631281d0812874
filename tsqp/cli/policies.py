"""`tsqp policies`, `masks` and `explain`: what there is to choose from, and what a policy means."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tsqp.cli.config import CONTEXT, config_option, model_argument
from tsqp.cli.options import use
from tsqp.run.process import bytes_for_people
from tsqp.run.settings import DEFAULT_POLICY, model_directory
from tsqp.tables import definitions, open_console, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tee_side.words import Phase, Verify
    from tsqp.catalogue import MaskEntry, PolicyEntry, Unusable
    from tsqp.lab.explain.explanation import Explanation, OperatorRow
    from tsqp.lab.explain.traffic import Cost, Message

_FOOTNOTE = "broken: tokens can be recovered where the weights are public, which they usually are"
# Headings of the first table of an explanation.
_PLACEMENT = ("operator", "layers", "phase", "where", "the GPU sees", "results")


@click.command(context_settings=CONTEXT)
@use("as_json")
@config_option
def policies(*, as_json: bool) -> None:
    """List the placement policies: what leaves the TEE under each, and masked how."""
    from tsqp.catalogue import policy_entries

    entries, unusable = policy_entries()
    if as_json:
        _echo_json("policies", entries, unusable, default=DEFAULT_POLICY)
        return
    console = open_console()
    rows = [("\n".join(_place(entry)), "\n".join(_leaving(entry))) for entry in entries]
    console.print(table("", [("policy", False), ("what leaves the TEE", False)], rows, lines=True))
    _show_unusable(console, unusable)
    console.print(
        f"{_FOOTNOTE}.\ntsqp explain MODEL --policy NAME says what one means for a model."
    )


def _place(entry: PolicyEntry) -> list[str]:
    services = {0: "no service", 1: "1 service"}.get(entry.services, f"{entry.services} services")
    arithmetic = "" if entry.arithmetic == "float" else f", {entry.arithmetic}"
    default = " (default)" if entry.name == DEFAULT_POLICY else ""
    place = [entry.name + default, entry.standing, services + arithmetic]
    return place + ([f"({entry.origin})"] if entry.origin != "built in" else [])


def _leaving(entry: PolicyEntry) -> list[str]:
    """Say what a policy is, and what crosses under each mask."""
    groups: dict[tuple[str | None, Phase | None, Verify], list[str]] = {}
    for one in entry.leaves:
        seen = groups.setdefault((one.mask, one.phase, one.verify), [])
        seen += [one.sees] if one.sees not in seen else []
    lines = [entry.summary]
    for (mask, phase, verify), seen in groups.items():
        how = f"under {mask}" if mask else "in the clear"
        when = f" at {phase}" if phase else ""
        checked = "" if verify == "none" else "; results verified"
        lines.append(f"- {how}{when}: {', '.join(seen)}{checked}")
    return lines


@click.command(context_settings=CONTEXT)
@click.argument("name", required=False, metavar="[NAME|FILE]")
@use("as_json")
@config_option
def masks(*, name: str | None, as_json: bool) -> None:
    """List the masks: what each hides, what breaks it, what it costs. With NAME: all about one."""
    from tsqp.catalogue import find_mask_entry, mask_entries

    if name is not None:
        entry = find_mask_entry(name)
        if as_json:
            click.echo(json.dumps(entry.model_dump(mode="json"), indent=1))
        else:
            _show_mask(entry)
        return
    entries, unusable = mask_entries()
    if as_json:
        _echo_json("masks", entries, unusable)
        return
    console = open_console()
    rows = [("\n".join(_facts(entry)), "\n".join(_claims(entry))) for entry in entries]
    console.print(table("", [("mask", False), ("what it does", False)], rows, lines=True))
    _show_unusable(console, unusable)
    console.print(f"{_FOOTNOTE}. tsqp masks NAME says more.")


def _echo_json(
    what: str,
    entries: Sequence[MaskEntry | PolicyEntry],
    unusable: list[Unusable],
    **more: str,
) -> None:
    found = {what: entries, "unusable": unusable}
    listed = {key: [one.model_dump(mode="json") for one in some] for key, some in found.items()}
    click.echo(json.dumps(listed | more, indent=1))


def _show_unusable(console: Console, unusable: list[Unusable]) -> None:
    for one in unusable:
        console.print(f"error: {one.name} (package): {one.error}")


def _facts(entry: MaskEntry) -> list[str]:
    facts = [entry.name, f"{entry.kind} mask", standing(entry)]
    facts += [f"tolerance {entry.tolerance:g}"]
    return facts + ([f"({entry.origin})"] if entry.origin != "built in" else [])


def _claims(entry: MaskEntry) -> list[str]:
    from tsqp.catalogue import default_text

    options = [
        f"{option.name} = {default_text(option)} ({option.values})" for option in entry.options
    ]
    return [
        f"hides: {entry.hides}",
        f"known break: {entry.known_break}",
        f"cost: {entry.cost}",
        f"source: {entry.source}",
        *([f"options: {'; '.join(options)}"] if options else []),
    ]


def _show_mask(entry: MaskEntry) -> None:
    from tsqp.catalogue import default_text, needs_of

    console = open_console()
    article = "an" if entry.kind == "additive" else "a"
    console.print(f"{entry.name}: {article} {entry.kind} mask ({entry.origin}), {standing(entry)}")
    console.print()
    # Written for 100 columns: one line a paragraph, for the console to break.
    console.print(re.sub(r"(?<!\n)\n(?!\n)", " ", entry.about))
    console.print()
    pairs = [
        ("hides", entry.hides),
        ("known break", entry.known_break),
        ("source", entry.source),
        ("cost", entry.cost),
        ("tolerance", f"{entry.tolerance:g}" + ("" if entry.tolerance else ", exact")),
        ("arithmetic", entry.arithmetic),
        ("operators", ", ".join(entry.operators)),
    ]
    pairs += [("needs", "; ".join(needs_of(entry)))] if needs_of(entry) else []
    pairs += [
        ("option", f"{option.name} = {default_text(option)} ({option.values})")
        for option in entry.options
    ]
    console.print(definitions(pairs))


def standing(entry: MaskEntry) -> str:
    """Say whether a mask is broken, in the words of the tables."""
    return "broken" if entry.broken else "not known to be broken"


@click.command(context_settings=CONTEXT)
@model_argument()
@use("policy")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=512,
    help="Tokens that the decoded token sees, itself included.",
)
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=128, help="Tokens of the prompt."
)
@use("step_tokens", "dtype", "as_json")
@config_option
def explain(
    *,
    model: str,
    policy: str,
    context: int,
    prompt_tokens: int,
    step_tokens: int,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Say operator by operator what the GPU sees under a policy, and what it costs.

    MODEL is a Hugging Face directory, or "demo"; only its config.json is read. RPCs and bytes are
    counted on messages that are encoded as for the wire, and not sent.
    """
    from tee_side.policy.placement import load_policy
    from tsqp.lab.explain.explanation import explain as explained

    # First, as the work may take a while.
    console = None if as_json else open_console()
    found = explained(
        model_directory(model),
        load_policy(policy),
        context=context,
        prompt_tokens=prompt_tokens,
        step_tokens=step_tokens,
        dtype=dtype,
    )
    if console is None:
        click.echo(found.model_dump_json(indent=1))
        return
    console.print(
        f"policy {found.policy} for {model}: {found.architecture},"
        f" {found.num_hidden_layers} layers, {found.dtype}"
    )
    console.print(found.summary)
    console.print(found.leakage_summary or f"policy {found.policy}: nothing leaves the TEE")
    console.print()
    columns = [(name, False) for name in _PLACEMENT]
    console.print(table("Placement", columns, [_placement_row(row) for row in found.operators]))
    for mask in found.masks:
        console.print(_mask_title(mask.name, mask.options, broken=mask.broken))
        claims = [("  hides", mask.hides), ("  known break", mask.known_break)]
        claims += [("  noise", mask.noise)] if mask.noise else []
        console.print(definitions(claims))
        console.print()
    if found.needs.services:
        console.print(_costs(f"One decoded token, context {context}", found, "decode"))
        steps = -(-prompt_tokens // step_tokens)
        cut = f" in {steps} steps" if steps > 1 else ""
        stocked = any(pads.left_to_decode is not None for pads in found.needs.pads)
        cut += ", where their pads are in stock" if stocked else ""
        console.print(_costs(f"Prefill of {prompt_tokens} tokens{cut}", found, "prefill"))
        console.print(
            "RPCs and bytes are those of all layers. Bytes count every frame; request ids and"
            " times in headers can make an RPC a few bytes shorter or longer."
        )
        console.print()
    console.print(definitions(_needs(found, policy)))


def _placement_row(row: OperatorRow) -> tuple[str, ...]:
    window = f", window {row.window.sinks}+{row.window.recent}" if row.window else ""
    return (
        row.operator,
        row.layers or "-",
        row.phase or "both",
        row.place + window,
        row.sees or "nothing",
        "-" if row.sees is None else "verified" if row.verify != "none" else "believed",
    )


def _mask_title(name: str, options: dict[str, object], *, broken: bool) -> str:
    from tsqp.lab.explain.explanation import with_options

    verdict = "broken where the weights are public" if broken else "not known to be broken"
    return f"mask {with_options(name, options)}: {verdict}"


def _costs(title: str, found: Explanation, phase: Phase) -> Table | str:
    total = found.decode if phase == "decode" else found.prefill
    if total.rpcs == 0:
        return f"{title}: nothing is sent\n"
    columns = [("operator", False), ("layers", False), ("sent in each layer", False)]
    columns += [("RPCs", True), ("bytes up", True), ("bytes down", True)]
    rows: list[tuple[str, ...]] = []
    for row in found.operators:
        measured = row.decode if phase == "decode" else row.prefill
        if measured is None:
            continue
        sent = _tensors(measured.messages)
        rows.append((row.operator, row.layers or "-", sent, *_numbers(measured.cost)))
    rows.append(("total", "", "", *_numbers(total)))
    return table(title, columns, rows)


def _numbers(cost: Cost) -> tuple[str, str, str]:
    return f"{cost.rpcs:,}", f"{cost.bytes_sent:,}", f"{cost.bytes_received:,}"


def _tensors(messages: tuple[Message, ...]) -> str:
    """Render what crosses: `3 x float32 [1, 192]`, or both operands of a product."""
    counts: dict[str, int] = {}
    for message in messages:
        text = " @ ".join(message.sent)
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{n} x {text}" if n > 1 else text for text, n in counts.items())


def _needs(found: Explanation, given: str) -> list[tuple[str, str]]:
    needs = found.needs
    services = {0: "none", 1: "1 gpu-service"}.get(
        needs.services, f"{needs.services} gpu-services that do not collude"
    )
    if needs.services and needs.arithmetic == "int8":
        services += ", with --arithmetic int8 or both"
    if needs.services and needs.attested != "none":
        services += f", by {needs.attested} evidence (gpu-service --attest, --service-appraisal)"
    pairs = [("services", services)]
    if needs.calibration:
        pairs.append(("calibration", "calibration.safetensors, by tsqp calibrate MODEL"))
    if needs.key:
        pairs.append(("key", f"--key FILE, by tsqp provision --mask {needs.key}, and its weights"))
    for pads in needs.pads:
        text = (
            f"one a token of {' and '.join(pads.phases)}, at {pads.sites} sites:"
            f" {bytes_for_people(pads.memory_bytes)} in memory"
        )
        if pads.bank_bytes is not None:
            text += f", {pads.bank_bytes:,} bytes in a bank (tee-runner pads make --policy {given})"
        if (share := pads.left_to_decode) is not None:
            text += f"; prompts only while {share:.0%} of those kept ready are left"
        pairs.append(("pads", text))
    pairs.append(("results", _results(found)))
    return pairs


def _results(found: Explanation) -> str:
    leaving = [row for row in found.operators if row.sees is not None]
    verified = [row for row in leaving if row.verify != "none"]
    if not leaving:
        return "computed in the TEE"
    if not verified:
        return "not verified: a service that lies changes the answer"
    some = "" if len(verified) == len(leaving) else "in part "
    return f"{some}verified against the weights of MODEL (docs/verification.md)"
