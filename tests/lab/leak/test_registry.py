"""Attacks are found by name, by path and by entry point; what is none is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tsqp.lab.leak
from tee_side.plugins import PluginError
from tee_side.policy.placement import load_policy
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import Attack, AttackError
from tsqp.lab.leak.attacks.direct import Logits
from tsqp.lab.leak.registry import ATTACKS, find_attacks

HERE = Path(inspect.getfile(tsqp.lab.leak)).parent
SAID = {"name": "'mine'", "reads": "'x'", "source": "'x'", "control": "'tsqp'", "published": "1"}
HEAD = "from tsqp.lab.leak.attack import Attack\n"


def attack(kind: str = "Mine", base: str = "Attack", **changed: str) -> str:
    """Return the text of an attack that says some things."""
    said = [f"    {name} = {value}" for name, value in {**SAID, **changed}.items() if value]
    return "\n".join([f"class {kind}({base}):", *said, ""])


def find(folder: Path, text: str) -> list[type[Attack]]:
    # A file is read once: each has a name of its own.
    path = folder / f"mine{len(list(folder.iterdir()))}.py"
    path.write_text(text, encoding="utf-8")
    return find_attacks(str(path))


def test_every_attack_in_the_folder_is_found_by_its_name_and_has_controls_that_load() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (HERE / "attacks").glob("*.py"))
    assert len(ATTACKS.builtin) == text.count("\n    name: ClassVar[str] = ")
    for name in ATTACKS.names():
        (found,) = find_attacks(name)
        assert (found.name, inspect.isabstract(found)) == (name, False)
        for control in filter(None, (found.control, found.integer_control)):
            policy = load_policy(str(HERE / control) if control.endswith(".toml") else control)
            assert policy.services
            assert (policy.arithmetic == "int8") or control != found.integer_control


def test_a_file_brings_its_own_attacks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that it imports, nor a family."""
    family = attack("Family", name="")
    several = HEAD + family + attack("One", "Family", name="'one'")
    several += (
        attack("Two", "One", name="'two'") + "from tsqp.lab.leak.attacks.direct import Logits"
    )
    assert [found.name for found in find(tmp_path, several)] == ["one", "two"]
    monkeypatch.chdir(tmp_path)
    assert [found.name for found in find_attacks("mine0.py")] == ["one", "two"]
    (one, *_) = find_attacks("./mine0.py")
    with pytest.raises(TypeError, match="abstract"):
        one()


@each_row(
    ("text", "got"),
    [
        ("", "no attack"),
        ("from tsqp.lab.leak.attacks.direct import Logits", "no attack"),
        (HEAD + attack(name=""), "no attack"),
        ("1 +", None),
        ("raise ValueError('no')", None),
        ("import no_such_module_of_mine", None),
        *((HEAD + attack(**{lacking: ""}), f"no {lacking}") for lacking in list(SAID)[1:]),
        # Of 0 every control would work.
        *(
            (HEAD + attack(published=value), f"published = {value}")
            for value in ("0", "-0.5", "95")
        ),
        (HEAD + attack(published="'much'"), None),
    ],
)
def test_a_file_without_a_whole_attack_is_refused_in_one_line(
    tmp_path: Path, text: str, got: str | None
) -> None:
    with pytest.raises((AttackError, PluginError)) as caught:
        find(tmp_path, text)
    assert got in (None, caught.value.got)
    assert "\n" not in str(caught.value)
    with pytest.raises(PluginError, match="no such file"):
        find_attacks(str(tmp_path / "none.py"))


class Theirs(Logits):
    name = "theirs"


@each_row(
    ("name", "loaded", "found"),
    [
        ("theirs", Theirs, Theirs),
        # A package cannot replace a built-in attack.
        ("logits", Theirs, Logits),
        ("theirs", Logits(), None),
    ],
)
def test_an_installed_package_brings_attacks_by_entry_points(
    name: str, loaded: object, found: type[Attack] | None
) -> None:
    def entry_points(group: str, **selection: Any) -> list[SimpleNamespace]:
        assert group == "tsqp.attacks"
        entry = SimpleNamespace(name=name, value=f"package:{name}", load=lambda: loaded)
        return [entry] if selection.get("name", name) == name else []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tee_side.plugins.entry_points", entry_points)
        assert ATTACKS.names() == sorted({*ATTACKS.builtin, name})
        if found is not None:
            assert find_attacks(name) == [found]
            return
        with pytest.raises(AttackError, match="entry point package:theirs"):
            find_attacks(name)
        with pytest.raises(AttackError, match=r"'Logits', expected one of .*logits.* theirs"):
            find_attacks("Logits")
