"""Attacks are found by name and by path; a file without a whole attack is refused.

That those of installed packages are found by their entry points is tested for masks.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import tsqp.lab.leak
from tee_side.plugins import PluginError
from tee_side.policy.placement import load_policy
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import AttackError
from tsqp.lab.leak.registry import ATTACKS, find_attacks

HERE = Path(inspect.getfile(tsqp.lab.leak)).parent
SAID = {"name": "'mine'", "reads": "'x'", "source": "'x'", "control": "'tsqp'", "published": "1"}
HEAD = "from tsqp.lab.leak.attack import Attack\n"
IMPORTED = "from tsqp.lab.leak.attacks.direct import Logits\n"


def attack(**changed: str) -> str:
    said = [f"    {name} = {value}" for name, value in {**SAID, **changed}.items() if value]
    return "\n".join(["class Mine(Attack):", *said, ""])


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
    with pytest.raises(AttackError, match=r"'Logits', expected one of .*logits.*, or a path"):
        find_attacks("Logits")


@each_row(
    ("text", "got"),
    [
        (IMPORTED, "no attack"),
        ("1 +", None),
        *((HEAD + attack(**{lacking: ""}), f"no {lacking}") for lacking in list(SAID)[1:]),
        # Of 0 every control would work.
        (HEAD + attack(published="0"), "published = 0"),
        (HEAD + attack(published="1.01"), "published = 1.01"),
    ],
)
def test_a_file_without_a_whole_attack_is_refused_in_one_line(
    tmp_path: Path, text: str, got: str | None
) -> None:
    # A file is read once: each has a name of its own.
    path = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((AttackError, PluginError)) as caught:
        find_attacks(str(path))
    assert got in (None, caught.value.got)
    assert "\n" not in str(caught.value)
