"""The page says what the report says, and nothing is written into a page that is none."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tests.unit.tsqp.leak.reports import sample
from tsqp.leak.page import BEGIN, END, PICTURES_OF, main, write_page
from tsqp.leak.words import count_words, judged, rate_words, verdict

DEMO, SHAPE = PICTURES_OF, "shape"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "leakage.md"
    sections = [f"{BEGIN.format(name)}\nold {name}\n{END.format(name)}" for name in (DEMO, SHAPE)]
    path.write_text("\n\n".join(["before", *sections, "after\n"]), encoding="utf-8")
    return path


def test_what_was_measured_stands_between_the_markers(page: Path) -> None:
    report = sample()
    write_page(report, page, DEMO)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old demo" not in text
    assert "old shape" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == [one.policy for one in report.policies]
    for row, policy in zip(rows, report.policies, strict=True):
        assert row[-1].removesuffix(" |") == verdict(policy)
        # No rate without its n.
        assert (row[6] == "-") == (row[7] == "-")
        if (score := judged(policy)) is not None:
            parts = [rate_words(score.prompt), rate_words(score.answer), count_words(score.whole)]
            assert row[-4:-1] == parts


def test_writing_twice_changes_nothing(page: Path) -> None:
    write_page(sample(), page, DEMO)
    pictures = page.with_name("leakage")
    first = {path.name: path.read_bytes() for path in [page, *sorted(pictures.iterdir())]}
    write_page(sample(), page, DEMO)
    assert first == {path.name: path.read_bytes() for path in [page, *sorted(pictures.iterdir())]}
    assert "reconstruction.svg" in first
    for name, content in first.items():
        if name.endswith(".svg"):
            ET.fromstring(content)


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"{BEGIN.format(DEMO)} only", encoding="utf-8")
    with pytest.raises(SettingsError, match="no markers"):
        write_page(sample(), path, DEMO)
    assert [one.name for one in tmp_path.iterdir()] == ["page.md"]


def test_the_command_wants_a_report(tmp_path: Path, page: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(SettingsError, match="a report of tsqp leak --json"):
        main([str(other), str(page), SHAPE])
    with pytest.raises(SettingsError, match="REPORT PAGE SECTION"):
        main([])
    other.write_text(sample().model_dump_json(), encoding="utf-8")
    main([str(other), str(page), SHAPE])
    text = page.read_text(encoding="utf-8")
    assert "old shape" not in text
    assert "old demo" in text


def test_a_section_of_random_tokens_has_no_pictures_and_no_costs_that_were_not_measured(
    page: Path,
) -> None:
    report = sample()
    free = [one.model_copy(update={"cost": None}) for one in report.policies]
    write_page(report.model_copy(update={"policies": tuple(free)}), page, SHAPE)
    text = page.read_text(encoding="utf-8")
    assert "![" not in text
    assert "overhead" not in text
    assert not list(page.with_name("leakage").iterdir())
    (columns,) = [line for line in text.splitlines() if line.startswith("| policy")]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert {line.count(" | ") for line in rows} == {columns.count(" | ")}


def test_pictures_are_shown_with_the_commands_that_make_them(page: Path) -> None:
    write_page(sample(), page, DEMO)
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"!\[.*\]\((.*)\)", text)
    assert sorted(links) == sorted(
        f"leakage/{path.name}" for path in page.with_name("leakage").iterdir()
    )
    assert text.count("`tsqp leak ") == len(links) + 1
