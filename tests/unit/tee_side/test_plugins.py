"""Masks and policies of a user's own: files and installed packages, checked, named and refused."""

import json
import sys
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from protocol.errors import InputError, ManifestError, PluginError, PolicyError, TsqpError
from tee_side import plugins
from tee_side.plugins import checking_files, load_module, load_object, sources
from tee_side.policy.placement import load_policy, policy_names
from tee_side.protect.masks.mask import Pad, all_masks, find_mask
from tee_side.protect.verification import find_checks
from tee_side.remote.call import find_registered
from tests.kit.model import policy_of
from tests.kit.rows import each_row

ONE = """
from typing import ClassVar
from tee_side.protect.masks.mask import Masked
from tsqp.mask_kinds import RowMask
from tsqp.lab.research.row_masks import RowMix

class One(RowMix):
    name: ClassVar[str] = "one"
"""
TWO = f"""{ONE}
class Two(One):
    name: ClassVar[str] = "two"
"""
HALF = """
from tsqp.mask_kinds import RowMask
class Half(RowMask):
    name = "half"
    hides = known_break = source = cost = "x"
    broken = True
    tolerance = 0.1
"""
POLICY = """
from tee_side.policy.placement import Policy
from tee_side.words import OPERATORS
POLICY = Policy(name="mine", summary="a test", operators=dict.fromkeys(OPERATORS, "tee"))
"""


def _file(folder: Path, text: str) -> Path:
    """Write a file of a name that no other row of a table has used: a file is run once."""
    path = folder / f"mine{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    return path


