"""One session as the attacker reads it, beside what was said: for a terminal, and as a picture.

Text comes from the model: what would break the layout or act on a terminal is written as an escape.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape

from tsqp.lab.leak.model import Piece, Reconstruction, Report
from tsqp.lab.leak.words import judged, verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Part = Literal["prompt", "answer"]

PARTS: tuple[Part, ...] = ("prompt", "answer")
# Of a token where nothing was guessed.
NO_GUESS = "[?]"
# Tokens of each part that are shown: a picture is to be taken in, and the report has all.
_MOST = 240

# ------------------------------------------------------------------------------------- words


def visible(text: str, *, ascii_only: bool = False) -> str:
    """Return a text of one line without anything invisible: those characters as escapes."""
    shown = (
        # A mark alone would stand on the last letter of the token before.
        character.encode("unicode_escape").decode("ascii")
        if place == 0 and unicodedata.combining(character)
        else _shown(character, ascii_only)
        for place, character in enumerate(text)
    )
    return "".join(shown)


def _shown(character: str, ascii_only: bool) -> str:
    # Controls, formats and separators: what moves a cursor or turns the direction of writing.
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")
    # The backslash, so that an escape can be told from text that looks like one.
    if hidden or character == "\\" or (ascii_only and not character.isascii()):
        return character.encode("unicode_escape").decode("ascii")
    return character


def read_words(piece: Piece, *, ascii_only: bool = False) -> str:
    """Return what was read for a token."""
    return NO_GUESS if piece.read is None else visible(piece.read, ascii_only=ascii_only)


def unseen_words(reconstruction: Reconstruction) -> str:
    """Say how many tokens stayed; empty if none did."""
    tokens = f"{reconstruction.unseen:,} token{'s' if reconstruction.unseen != 1 else ''}"
    return f"({tokens} of the prompt never left the TEE)" if reconstruction.unseen else ""


def outcome(reconstruction: Reconstruction) -> str:
    """Say how much of the session was read, by which attack."""
    right = sum(piece.right for piece in reconstruction.pieces)
    return (
        f"{right:,} of {len(reconstruction.pieces):,} tokens read, by {reconstruction.attack} at"
        f" {reconstruction.where}"
    )


def part_of(reconstruction: Reconstruction, part: Part) -> tuple[list[Piece], int]:
    """Return the tokens of the prompt or the answer that are shown, and how many more there are."""
    pieces = [piece for piece in reconstruction.pieces if piece.part == part]
    return pieces[:_MOST], max(0, len(pieces) - _MOST)


def more_words(more: int) -> str:
    """Say how many tokens are not shown; empty if all are."""
    return f" (and {more:,} more)" if more else ""


# ---------------------------------------------------------------------------------- terminal


def as_text(
    reconstruction: Reconstruction, *, marked: bool = False, ascii_only: bool = False
) -> Text:
    """Return real text and reading, right tokens green and wrong ones red.

    `marked`: wrong ones in brackets as well, for where there is no colour; then brackets of the
    text itself are written as escapes.
    """
    from rich.text import Text

    made = Text()
    made.append(outcome(reconstruction), style="bold")
    if reconstruction.unseen:
        made.append(f"\n{unseen_words(reconstruction)}", style="dim")
    for part in PARTS:
        pieces, more = part_of(reconstruction, part)
        if not pieces:
            continue
        rest = (more_words(more), "dim")
        made.append(f"\n{part + ',':7} real: ", style="bold")
        for piece in pieces:
            made.append(_plain(visible(piece.real, ascii_only=ascii_only), marked))
        made.append(*rest)
        made.append(f"\n{part + ',':7} read: ", style="bold")
        for piece in pieces:
            made.append(_read(piece, marked, ascii_only), style="green" if piece.right else "red")
        made.append(*rest)
    return made


def _read(piece: Piece, marked: bool, ascii_only: bool) -> str:
    words = read_words(piece, ascii_only=ascii_only)
    if piece.read is None:
        return words
    words = _plain(words, marked)
    return words if piece.right or not marked else f"[{words}]"


def _plain(words: str, marked: bool) -> str:
    return words.replace("[", "\\[").replace("]", "\\]") if marked else words


def render(reconstruction: Reconstruction, console: Console) -> None:
    """Print it, as far as the console can: without colours wrong tokens are in brackets."""
    console.print(
        as_text(
            reconstruction,
            marked=console.color_system is None or console.no_color,
            ascii_only=console.options.ascii_only,
        ),
        overflow="fold",
    )


# ----------------------------------------------------------------------------------- picture


@dataclass(frozen=True)
class Panel:
    """A policy in the picture. `verdict`: in words; no reconstruction: there is none to show."""

    policy: str
    verdict: str
    reconstruction: Reconstruction | None


def panels(report: Report) -> list[Panel]:
    """Return a panel for each policy.

    Where an attack did not work, what another one misread is not shown: it would look like cover.
    """
    return [
        Panel(policy.title, verdict(policy), policy.reconstruction if judged(policy) else None)
        for policy in report.policies
    ]


# Pixels. A letter's width is that of the column, whatever font there is: `textLength` sees to it.
_LETTER, _LINE, _EDGE, _GAP = 7.0, 19.0, 16.0, 28.0
_COLUMN = 62
_WIDTH = 2 * _EDGE + 2 * _COLUMN * _LETTER + _GAP
_COLOURS = {"right": ("#d9f2e3", "#0b5c33"), "wrong": ("#fde0dc", "#a11d10")}
_FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def svg(shown: Sequence[Panel]) -> str:
    """Draw what was said beside what was read, a panel a policy; wrong tokens are underlined.

    Equal panels give equal pictures. The background is white, so it reads on a dark page.
    """
    lines: list[str] = []
    y = _EDGE
    for panel in shown:
        y = _panel(lines, panel, y) + 18
    height = y - 18 + _EDGE
    size = f'width="{_WIDTH:.0f}" height="{height:.0f}" viewBox="0 0 {_WIDTH:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{_FONT}" font-size="11.5">'
    title = "<title>What was said, and what the service read</title>"
    return "\n".join(
        [head, title, '<rect width="100%" height="100%" fill="#fff"/>', *lines, "</svg>"]
    )


def _panel(lines: list[str], panel: Panel, y: float) -> float:
    """Draw a panel that begins at `y`; returns where it ends."""
    right = _EDGE + _COLUMN * _LETTER + _GAP
    y += 13
    lines.append(_words(panel.policy, _EDGE, y, "#111", weight="bold", size=14))
    lines.append(_words(panel.verdict, _WIDTH - _EDGE, y, "#333", anchor="end", size=12))
    y += 8
    lines.append(f'<path d="M{_EDGE:g} {y:g}H{_WIDTH - _EDGE:g}" stroke="#c5ccd3"/>')
    y += 17
    made = panel.reconstruction
    if made is None:
        lines.append(_words("There is nothing to show as read.", _EDGE, y, "#68727c"))
        return y + 4
    lines.append(_words("what was said", _EDGE, y, "#68727c"))
    lines.append(_words(f"what {made.attack} read at {made.where}", right, y, "#68727c"))
    y += 8
    if made.unseen:
        y = _unseen(lines, made, y)
    for part in PARTS:
        pieces, more = part_of(made, part)
        if not pieces:
            continue
        y += 12
        lines.append(_words(part + more_words(more), _EDGE, y, "#68727c", size=10))
        y += 5
        ends = []
        for x, read in ((_EDGE, False), (right, True)):
            tokens = [(read_words(p) if read else visible(p.real), p.right) for p in pieces]
            ends.append(_flow(lines, tokens, x, y, coloured=read))
        y = max(ends)
    return y


def _unseen(lines: list[str], made: Reconstruction, y: float) -> float:
    box = f'x="{_EDGE:g}" y="{y:g}" width="{_WIDTH - 2 * _EDGE:g}" height="22" rx="3"'
    lines.append(f'<rect {box} fill="#e6e9ec"/>')
    lines.append(_words(unseen_words(made), _EDGE + 8, y + 15, "#4a545e"))
    return y + 24


def _flow(
    lines: list[str], tokens: Sequence[tuple[str, bool]], left: float, top: float, *, coloured: bool
) -> float:
    """Set tokens line by line in a column; returns where the last line ends."""
    row = 0
    for row, column, cells, words, right in _placed(tokens):
        x, y = left + column * _LETTER, top + row * _LINE
        width = cells * _LETTER
        fill, ink = _COLOURS["right" if right else "wrong"] if coloured else ("#f3f5f7", "#1d2329")
        box = f'x="{x + 0.5:g}" y="{y:g}" width="{width - 1:g}" height="{_LINE - 3:g}" rx="2"'
        lines.append(f'<rect {box} fill="{fill}"/>')
        line = ' text-decoration="underline"' if coloured and not right else ""
        lines.append(
            f'<text x="{x:g}" y="{y + 12:g}" fill="{ink}" xml:space="preserve"'
            f' textLength="{width:g}" lengthAdjust="spacingAndGlyphs"{line}>'
            f"{escape(words)}</text>"
        )
    return top + (row + 1) * _LINE


def _placed(tokens: Sequence[tuple[str, bool]]) -> Iterator[tuple[int, int, int, str, bool]]:
    """Yield each token, or the pieces of one that is too long: row, column, cells, words, right."""
    from rich.cells import cell_len, chop_cells

    row, column = 0, 0
    for words, right in tokens:
        for part in chop_cells(words, _COLUMN) or [words]:
            cells = max(1, cell_len(part))
            if column and column + cells > _COLUMN:
                row, column = row + 1, 0
            yield row, column, cells, part, right
            column += cells


def _words(
    words: str,
    x: float,
    y: float,
    colour: str,
    *,
    weight: str = "normal",
    anchor: str = "start",
    size: float = 11.5,
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size:g}" font-weight="{weight}"'
        f' text-anchor="{anchor}" font-family="DejaVu Sans, system-ui, sans-serif">'
        f"{escape(visible(words))}</text>"
    )
