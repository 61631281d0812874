"""`tsqp explain`: what a policy means for a model, in tables or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tsqp.cli.config import CONTEXT, config_option, model_argument
from tsqp.cli.options import use
from tsqp.run.settings import model_directory
from tsqp.tables import definitions, open_console, table

if TYPE_CHECKING:
    from rich.table import Table

    from tee_side.words import Phase
    from tsqp.lab.explain.explanation import Explanation, OperatorRow
    from tsqp.lab.explain.traffic import Cost, Message

# Headings of the first table.
_PLACEMENT = ("operator", "layers", "phase", "where", "the GPU sees", "results")


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
    from tsqp.lab.explain.explanation import explain as run

    # First, as the work may take a while.
    console = None if as_json else open_console()
    found = run(
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
    console.print(table("Placement", columns, [_placement(row) for row in found.operators]))
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
    from tsqp.run.process import bytes_for_people

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
