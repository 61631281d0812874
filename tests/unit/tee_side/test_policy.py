"""Placement policies: what loads, and what is refused by which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from protocol.errors import PolicyError
from tee_side.policy import placement
from tee_side.policy.placement import builtin_policies, load_policy
from tee_side.protect.masks.pad import Pad
from tee_side.protect.masks.registry import find_mask
from tee_side.words import OPERATORS, Operator
from tests.kit.rows import each_row
from tests.unit.tee_side.policy_texts import CLEAR_TOML, LINEAR, leaves, policy_toml, refusal


@each_row("name", builtin_policies())
def test_every_builtin_policy_loads_under_its_own_name(name: str) -> None:
    policy = load_policy(name)
    assert policy.name == name
    assert policy.summary
    whole: set[Operator] = {"embedding", "segment", "lm_head"}
    assert set(policy.operators) == (whole if name.endswith("-segment") else set(OPERATORS))


@each_row(
    ("name", "on_gpu", "one_rpc_per_module"),
    [
        ("tee-only", set(), False),
        ("attention-in-tee", LINEAR, False),
        ("tsqp", set(OPERATORS), True),
        ("tsqp-permuted", set(OPERATORS), True),
        ("row-mix", set(OPERATORS) - {"embedding"}, False),
        ("row-rotation", LINEAR, False),
        ("stip", LINEAR, False),
        ("cloak", LINEAR, False),
        ("float-noise", LINEAR, False),
        ("quantized-clear", LINEAR, False),
        ("shielded", LINEAR | {"lm_head"}, False),
        ("shielded-prefill", LINEAR | {"lm_head"}, False),
        ("two-server", LINEAR, False),
    ],
)
def test_builtin_policies_place_what_their_names_say(
    name: str, on_gpu: set[Operator], one_rpc_per_module: bool
) -> None:
    policy = load_policy(name)
    assert {operator for operator in OPERATORS if leaves(policy, operator)} == on_gpu
    assert bool(policy.services) == bool(on_gpu)
    assert policy.one_rpc_per_module == one_rpc_per_module


@pytest.mark.parametrize("name", ["attention-in-tee", "shielded", "shielded-prefill", "two-server"])
def test_policies_that_keep_token_ids_and_logits(name: str) -> None:
    policy = load_policy(name)
    assert not leaves(policy, "embedding")
    for placed in policy.operators["lm_head"]:
        assert placed.place == "tee" or (placed.mask is not None and placed.mask.uniform)


def test_the_default_policy_keeps_prefill_and_pads_everything_else() -> None:
    policy = load_policy("shielded")
    assert policy.splits_phases
    for operator in LINEAR:
        assert policy.at(operator, 5, "prefill").place == "tee"
        assert policy.at(operator, 5, "decode").mask == Pad()
    assert policy.masks == [Pad()]


@each_row(
    ("name", "mask"),
    [
        ("tsqp-permuted", "row-permutation"),
        ("row-mix", "row-mix"),
        ("row-rotation", "row-rotation"),
        ("stip", "feature-permutation"),
        ("cloak", "feature-rotation"),
        ("float-noise", "float-noise"),
        ("shielded-prefill", "pad"),
        ("two-server", "shares"),
    ],
)
def test_everything_that_leaves_under_a_masked_policy_is_under_its_mask(
    name: str, mask: str
) -> None:
    policy = load_policy(name)
    assert policy.masks == [find_mask(mask)()]
    assert all(placement.mask is not None for _, placement in policy.leaving())
    assert policy.services == (2 if mask == "shares" else 1)
    assert not policy.splits_phases


@pytest.mark.parametrize("name", ["quantized-clear", "shielded", "shielded-prefill", "two-server"])
def test_policies_in_integers(name: str) -> None:
    assert load_policy(name).arithmetic == "int8"


@pytest.mark.parametrize("layers", [1, 2, 80])
@each_row("name", builtin_policies())
def test_every_builtin_policy_fits_models_of_any_depth(name: str, layers: int) -> None:
    load_policy(name).check(layers)


def test_a_policy_file_is_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(policy_toml(o_proj=CLEAR_TOML, one_rpc_per_module="true"))
    policy = load_policy(str(path))
    assert (policy.name, policy.one_rpc_per_module) == ("mine", True)
    assert [operator for operator in OPERATORS if leaves(policy, operator)] == ["o_proj"]


def test_a_relative_path_with_the_suffix_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tsqp.toml").write_text(policy_toml())
    monkeypatch.chdir(tmp_path)
    assert load_policy("tsqp.toml").name == "mine"
    assert load_policy("tsqp").name == "tsqp"


def test_one_rpc_per_module_may_be_left_out_and_is_off(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(policy_toml(one_rpc_per_module=None))
    assert load_policy(str(path)).one_rpc_per_module is False


@pytest.mark.parametrize("name", ["nope", "", "..", "TSQP"])
def test_an_unknown_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load_policy(name)
    assert caught.value.got == repr(name)
    assert all(builtin in caught.value.expected for builtin in builtin_policies())


def test_a_missing_file_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "missing.toml"
    with pytest.raises(PolicyError) as caught:
        load_policy(str(path))
    assert caught.value.where == str(path)
    assert "No such file" in caught.value.got


def test_a_directory_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, binary):
        with pytest.raises(PolicyError, match=str(path)):
            load_policy(str(path))


@each_row("operator", OPERATORS)
def test_an_operator_that_is_not_placed_is_named(tmp_path: Path, operator: Operator) -> None:
    error = refusal(tmp_path / "p.toml", policy_toml(**{operator: None}))
    assert "every operator placed" in error.expected
    assert operator in f"{error.expected} {error.got}"


@pytest.mark.parametrize("keys", [("mask",), ("verify",), ("mask", "verify")])
@pytest.mark.parametrize("operator", sorted(LINEAR))
def test_a_placement_that_leaves_without_saying_how_is_refused(
    tmp_path: Path, operator: Operator, keys: tuple[str, ...]
) -> None:
    """In a copy of the default policy: it would send the clear, or believe what comes back."""
    text = (Path(placement.__file__).parent / "builtin" / "shielded.toml").read_text()
    lines = text.splitlines()
    changed = lines.index(f"{operator} = [") + 2
    assert 'mask = "pad", verify = "freivalds"' in lines[changed]
    for key in keys:
        lines[changed] = re.sub(rf', {key} = "[a-z]+"', "", lines[changed])
    error = refusal(tmp_path / "p.toml", "\n".join(lines))
    assert error.where == f"{tmp_path}/p.toml: policy shielded: {operator}: decode: {keys[0]}"
    assert error.got == "nothing"
    assert '"none"' in error.expected


@pytest.mark.parametrize("operator", OPERATORS)
def test_gpu_alone_is_refused_at_every_operator(tmp_path: Path, operator: Operator) -> None:
    error = refusal(tmp_path / "p.toml", policy_toml(**{operator: '"gpu"'}))
    assert error.where.endswith(f": policy mine: {operator}: mask")
    path = tmp_path / "clear.toml"
    path.write_text(policy_toml(**{operator: CLEAR_TOML}))
    assert load_policy(str(path)).at(operator, 0, "decode").mask is None


def test_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    error = refusal(tmp_path / "p.toml", policy_toml(one_rpc_per_modul="true"))
    assert error.where.endswith(": one_rpc_per_modul")


def test_an_unknown_operator_is_refused_by_name(tmp_path: Path) -> None:
    error = refusal(tmp_path / "p.toml", policy_toml(op_rms_norm=CLEAR_TOML))
    assert error.where.endswith(": policy mine: operators")
    assert error.got == "'rms_norm'"
    assert error.expected == f"one of {', '.join(OPERATORS)}"
    error = refusal(tmp_path / "p.toml", policy_toml(op_gate_proj=CLEAR_TOML))
    assert error.expected.endswith(" (did you mean gate_up_proj?)")


@pytest.mark.parametrize("place", ['"cpu"', '"GPU"', '""', '{ place = "cpu" }'])
def test_an_unknown_place_is_refused(tmp_path: Path, place: str) -> None:
    error = refusal(tmp_path / "p.toml", policy_toml(lm_head=place))
    assert error.where.endswith(": policy mine: lm_head: place")
    assert error.expected == "'tee', 'gpu' or 'attested'"


@pytest.mark.parametrize("placement", ["true", "3", "[]", '["tee", 3]', "[true]", '[["tee"]]'])
def test_something_that_is_no_placement_is_refused(tmp_path: Path, placement: str) -> None:
    error = refusal(tmp_path / "p.toml", policy_toml(lm_head=placement))
    assert ": policy mine: lm_head" in error.where


@pytest.mark.parametrize("field", ["name", "summary"])
def test_a_missing_field_is_refused_by_name(tmp_path: Path, field: str) -> None:
    error = refusal(tmp_path / "p.toml", policy_toml(**{field: None}))
    assert error.where.endswith(f": {field}")
    assert error.got == "nothing"


@pytest.mark.parametrize("text", ["", "[operators]", "name = 'x'"])
def test_an_empty_policy_is_refused(tmp_path: Path, text: str) -> None:
    refusal(tmp_path / "p.toml", text)


def test_invalid_toml_is_refused_with_its_place(tmp_path: Path) -> None:
    error = refusal(tmp_path / "p.toml", 'name = "x"\nsummary = \n')
    assert error.got.startswith("invalid TOML")
    assert "line 2" in error.got


def test_a_policy_cannot_be_changed() -> None:
    policy = load_policy("tee-only")
    with pytest.raises(ValidationError):
        policy.name = "other"  # type: ignore[misc]
