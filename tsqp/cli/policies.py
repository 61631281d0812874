"""`tsqp policies`, `masks` and `explain`: what there is to choose from, and what a policy means."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tsqp.cli.config import CONTEXT, config_option, model_argument, use
from tsqp.run.settings import DEFAULT_POLICY, model_directory
from tsqp.tables import definitions, open_console, table

if TYPE_CHECKING:
    from tee_side.policy.placement import Policy
    from tee_side.protect.masks.mask import Mask
    from tee_side.words import Phase, Verify
    from tsqp.catalogue import MaskEntry, PolicyEntry, Unusable


@click.command(context_settings=CONTEXT)
@use("as_json")
@config_option
def policies(*, as_json: bool) -> None:
    """List the placement policies: what leaves the TEE under each, and masked how."""
    from tsqp.catalogue import policy_entries

    entries, unusable = policy_entries()
    if as_json:
        _echo_json("policies", entries, unusable, default=DEFAULT_POLICY)
    else:
        rows = [("\n".join(_place(one)), "\n".join(_leaving(one.policy))) for one in entries]
        more = "\ntsqp explain MODEL --policy NAME says what one means for a model."
        _show_all(("policy", "what leaves the TEE"), rows, unusable, more)


def _place(entry: PolicyEntry) -> list[str]:
    policy, count = entry.policy, entry.policy.services
    services = {0: "no service", 1: "1 service"}.get(count, f"{count} services")
    arithmetic = "" if policy.arithmetic == "float" else f", {policy.arithmetic}"
    default = " (default)" if policy.name == DEFAULT_POLICY else ""
    place = [policy.name + default, entry.standing, services + arithmetic]
    return place + ([f"({entry.origin})"] if entry.origin != "built in" else [])


def _leaving(policy: Policy) -> list[str]:
    """Say what a policy is, and what crosses under each mask."""
    from tee_side.policy.leakage_summary import SEEN

    groups: dict[tuple[str | None, Phase | None, Verify], list[str]] = {}
    for operator, one in policy.leaving():
        mask = one.mask.name if one.mask else None
        seen = groups.setdefault((mask, one.phase, one.verify), [])
        seen += [SEEN[operator]] if SEEN[operator] not in seen else []
    lines = [policy.summary]
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
    from tsqp.catalogue import default_text, find_mask_entry, mask_entries, needs_of

    if name is None:
        entries, unusable = mask_entries()
        if as_json:
            _echo_json("masks", entries, unusable)
        else:
            rows = [("\n".join(_facts(entry)), "\n".join(_claims(entry))) for entry in entries]
            more = " tsqp masks NAME says more."
            _show_all(("mask", "what it does"), rows, unusable, more)
        return
    entry = find_mask_entry(name)
    if as_json:
        click.echo(json.dumps(entry.described(), indent=1))
        return
    console, mask = open_console(), entry.mask
    article = "an" if mask.kind == "additive" else "a"
    console.print(f"{mask.name}: {article} {mask.kind} mask ({entry.origin}), {standing(mask)}")
    console.print()
    # Written for 100 columns: one line a paragraph, for the console to break.
    console.print(re.sub(r"(?<!\n)\n(?!\n)", " ", entry.about))
    console.print()
    pairs = [
        ("hides", mask.hides),
        ("known break", mask.known_break),
        ("source", mask.source),
        ("cost", mask.cost),
        ("tolerance", f"{mask.tolerance:g}" + ("" if mask.tolerance else ", exact")),
        ("arithmetic", mask.arithmetic),
        ("operators", ", ".join(entry.operators)),
        *([("needs", "; ".join(needs_of(mask)))] if needs_of(mask) else []),
        *(
            ("option", f"{option.name} = {default_text(option)} ({option.values})")
            for option in entry.options
        ),
    ]
    console.print(definitions(pairs))


def _echo_json(
    what: str,
    entries: Sequence[MaskEntry | PolicyEntry],
    unusable: list[Unusable],
    **more: str,
) -> None:
    found = {
        what: [entry.described() for entry in entries],
        "unusable": [one._asdict() for one in unusable],
    }
    click.echo(json.dumps(found | more, indent=1))


def _show_all(
    headings: Sequence[str], rows: Sequence[Sequence[str]], unusable: list[Unusable], more: str
) -> None:
    """Print a table, what does not load, and a footnote that ends in `more`."""
    console = open_console()
    console.print(table("", [(heading, False) for heading in headings], rows, lines=True))
    for one in unusable:
        console.print(f"error: {one.name} (package): {one.error}")
    console.print(
        "broken: tokens can be recovered where the weights are public, which they usually are."
        + more
    )


def _facts(entry: MaskEntry) -> list[str]:
    mask = entry.mask
    facts = [mask.name, f"{mask.kind} mask", standing(mask), f"tolerance {mask.tolerance:g}"]
    return facts + ([f"({entry.origin})"] if entry.origin != "built in" else [])


def _claims(entry: MaskEntry) -> list[str]:
    from tsqp.catalogue import default_text

    options = [
        f"{option.name} = {default_text(option)} ({option.values})" for option in entry.options
    ]
    return [
        f"hides: {entry.mask.hides}",
        f"known break: {entry.mask.known_break}",
        f"cost: {entry.mask.cost}",
        f"source: {entry.mask.source}",
        *([f"options: {'; '.join(options)}"] if options else []),
    ]


def standing(mask: type[Mask]) -> str:
    """Say whether a mask is broken, in the words of the tables."""
    return "broken" if mask.broken else "not known to be broken"


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
    from tsqp.lab.explain import explanation

    # First, as the work may take a while.
    console = None if as_json else open_console()
    found = explanation.explain(
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
    explanation.show(found, console, model, policy)
