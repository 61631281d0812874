"""The page of measured figures: `python -m benchmarks.page FILE` writes docs/benchmarks.md.

page.md.j2 has the page, and what each target is; the figures come from benchmarks/results. Nothing
is measured. Whether a target is reached is worked out here; what is missing or missed is said. A
test fails when docs/benchmarks.md is stale.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from benchmarks.record import RECORDINGS, RESULTS
from tsqp.lab.bench.results import Baseline, Case, PolicyRun, Report
from tsqp.lab.bench.summary import (
    case_name,
    case_stages,
    dominant,
    find_case,
    sustained_ms,
    tokens_per_step,
)
from tsqp.lab.report import figures, percent, size

Documents = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Check:
    """One figure against its target. `ok`: None where there is only something to state."""

    what: str
    wanted: str
    reached: str
    ok: bool | None

    @property
    def verdict(self) -> str:
        """What a cell says: empty where there is only something to state."""
        return "" if self.ok is None else "yes" if self.ok else "**no**"


class _Page:
    """What the template asks for, and the checks of its sections."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        # By title; None: a recording is missing.
        self.checks: dict[str, list[Check] | None] = {}
        self._now: list[Check] = []
        reports = {n: d["report"] for n, d in documents.items() if "report" in d}
        for name, document in documents.items():
            parts = document.get("reports", {})
            reports |= {f"{name} {part}": one for part, one in parts.items()}
        self.reports = {name: Report.model_validate(one) for name, one in reports.items()}

    def section(
        self,
        title: str,
        about: str,
        sources: Sequence[str],
        reason: str = "",
        *,
        repeats: bool = True,
        caller: Callable[[], str],
    ) -> str:
        """Return a section: what it is about, how to repeat it, its body, and what it missed."""
        head = f"## {title}\n\n{about} {self._repeat(sources) if repeats else ''}".rstrip()
        missing = [name for name in sources if name not in self.documents]
        if missing:
            self.checks[title] = None
            only = " ".join(f"`make bench ONLY={name}`" for name in missing)
            return f"{head}\n\nNot recorded yet: {only}."
        self._now = self.checks[title] = []
        body = caller().strip()
        missed = [check for check in self._now if check.ok is False]
        if not missed:
            return f"{head}\n\n{body}"
        what = "; ".join(f"{c.what}: {c.reached}" for c in missed)
        wanted = ", ".join(dict.fromkeys(c.wanted for c in missed))
        return f"{head}\n\n{body}\n\n**Not reached:** {what} (wanted {wanted}). {reason}".rstrip()

    def _repeat(self, names: Sequence[str]) -> str:
        """Say how to repeat recordings, and when they were made."""
        commands = {recording.name: recording.shown for recording in RECORDINGS}
        made = []
        for name in names:
            about = self.documents.get(name, {}).get("recorded", {})
            when = " (recorded {}; load of the minute before {:.1f})"
            when = when.format(about["created"][:10], about["load_before"]) if about else ""
            made.append(f"`{about.get('command', commands[name])}`{when}")
        return f"Repeat with {', '.join(made)}."

    def targets(self) -> str:
        """List where all was reached and where not; the sections have the figures."""
        found: dict[str, list[str]] = {}
        for title, checks in self.checks.items():
            anchor = "".join(c for c in title.lower() if c.isalnum() or c in " -").replace(" ", "-")
            link = f"[{title}](#{anchor})"
            judged = [check for check in checks or () if check.ok is not None]
            reached = sum(bool(check.ok) for check in judged)
            if checks is None:
                found.setdefault("Not recorded", []).append(link)
            elif judged:
                how = "All reached" if reached == len(judged) else "Not all reached"
                found.setdefault(how, []).append(f"{link} ({reached} of {len(judged)})")
        return "\n".join(f"- **{how}:** {', '.join(each)}." for how, each in sorted(found.items()))

    def machines(self) -> str:
        """Name each machine once, with the recordings made on it if there are several."""
        found: dict[str, list[str]] = {}
        for name, document in self.documents.items():
            report = document.get("report")
            machine = report["setup"]["machine"] if report else document["machine"]
            text = ", ".join(f"{key} {value}" for key, value in machine.items())
            found.setdefault(text.replace("_", " "), []).append(name)
        if len(found) < 2:
            return "".join(f"Machine: {text}." for text in found)
        return "Machines:\n\n" + "\n".join(f"- {t}: {', '.join(n)}" for t, n in found.items())

    def check(self, what: str, wanted: str, reached: str, ok: bool | None = None) -> Check:
        """Note a figure, and whether it reaches what is wanted."""
        self._now.append(Check(what, wanted, reached, ok))
        return self._now[-1]

    def at_least(self, what: str, value: float | None, target: float) -> Check:
        """Compare a ratio that is to be large; None: it could not be worked out.

        It is rounded down, so that one that misses the target does not read as the target.
        """
        return self.check(
            what,
            f">= {target:g}",
            hundredths(value, math.floor),
            value is not None and value >= target,
        )

    def at_most(self, what: str, value: float | None, target: float) -> Check:
        """Compare a ratio that is to be small, as `at_least` does; it is rounded up."""
        return self.check(
            what,
            f"<= {target:g}",
            hundredths(value, math.ceil),
            value is not None and value <= target,
        )

    def run(self, source: str, policy: str) -> PolicyRun | None:
        """Return what a report of `tsqp bench` has of a policy."""
        return next((r for r in self.reports[source].policies if r.policy == policy), None)

    def case(
        self, source: str, policy: str, phase: Any, tokens: int, batch: int = 1
    ) -> Case | None:
        """Return one case of it."""
        run = self.run(source, policy)
        return find_case(run, phase, (tokens, batch, 1)) if run else None

    def baseline(
        self, source: str, name: str, phase: str, tokens: int, new_tokens: int | None = None
    ) -> Baseline | None:
        """Return what a report has of a baseline."""
        same = (
            one
            for one in self.reports[source].baselines
            if (one.name, one.phase, one.tokens) == (name, phase, tokens)
        )
        return next((one for one in same if new_tokens in (None, one.new_tokens)), None)


