"""The page of measured figures, from what is recorded in benchmarks/results.

`python -m benchmarks.tables FILE` writes docs/benchmarks.md; a test fails when that file is stale.
Whether a target is reached is worked out from the figures; what is missing or missed is said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown
from benchmarks.record import RECORDINGS, RESULTS
from benchmarks.sections import SECTIONS, Documents, Section
from benchmarks.targets import REASONS, Check, verdict
from protocol.errors import SettingsError

_HEAD = """\
# Benchmarks

`make docs` writes this page from benchmarks/results; `make bench` measures it all again (about 40
minutes on two cores; nothing else should run). `make bench ONLY=NAME` repeats one recording. For a
machine and a policy of your own: `tsqp bench`, which also writes a page with plots.
"""

_METHOD = """\
## How it is measured

- Figures are medians. Ratios are of two things measured in the same run, most of them in turns:
  milliseconds belong to the machine, ratios less so.
- Models are random weights in the shape of a published one (here Llama-3.2-1B, bfloat16, unless a
  table says otherwise). Each policy and each baseline runs in a process of its own.
- A *step* is a whole prompt, or one token of each sequence. *Overhead* is a step less Embedding and
  LM head computed in the TEE: what a fast accelerator cannot take away. The published client has
  the service do these two, which a service that answers at once does for nothing; with them, the
  comparison would be of matrix products.
- Steps are timed without an observer. Where their time goes is measured in further steps.
"""


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Read what is recorded, by name. Raises SettingsError for a file that is no JSON object."""
    found = {}
    for recording in RECORDINGS:
        path = folder / f"{recording.name}.json"
        if not path.exists():
            continue
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SettingsError(str(path), got=f"no JSON ({error})", expected="JSON") from None
        if not isinstance(document, dict):
            raise SettingsError(str(path), got=type(document).__name__, expected="a JSON object")
        found[recording.name] = document
    return found


def _repeat(documents: Documents, names: Sequence[str]) -> list[str]:
    """Say how to repeat recordings, and when they were made."""
    lines = []
    commands = {recording.name: recording.shown for recording in RECORDINGS}
    for name in names:
        about = documents.get(name, {}).get("recorded", {})
        made = (
            f" (recorded {about['created'][:10]}; load of the minute before"
            f" {about['load_before']:.1f})"
            if about
            else ""
        )
        lines.append(f"- `{about.get('command', commands[name])}`{made}")
    return ["Repeat with:", "\n".join(lines)]


def _summary(checked: Sequence[tuple[Section, list[Check] | None]]) -> str:
    rows = []
    for section, checks in checked:
        link = f"[{section.title}](#{_anchor(section.title)})"
        if checks is None:
            rows.append((link, "", "", "", "not recorded"))
            continue
        rows += [
            (link if not place else "", check.what, check.wanted, check.reached, verdict(check))
            for place, check in enumerate(checks)
        ]
    return markdown(("target", "case", "wanted", "measured", "reached"), rows, texts=2)


def _anchor(title: str) -> str:
    kept = (letter for letter in title.lower() if letter.isalnum() or letter in " -")
    return "".join(kept).replace(" ", "-")


def _machines(documents: Documents) -> list[str]:
    """Name each machine once, with the recordings made on it if there are several."""
    found: dict[str, list[str]] = {}
    for name, document in documents.items():
        report = document.get("report")
        machine = report["setup"]["machine"] if report else document["machine"]
        text = ", ".join(f"{key} {value}" for key, value in machine.items())
        found.setdefault(text.replace("_", " "), []).append(name)
    if len(found) == 1:
        return [f"Machine: {next(iter(found))}."]
    lines = [f"- {text}: {', '.join(names)}" for text, names in found.items()]
    return ["Machines:", "\n".join(lines)] if lines else []


def benchmarks_page(documents: Documents) -> str:
    """Return the text of docs/benchmarks.md."""
    checked: list[tuple[Section, list[Check] | None]] = []
    bodies: list[str] = []
    for section in SECTIONS:
        bodies += [f"## {section.title}", section.about]
        missing = [name for name in section.sources if name not in documents]
        if missing:
            only = " ".join(f"`make bench ONLY={name}`" for name in missing)
            bodies.append(f"Not recorded yet: {only}.")
            checked.append((section, None))
            continue
        checks, parts = section.build(documents)
        checked.append((section, checks))
        bodies += parts
        missed = [check for check in checks if check.ok is False]
        if missed:
            what = "; ".join(f"{c.what}: {c.reached}, wanted {c.wanted}" for c in missed)
            bodies.append(f"**Not reached:** {what}. {REASONS.get(section.key, '')}".rstrip())
        bodies += _repeat(documents, section.sources)
    targets = [(section, checks) for section, checks in checked if checks is None or checks]
    head = [_HEAD.rstrip(), "## Targets", _summary(targets), _METHOD.rstrip()]
    return "\n\n".join([*head, *_machines(documents), *bodies]) + "\n"


def main(arguments: list[str]) -> None:
    """Write the page to the file that is named. Raises SettingsError."""
    if len(arguments) != 1:
        raise SettingsError("python -m benchmarks.tables", got=repr(arguments), expected="one file")
    Path(arguments[0]).write_text(benchmarks_page(read_results(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
