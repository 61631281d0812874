"""Attacks are found by name, by path and by entry point; what is none is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import tsqp.lab.leak
from tee_side.plugins import PluginError, classes_in
from tee_side.policy.placement import load_policy
from tsqp.lab.leak.attack import Attack, AttackError
from tsqp.lab.leak.attacks import direct, vocabulary
from tsqp.lab.leak.attacks.direct import Logits
from tsqp.lab.leak.registry import ATTACKS, find_attacks

ONE = """
from tsqp.lab.leak.attack import Attack, Reading

class Family(Attack):
    reads = "something"
    source = "this file"
    control = "tsqp"

    def refuses(self, view):
        return None

    def read(self, view, work):
        return iter(())

class One(Family):
    name = "one"
    published = 0.5
"""
TWO = f"""{ONE}
class Two(One):
    name = "two"
"""
SAID = {
    "name": "'mine'",
    "reads": "'x'",
    "source": "'x'",
    "control": "'tsqp'",
    "published": "0.5",
}


def mine(path: Path, **changed: str) -> str:
    """Write an attack that says some things, and return the file's path."""
    lines = [f"    {name} = {value}" for name, value in {**SAID, **changed}.items() if value]
    text = ["from tsqp.lab.leak.attack import Attack", "class Mine(Attack):", *lines]
    (path / "mine.py").write_text("\n".join(text), encoding="utf-8")
    return str(path / "mine.py")


# ------------------------------------------------------------------------------------- built in


