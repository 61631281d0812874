"""Policies and masks of a user's own: Python files, mask files, installed packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.errors import InputError, PolicyError
from tee_side.plugins import PluginError
from tee_side.policy.layer_range import LayerRange
from tee_side.policy.placement import Placement, Policy, builtin_policies, load_policy, policy_names
from tee_side.protect.masks.pad import Pad
from tee_side.protect.masks.shares import Shares
from tee_side.refusals import first_problem
from tee_side.words import OPERATORS
from tests.unit.tee_side.policy_texts import LINEAR, policy_of, policy_toml, refusal

MASK_FILE = """
from typing import ClassVar
from tsqp.lab.research.row_mix import RowMix

class Mine(RowMix):
    name: ClassVar[str] = "mine"
"""


HALF_FILE = """
from tee_side.protect.masks.mask import RowMask

class Half(RowMask):
    name = "half"
    hides = known_break = source = cost = "x"
    broken = True
    tolerance = 0.1
"""


POLICY_FILE = """
from tee_side.policy.placement import Placement, Policy
from tee_side.words import OPERATORS

POLICY = Policy(
    name="mine",
    summary="a test",
    operators={operator: (Placement(place="tee"),) for operator in OPERATORS},
)
"""


def test_a_mask_file_is_found_from_the_folder_of_the_policy_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "mine.py").write_text(MASK_FILE)
    path = tmp_path / "policy.toml"
    path.write_text(
        policy_toml(o_proj='{ place = "gpu", mask = "masks/mine.py", verify = "none" }')
    )
    monkeypatch.chdir("/")
    assert [mask.name for mask in load_policy(str(path)).masks] == ["mine"]
    mask = '{ name = "masks/mine.py:Mine" }'
    path.write_text(policy_toml(o_proj=f'{{ place = "gpu", mask = {mask}, verify = "none" }}'))
    assert [mask.name for mask in load_policy(str(path)).masks] == ["mine"]


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("missing.py", "missing.py: got no such file, expected a Python file (.py)"),
        ("mine.py:Other", "mine.py: got 0 masks (none), expected one named Other"),
        ("empty.py", "empty.py: got 0 masks (none), expected one (FILE.py:Class picks one)"),
        ("fails.py", "fails.py: got KeyError: 'x', expected a file that runs"),
        (
            "half.py",
            "half.py: mask Half: got no mask, expected what every mask of its kind has to say and"
            " do",
        ),
    ],
)
def test_a_mask_file_that_is_not_there_or_has_no_mask_is_refused(
    tmp_path: Path, reference: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(MASK_FILE)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "fails.py").write_text("raise KeyError('x')")
    (tmp_path / "half.py").write_text(HALF_FILE)
    path = tmp_path / "policy.toml"
    placed = f'{{ place = "gpu", mask = "{reference}", verify = "none" }}'
    error = refusal(path, policy_toml(o_proj=placed))
    assert str(error) == f"{path}: policy mine: o_proj: mask: {tmp_path}/{said}"


def test_a_policy_may_be_a_python_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE)
    policy = load_policy(str(path))
    assert policy.name == "mine"
    policy.check(3)


def test_a_python_policy_is_refused_as_a_file_is(tmp_path: Path) -> None:
    """By a PolicyError, not pydantic's; behind a file's path where there is one."""
    with pytest.raises(PolicyError) as caught:
        policy_of({"o_proj": {"place": "gpu", "mask": Pad(), "verify": "none"}})
    expected = 'policy n: o_proj: got arithmetic = "float", expected "int8", which mask pad needs'
    assert str(caught.value) == expected
    with pytest.raises(PolicyError, match=r"^policy: name: got nothing, expected a value$"):
        Policy(summary="s", operators=dict.fromkeys(OPERATORS, "tee"))  # type: ignore[call-arg]
    with pytest.raises(PolicyError, match=r"^policy: got 3, expected "):
        Policy.model_validate(3)
    text = ": o_proj: place: got 'cpu', expected 'tee', 'gpu' or 'attested'"
    with pytest.raises(PolicyError, match=text):
        Policy.model_validate_json('{"name": "n", "summary": "", "operators": {"o_proj": "cpu"}}')
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE.replace('Placement(place="tee")', '{"place": "cpu"}'))
    with pytest.raises(InputError) as refused:
        load_policy(str(path))
    assert str(refused.value) == (
        f"{path}: policy mine: embedding: place: got 'cpu', expected 'tee', 'gpu' or 'attested'"
    )


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, "mask"),
        ({"mask": Pad()}, "verify"),
        ({"verify": "none"}, "mask"),
        ({"mask": None, "verify": "none"}, "mask"),
        ({"mask": "none", "verify": None}, "verify"),
    ],
)
def test_a_python_placement_that_leaves_states_mask_and_verify(
    given: dict[str, Any], key: str
) -> None:
    """None is not a way to say "none"."""
    with pytest.raises(ValidationError) as caught:
        Placement(place="gpu", **given)
    problem = first_problem(caught.value)
    assert key in (problem.where, *problem.path)
    with pytest.raises(PolicyError, match=rf"policy n: o_proj: {key}: got (None|nothing)"):
        policy_of({"o_proj": {"place": "gpu", **given}})


def test_a_python_policy_may_hold_masks_as_objects() -> None:
    leaves = (
        Placement(place="tee", layers=LayerRange(0, 0)),
        Placement(place="gpu", layers=LayerRange(1, None), mask=Shares(), verify="none"),
    )
    stays = (Placement(place="tee"),)
    policy = Policy(
        name="n",
        summary="s",
        arithmetic="int8",
        operators={name: leaves if name in LINEAR else stays for name in OPERATORS},
    )
    policy.check(3)
    assert policy.services == 2
    assert policy.at("o_proj", 0, "decode").mask is None
    assert policy.at("o_proj", 1, "decode").mask == Shares()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["POLICY"]),
        ("POLICY = 3", ["3", "Policy"]),
        ("POLICY = {'name': 'x'}", ["dict", "Policy"]),
        ("raise KeyError('x')", ["KeyError"]),
        ("POLICY =", ["SyntaxError"]),
        ("import no_such_module_of_mine", ["no_such_module_of_mine"]),
    ],
)
def test_a_python_file_without_a_policy_is_refused_by_its_path(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_policy(str(path))
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_python_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.py: got no such file"):
        load_policy(str(tmp_path / "missing.py"))


class _Entry:
    """An installed package's entry point."""

    def __init__(self, name: str, found: object) -> None:
        self.name = name
        self.value = f"package:{name}"
        self._found = found

    def load(self) -> object:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def _install(monkeypatch: pytest.MonkeyPatch, *entries: _Entry) -> None:
    def entry_points(*, group: str, name: str | None = None) -> list[_Entry]:
        assert group == "tsqp.policies"
        return [entry for entry in entries if name in (None, entry.name)]

    for module in ("policy.placement", "plugins"):
        monkeypatch.setattr(f"tee_side.{module}.entry_points", entry_points)


