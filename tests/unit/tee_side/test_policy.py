"""Placement policies: what loads, what is refused and how, and what they say they disclose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.errors import InputError, PolicyError
from tee_side.masks.mask import Mask
from tee_side.masks.pad import Pad
from tee_side.masks.registry import builtin_masks
from tee_side.masks.row_mix import RowMix
from tee_side.masks.row_permutation import RowPermutation
from tee_side.masks.shares import Shares
from tee_side.plugins import PluginError
from tee_side.policy import (
    LayerRange,
    Placement,
    Policy,
    builtin_policies,
    load_policy,
    policy_names,
)
from tee_side.vocabulary import OPERATORS, PHASES, Operator

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
        ("tsqp-permuted", set(OPERATORS), True),
        ("row-mix", set(OPERATORS) - {"embedding"}, False),
        ("row-rotation", LINEAR, False),
        ("stip", LINEAR, False),
        ("cloak", LINEAR, False),
        ("float-noise", LINEAR, False),
        ("quantized-clear", LINEAR, False),
        ("shielded", LINEAR, False),
        ("shielded-prefill", LINEAR, False),
        ("two-server", LINEAR, False),
    ],
)
def test_builtin_policies_place_what_their_names_say(
    name: str, on_gpu: set[Operator], one_rpc_per_module: bool
) -> None:
    policy = load_policy(name)
    assert {operator for operator in OPERATORS if policy.on_gpu(operator)} == on_gpu
    assert policy.needs_service == bool(on_gpu)
    assert policy.one_rpc_per_module == one_rpc_per_module


@pytest.mark.parametrize("name", ["attention-in-tee", "shielded", "shielded-prefill", "two-server"])
def test_policies_that_keep_token_ids_and_logits(name: str) -> None:
    policy = load_policy(name)
    assert not policy.on_gpu("embedding")
    assert not policy.on_gpu("lm_head")


def test_the_default_policy_keeps_prefill_and_pads_everything_else() -> None:
    policy = load_policy("shielded")
    assert policy.splits_phases
    for operator in LINEAR:
        assert policy.at(operator, 5, "prefill").place == "tee"
        assert policy.at(operator, 5, "decode").mask == Pad()
    assert policy.masks == [Pad()]


@pytest.mark.parametrize(
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
    assert policy.masks == [builtin_masks()[mask]()]
    assert all(placement.mask is not None for _, placement in policy.leaving())
    assert policy.services == (2 if mask == "shares" else 1)
    assert not policy.splits_phases


@pytest.mark.parametrize("name", ["quantized-clear", "shielded", "shielded-prefill", "two-server"])
def test_policies_in_integers(name: str) -> None:
    assert load_policy(name).arithmetic == "int8"


@pytest.mark.parametrize("layers", [1, 2, 80])
@pytest.mark.parametrize("name", builtin_policies())
def test_every_builtin_policy_fits_models_of_any_depth(name: str, layers: int) -> None:
    load_policy(name).check(layers)


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
    assert "every operator placed" in error.expected
    assert operator in f"{error.expected} {error.got}"


def test_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    error = _refusal(tmp_path / "p.toml", _toml(one_rpc_per_modul="true"))
    assert error.where.endswith(": one_rpc_per_modul")


def test_an_unknown_operator_is_refused_by_name(tmp_path: Path) -> None:
    error = _refusal(tmp_path / "p.toml", _toml(op_rms_norm='"gpu"'))
    assert error.where.endswith(": policy mine: operators")
    assert error.got == "'rms_norm'"
    assert error.expected == f"one of {', '.join(OPERATORS)}"


@pytest.mark.parametrize("place", ['"cpu"', '"GPU"', '""', '{ place = "cpu" }'])
def test_an_unknown_place_is_refused(tmp_path: Path, place: str) -> None:
    error = _refusal(tmp_path / "p.toml", _toml(lm_head=place))
    assert error.where.endswith(": policy mine: lm_head: place")
    assert error.expected == "'tee' or 'gpu'"


@pytest.mark.parametrize("placement", ["true", "3", "[]", '["tee", 3]', "[true]", '[["tee"]]'])
def test_something_that_is_no_placement_is_refused(tmp_path: Path, placement: str) -> None:
    error = _refusal(tmp_path / "p.toml", _toml(lm_head=placement))
    assert error.where.endswith(": policy mine: lm_head")


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


# ---------------------------------------------------------------- masks, layers and phases

PAD = '{ place = "gpu", mask = "pad" }'


@pytest.mark.parametrize("name", builtin_policies())
def test_only_policies_of_uniform_masks_claim_uniform_numbers(name: str) -> None:
    line, policy = load_policy(name).disclosure(), load_policy(name)
    safe = policy.masks and all(type(mask) in (Pad, Shares) for mask in policy.masks)
    assert ("uniform random numbers" in (line or "")) == bool(safe)
    if policy.masks and not safe:
        assert line is not None
        assert "broken" in line
        assert all(mask.name in line for mask in policy.masks)


class Unbroken(RowMix):
    """A mask that nobody has broken yet, which is not the same as uniform numbers."""

    name = "unbroken"
    broken = False


class Other(RowMix):
    """Another broken mask."""

    name = "other"


HONEST = "; results are not verified, so this holds against a service that computes honestly"
CLEAR = "from which the prompt and the answer can be recovered"
PUBLIC = "broken where the weights are public (tsqp masks says how)"
LINES: dict[str, tuple[dict[Operator, Mask | None], str]] = {
    "pads": (
        {"o_proj": Pad()},
        f"the GPU sees uniform random numbers, lengths and timing{HONEST}",
    ),
    "shares": (
        {"o_proj": Shares()},
        "each GPU service sees uniform random numbers, lengths and timing, as long as the two do"
        f" not collude{HONEST}",
    ),
    "pads and shares": (
        {"o_proj": Pad(), "down_proj": Shares()},
        "each GPU service sees uniform random numbers, lengths and timing, as long as the two do"
        f" not collude{HONEST}",
    ),
    "a mask that is only not known to be broken": (
        {"attn_scores": Unbroken()},
        f"the GPU sees activations under unbroken, not known to be broken; lengths and timing"
        f"{HONEST}",
    ),
    "such a mask beside pads": (
        {"attn_scores": Unbroken(), "o_proj": Pad()},
        "the GPU sees activations under unbroken, pad, not known to be broken; lengths and timing"
        f"{HONEST}",
    ),
    "such a mask on the logits": (
        {"lm_head": Unbroken()},
        "the GPU sees the logits under unbroken, not known to be broken; lengths and timing"
        f"{HONEST}",
    ),
    "two broken masks": (
        {"attn_scores": RowMix(), "attn_values": Other()},
        f"the GPU sees activations under row-mix, other, which are {PUBLIC}",
    ),
    "all of them": (
        {
            "embedding": RowPermutation(),
            "attn_scores": None,
            "attn_values": RowMix(),
            "o_proj": Pad(),
            "down_proj": Shares(),
        },
        "the GPU sees the token ids of prompt and answer themselves, in random order among dummies"
        f" (row-permutation); queries and keys in the clear - {CLEAR}; activations under row-mix,"
        f" which is {PUBLIC}; activations under pad, shares, not known to be broken as long as the"
        " two services do not collude",
    ),
    "clear beside pads": (
        {"attn_values": None, "o_proj": Pad()},
        f"the GPU sees attention probabilities and values in the clear - {CLEAR};"
        " activations under pad, not known to be broken",
    ),
    "clear logits beside shuffled ids": (
        {"embedding": RowPermutation(), "lm_head": None},
        "the GPU sees the logits in the clear - the logits: the prompt and the answer themselves;"
        " the token ids of prompt and answer themselves, in random order among dummies"
        " (row-permutation)",
    ),
    "shuffled ids and logits": (
        {"embedding": RowPermutation(), "lm_head": RowPermutation()},
        "the GPU sees the token ids of prompt and answer themselves, in random order among dummies"
        f" (row-permutation); the logits under row-permutation, which is {PUBLIC}",
    ),
}


@pytest.mark.parametrize("case", LINES)
def test_what_a_policy_discloses_is_complete_and_worst_first(case: str) -> None:
    masks, line = LINES[case]
    integer = any(mask is not None and mask.arithmetic == "int8" for mask in masks.values())
    placed = {operator: {"place": "gpu", "mask": mask} for operator, mask in masks.items()}
    policy = _policy(placed, arithmetic="int8" if integer else "float")
    assert policy.disclosure() == f"policy n: {line}"


VERIFIED = "; results are verified, and a service that lies is asked no more"
NEARLY = (
    "; results are verified within a tolerance, and a service that lies by more is asked no more"
)
BOTH: dict[Operator, Mask] = {"o_proj": Pad(), "down_proj": Pad()}


@pytest.mark.parametrize("operators", [("o_proj",), ("o_proj", "down_proj"), ()])
def test_results_are_said_to_be_verified_only_where_all_of_them_are(
    operators: tuple[Operator, ...],
) -> None:
    placed = {
        operator: {
            "place": "gpu",
            "mask": mask,
            "verify": "freivalds" if operator in operators else "none",
        }
        for operator, mask in BOTH.items()
    }
    policy = _policy(placed, arithmetic="int8")
    seen = "policy n: the GPU sees uniform random numbers, lengths and timing"
    assert policy.disclosure() == seen + (VERIFIED if len(operators) == 2 else HONEST)
    assert policy.verified == bool(operators)


def test_a_mask_that_is_only_not_known_to_be_broken_may_be_verified_too() -> None:
    placed = {"attn_scores": {"place": "gpu", "mask": Unbroken(), "verify": "freivalds"}}
    line = _policy(placed).disclosure()
    assert line is not None
    # A mask of floats: whoever stays within the tolerance may lie.
    assert line.endswith(f"under unbroken, not known to be broken; lengths and timing{NEARLY}")


def test_one_float_among_integers_is_verified_within_a_tolerance() -> None:
    placed = {
        operator: {"place": "gpu", "mask": mask, "verify": "freivalds"}
        for operator, mask in (("attn_scores", Unbroken()), ("o_proj", Pad()))
    }
    line = _policy(placed, arithmetic="int8").disclosure()
    assert line is not None
    assert line.endswith(f"under unbroken, pad, not known to be broken; lengths and timing{NEARLY}")


@pytest.mark.parametrize("name", builtin_policies())
def test_what_protects_a_prompt_is_verified_and_baselines_are_not(name: str) -> None:
    policy = load_policy(name)
    protects = name in ("shielded", "shielded-prefill", "two-server")
    assert {p.verify for _, p in policy.leaving()} <= {"freivalds" if protects else "none"}
    assert policy.verified == protects


def test_nothing_is_verified_unless_it_is_asked_for() -> None:
    policy = _policy({"o_proj": "gpu"})
    assert [placement.verify for _, placement in policy.leaving()] == ["none"]


def test_a_placement_says_that_it_is_verified() -> None:
    policy = load_policy("shielded")
    assert [str(p) for p in policy.operators["o_proj"]] == [
        "prefill tee",
        "decode gpu under pad verified",
    ]


def test_the_published_placement_under_permutations_gives_the_ids_away() -> None:
    assert load_policy("tsqp-permuted").disclosure() == (
        "policy tsqp-permuted: the GPU sees the token ids of prompt and answer themselves, in"
        " random order among dummies (row-permutation); the logits and activations under"
        f" row-permutation, which is {PUBLIC}"
    )


def _policy(operators: dict[Any, Any] | None = None, **settings: Any) -> Policy:
    placed = {**dict.fromkeys(OPERATORS, "tee"), **(operators or {})}
    return Policy.model_validate(
        {"name": "n", "summary": "s", "operators": placed, **settings},
    )


# What is refused when the file is read: all of the message, behind the file's path.
REFUSED_IN_FILE: dict[str, tuple[dict[str, str | None], str]] = {
    "an unknown mask": (
        {"o_proj": '{ place = "gpu", mask = "nope" }'},
        "policy mine: o_proj: mask: got 'nope', expected one of feature-permutation,"
        " feature-rotation, float-noise, pad, row-mix, row-permutation, row-rotation, shares,"
        " or a path to a .py file",
    ),
    "mask in the TEE": (
        {"o_proj": '{ place = "tee", mask = "row-mix" }'},
        'policy mine: o_proj: got mask row-mix with place = "tee", expected no mask in the TEE',
    ),
    "feature mask on attention": (
        {"attn_scores": '{ place = "gpu", mask = "feature-permutation" }'},
        "policy mine: attn_scores: got mask feature-permutation, expected one that works on"
        " attn_scores; feature-permutation works on qkv_proj, o_proj, gate_up_proj, down_proj",
    ),
    "pad on attention": (
        {"attn_values": '{ place = "gpu", mask = "pad" }', "arithmetic": '"int8"'},
        "policy mine: attn_values: got mask pad, expected one that works on attn_values; pad"
        " works on qkv_proj, o_proj, gate_up_proj, down_proj",
    ),
    "pad on the LM head": (
        {"lm_head": '{ place = "gpu", mask = "pad" }', "arithmetic": '"int8"'},
        "policy mine: lm_head: got mask pad, expected one that works on lm_head; pad works on"
        " qkv_proj, o_proj, gate_up_proj, down_proj",
    ),
    "pad on the embedding": (
        {"embedding": '{ place = "gpu", mask = "pad" }', "arithmetic": '"int8"'},
        "policy mine: embedding: got mask pad, expected one that works on embedding; pad"
        " works on qkv_proj, o_proj, gate_up_proj, down_proj",
    ),
    "row-mix on the embedding": (
        {"embedding": '{ place = "gpu", mask = "row-mix" }'},
        "policy mine: embedding: got mask row-mix, expected one that works on embedding;"
        " row-mix works on qkv_proj, attn_scores, attn_values, o_proj, gate_up_proj,"
        " down_proj, lm_head",
    ),
    "row-rotation on attention": (
        {"attn_scores": '{ place = "gpu", mask = "row-rotation" }'},
        "policy mine: attn_scores: got mask row-rotation, expected one that works on"
        " attn_scores; row-rotation works on qkv_proj, o_proj, gate_up_proj, down_proj,"
        " lm_head",
    ),
    "pad without integers": (
        {"o_proj": '{ place = "gpu", mask = "pad" }'},
        'policy mine: o_proj: got arithmetic = "float", expected "int8", which mask pad needs',
    ),
    "shares without integers": (
        {"o_proj": '{ place = "gpu", mask = "shares" }'},
        'policy mine: o_proj: got arithmetic = "float", expected "int8", which mask shares needs',
    ),
    "float mask on a linear operator in integers": (
        {"o_proj": '{ place = "gpu", mask = "row-mix" }', "arithmetic": '"int8"'},
        'policy mine: o_proj: got arithmetic = "int8", expected "float", which mask row-mix needs',
    ),
    "feature mask in integers": (
        {"o_proj": '{ place = "gpu", mask = "feature-rotation" }', "arithmetic": '"int8"'},
        'policy mine: o_proj: got arithmetic = "int8", expected "float", which mask'
        " feature-rotation needs",
    ),
    "an option that the mask has not": (
        {"o_proj": '{ place = "gpu", mask = { name = "row-permutation", dummies = 3 } }'},
        "policy mine: o_proj: mask: row-permutation: dummies: got 3, expected no such key",
    ),
    "an option out of range": (
        {"o_proj": '{ place = "gpu", mask = { name = "row-permutation", dummy_rows = 0 } }'},
        "policy mine: o_proj: mask: row-permutation: dummy_rows: got 0, expected greater than"
        " or equal to 1",
    ),
    "an option of another type": (
        {"o_proj": '{ place = "gpu", mask = { name = "float-noise", sigma = "much" } }'},
        "policy mine: o_proj: mask: float-noise: sigma: got 'much', expected a number",
    ),
    "a mask without a name": (
        {"o_proj": '{ place = "gpu", mask = { dummy_rows = 3 } }'},
        "policy mine: o_proj: mask: got a table without a name, expected the name of a mask,"
        " or a table with its name and options",
    ),
    "a mask that is a number": (
        {"o_proj": '{ place = "gpu", mask = 3 }'},
        "policy mine: o_proj: mask: got 3, expected the name of a mask, or a table with its"
        " name and options",
    ),
    "layers of the embedding": (
        {"embedding": '{ place = "tee", layers = 0 }'},
        "policy mine: embedding: got layers 0, expected no layers, as it belongs to none",
    ),
    "layers of the LM head": (
        {"lm_head": '[{ place = "tee", layers = "0-" }]'},
        "policy mine: lm_head: got layers 0-, expected no layers, as it belongs to none",
    ),
    "layers backwards": (
        {"o_proj": '{ place = "tee", layers = "3-1" }'},
        "policy mine: o_proj: layers: got '3-1', expected a range that does not run backwards",
    ),
    "layers of no form": (
        {"o_proj": '{ place = "tee", layers = "a" }'},
        'policy mine: o_proj: layers: got \'a\', expected layers such as "3", "0-3" or "4-"',
    ),
    "negative layers": (
        {"o_proj": '{ place = "tee", layers = -1 }'},
        'policy mine: o_proj: layers: got -1, expected layers such as "3", "0-3" or "4-"',
    ),
    "layers true": (
        {"o_proj": '{ place = "tee", layers = true }'},
        'policy mine: o_proj: layers: got True, expected layers such as "3", "0-3" or "4-"',
    ),
    "an unknown phase": (
        {"o_proj": '{ place = "tee", phase = "warmup" }'},
        "policy mine: o_proj: phase: got 'warmup', expected 'prefill' or 'decode'",
    ),
    "an unknown key": (
        {"o_proj": '{ place = "tee", masks = "pad" }'},
        "policy mine: o_proj: masks: got 'pad', expected no such key",
    ),
    "no place": (
        {"o_proj": '{ mask = "row-mix" }'},
        "policy mine: o_proj: place: got nothing, expected a value",
    ),
    "a check that there is not": (
        {"o_proj": '{ place = "gpu", verify = "hash" }'},
        "policy mine: o_proj: verify: got 'hash', expected 'none' or 'freivalds'",
    ),
    "a check of nothing": (
        {"o_proj": '{ place = "gpu", verify = "" }'},
        "policy mine: o_proj: verify: got '', expected 'none' or 'freivalds'",
    ),
    "a check switched on": (
        {"o_proj": '{ place = "gpu", verify = true }'},
        "policy mine: o_proj: verify: got True, expected 'none' or 'freivalds'",
    ),
    "a check of what stays": (
        {
            "o_proj": (
                '[{ phase = "decode", place = "gpu" },'
                ' { phase = "prefill", place = "tee", verify = "freivalds" }]'
            )
        },
        'policy mine: o_proj: prefill: got verify = "freivalds" with place = "tee", expected none:'
        " nothing comes back that could be wrong",
    ),
    "a check of results that noise makes inexact": (
        {
            "o_proj": (
                '{ place = "gpu", verify = "freivalds", mask = { name = "feature-rotation",'
                " sigma = 0.1 } }"
            )
        },
        'policy mine: o_proj: got verify = "freivalds" under feature-rotation block=128 delta=1e-05'
        " sigma=0.1, expected a mask whose results are the plain ones, within its tolerance",
    ),
    "another arithmetic": (
        {"arithmetic": '"int4"'},
        "policy mine: arithmetic: got 'int4', expected 'float' or 'int8'",
    ),
    "a mask of some layers": (
        {
            "o_proj": (
                '[{ place = "tee", layers = "0-3" }, { place = "gpu", layers = "4-", mask = "pad"'
                " }]"
            )
        },
        'policy mine: o_proj: layers 4-: got arithmetic = "float", expected "int8", which'
        " mask pad needs",
    ),
    "an unknown mask of some layers and a phase": (
        {"o_proj": '[{ phase = "decode", place = "gpu", layers = "4-", mask = "nope" }]'},
        "policy mine: o_proj: layers 4- decode: mask: got 'nope', expected one of"
        " feature-permutation, feature-rotation, float-noise, pad, row-mix, row-permutation,"
        " row-rotation, shares, or a path to a .py file",
    ),
    "the second of two that say nothing else": (
        {"lm_head": '[{ place = "tee" }, { place = "cpu" }]'},
        "policy mine: lm_head: placement 2: place: got 'cpu', expected 'tee' or 'gpu'",
    ),
    "the LM head in integers": (
        {"lm_head": '"gpu"', "arithmetic": '"int8"'},
        'policy mine: lm_head: got place = "gpu" with arithmetic = "int8", expected place ='
        ' "tee", or arithmetic = "float": no service has integers for it',
    ),
    "an unknown operator": (
        {"op_mlp": '"gpu"'},
        "policy mine: operators: got 'mlp', expected one of embedding, qkv_proj, attn_scores,"
        " attn_values, o_proj, gate_up_proj, down_proj, lm_head",
    ),
    "an operator that is not placed": (
        {"o_proj": None, "lm_head": None},
        "policy mine: operators: got nothing for o_proj, lm_head, expected every operator placed",
    ),
    "no placement": (
        {"o_proj": "[]"},
        "policy mine: o_proj: got an empty list, expected at least one placement",
    ),
    "a placement that is a number": (
        {"o_proj": "3"},
        'policy mine: o_proj: got 3, expected "tee", "gpu", or a table with place',
    ),
    "a list of strings": (
        {"o_proj": '["tee"]'},
        "policy mine: o_proj: got 'tee', expected a table with place",
    ),
    "an unknown place": (
        {"o_proj": '"cpu"'},
        "policy mine: o_proj: place: got 'cpu', expected 'tee' or 'gpu'",
    ),
    "an unknown setting": (
        {"arithmetics": '"int8"'},
        "policy mine: arithmetics: got 'int8', expected no such key",
    ),
    "a policy without a name": ({"name": None}, "policy: name: got nothing, expected a value"),
    "a name that is none": (
        {"name": '"a b"'},
        "policy: name: got 'a b', expected text that matches ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    ),
}


@pytest.mark.parametrize("case", REFUSED_IN_FILE)
def test_a_policy_that_cannot_work_is_refused_by_policy_operator_and_layers(
    tmp_path: Path, case: str
) -> None:
    changes, message = REFUSED_IN_FILE[case]
    text = _toml(**{key: value for key, value in changes.items() if key != "arithmetic"})
    if "arithmetic" in changes:
        text = f"arithmetic = {changes['arithmetic']}\n{text}"
    path = tmp_path / "p.toml"
    assert str(_refusal(path, text)) == f"{path}: {message}"


# What is refused beside a model of three layers: policy, operator and layer are named.
GPU, TEE = {"place": "gpu"}, {"place": "tee"}
REFUSED_BESIDE_MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "a layer that the model has not": (
        {"o_proj": [{**TEE, "layers": "0-2"}, {**TEE, "layers": 3}]},
        "policy n: o_proj: got layers 3, expected layers within 0-2, which is what the model has",
    ),
    "a range that ends behind the model": (
        {"o_proj": {**TEE, "layers": "0-3"}},
        "policy n: o_proj: got layers 0-3, expected layers within 0-2, which is what the model has",
    ),
    "an open range that starts behind the model": (
        {"o_proj": [{**TEE, "layers": "0-2"}, {**TEE, "layers": "3-"}]},
        "policy n: o_proj: got layers 3-, expected layers within 0-2, which is what the model has",
    ),
    "a gap": (
        {"qkv_proj": [{**TEE, "layers": 0}, {**GPU, "layers": 2}]},
        "policy n: qkv_proj: layer 1: got 0 placements in prefill, expected exactly one",
    ),
    "a gap in one phase": (
        {"down_proj": [TEE | {"phase": "prefill"}, {**GPU, "phase": "decode", "layers": "1-"}]},
        "policy n: down_proj: layer 0: got 0 placements in decode, expected exactly one",
    ),
    "an overlap": (
        {"qkv_proj": [{**TEE, "layers": "0-1"}, {**GPU, "layers": "1-"}]},
        "policy n: qkv_proj: layer 1: got 2 placements in prefill (layers 0-1 tee; layers 1-"
        " gpu), expected exactly one",
    ),
    "an overlap of phases": (
        {"qkv_proj": [TEE, {**GPU, "phase": "decode"}]},
        "policy n: qkv_proj: layer 0: got 2 placements in decode (tee; decode gpu), expected"
        " exactly one",
    ),
    "the LM head in one phase only": (
        {"lm_head": {**TEE, "phase": "decode"}},
        "policy n: lm_head: got 0 placements in prefill, expected exactly one",
    ),
    "a feature mask beside clear": (
        {"o_proj": {**GPU, "mask": "feature-permutation"}, "down_proj": "gpu"},
        "policy n: down_proj: got no mask beside feature-permutation block=null, expected in"
        " the TEE, or under the same mask with the same options: a provisioned server holds"
        " transformed linear weights and nothing else",
    ),
    "a feature mask beside a row mask": (
        {"o_proj": {**GPU, "mask": "feature-permutation"}, "lm_head": {**GPU, "mask": "row-mix"}},
        "policy n: lm_head: got row-mix beside feature-permutation block=null, expected in"
        " the TEE, or under the same mask with the same options: a provisioned server holds"
        " transformed linear weights and nothing else",
    ),
    "a feature mask beside a clear embedding": (
        {"o_proj": {**GPU, "mask": "feature-rotation"}, "embedding": "gpu"},
        "policy n: embedding: got no mask beside feature-rotation block=128 delta=1e-05"
        " sigma=0.0, expected in the TEE, or under the same mask with the same options: a"
        " provisioned server holds transformed linear weights and nothing else",
    ),
    "two feature masks": (
        {
            "o_proj": {**GPU, "mask": "feature-rotation"},
            "down_proj": {**GPU, "mask": "feature-permutation"},
        },
        "policy n: down_proj: got feature-permutation block=null beside feature-rotation"
        " block=128 delta=1e-05 sigma=0.0, expected in the TEE, or under the same mask with"
        " the same options: a provisioned server holds transformed linear weights and nothing"
        " else",
    ),
    "one feature mask with two options": (
        {
            "o_proj": {**GPU, "mask": {"name": "feature-permutation", "block": 8}},
            "down_proj": {**GPU, "mask": {"name": "feature-permutation", "block": 4}},
        },
        "policy n: down_proj: got feature-permutation block=4 beside feature-permutation"
        " block=8, expected in the TEE, or under the same mask with the same options: a"
        " provisioned server holds transformed linear weights and nothing else",
    ),
}


@pytest.mark.parametrize("case", REFUSED_BESIDE_MODEL)
def test_a_policy_that_does_not_fit_the_model_is_refused_with_operator_and_layer(case: str) -> None:
    operators, message = REFUSED_BESIDE_MODEL[case]
    policy = _policy(operators)
    with pytest.raises(PolicyError) as caught:
        policy.check(3)
    assert str(caught.value) == message


def test_a_mask_for_attention_products_alone_is_refused_on_a_linear_operator(
    tmp_path: Path,
) -> None:
    (tmp_path / "products.py").write_text(PRODUCTS_FILE)
    error = _refusal(
        tmp_path / "p.toml", _toml(down_proj='{ place = "gpu", mask = "products.py" }')
    )
    for word in ("down_proj", "products-alone", "attn_scores, attn_values"):
        assert word in str(error)
    placed = '{ place = "gpu", mask = "products.py" }'
    (tmp_path / "p.toml").write_text(_toml(attn_scores=placed, attn_values=placed))
    load_policy(str(tmp_path / "p.toml")).check(3)


def test_a_feature_mask_beside_attention_in_the_clear_is_allowed() -> None:
    """Attention needs no weights, so a provisioned server can multiply it."""
    _policy({"o_proj": {**GPU, "mask": "feature-permutation"}, "attn_scores": "gpu"}).check(3)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (3, [3], [0, 2, 4]),
        ("3", [3], [2, 4]),
        ("0", [0], [1]),
        ("1-3", [1, 2, 3], [0, 4]),
        ("2-", [2, 3, 4000], [0, 1]),
        ("2-2", [2], [1, 3]),
    ],
)
def test_layer_ranges_include_both_ends(text: Any, inside: list[int], outside: list[int]) -> None:
    layers = Placement(place="tee", layers=text).layers
    assert layers is not None
    assert [layer in layers for layer in inside] == [True] * len(inside)
    assert [layer in layers for layer in outside] == [False] * len(outside)
    assert Placement(place="tee", layers=str(layers)).layers == layers


def test_placements_by_layer_and_phase_are_found() -> None:
    policy = _policy(
        {
            "qkv_proj": [
                {**TEE, "phase": "prefill"},
                {**TEE, "phase": "decode", "layers": "0-1"},
                {**GPU, "phase": "decode", "layers": "2-", "mask": "row-mix"},
            ]
        }
    )
    policy.check(4)
    assert policy.splits_phases
    found = {
        (layer, phase): policy.at("qkv_proj", layer, phase).place
        for layer in range(4)
        for phase in PHASES
    }
    assert [key for key, place in found.items() if place == "gpu"] == [(2, "decode"), (3, "decode")]
    assert not _policy({"qkv_proj": [{**TEE, "layers": 0}, {**GPU, "layers": "1-"}]}).splits_phases


def test_a_mask_may_have_options_and_each_instance_counts_once() -> None:
    policy = _policy(
        {
            "qkv_proj": {**GPU, "mask": {"name": "row-permutation", "dummy_rows": 9}},
            "o_proj": {**GPU, "mask": {"name": "row-permutation", "dummy_rows": 9}},
            "down_proj": {**GPU, "mask": "row-permutation"},
        }
    )
    assert policy.masks == [RowPermutation(dummy_rows=9), RowPermutation()]


# ------------------------------------------------------------------------ of a user's own

MASK_FILE = """
from typing import ClassVar
from tee_side.masks.row_mix import RowMix

