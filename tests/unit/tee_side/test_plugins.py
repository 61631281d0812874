"""Masks and policies of a user's own: files and installed packages, checked, named and refused."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import InputError, ManifestError, MaskError, TsqpError
from tee_side.plugins import PluginError, checking_files, load_module, load_object, source_of
from tee_side.policy.placement import load_policy, policy_names
from tee_side.protect.masks.mask import AdditiveMask, Mask
from tee_side.protect.masks.pad import Pad
from tee_side.protect.masks.registry import MASKS, find_mask
from tests.kit.model import policy_of
from tests.kit.rows import each_row

ONE = """
from typing import ClassVar
from tee_side.protect.masks.mask import Masked, RowMask
from tsqp.lab.research.row_mix import RowMix

class One(RowMix):
    name: ClassVar[str] = "one"
"""
TWO = f"""{ONE}
class Two(One):
    name: ClassVar[str] = "two"
"""
CLAIMS = {
    "name": "'half'",
    **dict.fromkeys(("hides", "known_break", "source", "cost"), "'x'"),
    "broken": "True",
    "tolerance": "0.1",
}
PADDED = (files("tee_side") / "policy" / "builtin" / "shielded.toml").read_text(encoding="utf-8")
POLICY = """
from tee_side.policy.placement import Policy
from tee_side.words import OPERATORS
POLICY = Policy(name="mine", summary="a test", operators=dict.fromkeys(OPERATORS, "tee"))
"""


def _half(without: str = "") -> str:
    """Return a file of a row mask that has no methods, and leaves out one of its claims."""
    said = [f"    {name} = {value}" for name, value in CLAIMS.items() if name != without]
    head = ["from tee_side.protect.masks.mask import RowMask", "class Half(RowMask):"]
    return "\n".join([*head, *said])


def _file(folder: Path, text: str) -> Path:
    """Write a file of a name that no other row of a table has used: a file is run once."""
    path = folder / f"mine{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    return path


# ---------------------------------------------------------------------------------------- files


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
    assert source_of(load_module(path).__name__) == b"VALUE = 1\n"
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
        ("1 +", ": got SyntaxError: invalid syntax"),
        (
            "import no_such_module_of_mine",
            ": got ModuleNotFoundError: No module named 'no_such_mod",
        ),
        (
            "from tee_side.policy.placement import Placement\n"
            "Placement(place='gpu', mask='nope', verify='none')",
            ": Placement.mask: got 'nope', expected one of cloak-segment, ",
        ),
        (
            "from tsqp.lab.research.row_mix import RowMix\nRowMix(x=1)",
            ": RowMix.x: got 1, expected no such key",
        ),
        (
            POLICY.replace('"tee"', '"cpu"'),
            ": policy mine: embedding: place: got 'cpu', expected 'tee', 'gpu' or 'attested'",
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


def test_a_mask_file_is_found_from_the_folder_of_the_policy_file_or_where_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    path = tmp_path / "policy.toml"
    for mask, text in (("one.py", ONE), ("two.py:Two", TWO)):
        (tmp_path / mask[:6]).write_text(text)
        path.write_text(PADDED.replace('"pad"', f'"{mask}"').replace('"int8"', '"float"'))
        assert [found.name for found in load_policy(str(path)).masks] == [mask[:3]]
    found = find_mask("one.py", tmp_path)
    assert issubclass(found, Mask)
    assert find_mask(str(tmp_path / "one.py"), Path("/nowhere")) is found
    monkeypatch.chdir(tmp_path)
    assert find_mask("./one.py") is find_mask("one.py") is found


@each_row("name", ["missing.py", "folder", "folder.py"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    for folder in ("folder", "folder.py"):
        (tmp_path / folder).mkdir(exist_ok=True)
    for load in (load_module, lambda path: find_mask(str(path))):
        with pytest.raises(PluginError, match="got no such file, expected a Python file"):
            load(tmp_path / name)


# ---------------------------------------------------------------------------------------- masks


@each_row(
    ("text", "wanted", "said"),
    [
        (TWO, "", ": got 2 masks (One, Two), expected one (FILE.py:Class picks one)"),
        (TWO, ":Three", ": got 0 masks (none), expected one named Three"),
        # What a file imports is not its own.
        (ONE[: ONE.index("class")], "", ": got 0 masks (none), expected one (FILE.py:Class picks "),
        ("raise KeyError('x')", "", ": got KeyError: 'x', expected a file that runs"),
        (_half(), "", ": mask Half: got no mask, expected what every mask of its kind has to say"),
        *(
            (_half(name), "", f": mask Half: got no {name}, mask, expected what every mask of its")
            for name in list(CLAIMS)[1:]
        ),
        (_half().replace("= True", "= 'no'"), "", ": mask Half: got no mask"),
    ],
)
def test_a_mask_file_without_one_good_mask_is_refused(
    tmp_path: Path, text: str, wanted: str, said: str
) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(TsqpError) as caught:
        find_mask(f"{path}{wanted}")
    assert str(caught.value).startswith(f"{path}{said}")


def test_a_mask_claims_what_it_does_by_itself() -> None:
    class Theirs(Pad):
        name = "theirs"

    class Claims(Theirs):
        name = "claims"
        uniform = True

    assert (Pad.uniform, Theirs.uniform, Claims.uniform) == (True, False, True)
    with pytest.raises(MaskError, match="got uniform = True and broken = True"):
        type("Both", (Pad,), {"name": "both", "uniform": True, "broken": True})
    for changes in ({"broken": "no"}, {"tolerance": float("nan")}, {"tolerance": -0.1}):
        with pytest.raises(MaskError, match="expected True or False, and a number from 0"):
            type("Wrong", (Pad,), {"name": "wrong", **changes})
    said: dict[str, Any] = dict.fromkeys(CLAIMS, "x") | {"broken": True, "tolerance": 0.1}
    with pytest.raises(MaskError, match="got no draw, mask"):
        type("Half", (AdditiveMask,), said)


# --------------------------------------------------------------------------- installed packages


class _Entry:
    """An installed package's entry point."""

    def __init__(self, name: str, found: object) -> None:
        self.name, self.value = name, f"package:{name}"
        self._found = found

    def load(self) -> object:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def _install(patch: pytest.MonkeyPatch, wanted: str, *given: tuple[str, object]) -> None:
    """Let packages bring entries of a group, and no others."""
    entries = [_Entry(*one) for one in given]

    def entry_points(*, group: str, name: str | None = None) -> list[_Entry]:
        return [one for one in entries if group == wanted and name in (None, one.name)]

    for module in ("policy.placement", "plugins"):
        patch.setattr(f"tee_side.{module}.entry_points", entry_points)


class Theirs(Pad):
    """A mask of an installed package."""

    name = "theirs"


FAILING = ImportError("no module\nthat it needs")
A_POLICY = policy_of()


@each_row(
    ("group", "find", "theirs", "ours", "names", "said"),
    [
        ("tsqp.policies", load_policy, A_POLICY, "shielded", policy_names, "a tee_side.policy.pla"),
        ("tsqp.masks", find_mask, Theirs, "pad", MASKS.names, "a subclass of a mask kind"),
    ],
)
def test_what_an_installed_package_brings_is_found_by_its_name(
    group: str, find: Any, theirs: object, ours: str, names: Any, said: str
) -> None:
    own = find(ours)
    # Among them what is of another kind, what fails, one in place of ours, and two of one name.
    entries = {"theirs": theirs, "number": 3, "one": Pad(), "class": object, "failing": FAILING}
    twice = [("twice", theirs)] * 2
    with pytest.MonkeyPatch.context() as patch:
        _install(patch, group, *entries.items(), (ours, theirs), *twice)
        assert find("theirs") is theirs
        assert find(ours) == own != theirs
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
