"""What was read stands beside what was said, whatever characters are in it."""

from __future__ import annotations

from io import BytesIO, StringIO, TextIOWrapper
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from tsqp.lab.leak.model import Reconstruction
from tsqp.lab.leak.reconstruction import (
    Panel,
    as_text,
    outcome,
    panels,
    render,
    svg,
    visible,
)

from .reports import piece, reconstruction, report, sample, shielded, tee_only, unjudged

_SVG = "{http://www.w3.org/2000/svg}"


def with_pieces(*pairs: tuple[str, str | None]) -> Reconstruction:
    made = tuple(piece(real, read) for real, read in pairs)
    return reconstruction().model_copy(update={"pieces": made})


def printed(made: Reconstruction, *, width: int = 80, encoding: str = "utf-8") -> str:
    output = BytesIO()
    file = TextIOWrapper(output, encoding=encoding)
    render(made, Console(file=file, width=width, color_system=None))
    file.flush()
    return output.getvalue().decode(encoding)


def words_of(picture: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(picture).iter(f"{_SVG}text")]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" Weber,\n", " Weber,\\n"),
        ("a\tb\r", "a\\tb\\r"),
        ("\\n", "\\\\n"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\u202eabc", "\\u202eabc"),
        ("\u2028", "\\u2028"),
        ("\ud800", "\\ud800"),
        ("\u0301e", "\\u0301e"),
        ("e\u0301", "e\u0301"),
        ("caf\xe9", "caf\xe9"),
    ],
)
def test_what_cannot_be_seen_is_an_escape(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(text, ascii_only=True).isascii()


def test_right_tokens_are_green_and_wrong_ones_red() -> None:
    text = as_text(with_pieces(("Dear", "Dear"), (" Dr", " Mr"), (".", None)))
    found = {
        text.plain[s.start : s.end]: s.style for s in text.spans if s.style in ("green", "red")
    }
    assert found == {"Dear": "green", " Mr": "red", "[?]": "red"}
    assert "real: Dear Dr." in text.plain
    assert "read: Dear Mr[?]" in text.plain
    assert outcome(with_pieces(("a", "a"), ("b", None))).startswith("1 of 2 tokens read, by vocab")


def test_wrong_tokens_are_marked_where_there_is_no_colour() -> None:
    text = printed(with_pieces(("Dear", "Dear"), (" Dr", " Mr"), ("[x]", "[x]"), ("a", None)))
    assert "read: Dear[ Mr]\\[x\\][?]\n" in text
    coloured = StringIO()
    render(with_pieces((" Dr", " Mr")), Console(file=coloured, force_terminal=True, width=80))
    assert "[ Mr]" not in coloured.getvalue()
    assert "\x1b[" in coloured.getvalue()


def test_a_plain_terminal_gets_plain_characters() -> None:
    text = printed(with_pieces(("caf\xe9\n", "\u65e5"), ("\x1b[2J", "\x1b[2J")), encoding="ascii")
    assert "real: caf\\xe9\\n\\x1b\\[2J" in text
    assert "read: [\\u65e5]\\x1b\\[2J" in text
    assert max(map(len, printed(reconstruction((1, 2)), width=40).splitlines())) <= 40


def test_tokens_that_stayed_are_counted() -> None:
    assert "(48 tokens of the prompt never left the TEE)" in printed(reconstruction(unseen=48))
    assert "(1 token of the prompt" in printed(reconstruction(unseen=1))
    assert "never left" not in printed(reconstruction())
    panel = Panel("shielded", "v", reconstruction(unseen=48))
    assert "(48 tokens of the prompt never left the TEE)" in words_of(svg([panel]))


def test_a_long_session_is_cut_and_says_so() -> None:
    made = with_pieces(*[(f" t{i}", f" t{i}") for i in range(300)])
    assert " t239 (and 60 more)" in " ".join(printed(made).split("\n")).replace("  ", " ")
    picture = svg([Panel("p", "v", made)])
    assert "prompt (and 60 more)" in words_of(picture)
    assert " t240" not in words_of(picture)


def test_the_picture_has_both_texts_in_colours_that_tell() -> None:
    picture = svg(
        [Panel("stip", "reads 50.0% (n 2)", with_pieces((" Dr", " Dr"), (" no", " yes")))]
    )
    found = words_of(picture)
    assert found.count(" Dr") == 2
    for words in ("stip", "reads 50.0% (n 2)", " no", " yes", "what was said", "prompt"):
        assert words in found
    texts = {"".join(t.itertext()): t for t in ET.fromstring(picture).iter(f"{_SVG}text")}
    assert texts[" yes"].get("text-decoration") == "underline"
    assert texts[" yes"].get("fill") != texts[" Dr"].get("fill")
    assert texts[" Dr"].get("text-decoration") is None


def test_text_in_the_picture_is_text() -> None:
    strange = with_pieces(("<script>&", "]]>\x00"), ("\n\n", '"\ufffe'), ("", "\u65e5\u672c"))
    picture = svg([Panel("<p>", "<v>", strange)])
    assert "<script" not in picture
    assert {"<p>", "<v>", "<script>&", "]]>\\x00", "\\n\\n", "\u65e5\u672c"} <= set(
        words_of(picture)
    )
    assert {element.tag for element in ET.fromstring(picture).iter()} <= {
        f"{_SVG}{name}" for name in ("svg", "title", "rect", "path", "text")
    }


def test_nothing_is_drawn_beyond_the_edges() -> None:
    long = with_pieces(("x" * 500, "y" * 130), *[(" word", " other")] * 100)
    root = ET.fromstring(svg([Panel("p", "v", long), Panel("q", "v", reconstruction((1,)))]))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for box in list(root.iter(f"{_SVG}rect"))[1:]:
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
        assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height


def test_a_policy_with_nothing_to_show_is_there() -> None:
    (panel,) = [one for one in panels(sample()) if one.policy == tee_only().policy]
    assert (panel.verdict, panel.reconstruction) == ("nothing crosses", None)
    assert "There is nothing to show as read." in words_of(svg([panel]))


def test_a_misreading_is_not_shown_where_another_attack_did_not_work() -> None:
    made = unjudged().model_copy(update={"reconstruction": reconstruction(every=True)})
    (panel,) = panels(report(made))
    assert panel == Panel("row-mix", "attack did not work: row-space", None)
    (panel,) = panels(report(shielded()))
    assert panel.reconstruction is not None


def test_equal_panels_give_equal_pictures() -> None:
    assert svg(panels(sample())) == svg(panels(sample()))
    assert ET.fromstring(svg([])).tag == f"{_SVG}svg"
