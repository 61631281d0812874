"""Whether the tokens are right, and what the demo shows: panels, tables of costs, and the verdict.

They are compared with transformers, and with integers without a mask. All that is shown fits a
terminal of 80 columns, and is plain text where there is none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import rich.box
import torch
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from tee_side.engine.tokenizer import Tokenizer
from tee_side.policy.placement import Policy
from tee_side.serve.answers import TokenBytes
from tee_side.words import OPERATORS
from tsqp.demo.programs import DTYPE, Lie, TapFeed, Tokens
from tsqp.page.seen import ByteSummary, Seen, VocabularyReading, summarise
from tsqp.run.process import bytes_for_people
from tsqp.run.settings import model_directory
from tsqp.tables import definitions, table

# What the integers of a masked policy must be equal to.
CLEAR_INTEGERS = "quantized-clear"
# What the runner calls what Freivalds' check refuses (tee_side.remote.fault_attribution).
_WRONG_RESULT = "a wrong result"


@dataclass(frozen=True)
class Verdict:
    """One comparison. `remark`: for information, whatever the outcome."""

    policy: str
    passed: bool
    finding: str
    remark: str = ""


def transformers_tokens(prompt_ids: Sequence[int], max_new_tokens: int) -> Tokens:
    """Run the prompt through transformers, in this process."""
    import transformers

    # Untyped: transformers' annotations of `generate` do not hold for its own models.
    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    model = library.AutoModelForCausalLM.from_pretrained(
        model_directory("demo"), dtype=torch.float32
    )
    prompt = torch.tensor([list(prompt_ids)])
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    ids: list[int] = output.sequences[0, prompt.shape[1] :].tolist()
    return Tokens(
        f"transformers {transformers.__version__} in {DTYPE}", ids, torch.cat(output.logits).float()
    )


def compare_floats(ours: Tokens, reference: Tokens) -> Verdict:
    """Floats: the same token ids; logits may differ by rounding, and it is said how far."""
    shared = agreeing(ours.ids, reference.ids)
    # Logits are of the same context up to the first token that differs, and that one's own.
    comparable = min(shared + 1, len(ours.ids), len(reference.ids))
    difference = (ours.logits[:comparable] - reference.logits[:comparable]).abs().max().item()
    identical = ours.ids == reference.ids
    word = "identical" if identical else f"NOT identical from token {shared} on"
    return Verdict(
        ours.name,
        identical,
        f"{len(ours.ids)} token ids {word} to {reference.name}; largest logit difference"
        f" {difference:.1e}",
    )


def compare_integers(ours: Tokens, clear: Tokens, reference: Tokens) -> Verdict:
    """Integers: token ids and logits the same bit for bit; `reference`, in floats, is informal."""
    same_ids = ours.ids == clear.ids
    same_logits = torch.equal(ours.logits, clear.logits)
    if same_ids and same_logits:
        finding = f"{len(ours.ids)} token ids and all their logits identical, bit for bit, to"
    elif same_ids:
        finding = f"{len(ours.ids)} token ids identical, but logits NOT identical to"
    else:
        finding = f"token ids NOT identical from token {agreeing(ours.ids, clear.ids)} on to"
    return Verdict(
        ours.name,
        same_ids and same_logits,
        f"{finding} {clear.name}, the same int8 arithmetic without a mask",
        _agreement(ours, reference),
    )


def compare_served(policy: str, served: Sequence[bytes], clear: Tokens) -> Verdict:
    """Of a chat over HTTP, bytes are what each token is known by: the same ones."""
    wanted = [*map(TokenBytes(Tokenizer(model_directory("demo"))), clear.ids)]
    same = list(served) == wanted
    word = "identical" if same else f"NOT identical from token {agreeing(served, wanted)} on"
    return Verdict(
        f"{policy}, served",
        same,
        f"{len(served)} tokens of a chat over HTTP {word} to {clear.name}",
    )


def check_refusal(
    policy: str, lie: Lie, status: int, complaint: str, story: str, honest: str
) -> Verdict:
    """Judge a run that was lied to: it must end with an error, and show no wrong word before.

    `complaint`: its last line; `story`: what it showed; `honest`: the same run without the lie.
    """
    refused = status != 0 and _WRONG_RESULT in complaint
    unharmed = honest.startswith(story)
    if not refused:
        finding = f"one of {lie.count} numbers of a reply was wrong, and was NOT noticed"
    elif not unharmed:
        finding = "a lie was noticed, but what was shown before is NOT the honest story's beginning"
    else:
        finding = (
            f"one of {lie.count} numbers of a reply was wrong by 1: the run ended, and no token"
            " came of it"
        )
    return Verdict(f"{policy}, lied to", refused and unharmed, finding)


def _agreement(ours: Tokens, reference: Tokens) -> str:
    if ours.ids == reference.ids:
        return f"all {len(ours.ids)} are those of {reference.name}, too"
    equal = sum(a == b for a, b in zip(ours.ids, reference.ids, strict=False))
    return (
        f"{equal} of {len(ours.ids)} are those of {reference.name}; the first that differs is"
        f" number {agreeing(ours.ids, reference.ids) + 1}. int8 weights round, and may choose"
        " another word: no failure"
    )


def agreeing(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many elements two sequences have in common at their start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def clear_reference(policy: Policy, folder: Path) -> str:
    """Return name or path of the policy whose tokens an int8 policy must have exactly.

    That of `CLEAR_INTEGERS` itself is written to `folder`: the same numbers, all in the TEE.
    """
    if policy.masks:
        return CLEAR_INTEGERS
    lines = [
        'name = "int8-in-tee"',
        'summary = "all in the TEE, in integers"',
        'arithmetic = "int8"',
        "[operators]",
        *(f'{name} = "tee"' for name in OPERATORS),
    ]
    path = folder / "int8-in-tee.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*%#"
_BUCKETS = 64
_READING_CHARACTERS = 180
# Columns of both tables of costs.
_COSTS = [(name, True) for name in ("RPCs", "sent", "received", "TEE ms", "wire ms", "GPU ms")]
# Wider tables are harder to read.
_MAX_WIDTH = 120


# Seconds in the TEE, on the wire (with the service's queue), and in the service.
Times: TypeAlias = tuple[float, float, float]


class RunCost:
    """What one run cost. `report`: what `tee-runner generate --report` wrote."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report
        # Waiting in the service's queue is neither wire nor GPU; with one client it is next to 0.
        self.operators: dict[str, Times] = {
            name: (row["tee_s"], row["wire_s"] + row["queue_s"], row["gpu_s"])
            for name, row in report["operators"].items()
        }
        tee_s, wire_s, gpu_s = (sum(t[at] for t in self.operators.values()) for at in range(3))
        # What no operator accounts for was spent in the TEE.
        self.rest_s = max(0.0, report["timing"]["total_s"] - tee_s - wire_s - gpu_s)
        per_token = report["timing"]["tpot_s"]
        self.token_ms = "" if per_token is None else f"{per_token * 1e3:.1f}"
        self.total: Times = (tee_s + self.rest_s, wire_s, gpu_s)


