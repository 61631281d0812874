"""The page needs nothing but itself, shows what was measured, and says what was not."""

from __future__ import annotations

import re
from base64 import b64decode
from html import escape
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from tsqp.lab.bench.caveats import caveats
from tsqp.lab.bench.findings import missing
from tsqp.lab.bench.html import render_html
from tsqp.lab.bench.model import Report

from .sample_report import partial_reports, sample_report, setup

PARTIAL = partial_reports()
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """What a page holds; fails where its elements are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def undrawn(report: Report) -> Report:
    """The same without timelines, of which the page would have many pictures."""
    runs = tuple(run.model_copy(update={"timelines": ()}) for run in report.policies)
    return report.model_copy(update={"policies": runs})


@pytest.fixture(scope="module")
def complete() -> str:
    return render_html(sample_report(layers=4))


def test_nothing_is_loaded_from_anywhere(complete: str) -> None:
    page = Page(complete)
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in page.found}
    for _, attributes in page.found:
        for name, value in attributes.items():
            if name in {"src", "href", "action", "srcset"}:
                assert value is not None
                assert value.startswith(("data:image/svg+xml;base64,", "#"))
    outside = re.sub(r"base64,[A-Za-z0-9+/=]+", "", complete)
    assert "://" not in outside
    assert "@import" not in outside
    assert "url(" not in outside


def test_links_lead_somewhere(complete: str) -> None:
    page = Page(complete)
    names = {attributes.get("id") for _, attributes in page.found}
    links = [attributes["href"] for attributes in page.all("a")]
    assert links
    assert {str(link)[1:] for link in links} <= names


def test_pictures_are_svg_with_words_for_those_who_do_not_see_them(complete: str) -> None:
    pictures = Page(complete).all("img")
    # Side by side, two phases, and three timelines of three policies; no growth of two sizes.
    assert len(pictures) == 3 + 9
    for picture in pictures:
        svg = b64decode(str(picture["src"]).partition(",")[2])
        assert ET.fromstring(svg).tag.endswith("svg")
        assert picture["alt"]


def test_the_first_chart_stands_before_everything_but_the_warnings(complete: str) -> None:
    for later in ("<h2>", "<table", "<ul>", "What this report lacks"):
        assert complete.index("<img") < complete.find(later) or later not in complete


def test_a_stage_that_no_step_has_is_not_explained() -> None:
    report = undrawn(sample_report(("tsqp",), lengths=(128,), batches=(1,), layers=1))
    terms = re.findall(r"<dt>([^<]*)</dt>", render_html(report))
    assert {"wire", "GPU"} <= set(terms)
    assert not {"mask", "unmask", "verify"} & set(terms)


def test_plots_come_before_tables(complete: str) -> None:
    assert complete.index("<img") < complete.index("<table")


def test_everything_measured_is_there(complete: str) -> None:
    report = sample_report(layers=4)
    text = Page(complete).text
    for run in report.policies:
        assert run.summary in text
        assert run.leakage_summary is not None
        assert run.leakage_summary in text
    for words in (
        "Whole requests",
        "TTFT ms",
        "TPOT ms",
        "Growth",
        "exponent",
        "published, prefill 512",
        "transformers, decode at 128 (mean of 16)",
        "Ping-pong",
        "layer by layer",
        "layer 3",
        "decode 8 at 128, 2 micro",
        report.setup.command,
        "AMD EPYC",
        "published, decode at 512 (mean of 64)",
    ):
        assert words in text, words
    assert "What this report lacks" not in text


def test_layers_are_split_into_operators_only_where_policies_are_compared() -> None:
    # Of one policy with one layer: prefill 512 and decode at 512 of six cases.
    text = Page(render_html(undrawn(sample_report(("attention-in-tee",), layers=1)))).text
    assert text.count("layer by layer") == 6
    # In six tables of operators, and in two of layers.
    assert text.count("silu_mul") == 6 + 2


def test_each_warning_is_said_once_at_the_top(complete: str) -> None:
    report = sample_report(layers=4)
    for warning in caveats(report):
        assert complete.count(warning) == 1
        assert f"! {warning}" in complete[: complete.index("<nav")]
    computed = undrawn(report.model_copy(update={"setup": setup(device="cpu")}))
    text = Page(render_html(computed)).text
    assert "upper bound" not in text
    assert "pads are made ahead" in text


def test_letters_are_of_one_size_in_all_pictures() -> None:
    report = undrawn(sample_report(("tsqp",), lengths=(128, 512), batches=(1,), layers=1))
    pictures = Page(render_html(report)).all("img")
    scales = set()
    for picture in pictures:
        svg = b64decode(str(picture["src"]).partition(",")[2]).decode()
        width = re.search(r'width="([\d.]+)pt"', svg)
        style = re.fullmatch(r"width: ([\d.]+)%", str(picture["style"]))
        assert width is not None
        assert style is not None
        scales.add(round(float(width[1]) / float(style[1]), 1))
    assert len(pictures) == 3
    assert len(scales) == 1


def test_policies_of_one_name_are_told_apart() -> None:
    text = Page(render_html(undrawn(sample_report(("tsqp", "tsqp"), layers=1)))).text
    assert "tsqp (2)" in text


def test_text_of_others_is_escaped() -> None:
    report = undrawn(sample_report(("tsqp",), layers=1))
    hostile = "<script>alert(1)</script>"
    run = report.policies[0].model_copy(update={"summary": hostile, "policy": "a<b>&"})
    page = render_html(
        report.model_copy(update={"policies": (run,), "setup": setup(model=hostile)})
    )
    assert hostile not in page
    assert escape(hostile) in page
    assert hostile in Page(page).text


@pytest.mark.parametrize("name", list(PARTIAL))
def test_partial_reports_say_what_they_lack(name: str) -> None:
    report = PARTIAL[name]
    text = Page(render_html(report)).text
    lacking = missing(report)
    assert ("What this report lacks" in text) == bool(lacking)
    for sentence in lacking:
        assert sentence in text
    assert report.setup.command in text


def test_without_a_service_nothing_is_disclosed() -> None:
    text = Page(render_html(undrawn(PARTIAL["tee-only"]))).text
    assert "nothing leaves the TEE" in text
    assert "no service" in text


def test_equal_reports_give_equal_pages() -> None:
    pages = [render_html(undrawn(sample_report(("tsqp",), layers=1))) for _ in range(2)]
    assert pages[0] == pages[1]
