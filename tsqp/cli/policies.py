"""`tsqp policies`, `masks` and `explain`: what there is to choose from, and what a policy means."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import click

from tsqp.cli.config import CONTEXT, config_option, model_argument, use
from tsqp.run.settings import DEFAULT_POLICY, model_directory
from tsqp.tables import definitions, open_console, table


@click.command(context_settings=CONTEXT)
@use("as_json")
@config_option
def policies(*, as_json: bool) -> None:
    """List the placement policies: what leaves the TEE under each, and masked how."""
    from tsqp.catalogue import policy_entries

    entries, unusable = policy_entries()
    _list(
        as_json,
        "policies",
        [(entry.described(), entry.row(DEFAULT_POLICY)) for entry in entries],
        unusable,
        ("policy", "what leaves the TEE"),
        "\ntsqp explain MODEL --policy NAME says what one means for a model.",
        default=DEFAULT_POLICY,
    )


@click.command(context_settings=CONTEXT)
@click.argument("name", required=False, metavar="[NAME|FILE]")
@use("as_json")
@config_option
def masks(*, name: str | None, as_json: bool) -> None:
    """List the masks: what each hides, what breaks it, what it costs. With NAME: all about one."""
    from tsqp.catalogue import find_mask_entry, mask_entries, needs_of

    if name is None:
        entries, unusable = mask_entries()
        _list(
            as_json,
            "masks",
            [(entry.described(), entry.row()) for entry in entries],
            unusable,
            ("mask", "what it does"),
            " tsqp masks NAME says more.",
        )
        return
    entry = find_mask_entry(name)
    if as_json:
        click.echo(json.dumps(entry.described(), indent=1))
        return
    console, mask = open_console(), entry.mask
    article = "an" if mask.kind == "additive" else "a"
    console.print(f"{mask.name}: {article} {mask.kind} mask ({entry.origin}), {entry.standing}")
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
        *(("option", str(option)) for option in entry.options),
    ]
    console.print(definitions(pairs))


def _list(
    as_json: bool,
    what: str,
    entries: Iterable[tuple[dict[str, Any], tuple[str, str]]],
    unusable: Mapping[str, str],
    headings: tuple[str, str],
    more: str,
    **fields: str,
) -> None:
    """Print what JSON or a table says of each entry, and what does not load.

    `more`: how the footnote of the table ends; `fields`: what JSON says beside the entries.
    """
    described, rows = zip(*entries, strict=True)
    if as_json:
        refused = [{"name": name, "error": error} for name, error in unusable.items()]
        click.echo(json.dumps({what: described, "unusable": refused, **fields}, indent=1))
        return
    console = open_console()
    console.print(table("", [(heading, False) for heading in headings], rows, lines=True))
    for name, error in unusable.items():
        console.print(f"error: {name} (package): {error}")
    console.print(
        "broken: tokens can be recovered where the weights are public, which they usually are."
        + more
    )


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