class Mine(RowMix):
    name: ClassVar[str] = "mine"
"""
PRODUCTS_FILE = """
from typing import ClassVar
from tee_side.masks.row_mix import RowMix

class Products(RowMix):
    name: ClassVar[str] = "products-alone"

    @classmethod
    def supports(cls, operator):
        return operator in ("attn_scores", "attn_values")
"""
HALF_FILE = """
from tee_side.masks.mask import RowMask

class Half(RowMask):
    name = "half"
    hides = known_break = source = cost = "x"
    broken = True
    tolerance = 0.1
"""
POLICY_FILE = """
from tee_side.policy import Placement, Policy
from tee_side.vocabulary import OPERATORS

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
    path.write_text(_toml(o_proj='{ place = "gpu", mask = "masks/mine.py" }'))
    monkeypatch.chdir("/")
    assert [mask.name for mask in load_policy(str(path)).masks] == ["mine"]
    path.write_text(_toml(o_proj='{ place = "gpu", mask = { name = "masks/mine.py:Mine" } }'))
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
    error = _refusal(path, _toml(o_proj=f'{{ place = "gpu", mask = "{reference}" }}'))
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
        _policy({"o_proj": {"place": "gpu", "mask": Pad()}})
    expected = 'policy n: o_proj: got arithmetic = "float", expected "int8", which mask pad needs'
    assert str(caught.value) == expected
    with pytest.raises(PolicyError, match=r"^policy: name: got nothing, expected a value$"):
        Policy(summary="s", operators=dict.fromkeys(OPERATORS, "tee"))  # type: ignore[call-arg]
    with pytest.raises(PolicyError, match=r"^policy: got 3, expected "):
        Policy.model_validate(3)
    with pytest.raises(PolicyError, match=": o_proj: place: got 'cpu', expected 'tee' or 'gpu'"):
        Policy.model_validate_json('{"name": "n", "summary": "", "operators": {"o_proj": "cpu"}}')
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE.replace('Placement(place="tee")', '{"place": "cpu"}'))
    with pytest.raises(InputError) as refused:
        load_policy(str(path))
    assert str(refused.value) == (
        f"{path}: policy mine: embedding: place: got 'cpu', expected 'tee' or 'gpu'"
    )


