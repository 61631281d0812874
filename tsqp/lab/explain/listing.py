"""What `tsqp explain` prints."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from tee_side.words import Phase
from tsqp.lab.explain.explanation import Explanation, OperatorRow, with_options
from tsqp.lab.explain.traffic import Cost, Crossing
from tsqp.run.process import bytes_for_people
from tsqp.tables import definitions, table

_PLACEMENT = ("operator", "layers", "phase", "where", "the GPU sees", "results")


def show(found: Explanation, console: Console, model: str, policy: str) -> None:
    """Print an explanation. `model`, `policy`: as they were named."""
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
        verdict = "broken where the weights are public" if mask.broken else "not known to be broken"
        console.print(f"mask {with_options(mask.name, mask.options)}: {verdict}")
        claims = [("  hides", mask.hides), ("  known break", mask.known_break)]
        claims += [("  noise", mask.noise)] if mask.noise else []
        console.print(definitions(claims))
        console.print()
    if found.needs.services:
        console.print(_costs(f"One decoded token, context {found.context}", found, "decode"))
        steps = -(-found.prompt_tokens // found.step_tokens)
        cut = f" in {steps} steps" if steps > 1 else ""
        stocked = any(pads.left_to_decode is not None for pads in found.needs.pads)
        cut += ", where their pads are in stock" if stocked else ""
        console.print(_costs(f"Prefill of {found.prompt_tokens} tokens{cut}", found, "prefill"))
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


def _tensors(messages: tuple[Crossing, ...]) -> str:
    """Render what crosses: `3 x float32 [1, 192]`, or both operands of a product."""
    counts = Counter(" @ ".join(message.sent) for message in messages)
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