def _milliseconds(seconds: float) -> str:
    """Render a time in 6 characters at most, so that the table fits a terminal of 80 columns."""
    if seconds == 0:
        return ""
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def act_panel(
    title: str,
    story: Text,
    feed: TapFeed,
    *,
    width: int,
    ascii_only: bool = False,
    services: int = 1,
    broken: bool = False,
    subtitle: str | None = None,
    reading: VocabularyReading | None = None,
) -> Panel:
    """Show the story, and what the GPU received for it.

    `subtitle`: None while the act runs, when the last requests are shown; after it, the first.
    `broken`: whether stronger attacks on what crosses are known than `reading`.
    """
    running = subtitle is None
    width = min(width, _MAX_WIDTH)
    first = "the service, beside a dealer," if services > 1 else "the GPU"
    dtypes = f": {', '.join(feed.dtypes)}" if feed.dtypes else ""
    rows: list[RenderableType] = [story, Rule(f"what {first} received{dtypes}", style="dim")]
    summary = summarise(feed.counts)
    if summary is None:
        rows.append(Text(f"nothing{' so far' if running else ': no request, not one byte'}"))
    else:
        shown = feed.last if running else feed.first
        rows.append(_feed_table(shown, feed, width, "last" if running else "first"))
        measured = _measured(summary, feed, _ASCII_BARS if ascii_only else _BARS)
        if reading is not None:
            measured.append(("read", _reading(reading, broken)))
        rows.append(definitions(measured, style="bold"))
    return Panel(
        Group(*rows),
        title=Text(title, style="bold"),
        title_align="left",
        subtitle=subtitle,
        subtitle_align="right",
        width=width,
    )


def chat_panel(title: str, said: str, answer: str, *, width: int) -> Panel:
    """Show a chat over HTTP, while it is streamed and after it."""
    return Panel(
        Group(Text(said, style="bold"), Text(answer)),
        title=Text(title, style="bold"),
        title_align="left",
        width=min(width, _MAX_WIDTH),
    )


def lie_panel(title: str, prompt: str, story: str, lie: Lie, refusal: str, *, width: int) -> Panel:
    """Show the act in which one number of one reply is a lie, and how the runner ended."""
    asked = f"{lie.asked.what} in layer {lie.asked.layer}"
    true, told = (f"{number & 0xFFFFFFFF:08x}" for number in (lie.true, lie.told))
    facts: list[tuple[str, RenderableType]] = [
        ("reply", f"to {asked}: {lie.count} numbers, all but one as computed"),
        ("lie", f"number {lie.index} is {told} instead of {true}"),
        ("runner", Text(refusal, style="bold red")),
    ]
    return Panel(
        Group(
            Text.assemble((prompt, "bold"), story),
            Rule("what the service did, and what the runner said", style="dim"),
            definitions(facts, style="bold"),
        ),
        title=Text(title, style="bold"),
        title_align="left",
        width=min(width, _MAX_WIDTH),
    )


