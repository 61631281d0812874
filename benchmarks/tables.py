"""The page of measured figures, from what is recorded in benchmarks/results.

`python -m benchmarks.tables FILE` writes docs/benchmarks.md; a test fails when that file is stale.
Whether a target is reached is worked out from the figures; what is missing or missed is said.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDINGS, RESULTS
from benchmarks.sections import GAINED, SECTIONS, Documents, Section
from benchmarks.targets import REASONS, Check
from protocol.errors import SettingsError

_HEAD = """\
# Benchmarks

`make docs` writes this page from benchmarks/results. `make bench` measures everything again (about
40 minutes on two cores; nothing else should run); `make bench ONLY=NAME` repeats one recording.
`tsqp bench` measures your machine and policy.
"""

# What no recording has: the machine was borrowed.
_ON_A_GPU = """\
**On an accelerator nothing was measured since commit e18fae2**: none was at hand, so whether these
targets are reached is not known. The figures are that commit's, before there were compiled kernels,
shared memory or kernels for CUDA: one H100 (PCIe 5), 16 vCPU Xeon with AMX, torch 2.11, Unix
stream, both sides spinning. Targets are for shared memory. The GPU alone, unmasked, is a bf16
decode in one CUDA graph, a baseline of `tsqp bench --device cuda` that no GPU has run yet.

| `shielded`, context 128, 1b / 8b | at e18fae2 | wanted |
| --- | ---: | ---: |
| one token | 85.5 / 225 ms (`tee-only` 63.8 / -) | <= 2.4 / <= 8.3 ms |
| one token / the GPU alone, unmasked | - | <= 1.6 / <= 1.25 |
| one token at context 2048 | - | <= 3.1 / <= 14 ms |
| 8 rows / 32 rows, 1b | 142 ms / - | <= 4 / <= 10 ms |
| masked prompt of 512 (`shielded-prefill`) | 2,419 ms / - | <= 56 / <= 215 ms |
| `tee-only-int8` / `shielded`, one token | - | >= 5 / >= 8 |
"""

_METHOD = """\
## How it is measured

- Figures are medians. Ratios are of two things measured in the same run, most of them in turns;
  milliseconds belong to the machine.
- Models are random weights in the shape of a published one (Llama-3.2-1B, bfloat16, unless a table
  says otherwise). Each policy and each baseline runs in a process of its own.
- A *step* is a whole prompt, or one token of each sequence. *Overhead* is a step less Embedding and
  LM head computed in the TEE: what a fast accelerator cannot take away. (The published client
  leaves these two to the service, which is free when it answers at once.)
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


def _repeat(documents: Documents, names: Sequence[str]) -> str:
    """Say how to repeat recordings, and when they were made."""
    commands = {recording.name: recording.shown for recording in RECORDINGS}
    made = []
    for name in names:
        about = documents.get(name, {}).get("recorded", {})
        when = (
            f" (recorded {about['created'][:10]}; load of the minute before"
            f" {about['load_before']:.1f})"
            if about
            else ""
        )
        made.append(f"`{about.get('command', commands[name])}`{when}")
    return f"Repeat with {', '.join(made)}."


def _summary(checked: Sequence[tuple[Section, list[Check] | None]]) -> str:
    """List where all was reached and where not; the sections have the figures."""
    found: dict[str, list[str]] = {}
    for section, checks in checked:
        link = f"[{section.title}](#{_anchor(section.title)})"
        judged = [check for check in checks or () if check.ok is not None]
        reached = sum(bool(check.ok) for check in judged)
        if checks is None:
            found.setdefault("Not recorded", []).append(link)
        elif judged:
            how = "All reached" if reached == len(judged) else "Not all reached"
            found.setdefault(how, []).append(f"{link} ({reached} of {len(judged)})")
    return "\n".join(f"- **{how}:** {', '.join(links)}." for how, links in sorted(found.items()))


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
        checks, parts = _body(section, documents)
        checked.append((section, checks))
        bodies += parts
    opening, gained = _body(GAINED, documents)
    targets = [(GAINED, opening), *((s, c) for s, c in checked if c is None or c)]
    head = [_unwrapped(_HEAD), *gained, "## Targets", _summary(targets), _unwrapped(_ON_A_GPU)]
    return "\n\n".join([*head, _unwrapped(_METHOD), *_machines(documents), *bodies]) + "\n"


def _unwrapped(text: str) -> str:
    """Return a text with a line for each paragraph, point and row, as all others on the page."""
    return re.sub(r"(?<=[^\n])\n *(?=[^\n|#-])", " ", text.strip())


def _body(section: Section, documents: Documents) -> tuple[list[Check] | None, list[str]]:
    """Return what a section checks, None if something is not recorded, and its paragraphs."""
    about = section.about
    if section is not GAINED:  # made of recordings that other sections say how to repeat
        about += f" {_repeat(documents, section.sources)}"
    parts = [f"## {section.title}", about]
    missing = [name for name in section.sources if name not in documents]
    if missing:
        only = " ".join(f"`make bench ONLY={name}`" for name in missing)
        return None, [*parts, f"Not recorded yet: {only}."]
    checks, built = section.build(documents)
    parts += built
    missed = [check for check in checks if check.ok is False]
    if missed:
        what = "; ".join(f"{c.what}: {c.reached}" for c in missed)
        wanted = ", ".join(dict.fromkeys(c.wanted for c in missed))
        reason = REASONS.get(section.key, "")
        parts.append(f"**Not reached:** {what} (wanted {wanted}). {reason}".rstrip())
    return checks, parts


def main(arguments: list[str]) -> None:
    """Write the page to the file that is named. Raises SettingsError."""
    if len(arguments) != 1:
        raise SettingsError("python -m benchmarks.tables", got=repr(arguments), expected="one file")
    Path(arguments[0]).write_text(benchmarks_page(read_results(RESULTS)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
