"""The page needs nothing but itself, shows what was read, and escapes it."""

from __future__ import annotations

import re
from base64 import b64decode
from xml.etree import ElementTree as ET

import pytest

from tsqp.lab.leak.html import render_html
from tsqp.lab.leak.words import verdict

from ..bench.test_html import Page
from .reports import piece, policy, reconstruction, report, run, sample, score, shielded, unjudged


@pytest.fixture(scope="module")
def complete() -> str:
    return render_html(sample())


def test_nothing_is_loaded_from_anywhere(complete: str) -> None:
    page = Page(complete)
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in page.found}
    for _, attributes in page.found:
        for name in {"src", "href", "action", "srcset"} & set(attributes):
            assert str(attributes[name]).startswith(("data:image/svg+xml;base64,", "#"))
    outside = re.sub(r"base64,[A-Za-z0-9+/=]+", "", complete)
    assert "://" not in outside
    assert "@import" not in outside
    assert "url(" not in outside


def test_the_style_of_the_bench_page_is_there(complete: str) -> None:
    """It is taken out of that page: its parts must be found."""
    (style,) = re.findall(r"<style>(.*?)</style>", complete, re.DOTALL)
    for rule in (".scroll", "figcaption", ".missing", "@media print", ".said .wrong"):
        assert rule in style
    assert "{%" not in complete
    assert complete.startswith("<!doctype html>")
    assert complete.count("<!doctype html>") == 1


def test_links_lead_somewhere(complete: str) -> None:
    page = Page(complete)
    names = {attributes.get("id") for _, attributes in page.found}
    links = [str(attributes["href"])[1:] for attributes in page.all("a")]
    assert links
    assert set(links) <= names


def test_pictures_are_svg_with_words_for_those_who_do_not_see_them(complete: str) -> None:
    pictures = Page(complete).all("img")
    assert len(pictures) == 3  # costs, and two curves
    for picture in pictures:
        svg = b64decode(str(picture["src"]).partition(",")[2])
        assert ET.fromstring(svg).tag.endswith("svg")
        assert picture["alt"]


def test_what_was_read_comes_first(complete: str) -> None:
    assert complete.index("<h2>What was read</h2>") < complete.index("<h2>Summary</h2>")
    assert complete.count("<h2>What was read</h2>") == 1


def test_everything_found_is_there(complete: str) -> None:
    made = sample()
    text = Page(complete).text
    for one in made.policies:
        assert one.summary in text
        assert verdict(one) in text
    for words in (
        made.setup.command,
        "AMD EPYC",
        "Lengths, visible under every mask",
        "float-noise: recovery against sigma",
        "(48 tokens of the prompt never left the TEE)",
        "stip: every attack and place",
        "two-server (service): controls and work",
        "Attacks that find nothing to do",
        "integers under a pad",
        "97.7% of 512",
        "nothing crosses: no operator leaves the TEE",
        "2,048 tokens of prompts and 2,048 of answers",
    ):
        assert words in text, words


def test_wrong_tokens_are_told_from_right_ones() -> None:
    made = reconstruction().model_copy(update={"pieces": (piece("a", "a"), piece("b", "x"))})
    page = render_html(report(policy("p", run("a", score(2048)), read=made)))
    assert '<span class="right">a</span><span class="wrong">x</span>' in page
    assert "<span>a</span><span>b</span>" in page


def test_text_is_text() -> None:
    made = reconstruction().model_copy(
        update={"pieces": (piece("<script>alert(1)</script>", "</style><img src=x>"),)}
    )
    one = policy("p", run("<b>a</b>", score(2048)), read=made)
    page = render_html(report(one, incomplete="<i>stopped</i>"))
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert not {"script", "b", "i"} & {tag for tag, _ in Page(page).found}


def test_an_attack_that_did_not_work_is_no_low_rate() -> None:
    text = Page(render_html(report(unjudged()))).text
    assert "! row-mix: row-space did not work (control: 11.9% (n 512) of 95.0%" in text
    assert "attack did not work: row-space" in text
    assert "0.1%" not in text
    assert "not above chance" not in text


def test_an_incomplete_report_is_a_page() -> None:
    empty = Page(render_html(report(incomplete="KeyboardInterrupt")))
    assert "! The run is incomplete: KeyboardInterrupt." in empty.text
    assert "No policy was attacked." in empty.text
    assert empty.all("img") == []
    part = Page(render_html(report(shielded(), incomplete="stopped"))).text
    assert "What was read" in part
    assert "Noise" not in part


def test_equal_reports_give_equal_pages(complete: str) -> None:
    assert render_html(sample()) == complete
