"""Placement policies: what loads, what is refused and how, and what they say they disclose."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from protocol.errors import PolicyError
from tee_side.policy import (
    OPERATORS,
    Operator,
    Policy,
    builtin_policies,
    load_policy,
)

LINEAR: set[Operator] = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


def _toml(**changes: str | None) -> str:
    """Text of a policy with everything in the TEE, and some lines changed or left out."""
    lines: dict[str, str | None] = {
        "name": '"mine"',
        "summary": '"a test"',
        "one_rpc_per_module": "false",
    }
    operators: dict[str, str | None] = dict.fromkeys(OPERATORS, '"tee"')
    for key, value in changes.items():
        target = operators if key in operators or key.startswith("op_") else lines
        target[key.removeprefix("op_")] = value
    head = [f"{key} = {value}" for key, value in lines.items() if value is not None]
    body = [f"{key} = {value}" for key, value in operators.items() if value is not None]
    return "\n".join([*head, "[operators]", *body])


def _refusal(path: Path, text: str) -> PolicyError:
    path.write_text(text)
    with pytest.raises(PolicyError) as caught:
        load_policy(str(path))
    assert str(path) in caught.value.where
    return caught.value


@pytest.mark.parametrize("name", builtin_policies())
def test_every_builtin_policy_loads_under_its_own_name(name: str) -> None:
    policy = load_policy(name)
    assert policy.name == name
    assert policy.summary
    assert set(policy.operators) == set(OPERATORS)


@pytest.mark.parametrize(
    ("name", "on_gpu", "one_rpc_per_module"),
    [
        ("tee-only", set(), False),
        ("attention-in-tee", LINEAR, False),
        ("tsqp", set(OPERATORS), True),
    ],
)
def test_builtin_policies_place_what_their_names_say(
    name: str, on_gpu: set[Operator], one_rpc_per_module: bool
) -> None:
    policy = load_policy(name)
    assert {operator for operator in OPERATORS if policy.on_gpu(operator)} == on_gpu
    assert policy.needs_service == bool(on_gpu)
    assert policy.one_rpc_per_module == one_rpc_per_module


def test_the_default_policy_sends_neither_token_ids_nor_logits() -> None:
    policy = load_policy("attention-in-tee")
    assert not policy.on_gpu("embedding")
    assert not policy.on_gpu("lm_head")


def test_a_policy_file_is_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(_toml(o_proj='"gpu"', one_rpc_per_module="true"))
    policy = load_policy(str(path))
    assert (policy.name, policy.one_rpc_per_module) == ("mine", True)
    assert [operator for operator in OPERATORS if policy.on_gpu(operator)] == ["o_proj"]


def test_a_relative_path_with_the_suffix_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tsqp.toml").write_text(_toml())
    monkeypatch.chdir(tmp_path)
    assert load_policy("tsqp.toml").name == "mine"
    assert load_policy("tsqp").name == "tsqp"


def test_one_rpc_per_module_may_be_left_out_and_is_off(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(_toml(one_rpc_per_module=None))
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


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_that_is_not_placed_is_named(tmp_path: Path, operator: Operator) -> None:
    error = _refusal(tmp_path / "p.toml", _toml(**{operator: None}))
    assert error.where.endswith(": operators")
    assert error.expected == f"every operator placed; missing: {operator}"


def test_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    error = _refusal(tmp_path / "p.toml", _toml(one_rpc_per_modul="true"))
    assert error.where.endswith(": one_rpc_per_modul")


def test_an_unknown_operator_is_refused_by_name(tmp_path: Path) -> None:
    error = _refusal(tmp_path / "p.toml", _toml(op_rms_norm='"gpu"'))
    assert "rms_norm" in error.where


@pytest.mark.parametrize("place", ['"cpu"', '"GPU"', "true", '""'])
def test_an_unknown_place_is_refused(tmp_path: Path, place: str) -> None:
    error = _refusal(tmp_path / "p.toml", _toml(lm_head=place))
    assert error.where.endswith(": operators.lm_head")
    assert "'tee' or 'gpu'" in error.expected


@pytest.mark.parametrize("field", ["name", "summary"])
def test_a_missing_field_is_refused_by_name(tmp_path: Path, field: str) -> None:
    error = _refusal(tmp_path / "p.toml", _toml(**{field: None}))
    assert error.where.endswith(f": {field}")
    assert error.got == "nothing"


@pytest.mark.parametrize("text", ["", "[operators]", "name = 'x'"])
def test_an_empty_policy_is_refused(tmp_path: Path, text: str) -> None:
    _refusal(tmp_path / "p.toml", text)


def test_invalid_toml_is_refused_with_its_place(tmp_path: Path) -> None:
    error = _refusal(tmp_path / "p.toml", 'name = "x"\nsummary = \n')
    assert error.got.startswith("invalid TOML")
    assert "line 2" in error.got


def test_a_policy_cannot_be_changed() -> None:
    policy = load_policy("tee-only")
    with pytest.raises(ValidationError):
        policy.name = "other"  # type: ignore[misc]


def test_nothing_is_disclosed_where_nothing_leaves() -> None:
    assert load_policy("tee-only").disclosure() is None


def test_the_published_placement_says_that_it_gives_everything_away() -> None:
    line = load_policy("tsqp").disclosure()
    assert line == (
        "policy tsqp: the GPU sees the token ids, hidden states, queries and keys, attention"
        " probabilities and values, attention outputs, MLP activations, the logits in the clear -"
        " the token ids and the logits: the prompt and the answer themselves"
    )


def test_hidden_states_are_said_to_be_enough_to_recover_the_prompt() -> None:
    line = load_policy("attention-in-tee").disclosure()
    assert line is not None
    assert line.endswith("from which the prompt and the answer can be recovered")
    assert "token ids" not in line
    assert "\n" not in line


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_that_leaves_is_disclosed(operator: Operator) -> None:
    operators = {**dict.fromkeys(OPERATORS, "tee"), operator: "gpu"}
    policy = Policy.model_validate({"name": "n", "summary": "s", "operators": operators})
    line = policy.disclosure()
    assert line is not None
    assert line.startswith("policy n: the GPU sees ")