def test_a_file_is_run_once_whatever_path_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    # Named like a module of the library, and like a file elsewhere.
    for path, value in ((tmp_path / "json.py", "object()"), (tmp_path / "other/json.py", "'b'")):
        path.write_text(f"VALUE = {value}\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "json.py")
    first = load_object(str(tmp_path / "json.py"), "VALUE")
    assert load_object("./json.py", "VALUE") is load_object("link.py", "VALUE") is first
    assert load_object("other/json.py", "VALUE") == "b"
    for path in (tmp_path, tmp_path / "none.py"):
        with pytest.raises(PluginError, match="got no such file, expected a Python file"):
            load_module(path)
    assert sys.modules["json"] is json


def test_a_file_is_checked_each_time_and_what_was_checked_is_what_runs(tmp_path: Path) -> None:
    path, other = tmp_path / "mine.py", tmp_path / "other.py"
    path.write_text("VALUE = 1\n")
    other.write_text("raise KeyError('it was run')")
    checked: list[tuple[Path, bytes]] = []

    def check(at: Path, content: bytes) -> None:
        checked.append((at, content))
        path.write_text("VALUE = 'exchanged'")
        if at == other:
            raise ManifestError(str(at), got="another file", expected="the one that is pinned")

    with checking_files(check):
        assert [load_object(str(path), "VALUE") for _ in range(2)] == [1, 1]
        assert checked == [(path, b"VALUE = 1\n")] * 2
        with pytest.raises(ManifestError):
            load_module(other)
        path.write_text("VALUE = 3")
    assert load_object(str(path), "VALUE") == 1
    assert len(checked) == 3
    assert sources[load_module(path).__name__] == b"VALUE = 1\n"
    # One that failed is run again the next time.
    with pytest.raises(PluginError):
        load_module(other)
    other.write_text("VALUE = 'mended, and of another length'")
    assert load_object(str(other), "VALUE") == "mended, and of another length"


@each_row(
    ("text", "said"),
    [
        (
            "raise ValueError('two\\nlines')",
            ": got ValueError: two lines, expected a file that run",
        ),
        (
            "from tee_side.policy.placement import Placement\n"
            "Placement(place='gpu', mask='nope', verify='none')",
            ": Placement.mask: got 'nope', expected one of cloak-segment, ",
        ),
        ("", ": got nothing named POLICY, expected POLICY = ..."),
        ("POLICY = 3", ": got 3, expected a tee_side.policy.placement.Policy"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_its_path(
    tmp_path: Path, text: str, said: str
) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_policy(str(path))
    assert str(caught.value).startswith(f"{path}{said}")
    assert "\n" not in str(caught.value)
    # For people who debug their file.
    assert (caught.value.__cause__ is None) == ("POLICY" in said or "Policy" in said)


@each_row(
    ("text", "wanted", "said"),
    [
        (TWO, "", ": got 2 masks (One, Two), expected one (FILE.py:Class picks one)"),
        (TWO, ":Three", ": got 0 masks (none), expected one named Three"),
        # What a file imports is not its own.
        (ONE[: ONE.index("class")], "", ": got 0 masks (none), expected one (FILE.py:Class picks "),
        ("raise KeyError('x')", "", ": got KeyError: 'x', expected a file that runs"),
        (HALF, "", ": mask Half: got no mask, expected what every mask of its kind has to say"),
        *(
            (HALF.replace(said, ""), "", f": mask Half: got no {name}, mask, expected what every ")
            for name, said in (
                *((name, f"{name} = ") for name in ("hides", "known_break", "source")),
                *(("cost", "cost = "), ("broken", "broken = True")),
                ("tolerance", "tolerance = 0.1"),
            )
        ),
        (HALF.replace("True", "'no'"), "", ": mask Half: got no mask"),
        (f"{ONE}    uniform = True\n", "", ": mask One: got uniform = True and broken = True"),
        # It says how the class is called, so its base says it.
        (f"{ONE}    kind = 'additive'\n", "", ": mask One: got a kind of its own"),
        (
            "from tee_side.protect.masks.mask import RowMask",
            "",
            ": got ImportError: RowMask is in tsqp.mask_kinds, expected a file",
        ),
    ],
)
def test_a_mask_file_without_one_good_mask_is_refused(
    tmp_path: Path, text: str, wanted: str, said: str
) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(TsqpError) as caught:
        find_mask(f"{path}{wanted}")
    assert str(caught.value).startswith(f"{path}{said}")


def test_a_mask_file_lies_beside_its_policy(tmp_path: Path) -> None:
    assert find_mask(_file(tmp_path, ONE).name, tmp_path).name == "one"


class Theirs(Pad):
    name = "theirs"


FAILING = ImportError("no module\nthat it needs")
A_POLICY = policy_of()


@each_row(
    ("group", "find", "theirs", "ours", "names", "said"),
    [
        ("tsqp.policies", load_policy, A_POLICY, "shielded", policy_names, "a tee_side.policy.pla"),
        ("tsqp.masks", find_mask, Theirs, "pad", all_masks().names, "a subclass of a mask kind"),
    ],
)
def test_what_an_installed_package_brings_is_found_by_its_name(
    group: str, find: Any, theirs: object, ours: str, names: Any, said: str
) -> None:
    own = find(ours)
    # Among them what is of another kind, what fails, one in place of ours, and two of one name.
    entries = {"theirs": theirs, "number": 3, "one": Pad(), "class": object, "failing": FAILING}
    twice = [("twice", theirs)] * 2
    given = [
        SimpleNamespace(name=name, value=f"package:{name}", load=Mock(side_effect=repeat(found)))
        for name, found in (*entries.items(), (ours, theirs), *twice)
    ]

    def installed(group: str, *, wanted: str = group) -> list[Any]:
        return [one for one in given if group == wanted]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tee_side.plugins.installed", installed)
        assert find("theirs") is theirs
        assert find(ours) == own != theirs
        assert all_masks().named("pad") is Pad
        # A mask is uniform by its own word alone.
        assert (Pad.uniform, Theirs.uniform) == (True, False)
        assert {*entries, ours, "twice"} <= set(names())
        for name in ("number", "one", "class"):
            with pytest.raises(TsqpError, match=f"entry point package:{name}: got .*{said}"):
                find(name)
        for name, text in {
            "failing": "entry point package:failing: got ImportError: no module that it needs",
            "twice": "got package:twice and package:twice for 'twice', expected one of them",
            "no-such": "got 'no-such', expected one of .*theirs.*, or a path to a ",
        }.items():
            with pytest.raises(TsqpError, match=text):
                find(name)
        # What is not asked for is not imported.
        assert load_policy("shielded").masks == [Pad()]


def test_each_group_is_read_once() -> None:
    group = all_masks().group
    assert "row-rotation" in {entry.name for entry in plugins.installed(group)}
    assert not plugins.installed("tsqp.none")
    assert plugins.installed(group) is plugins.installed(group)


def test_what_no_installed_package_brings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tee_side.plugins.installed", Mock(return_value=[]))
    for lacking in (
        lambda: find_checks("mine", "float"),
        lambda: find_registered("mine", ["lm_head"]),
    ):
        with pytest.raises(PolicyError, match="expected an installed package that registers"):
            lacking()