def test_a_policy_of_an_installed_package_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = policy_of()
    _install(monkeypatch, _Entry("theirs", theirs), _Entry("broken", 3))
    assert load_policy("theirs") is theirs
    assert {"theirs", "broken", *builtin_policies()} == set(policy_names())
    with pytest.raises(PolicyError, match="package:broken"):
        load_policy("broken")
    with pytest.raises(PolicyError, match="theirs"):
        load_policy("no-such-policy")


def test_two_packages_that_bring_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _Entry("theirs", policy_of()), _Entry("theirs", policy_of()))
    with pytest.raises(PluginError, match="package:theirs and package:theirs"):
        load_policy("theirs")


def test_an_installed_package_cannot_replace_a_builtin_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, _Entry("shielded", policy_of()))
    assert load_policy("shielded").name == "shielded"


def test_a_package_that_fails_is_refused_by_its_place_and_breaks_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = ImportError("no module\nthat it needs")
    _install(monkeypatch, _Entry("theirs", policy_of()), _Entry("failing", failing))
    masks = [_Entry(name, failing) for name in ("their-mask", "pad")]
    with monkeypatch.context() as patch:
        patch.setattr("tee_side.plugins.entry_points", lambda **_: masks)
        assert load_policy("shielded").masks == [Pad()]
    assert load_policy("theirs").name == "n"
    assert "failing" in policy_names()
    with pytest.raises(PluginError) as caught:
        load_policy("failing")
    assert str(caught.value) == (
        "entry point package:failing: got ImportError: no module that it needs, expected one that"
        " loads"
    )


def test_a_copy_that_was_not_validated_states_its_protection_too(tmp_path: Path) -> None:
    """pydantic's `model_copy` runs no validators: such a policy is refused before it is used."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from tee_side.policy.placement import Placement, load_policy\n"
        "base = load_policy('tee-only')\n"
        "leaves = Placement(place='tee').model_copy(update={'place': 'gpu'})\n"
        "POLICY = base.model_copy(update={'operators': {**base.operators, 'o_proj': (leaves,)}})\n"
    )
    with pytest.raises(PolicyError, match="o_proj: mask: got nothing"):
        load_policy(str(path)).check(4)
