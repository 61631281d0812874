"""Masks are found by name, by path and by entry point; what is none is refused with both names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import MaskError
from tee_side.plugins import PluginError
from tee_side.protect.masks.mask import AdditiveMask, Mask
from tee_side.protect.masks.pad import Pad
from tee_side.protect.masks.registry import MASKS, find_mask
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


@each_row("name", MASKS.names())
def test_masks_are_found_by_their_own_name(name: str) -> None:
    assert find_mask(name).name == name


@pytest.mark.parametrize("name", ["nope", "", "Pad", "pad ", "row_mix"])
def test_an_unknown_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(MaskError) as caught:
        find_mask(name)
    assert caught.value.got == repr(name)
    assert all(mask in caught.value.expected for mask in MASKS.names())


def test_a_file_is_found_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(ONE)
    mask = find_mask(str(tmp_path / "one.py"))
    assert mask.name == "one"
    assert issubclass(mask, Mask)
    # Kinds and masks that a file imports are not its own.
    assert mask.__module__ != Mask.__module__


def test_a_relative_path_starts_at_the_folder_given_or_where_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text(ONE)
    assert find_mask("one.py", tmp_path).name == "one"
    assert find_mask("./one.py", tmp_path).name == "one"
    monkeypatch.chdir(tmp_path)
    assert find_mask("one.py").name == "one"


def test_an_absolute_path_does_not_care_for_the_folder(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(ONE)
    assert find_mask(str(tmp_path / "one.py"), Path("/nowhere")).name == "one"


def test_the_class_of_a_file_with_several_has_to_be_named(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text(TWO)
    with pytest.raises(MaskError) as caught:
        find_mask(str(path))
    assert caught.value.got == "2 masks (One, Two)"
    assert find_mask(f"{path}:One").name == "one"
    assert find_mask(f"{path}:Two").name == "two"
    with pytest.raises(MaskError, match="one named Three"):
        find_mask(f"{path}:Three")


def test_a_file_without_a_mask_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.py"
    path.write_text("from tee_side.protect.masks.pad import Pad\n")
    with pytest.raises(MaskError, match=r"0 masks \(none\)"):
        find_mask(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="no such file"):
        find_mask(str(tmp_path / "missing.py"))


@pytest.mark.parametrize(
    "attribute", ["hides", "known_break", "broken", "source", "tolerance", "cost"]
)
def test_a_mask_that_does_not_say_what_it_claims_does_not_load(
    tmp_path: Path, attribute: str
) -> None:
    said = {
        "name": "'mine'",
        "hides": "'x'",
        "known_break": "'x'",
        "broken": "True",
        "source": "'x'",
        "tolerance": "0.1",
        "cost": "'x'",
    }
    del said[attribute]
    lines = [f"    {name} = {value}" for name, value in said.items()]
    path = tmp_path / "mine.py"
    path.write_text(
        "\n".join(
            ["from tee_side.protect.masks.mask import RowMask", "class Mine(RowMask):", *lines]
        )
    )
    with pytest.raises(PluginError) as caught:
        find_mask(str(path))
    assert attribute in str(caught.value)
    assert "Mine" in str(caught.value)


class _Entry:
    def __init__(self, name: str, found: object) -> None:
        self.name = name
        self.value = f"package:{name}"
        self._found = found

    def load(self) -> object:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def _install(monkeypatch: pytest.MonkeyPatch, name: str, found: object) -> None:
    def entry_points(**selection: Any) -> list[_Entry]:
        assert selection["group"] == "tsqp.masks"
        return [_Entry(name, found)] if selection.get("name", name) == name else []

    monkeypatch.setattr("tee_side.plugins.entry_points", entry_points)


def test_a_mask_of_an_installed_package_is_found_by_its_entry_points_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Theirs(Pad):
        name = "theirs"

    _install(monkeypatch, "theirs", Theirs)
    assert find_mask("theirs") is Theirs
    assert MASKS.names() == sorted([*MASKS.builtin, "theirs"])
    assert "theirs" not in MASKS.builtin


@pytest.mark.parametrize("found", [3, Pad(), object])
def test_an_entry_point_that_is_no_mask_is_refused_by_its_place(
    monkeypatch: pytest.MonkeyPatch, found: object
) -> None:
    _install(monkeypatch, "theirs", found)
    with pytest.raises(MaskError, match="entry point package:theirs"):
        find_mask("theirs")


def test_an_installed_package_cannot_replace_a_builtin_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default policy asks for `pad`, and must get ours."""

    class Theirs(Pad):
        name = "pad"

    _install(monkeypatch, "pad", Theirs)
    assert find_mask("pad") is Pad


def test_a_package_that_fails_is_refused_by_its_place_and_breaks_no_builtin_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, "theirs", ImportError("no module named theirs"))
    assert find_mask("pad") is Pad
    with pytest.raises(MaskError, match=r"expected one of .*, theirs, or a path"):
        find_mask("nope")
    with pytest.raises(PluginError) as caught:
        find_mask("theirs")
    assert str(caught.value) == (
        "entry point package:theirs: got ImportError: no module named theirs, expected one that"
        " loads"
    )


def test_a_mask_without_all_methods_of_its_kind_does_not_load() -> None:
    said = dict.fromkeys(("hides", "known_break", "source", "cost"), "x")
    with pytest.raises(MaskError) as caught:
        type("Half", (AdditiveMask,), {**said, "name": "half", "broken": True, "tolerance": 0.1})
    assert (caught.value.where, caught.value.got) == ("mask Half", "no draw, mask")


def test_uniform_numbers_have_to_be_claimed_by_the_class_itself() -> None:
    class Theirs(Pad):
        name = "theirs"

    class Claims(Theirs):
        name = "claims"
        uniform = True

    assert (Pad.uniform, Theirs.uniform, Claims.uniform) == (True, False, True)
    with pytest.raises(MaskError, match="got uniform = True and broken = True"):
        type("Both", (Pad,), {"name": "both", "uniform": True, "broken": True})
