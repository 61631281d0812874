"""The page says what the report says, and nothing is written into a page that is none."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tests.unit.tsqp.leak.reports import sample
from tsqp.lab.leak.cost import read_recorded
from tsqp.lab.leak.page import BEGIN, END, PICTURES_OF, at_another_shape, main, write_page
from tsqp.lab.leak.words import count_words, judged, rate_words, verdict

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
    assert [row[0].strip("| `") for row in rows] == [one.title for one in report.policies]
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


def test_the_cost_may_be_that_of_a_shape_where_offloading_pays(page: Path, tmp_path: Path) -> None:
    costs = Path(__file__).parents[4] / "benchmarks" / "results" / "bench_null_unix.json"
    report, cost_of, read_of = at_another_shape(sample(), read_recorded(costs))
    overheads = {
        one.policy: one.cost.overhead_ms for one in report.policies if one.cost is not None
    }
    # That is the point: what the TEE sends away costs less than what it computes alone.
    assert overheads["shielded"] < overheads["tee-only"]
    assert (cost_of, read_of) == ("llama-3.2-1b, service answers at once", sample().setup.model)
    path = tmp_path / "leakage.json"
    path.write_text(sample().model_dump_json(), encoding="utf-8")
    main([str(path), str(page), DEMO, str(costs)])
    drawn = page.with_name("leakage").joinpath("cost.svg").read_text(encoding="utf-8")
    assert f"<!-- overhead of a decoded token, ms ({cost_of}) -->" in drawn
    assert "cost of llama-3.2-1b's shape (`make leak`):" in page.read_text(encoding="utf-8")


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