def test_a_python_policy_may_hold_masks_as_objects() -> None:
    leaves = (
        Placement(place="tee", layers=LayerRange(0, 0)),
        Placement(place="gpu", layers=LayerRange(1, None), mask=Shares()),
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

    monkeypatch.setattr("tee_side.policy.entry_points", entry_points)


def test_a_policy_of_an_installed_package_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = _policy()
    _install(monkeypatch, _Entry("theirs", theirs), _Entry("broken", 3))
    assert load_policy("theirs") is theirs
    assert {"theirs", "broken", *builtin_policies()} == set(policy_names())
    with pytest.raises(PolicyError, match="package:broken"):
        load_policy("broken")
    with pytest.raises(PolicyError, match="theirs"):
        load_policy("no-such-policy")


def test_an_installed_package_cannot_replace_a_builtin_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, _Entry("shielded", _policy()))
    assert load_policy("shielded").name == "shielded"


def test_a_package_that_fails_is_refused_by_its_place_and_breaks_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = ImportError("no module\nthat it needs")
    _install(monkeypatch, _Entry("theirs", _policy()), _Entry("failing", failing))
    masks = [_Entry(name, failing) for name in ("their-mask", "pad")]
    monkeypatch.setattr("tee_side.masks.registry.entry_points", lambda **_: masks)
    assert load_policy("shielded").masks == [Pad()]
    assert load_policy("theirs").name == "n"
    assert "failing" in policy_names()
    with pytest.raises(PluginError) as caught:
        load_policy("failing")
    assert str(caught.value) == (
        "entry point package:failing: got ImportError: no module that it needs, expected one that"
        " loads"
    )
