"""Files of a user's own are run once, and what goes wrong in them is one line with their path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tee_side.plugins import PluginError, load_module, load_object


def test_an_object_is_found_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("VALUE = [1, 2]\n")
    assert load_object(str(path), "VALUE") == [1, 2]
    with pytest.raises(PluginError) as caught:
        load_object(str(path), "OTHER")
    assert (caught.value.where, caught.value.got) == (str(path), "nothing named OTHER")


def test_a_file_is_run_once_whatever_path_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("VALUE = object()\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.py").symlink_to(path)
    first = load_object(str(path), "VALUE")
    assert load_object("mine.py", "VALUE") is first
    assert load_object(str(tmp_path / "link.py"), "VALUE") is first


def test_two_files_of_the_same_name_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"VALUE = {folder!r}\n")
    assert load_object(str(tmp_path / "a" / "mine.py"), "VALUE") == "a"
    assert load_object(str(tmp_path / "b" / "mine.py"), "VALUE") == "b"


def test_a_file_can_be_named_like_a_module_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text("VALUE = 1\n")
    import json

    assert load_object(str(path), "VALUE") == 1
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ValueError('two\\nlines')", ["ValueError", "two lines"]),
        ("1 +", ["SyntaxError"]),
        (
            "from tee_side.policy.placement import Placement\n"
            "Placement(place='gpu', mask='nope', verify='none')",
            [": Placement.mask: got 'nope', expected one of cloak-segment, "],
        ),
        ("import no_such_module_of_mine", ["ModuleNotFoundError", "no_such_module_of_mine"]),
        (
            "from tsqp.lab.research.row_mix import RowMix\nRowMix(x=1)",
            [": RowMix.x: got 1, expected no such key"],
        ),
        (
            "from tee_side.policy.placement import Policy\n"
            "Policy(name='x', summary='y', operators={})",
            [": policy x: operators: got nothing for embedding, ", ", expected every operator pl"],
        ),
    ],
)
def test_what_a_file_raises_is_one_line_with_its_path(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(PluginError) as caught:
        load_module(path)
    said = str(caught.value)
    assert "\n" not in said
    assert said.count(": got ") == 1
    for word in [str(path), *words]:
        assert word in said
    # For whoever debugs their file.
    assert caught.value.__cause__ is not None


def test_a_file_that_failed_is_run_again_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("raise KeyError")
    with pytest.raises(PluginError):
        load_module(path)
    path.write_text("VALUE = 'mended, and of another length'")
    assert load_object(str(path), "VALUE") == "mended, and of another length"


@pytest.mark.parametrize("name", ["missing.py", "folder", "folder.py"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(PluginError, match="got no such file, expected a Python file"):
        load_module(tmp_path / name)