def _feed_table(shown: Sequence[Seen], feed: TapFeed, width: int, which: str) -> Table:
    made = Table(
        Column("layer", justify="right", width=5),
        Column("operator", no_wrap=True, width=20),
        Column("shape", no_wrap=True, width=9),
        Column(Text(f"{which} {len(shown)} of {feed.requests} requests"), no_wrap=True, ratio=1),
        box=rich.box.SIMPLE_HEAD,
        header_style="dim",
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
        expand=True,
    )
    for seen in shown:
        made.add_row(
            "" if seen.layer is None else str(seen.layer),
            seen.what,
            "x".join(map(str, seen.first.shape)),
            _numbers(seen, 4 if width < 110 else 8),
        )
    return made


def _numbers(seen: Seen, count: int) -> str:
    numbers: list[float] = seen.first.flatten()[:count].tolist()
    if seen.first.is_floating_point():
        return " ".join(f"{n:+8.3f}" for n in numbers)
    whole = [int(n) for n in numbers]
    # Small integers are read best as they are, elements of a ring as words of it.
    if all(abs(n) < 1 << 20 for n in whole):
        return " ".join(f"{n:8d}" for n in whole)
    return " ".join(f"{n & 0xFFFFFFFF:08x}" for n in whole)


def _measured(summary: ByteSummary, feed: TapFeed, bars: str) -> list[tuple[str, RenderableType]]:
    verdict = "as even as chance makes them" if summary.even else "uneven: there is a pattern"
    said = (
        f"{bytes_for_people(summary.total)}, {summary.values} values, each"
        f" {summary.rarest:.2%} to {summary.commonest:.2%} of all,"
        f" entropy {summary.entropy_bits:.3f} of 8 bits: {verdict}"
    )
    counts: list[int] = feed.counts.reshape(_BUCKETS, -1).sum(axis=1).tolist()
    # Rounded up: only what is not there at all has no height.
    drawn = "".join(bars[-(-count * (len(bars) - 1) // max(counts))] for count in counts)
    return [("bytes", said), ("00 to ff", Text(drawn, style="cyan", no_wrap=True))]


def _reading(reading: VocabularyReading, broken: bool) -> Text:
    text = " ".join(reading.text.split())
    if len(text) > _READING_CHARACTERS:
        text = text[:_READING_CHARACTERS].rstrip() + " ..."
    what = f"{reading.right} of {reading.rows} tokens recovered by matching"
    if not reading.better:
        what += ", no more than by chance,"
    stronger = " (stronger attacks are known)" if broken else ""
    return Text.assemble(f"{what} with the public weights{stronger}: ", (text, "italic"))


def checks_table(checks: Iterable[Verdict]) -> Table:
    """Show what was compared with what, and how that came out."""
    rows: list[tuple[RenderableType, ...]] = []
    for check in checks:
        word = Text("ok", style="bold green") if check.passed else Text("FAIL", style="bold red")
        rows.append((word, Text(check.policy), Text(check.finding)))
        if check.remark:
            rows.append(("", "", Text(check.remark, style="dim")))
    return table("Verdict", [("", False)] * 3, rows, compact=True)


def acts_table(costs: Iterable[RunCost]) -> Table:
    """Show what each act cost, side by side."""
    columns = [("policy", False), ("ms/token", True), *_COSTS]
    rows = [(cost.report["policy"], cost.token_ms, *_totals(cost)) for cost in costs]
    return table("Cost", columns, rows, compact=True)


def operators_table(cost: RunCost) -> Table:
    """Show what each operator of one act cost."""
    report = cost.report
    rows = [
        (
            name,
            row["place"],
            str(row["calls"]),
            str(row["round_trips"]),
            _size(row["bytes_sent"]),
            _size(row["bytes_received"]),
            *map(_milliseconds, cost.operators[name]),
        )
        for name, row in report["operators"].items()
    ]
    rows.append(("everything else", "tee", "", "", "", "", _milliseconds(cost.rest_s), "", ""))
    columns = [("operator", False), ("where", False), ("calls", True), *_COSTS]
    made = table(f"Cost per operator: {report['policy']}", columns, rows, compact=True)
    made.add_section()
    made.add_row("total", "", "", *_totals(cost))
    return made


def _totals(cost: RunCost) -> tuple[str, ...]:
    rpc = cost.report["rpc"]
    sizes = (_size(rpc["bytes_sent"]), _size(rpc["bytes_received"]))
    return (str(rpc["count"]), *sizes, *map(_milliseconds, cost.total))


def _size(size: int) -> str:
    return bytes_for_people(size) if size else ""
