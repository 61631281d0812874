"""What `tsqp plan` prints of a report."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from tsqp.lab.plan.costs import Crossover, PlanReport, PolicyPlan, Prediction
from tsqp.run.process import bytes_for_people
from tsqp.tables import definitions, table

# What a service has to beat; planned for beside whatever is asked.
BEST_ALONE = "tee-only-int8"
_TERMS = (
    ("TEE weights", "LM head, and linear layers that stay in the TEE"),
    ("TEE operators", "everything else computed there: attention, norms, sampling"),
    ("messages", "encoding and decoding, at both ends"),
    ("transport", "what handing messages over takes here beyond the link's own time"),
    ("link", "bandwidth: bytes both ways; latency: one round trip an RPC"),
    ("GPU", "kernels and copies on the accelerator described"),
)


def show(report: PlanReport, console: Console) -> None:
    """Print a report: what each policy would reach, part by part."""
    console.print(_title(report))
    console.print()
    console.print(definitions(_TERMS))
    for found in report.policies:
        console.print()
        console.print(f"policy {found.policy}: {found.summary}")
        console.print(found.leakage_summary or f"policy {found.policy}: nothing leaves the TEE")
        console.print()
        console.print(definitions(_figures(found, report)))
        console.print()
        prompt = f"Up to the first token of a prompt of {report.prompt_tokens}"
        console.print(_parts(prompt, found.prefill))
        together = "one sequence" if report.batch == 1 else f"{report.batch} sequences together"
        step = f"One decode step of {together}, context {report.context}"
        console.print(_parts(step, found.decode))
        console.print("Assumed:")
        console.print(definitions([("  -", line) for line in found.assumptions]))


def _title(report: PlanReport) -> str:
    link = "no link between them"
    if report.link_gbps is not None or report.link_rtt_us > 0:
        rate = "any" if report.link_gbps is None else f"{report.link_gbps:g}"
        link = f"a link of {rate} Gbit/s with {report.link_rtt_us:g} us round trip"
    return (
        f"{report.model}: {report.num_hidden_layers} layers, {report.dtype};"
        f" TEE with {report.tee_cores} cores, accelerator {report.gpu}, {link};"
        f" micro-batches: {report.micro_batches}"
    )


def _figures(found: PolicyPlan, report: PlanReport) -> Iterator[tuple[str, str]]:
    rate = f"{found.tokens_per_s_per_request:.1f} tokens/s"
    if report.batch > 1:
        rate += f" a sequence, {found.tokens_per_s:.1f} of all {report.batch} together"
    yield "time to first token", f"{_ms(found.prefill.total_us)} ms{_held_back(found.prefill)}"
    yield "decode", f"{rate}, {_ms(found.decode.total_us)} ms a step{_held_back(found.decode)}"
    if (several := found.several) is not None:
        decode = several.tpot_alone_ms / found.tpot_ms
        prefill = several.ttft_alone_ms / found.ttft_ms
        text = f"decode {decode:.2f} times as fast as with one accelerator; first token"
        yield f"--tensor-parallel {report.tensor_parallel}", f"{text} {prefill:.2f}"
        for when, where in (("decode", several.decode), ("prompt", several.prefill)):
            if where is not None:
                yield f"pays, {when}", _pays(where)
    if found.pads is not None:
        rate = f"{found.sustained_tokens_per_s:.1f} tokens/s of all together"
        made = f"{found.pads.token_ms:.2f} ms to make a token's pads"
        yield "sustained", f"{rate}; {made}, on the same cores after the step that uses them"
    (alone,) = (one for one in report.policies if one.policy == BEST_ALONE)
    if alone is not found:
        decode = alone.tpot_ms / found.tpot_ms
        sustained = found.sustained_tokens_per_s / alone.sustained_tokens_per_s
        text = f"decode {decode:.2f} times as fast, {sustained:.2f} sustained; first token"
        yield f"beside {BEST_ALONE}", f"{text} {alone.ttft_ms / found.ttft_ms:.2f}"
    yield "TEE memory", f"about {bytes_for_people(found.tee_memory_bytes)}"


def _pays(where: Crossover) -> str:
    largest = f"the largest that leaves has {bytes_for_people(where.largest_bytes)}"
    if where.weight_bytes is None:
        return f"for no weight; {largest}"
    return f"for weights from {bytes_for_people(where.weight_bytes)}; {largest}"


def _held_back(found: Prediction) -> str:
    return f"; bottleneck: {found.bottleneck}" if found.bottleneck else ""


def _parts(title: str, found: Prediction) -> Table:
    columns = [("part", False), ("ms", True), ("share", True), ("without it, ms", True)]
    columns += [("times as fast", True)]
    rows = [
        (
            part.name + (" (bottleneck)" if part.name == found.bottleneck else ""),
            _ms(part.busy_us),
            f"{part.busy_us / found.total_us:.0%}",
            _ms(part.without_us),
            f"{found.total_us / part.without_us:.2f}" if part.without_us > 0 else "-",
        )
        for part in found.parts
        if part.busy_us > 0
    ]
    traffic = (
        f"{_ms(found.total_us)} ms, {found.rpcs} RPCs, {found.bytes_sent:,} bytes up,"
        f" {found.bytes_received:,} down"
    )
    return table(f"{title}: {traffic}", columns, rows)


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}" if us >= 1e4 else f"{us / 1e3:.2f}"
