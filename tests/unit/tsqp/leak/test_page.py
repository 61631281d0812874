"""The page says what the report says, and nothing is written into a page that is none."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tests.unit.tsqp.leak.reports import sample
from tsqp.leak.page import BEGIN, END, main, write_page
from tsqp.leak.table import verdict


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "leakage.md"
    path.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n", encoding="utf-8")
    return path


def test_what_was_measured_stands_between_the_markers(page: Path) -> None:
    report = sample()
    write_page(report, page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == [one.policy for one in report.policies]
    for row, policy in zip(rows, report.policies, strict=True):
        assert row[-1].removesuffix(" |") == verdict(policy)
        # No rate without its n.
        assert (row[6] == "-") == (row[7] == "-")


def test_writing_twice_changes_nothing(page: Path) -> None:
    write_page(sample(), page)
    pictures = page.with_name("leakage")
    first = {path.name: path.read_bytes() for path in [page, *sorted(pictures.iterdir())]}
    write_page(sample(), page)
    assert first == {path.name: path.read_bytes() for path in [page, *sorted(pictures.iterdir())]}
    assert "reconstruction.svg" in first
    for name, content in first.items():
        if name.endswith(".svg"):
            ET.fromstring(content)


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"{BEGIN} only", encoding="utf-8")
    with pytest.raises(SettingsError, match="no markers"):
        write_page(sample(), path)
    assert [one.name for one in tmp_path.iterdir()] == ["page.md"]


def test_the_command_wants_a_report(tmp_path: Path, page: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(SettingsError, match="a report of tsqp leak --json"):
        main([str(other), str(page)])
    with pytest.raises(SettingsError, match="a report and a page"):
        main([])
    other.write_text(sample().model_dump_json(), encoding="utf-8")
    main([str(other), str(page)])
    assert "old" not in page.read_text(encoding="utf-8")
