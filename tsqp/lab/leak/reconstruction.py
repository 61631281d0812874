"""One session as the attacker reads it, beside what was said: for a terminal, and as a picture.

Text comes from the model: what would break the layout or act on a terminal is written as an escape.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from tsqp.lab.leak.model import LeakReport, PolicyLeak, Reconstruction
from tsqp.lab.leak.words import judged, verdict

if TYPE_CHECKING:
    from rich.console import Console

# Of a token where nothing was guessed.
_NO_GUESS = "[?]"
# Tokens of each part that are shown: a picture is to be taken in, and the report has all.
_MOST = 240
# Of a picture, in letters, and the colours of right and wrong tokens in it.
_WIDTH = 132
_RIGHT, _WRONG = "#0b5c33 on #d9f2e3", "underline #a11d10 on #fde0dc"
_SAID = "#1d2329 on #f3f5f7"
# Controls, formats and separators: what moves a cursor or turns the direction of writing.
_HIDDEN = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")
# Without the window and the fonts of the web that rich draws.
_SVG = """\
<svg viewBox="0 40 {width} {height}" width="{width}" xmlns="http://www.w3.org/2000/svg">
<title>What was said, and what the service read</title>
<style>.{unique_id}-matrix {{ font: {char_height}px "DejaVu Sans Mono", Menlo, Consolas, monospace;
}} {styles}</style>
<rect y="40" width="100%" height="100%" fill="#fff"/>
<defs>{lines}</defs>
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>"""


@dataclass(frozen=True)
class Passage:
    """The prompt or the answer: of each token what was said, what was read, whether it is right.

    `more`: how many tokens are left out; empty if none are.
    """

    name: str
    tokens: tuple[tuple[str, str, bool], ...]
    more: str


@dataclass(frozen=True)
class Panel:
    """A policy, its verdict, and a session as its best attack reads it, unless there is none.

    `outcome`: how much was read, by which attack; empty without one. `unseen`: what stayed.
    """

    policy: str
    verdict: str
    outcome: str = ""
    unseen: str = ""
    parts: tuple[Passage, ...] = ()


def panels(report: LeakReport, *, ascii_only: bool = False) -> list[Panel]:
    """Return a panel for each policy.

    Where an attack did not work, what another one misread is not shown: it would look like cover.
    """
    return [_panel(policy, ascii_only) for policy in report.policies]


def _panel(policy: PolicyLeak, ascii_only: bool) -> Panel:
    made = policy.reconstruction
    if made is None or judged(policy) is None:
        return Panel(policy.title, verdict(policy))
    right, every = sum(piece.right for piece in made.pieces), len(made.pieces)
    outcome = f"{right:,} of {every:,} tokens read, by {made.attack} at {made.where}"
    plural = "s" if made.unseen != 1 else ""
    unseen = f"({made.unseen:,} token{plural} of the prompt never left the TEE)"
    parts = (_part(made, name, ascii_only) for name in ("prompt", "answer"))
    shown = tuple(part for part in parts if part.tokens)
    return Panel(policy.title, verdict(policy), outcome, unseen if made.unseen else "", shown)


def _part(made: Reconstruction, name: str, ascii_only: bool) -> Passage:
    pieces = [piece for piece in made.pieces if piece.part == name]
    tokens = tuple(
        (
            visible(piece.real, ascii_only=ascii_only),
            _NO_GUESS if piece.read is None else visible(piece.read, ascii_only=ascii_only),
            piece.right,
        )
        for piece in pieces[:_MOST]
    )
    left = len(pieces) - len(tokens)
    return Passage(name, tokens, f" (and {left:,} more)" if left else "")


def visible(text: str, *, ascii_only: bool = False) -> str:
    """Return a text of one line without anything invisible: those characters as escapes."""
    # A mark at the beginning would stand on the last letter of the token before. The backslash
    # is escaped, so that an escape can be told from text that looks like one.
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if unicodedata.category(character) in _HIDDEN
        or character == "\\"
        or (place == 0 and unicodedata.combining(character))
        or (ascii_only and not character.isascii())
        else character
        for place, character in enumerate(text)
    )


def draw(
    panel: Panel, console: Console, right: str = "green", wrong: str = "red", said: str = ""
) -> None:
    """Print a panel: what was said beside what was read. `right`, `wrong`, `said`: styles.

    On a console without colours wrong tokens are in brackets, and brackets of the text are escaped.
    """
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    marked = console.color_system is None or console.no_color
    head = Table.grid(expand=True)
    head.add_column()
    head.add_column(justify="right")
    head.add_row(Text(panel.policy, style="bold"), panel.verdict)
    console.print("", head, Rule(style="dim", characters="\u2500"))
    if not panel.outcome:
        console.print(Text("There is nothing to show as read.", style="dim"))
        return
    console.print(Text("\n".join(filter(None, (panel.outcome, panel.unseen))), style="dim"))
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for part in panel.parts:
        real, read = Text(), Text()
        for token, guess, is_right in part.tokens:
            real.append(_escaped(token) if marked else token, style=said)
            shown = _escaped(guess) if marked and guess != _NO_GUESS else guess
            bare = is_right or not marked or guess == _NO_GUESS
            read.append(shown if bare else f"[{shown}]", style=right if is_right else wrong)
        name = f"{part.name}{part.more}"
        table.add_row(*(Text(f"{name}, as it was {end}", style="dim") for end in ("said", "read")))
        table.add_row(real, read)
    console.print(table)


def _escaped(words: str) -> str:
    return words.replace("[", "\\[").replace("]", "\\]")


def svg(shown: list[Panel]) -> str:
    """Draw panels as a picture on white; wrong tokens are underlined.

    Equal panels give equal pictures.
    """
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME

    console = Console(
        record=True, width=_WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    for panel in shown:
        draw(panel, console, _RIGHT, _WRONG, _SAID)
    return console.export_svg(
        title="", theme=DEFAULT_TERMINAL_THEME, code_format=_SVG, unique_id="tsqp"
    )