def hundredths(value: float | None, rounding: Callable[[float], int] = round) -> str:
    """Render a ratio with two decimals, rounded as `rounding` does; None: it has none."""
    if value is None:
        return "not measurable"
    # 1.2 is a little more in binary, and still not 1.21.
    return f"{rounding(round(value * 100, 6)) / 100:.2f}"


def divided(a: float | None, b: float | None) -> float | None:
    """Return a / b; None where one of them was not measured, or is no time."""
    return a / b if a is not None and b is not None and a > 0 and b > 0 else None


def step_ms(case: Case | Baseline | None) -> float | None:
    """Return the median of a step."""
    return case.step_ms.median if case else None


def cpu_ms(case: Case | None) -> float | None:
    """Return the CPU time of the TEE side for a token."""
    return case.cpu_tee_ms / tokens_per_step(case) if case else None


def attention_ms(case: Case) -> float:
    """Return what attention takes in the TEE, with writing keys and values, of all layers.

    In the step that was observed.
    """
    costs = (one for one in case.operators if one.operator in ("attention", "kv_cache"))
    return math.fsum(one.stages.tee_us for one in costs) / 1e3


def milliseconds(value: float | None) -> str:
    """Render a time; empty for one that was not measured."""
    return "" if value is None else figures(value) or "0"


def grouped(rows: Iterable[Mapping[str, Any]], *keys: str) -> list[list[Mapping[str, Any]]]:
    """Group rows that are alike in these fields, in the order in which they come first."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return list(found.values())


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Read what is recorded, by name."""
    # Further ones need a machine with an accelerator, and a model that is downloaded.
    names = [*(one.name for one in RECORDINGS), "accelerator", "accuracy_smollm2"]
    paths = [folder / f"{name}.json" for name in names]
    return {path.stem: json.loads(path.read_text("utf-8")) for path in paths if path.exists()}


def benchmarks_page(documents: Documents) -> str:
    """Return the text of docs/benchmarks.md."""
    page = _Page(documents)
    # The page is Markdown: nothing in it is escaped.
    environment = Environment(  # noqa: S701
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        extensions=["jinja2.ext.do"],
    )
    environment.globals.update({n: getattr(page, n) for n in dir(page) if not n.startswith("_")})
    for helper in (attention_ms, case_name, case_stages, divided, dominant, grouped, sustained_ms):
        environment.globals[helper.__name__] = helper
    for one in (figures, percent, size, hundredths, milliseconds, step_ms, cpu_ms):
        environment.filters[one.__name__] = one
    template = environment.from_string(Path(__file__).with_name("page.md.j2").read_text("utf-8"))
    # A line for each paragraph, point and row.
    text = re.sub(r"\n{3,}", "\n\n", template.render(**documents))
    return re.sub(r"(?<=[^\n])\n *(?=[^\n|#-])", " ", text.strip()) + "\n"


if __name__ == "__main__":
    (file,) = sys.argv[1:] or sys.exit("usage: python -m benchmarks.page FILE")
    Path(file).write_text(benchmarks_page(read_results(RESULTS)), encoding="utf-8")
