"""Masks and policies of a user's own: files and installed packages, checked, named and refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import InputError, ManifestError, MaskError, PolicyError, TsqpError
from tee_side.plugins import PluginError, checking_files, load_module, load_object, source_of
from tee_side.policy.placement import builtin_policies, load_policy, policy_names
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


def test_a_file_that_failed_is_run_again_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("raise KeyError")
    with pytest.raises(PluginError):
        load_module(path)
    path.write_text("VALUE = 'mended, and of another length'")
    assert load_object(str(path), "VALUE") == "mended, and of another length"


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


@each_row("name", ["missing.py", "folder", "folder.py"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    for folder in ("folder", "folder.py"):
        (tmp_path / folder).mkdir(exist_ok=True)
    for load in (load_module, lambda path: find_mask(str(path))):
        with pytest.raises(PluginError, match="got no such file, expected a Python file"):
            load(tmp_path / name)


def test_a_policy_may_be_a_python_file_and_name_a_mask_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    (tmp_path / "mine.py").write_text(POLICY)
    assert load_policy(str(tmp_path / "mine.py")).name == "mine"
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "two.py").write_text(TWO)
    text = 'place = "gpu", verify = "none", mask = { name = "masks/two.py:Two" }'
    (tmp_path / "p.toml").write_text(
        'name = "p"\nsummary = ""\n[operators]\nembedding = "tee"\nlm_head = "tee"\n'
        + "".join(f"{name} = {{ {text} }}\n" for name in ("qkv_proj", "o_proj"))
        + "".join(f'{n} = "tee"\n' for n in ("attn_scores", "attn_values"))
        + "".join(f'{n} = "tee"\n' for n in ("gate_up_proj", "down_proj"))
    )
    assert [mask.name for mask in load_policy(str(tmp_path / "p.toml")).masks] == ["two"]


# ---------------------------------------------------------------------------------------- masks


@each_row("name", MASKS.names())
def test_a_mask_is_found_by_its_own_name(name: str) -> None:
    assert find_mask(name).name == name


@each_row("name", ["nope", "", "Pad", "pad ", "row_mix"])
def test_an_unknown_mask_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(MaskError) as caught:
        find_mask(name)
    assert caught.value.got == repr(name)
    assert all(mask in caught.value.expected for mask in MASKS.names())


def test_a_mask_file_is_found_from_the_folder_given_or_where_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text(ONE)
    found = find_mask("one.py", tmp_path)
    assert issubclass(found, Mask)
    assert found.name == "one"
    assert find_mask(str(tmp_path / "one.py"), Path("/nowhere")) is found
    monkeypatch.chdir(tmp_path)
    assert find_mask("./one.py") is find_mask("one.py") is found


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


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function by which packages bring entries of a group, and there are no others."""

    def go(group: str, *given: tuple[str, object]) -> None:
        entries = [_Entry(*one) for one in given]

        def entry_points(*, group: str, name: str | None = None) -> list[_Entry]:
            return [one for one in entries if group == wanted and name in (None, one.name)]

        wanted = group
        for module in ("policy.placement", "plugins"):
            monkeypatch.setattr(f"tee_side.{module}.entry_points", entry_points)

    return go


class Theirs(Pad):
    """A mask of an installed package."""

    name = "theirs"


FAILING = ImportError("no module\nthat it needs")
FAILED = "got ImportError: no module that it needs, expected one that loads"


def test_a_policy_of_an_installed_package_is_found_by_its_name(install: Install) -> None:
    theirs = policy_of()
    entries = {"theirs": theirs, "number": 3, "failing": FAILING, "shielded": theirs}
    install("tsqp.policies", *entries.items())
    assert load_policy("theirs") is theirs
    # One cannot take the place of ours.
    assert load_policy("shielded").name == "shielded"
    assert policy_names() == sorted({*builtin_policies(), *entries})
    with pytest.raises(PolicyError, match="entry point package:number: got 3, expected a tee_side"):
        load_policy("number")
    with pytest.raises(PluginError, match=f"entry point package:failing: {FAILED}"):
        load_policy("failing")
    with pytest.raises(PolicyError, match="theirs"):
        load_policy("no-such-policy")


def test_a_mask_of_an_installed_package_is_found_by_its_name(install: Install) -> None:
    entries = {"theirs": Theirs, "number": 3, "one": Pad(), "class": object, "failing": FAILING}
    install("tsqp.masks", *entries.items(), ("pad", Theirs))
    assert find_mask("theirs") is Theirs
    # The default policy asks for `pad`, and must get ours.
    assert find_mask("pad") is Pad
    assert load_policy("shielded").masks == [Pad()]
    assert MASKS.names() == sorted({*MASKS.builtin, *entries})
    for name in ("number", "one", "class"):
        with pytest.raises(
            MaskError, match=f"entry point package:{name}: got .*a subclass of a ma"
        ):
            find_mask(name)
    with pytest.raises(PluginError, match=f"entry point package:failing: {FAILED}"):
        find_mask("failing")


def test_two_packages_that_bring_one_name_are_refused(install: Install) -> None:
    install("tsqp.policies", ("theirs", policy_of()), ("theirs", policy_of()))
    with pytest.raises(PluginError, match="package:theirs and package:theirs for 'theirs'"):
        load_policy("theirs")
