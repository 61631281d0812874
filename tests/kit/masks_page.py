"""The text of docs/masks.md: `python -m tests.kit.masks_page FILE` writes it (`make docs`)."""

import sys
from collections.abc import Iterable
from pathlib import Path

from tsqp.catalogue import MaskEntry, needs_of, our_masks

_HEAD = """\
# Masks

For researchers and reviewers. Afterwards you know what each mask hides, what it is known not to
hide, and where it comes from.

A mask hides a tensor before it leaves the TEE, and undoes that in the reply. `make docs` writes
this page from the classes: `pad` in `tee_side/protect/masks`, the research masks in
`tsqp/lab/research`. `tsqp masks` also lists masks of installed packages.
[write-a-mask.md](write-a-mask.md) says what the kinds are and how to add a mask.

**Broken** means that the known break recovers tokens where the weights are public. The attacker is
the service, which also knows the policy and the code. Lengths and timing are visible under every
mask. **Tolerance** is the largest difference from the plain result, relative to its largest
element, in float32; 0 is exact.
"""

_COLUMNS = (
    "mask",
    "kind",
    "hides",
    "known break",
    "broken",
    "source",
    "cost",
    "operators",
    "tolerance",
)


def masks_page() -> str:
    """Return the text of docs/masks.md: the masks that ship with us, whatever is installed."""
    entries = [MaskEntry(mask) for mask in our_masks().values()]
    lines = [_HEAD, _row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
    lines += [_row(_cells(entry)) for entry in entries]
    for entry in entries:
        lines += ["", f"## {entry.mask.name}", "", entry.about, *_options(entry)]
    return "\n".join(lines) + "\n"


def _cells(entry: MaskEntry) -> list[str]:
    return [
        f"[`{entry.mask.name}`](#{entry.mask.name})",
        entry.mask.kind,
        entry.mask.hides,
        entry.mask.known_break,
        "yes" if entry.mask.broken else "not known to be",
        entry.mask.source,
        entry.mask.cost,
        ", ".join(f"`{operator}`" for operator in entry.operators),
        f"{entry.mask.tolerance:g}",
    ]


def _options(entry: MaskEntry) -> list[str]:
    """List what a policy may set, and what the mask needs, a line each."""
    options = [
        f"- option `{option.name}`: {option.values}; default: {option.default_text}"
        for option in entry.options
    ]
    needs = needs_of(entry.mask)
    return options + ([f"- needs {', '.join(needs)}"] if needs else [])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(masks_page(), encoding="utf-8")