def test_there_are_attacks_of_every_module() -> None:
    modules = {attack.__module__.rpartition(".")[2] for attack in ATTACKS.builtin.values()}
    folder = Path(inspect.getfile(tsqp.lab.leak)).parent / "attacks"
    assert modules == {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_names_are_unique_and_no_attack_is_lost() -> None:
    """Of two of one name a table would hold the last."""
    folder = Path(inspect.getfile(tsqp.lab.leak)).parent / "attacks"
    written = sum(
        line.startswith("    name: ClassVar[str] = ")
        for path in folder.glob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    assert len(ATTACKS.builtin) == written
    assert ATTACKS.names() == sorted(ATTACKS.builtin)


@pytest.mark.parametrize("name", ATTACKS.builtin)
def test_a_builtin_attack_is_found_by_its_own_name(name: str) -> None:
    (found,) = find_attacks(name)
    assert found.name == name
    assert not inspect.isabstract(found)
    assert isinstance(found(), Attack)
    assert found.reads
    assert found.source


@pytest.mark.parametrize("name", ATTACKS.builtin)
def test_a_builtin_attack_has_controls_that_load(name: str) -> None:
    """Something crosses under them, as floats or integers as they say."""
    attack = ATTACKS.builtin[name]
    here = Path(inspect.getfile(tsqp.lab.leak)).parent
    for control in filter(None, (attack.control, attack.integer_control)):
        by_path = control.endswith((".toml", ".py"))
        policy = load_policy(str(here / control) if by_path else control)
        assert policy.services
        if control == attack.integer_control:
            assert policy.arithmetic == "int8"


def test_a_modules_attacks_are_its_own_in_the_order_of_its_text() -> None:
    """Without families, and without what it imports."""
    assert [one.name for one in classes_in(direct, Attack)] == [
        "token-ids",
        "logits",
        "nearest-embedding",
    ]
    assert [one.name for one in classes_in(vocabulary, Attack)] == [
        "vocabulary",
        "vocabulary-rows",
        "vocabulary-features",
        "vocabulary-both",
    ]


# -------------------------------------------------------------------------------------- by path


def test_a_file_brings_one_attack_or_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, text, names in (("one.py", ONE, ["one"]), ("two.py", TWO, ["one", "two"])):
        (tmp_path / file).write_text(text, encoding="utf-8")
        assert [attack.name for attack in find_attacks(str(tmp_path / file))] == names
    monkeypatch.chdir(tmp_path)
    assert [attack.name for attack in find_attacks("one.py")] == ["one"]
    assert [attack.name for attack in find_attacks("./two.py")] == ["one", "two"]


@pytest.mark.parametrize(
    "text", ["", "from tsqp.lab.leak.attacks.direct import Logits\n", ONE.partition("class One")[0]]
)
def test_a_file_without_an_attack_of_its_own_is_refused(tmp_path: Path, text: str) -> None:
    """One that it imports is none, nor is a family."""
    (tmp_path / "none.py").write_text(text, encoding="utf-8")
    with pytest.raises(AttackError) as caught:
        find_attacks(str(tmp_path / "none.py"))
    assert caught.value.where == str(tmp_path / "none.py")
    assert (caught.value.got, caught.value.expected) == ("no attack", "a subclass of Attack")


@pytest.mark.parametrize("text", ["1 +", "raise ValueError('no')", "import no_such_module_of_mine"])
def test_a_file_that_is_broken_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.py").write_text(text, encoding="utf-8")
    with pytest.raises(PluginError) as caught:
        find_attacks(str(tmp_path / "broken.py"))
    assert str(tmp_path / "broken.py") in caught.value.where
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        find_attacks(str(tmp_path / "none.py"))
    assert caught.value.got == "no such file"


@pytest.mark.parametrize("attribute", ["reads", "source", "control", "published"])
def test_an_attack_says_what_every_attack_has_to(tmp_path: Path, attribute: str) -> None:
    with pytest.raises(PluginError) as caught:
        find_attacks(mine(tmp_path, **{attribute: ""}))
    assert "attack Mine" in caught.value.where
    assert caught.value.got == f"no {attribute}"


@pytest.mark.parametrize("published", ["0", "0.0", "-0.5", "1.01", "95"])
def test_what_is_published_is_a_share(tmp_path: Path, published: str) -> None:
    """Of 0 every control would work."""
    with pytest.raises(PluginError) as caught:
        find_attacks(mine(tmp_path, published=published))
    assert caught.value.got == f"published = {published}"
    (found,) = find_attacks(_other(tmp_path))
    assert found.published == 1


def _other(folder: Path) -> str:
    other = folder / "other"
    other.mkdir()
    return mine(other, published="1")


@pytest.mark.parametrize("published", ["'much'", "None"])
def test_what_is_published_is_a_number(tmp_path: Path, published: str) -> None:
    with pytest.raises(PluginError):
        find_attacks(mine(tmp_path, published=published))


def test_an_attack_without_its_methods_cannot_be_made(tmp_path: Path) -> None:
    (found,) = find_attacks(mine(tmp_path))
    with pytest.raises(TypeError, match="abstract"):
        found()


# -------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize("name", ["nope", "", "Logits", "logits ", "token_ids"])
def test_an_unknown_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(AttackError) as caught:
        find_attacks(name)
    assert caught.value.got == repr(name)
    assert all(attack in caught.value.expected for attack in ATTACKS.builtin)


class _Entry:
    def __init__(self, name: str, found: object) -> None:
        self.name = name
        self.value = f"package:{name}"
        self._found = found

    def load(self) -> object:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def install(monkeypatch: pytest.MonkeyPatch, name: str, found: object) -> None:
    def entry_points(**selection: Any) -> list[_Entry]:
        assert selection["group"] == "tsqp.attacks"
        return [_Entry(name, found)] if selection.get("name", name) == name else []

    monkeypatch.setattr("tee_side.plugins.entry_points", entry_points)


def test_an_attack_of_an_installed_package_is_found_by_its_entry_points_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Theirs(Logits):
        name = "theirs"

    install(monkeypatch, "theirs", Theirs)
    assert find_attacks("theirs") == [Theirs]
    assert ATTACKS.names() == sorted([*ATTACKS.builtin, "theirs"])
    assert "theirs" not in ATTACKS.builtin
    with pytest.raises(AttackError, match="theirs"):
        find_attacks("nope")


@pytest.mark.parametrize("found", [3, Logits(), object, direct])
def test_an_entry_point_that_is_no_attack_is_refused_by_its_place(
    monkeypatch: pytest.MonkeyPatch, found: object
) -> None:
    install(monkeypatch, "theirs", found)
    with pytest.raises(AttackError) as caught:
        find_attacks("theirs")
    assert caught.value.where == "entry point package:theirs"
    assert caught.value.expected == "a subclass of Attack"


def test_an_entry_point_that_does_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "theirs", ImportError("no module named theirs"))
    with pytest.raises(PluginError) as caught:
        find_attacks("theirs")
    assert caught.value.where == "entry point package:theirs"


def test_an_installed_package_cannot_replace_a_builtin_attack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Theirs(Logits):
        name = "logits"

    install(monkeypatch, "logits", Theirs)
    assert find_attacks("logits") == [Logits]
    assert ATTACKS.names() == sorted(ATTACKS.builtin)
