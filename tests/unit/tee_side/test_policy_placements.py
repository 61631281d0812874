"""Placements by layer, phase and mask: which fit together, and the model, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import PolicyError
from tee_side.policy.placement import Placement, load_policy
from tee_side.words import PHASES
from tests.kit.rows import each_row
from tests.unit.tee_side.policy_texts import CLEAR, CLEAR_TOML, policy_of, policy_toml, refusal
from tsqp.lab.research.row_permutation import RowPermutation

MASK = 'the name of a mask, a table with its name and options, or "none" to send the clear'
VERIFY = '"freivalds", or "none" to believe every result'


def _masked(mask: str) -> str:
    return f'{{ place = "gpu", mask = {mask}, verify = "none" }}'


# What is refused when the file is read: all of the message, behind the file's path.
REFUSED_IN_FILE: dict[str, tuple[dict[str, str | None], str]] = {
    "an unknown mask": (
        {"o_proj": '{ place = "gpu", mask = "nope", verify = "none" }'},
        "policy mine: o_proj: mask: got 'nope', expected one of cloak-segment,"
        " feature-permutation, feature-rotation, float-noise, pad, row-mix, row-permutation,"
        " row-rotation, shares, stip-segment, or a path to a .py file",
    ),
    "mask in the TEE": (
        {"o_proj": '{ place = "tee", mask = "row-mix" }'},
        'policy mine: o_proj: got mask row-mix with place = "tee", expected no mask in the TEE',
    ),
    "feature mask on attention": (
        {"attn_scores": '{ place = "gpu", mask = "feature-permutation", verify = "none" }'},
        "policy mine: attn_scores: got mask feature-permutation, expected one that works on"
        " attn_scores; feature-permutation works on qkv_proj, o_proj, gate_up_proj, down_proj",
    ),
    "pad on attention": (
        {"attn_values": '{ place = "gpu", mask = "pad", verify = "none" }', "arithmetic": '"int8"'},
        "policy mine: attn_values: got mask pad, expected one that works on attn_values; pad"
        " works on qkv_proj, o_proj, gate_up_proj, down_proj, lm_head",
    ),
    "pad on the LM head of floats": (
        {"lm_head": '{ place = "gpu", mask = "pad", verify = "none" }'},
        'policy mine: lm_head: got arithmetic = "float", expected "int8", which mask pad needs',
    ),
    "pad on the embedding": (
        {"embedding": '{ place = "gpu", mask = "pad", verify = "none" }', "arithmetic": '"int8"'},
        "policy mine: embedding: got mask pad, expected one that works on embedding; pad"
        " works on qkv_proj, o_proj, gate_up_proj, down_proj, lm_head",
    ),
    "row-mix on the embedding": (
        {"embedding": '{ place = "gpu", mask = "row-mix", verify = "none" }'},
        "policy mine: embedding: got mask row-mix, expected one that works on embedding;"
        " row-mix works on qkv_proj, attn_scores, attn_values, o_proj, gate_up_proj,"
        " down_proj, lm_head",
    ),
    "row-rotation on attention": (
        {"attn_scores": '{ place = "gpu", mask = "row-rotation", verify = "none" }'},
        "policy mine: attn_scores: got mask row-rotation, expected one that works on"
        " attn_scores; row-rotation works on qkv_proj, o_proj, gate_up_proj, down_proj,"
        " lm_head",
    ),
    "pad without integers": (
        {"o_proj": '{ place = "gpu", mask = "pad", verify = "none" }'},
        'policy mine: o_proj: got arithmetic = "float", expected "int8", which mask pad needs',
    ),
    "shares without integers": (
        {"o_proj": '{ place = "gpu", mask = "shares", verify = "none" }'},
        'policy mine: o_proj: got arithmetic = "float", expected "int8", which mask shares needs',
    ),
    "float mask on a linear operator in integers": (
        {"o_proj": '{ place = "gpu", mask = "row-mix", verify = "none" }', "arithmetic": '"int8"'},
        'policy mine: o_proj: got arithmetic = "int8", expected "float", which mask row-mix needs',
    ),
    "feature mask in integers": (
        {
            "o_proj": '{ place = "gpu", mask = "feature-rotation", verify = "none" }',
            "arithmetic": '"int8"',
        },
        'policy mine: o_proj: got arithmetic = "int8", expected "float", which mask'
        " feature-rotation needs",
    ),
    "an option that the mask has not": (
        {"o_proj": _masked('{ name = "row-permutation", dummy_row = 3 }')},
        "policy mine: o_proj: mask: row-permutation: dummy_row: got 3, expected no such key"
        " (did you mean dummy_rows?)",
    ),
    "an option out of range": (
        {"o_proj": _masked('{ name = "row-permutation", dummy_rows = 0 }')},
        "policy mine: o_proj: mask: row-permutation: dummy_rows: got 0, expected greater than"
        " or equal to 1",
    ),
    "an option of another type": (
        {"o_proj": _masked('{ name = "float-noise", sigma = "much" }')},
        "policy mine: o_proj: mask: float-noise: sigma: got 'much', expected a number",
    ),
    "a mask without a name": (
        {"o_proj": '{ place = "gpu", mask = { dummy_rows = 3 }, verify = "none" }'},
        f"policy mine: o_proj: mask: got a table without a name, expected {MASK}",
    ),
    "a mask that is a number": (
        {"o_proj": '{ place = "gpu", mask = 3, verify = "none" }'},
        f"policy mine: o_proj: mask: got 3, expected {MASK}",
    ),
    "layers of the embedding": (
        {"embedding": '{ place = "tee", layers = 0 }'},
        "policy mine: embedding: layers 0: got layers 0, expected no layers, as it belongs to none",
    ),
    "layers of the LM head": (
        {"lm_head": '[{ place = "tee", layers = "0-" }]'},
        "policy mine: lm_head: layers 0-: got layers 0-, expected no layers, as it belongs to none",
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
        "policy mine: o_proj: masks: got 'pad', expected no such key (did you mean mask?)",
    ),
    "an unknown key beside those that are needed": (
        {"o_proj": '{ place = "gpu", mask = "none", verify = "none", verifies = "freivalds" }'},
        "policy mine: o_proj: verifies: got 'freivalds', expected no such key (did you mean"
        " verify?)",
    ),
    "an unknown key that is near none": (
        {"o_proj": '{ place = "tee", colour = 1 }'},
        "policy mine: o_proj: colour: got 1, expected no such key",
    ),
    "gpu alone": ({"o_proj": '"gpu"'}, f"policy mine: o_proj: mask: got nothing, expected {MASK}"),
    "gpu alone in a table": (
        {"o_proj": '{ place = "gpu" }'},
        f"policy mine: o_proj: mask: got nothing, expected {MASK}",
    ),
    "gpu without a mask in some layers": (
        {"o_proj": '[{ place = "tee", layers = 0 }, { place = "gpu", layers = "1-" }]'},
        f"policy mine: o_proj: layers 1-: mask: got nothing, expected {MASK}",
    ),
    "gpu without a check": (
        {"o_proj": '{ place = "gpu", mask = "none" }'},
        f"policy mine: o_proj: verify: got nothing, expected {VERIFY}",
    ),
    "a mask and no check": (
        {"o_proj": '{ place = "gpu", mask = "row-mix" }'},
        f"policy mine: o_proj: verify: got nothing, expected {VERIFY}",
    ),
    "a mask that is false": (
        {"o_proj": _masked("false")},
        f"policy mine: o_proj: mask: got False, expected {MASK}",
    ),
    "an empty mask": (
        {"o_proj": _masked('""')},
        "policy mine: o_proj: mask: got '', expected one of cloak-segment,"
        " feature-permutation, feature-rotation, float-noise, pad, row-mix, row-permutation,"
        " row-rotation, shares, stip-segment, or a path to a .py file",
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
                f'[{{ phase = "decode", {CLEAR_TOML[2:]},'
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
        "policy mine: arithmetic: got 'int4', expected 'float', 'int8' or 'int8-dynamic'",
    ),
    "a mask of some layers": (
        {
            "o_proj": (
                '[{ place = "tee", layers = "0-3" }, { place = "gpu", layers = "4-", mask = "pad",'
                ' verify = "none" }]'
            )
        },
        'policy mine: o_proj: layers 4-: got arithmetic = "float", expected "int8", which'
        " mask pad needs",
    ),
    "an unknown mask of some layers and a phase": (
        {"o_proj": '[{ phase = "decode", place = "gpu", layers = "4-", mask = "nope" }]'},
        "policy mine: o_proj: layers 4- decode: mask: got 'nope', expected one of"
        " cloak-segment, feature-permutation, feature-rotation, float-noise, pad, row-mix,"
        " row-permutation, row-rotation, shares, stip-segment, or a path to a .py file",
    ),
    "the second of two that say nothing else": (
        {"lm_head": '[{ place = "tee" }, { place = "cpu" }]'},
        "policy mine: lm_head: placement 2: place: got 'cpu', expected 'tee', 'gpu' or 'attested'",
    ),
    "a prompt in the clear from stock": (
        {"o_proj": CLEAR_TOML, "arithmetic": '"int8"', "prefill": '"stock"'},
        "policy mine: prefill: got 'stock', expected arithmetic = \"int8\" and a pad on what leaves"
        " at prefill: pads are in stock",
    ),
    "a share of what is not in stock": (
        {"decode_share": "0.3"},
        'policy mine: decode_share: got without prefill = "stock", expected both or none',
    ),
    "a share of more than all": (
        {"prefill": '"stock"', "decode_share": "1.5"},
        "policy mine: decode_share: got 1.5, expected less than or equal to 1",
    ),
    "an unknown operator": (
        {"op_mlp": CLEAR_TOML},
        "policy mine: operators: got 'mlp', expected one of embedding, qkv_proj, attn_scores,"
        " attn_values, o_proj, gate_up_proj, down_proj, lm_head",
    ),
    "an operator that is not placed": (
        {"o_proj": None, "lm_head": None},
        "policy mine: operators: got nothing for o_proj, lm_head, expected every operator placed",
    ),
    "no placement": (
        {"o_proj": "[]"},
        "policy mine: o_proj: got [], expected at least 1 of them",
    ),
    "a placement that is a number": (
        {"o_proj": "3"},
        "policy mine: o_proj: got 3, expected a table",
    ),
    "a list of strings": (
        {"o_proj": '["tee"]'},
        "policy mine: o_proj: got 'tee', expected a table",
    ),
    "an unknown place": (
        {"o_proj": '"cpu"'},
        "policy mine: o_proj: place: got 'cpu', expected 'tee', 'gpu' or 'attested'",
    ),
    "an unknown setting": (
        {"arithmetics": '"int8"'},
        "policy mine: arithmetics: got 'int8', expected no such key (did you mean arithmetic?)",
    ),
    "a policy without a name": ({"name": None}, "policy: name: got nothing, expected a value"),
    "a name that is none": (
        {"name": '"a b"'},
        "policy: name: got 'a b', expected text that matches ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    ),
}


@each_row("case", REFUSED_IN_FILE)
def test_a_policy_that_cannot_work_is_refused_by_policy_operator_and_layers(
    tmp_path: Path, case: str
) -> None:
    changes, message = REFUSED_IN_FILE[case]
    text = policy_toml(**{key: value for key, value in changes.items() if key != "arithmetic"})
    if "arithmetic" in changes:
        text = f"arithmetic = {changes['arithmetic']}\n{text}"
    path = tmp_path / "p.toml"
    assert str(refusal(path, text)) == f"{path}: {message}"


# What is refused beside a model of three layers: policy, operator and layer are named.
GPU, TEE = CLEAR, {"place": "tee"}


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
        {"o_proj": {**GPU, "mask": "feature-permutation"}, "down_proj": GPU},
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
        {"o_proj": {**GPU, "mask": "feature-rotation"}, "embedding": GPU},
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


@each_row("case", REFUSED_BESIDE_MODEL)
def test_a_policy_that_does_not_fit_the_model_is_refused_with_operator_and_layer(case: str) -> None:
    operators, message = REFUSED_BESIDE_MODEL[case]
    policy = policy_of(operators)
    with pytest.raises(PolicyError) as caught:
        policy.check(3)
    assert str(caught.value) == message


def test_a_mask_for_attention_products_alone_is_refused_on_a_linear_operator(
    tmp_path: Path,
) -> None:
    (tmp_path / "products.py").write_text(PRODUCTS_FILE)
    error = refusal(
        tmp_path / "p.toml",
        policy_toml(down_proj='{ place = "gpu", mask = "products.py", verify = "none" }'),
    )
    for word in ("down_proj", "products-alone", "attn_scores, attn_values"):
        assert word in str(error)
    placed = '{ place = "gpu", mask = "products.py", verify = "none" }'
    (tmp_path / "p.toml").write_text(policy_toml(attn_scores=placed, attn_values=placed))
    load_policy(str(tmp_path / "p.toml")).check(3)


def test_a_feature_mask_beside_attention_in_the_clear_is_allowed() -> None:
    """Attention needs no weights, so a provisioned server can multiply it."""
    policy_of({"o_proj": {**GPU, "mask": "feature-permutation"}, "attn_scores": GPU}).check(3)


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
    policy = policy_of(
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
    assert not policy_of(
        {"qkv_proj": [{**TEE, "layers": 0}, {**GPU, "layers": "1-"}]}
    ).splits_phases


def test_a_mask_may_have_options_and_each_instance_counts_once() -> None:
    policy = policy_of(
        {
            "qkv_proj": {**GPU, "mask": {"name": "row-permutation", "dummy_rows": 9}},
            "o_proj": {**GPU, "mask": {"name": "row-permutation", "dummy_rows": 9}},
            "down_proj": {**GPU, "mask": "row-permutation"},
        }
    )
    assert policy.masks == [RowPermutation(dummy_rows=9), RowPermutation()]


PRODUCTS_FILE = """
from typing import ClassVar
from tsqp.lab.research.row_mix import RowMix

class Products(RowMix):
    name: ClassVar[str] = "products-alone"

    @classmethod
    def supports(cls, operator):
        return operator in ("attn_scores", "attn_values")
"""


def test_a_policy_needs_as_many_services_as_its_mask_with_the_most() -> None:
    shares = {"place": "gpu", "mask": "shares", "verify": "freivalds"}
    pad = {"place": "gpu", "mask": "pad", "verify": "freivalds"}
    both = policy_of({"o_proj": shares, "down_proj": pad}, arithmetic="int8")
    assert both.services == 2
