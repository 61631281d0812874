"""Placement policies: what loads, where operators are placed, and what is refused, by field."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.errors import PolicyError
from tee_side.policy.layer_range import LayerRange
from tee_side.policy.placement import Placement, Policy, builtin_policies, load_policy
from tee_side.protect.masks.pad import Pad
from tee_side.protect.masks.shares import Shares
from tee_side.words import OPERATORS
from tests.kit.model import CLEAR, policy_of
from tests.kit.rows import each_row
from tsqp.lab.research.row_permutation import RowPermutation

LAYERS = 3
LINEAR = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
TEE = {"place": "tee"}
INT8 = {"arithmetic": "int8"}
ROWS, FEATURES = "row-permutation", "feature-permutation"


def under(mask: object, **more: Any) -> dict[str, Any]:
    """Return a placement under a mask, whose results are believed."""
    return {**CLEAR, "mask": mask, **more}


def of(name: str, **options: object) -> dict[str, object]:
    """Return a mask with options."""
    return {"name": name, **options}


STIP, CLOAK = under("stip-segment"), under("cloak-segment")
ALL_IN_LAYER_0 = {name: TEE | {"layers": 0} for name in OPERATORS[1:-1]}


# ---------------------------------------------------------------------------- built-in policies

# Of each: its arithmetic, its mask, and what leaves.
BUILTIN: dict[str, tuple[str, str | None, set[str]]] = {
    "tee-only": ("float", None, set()),
    "tee-only-int8": ("int8-dynamic", None, set()),
    "attention-in-tee": ("float", None, LINEAR),
    "tsqp": ("float", None, set(OPERATORS)),
    "tsqp-permuted": ("float", "row-permutation", set(OPERATORS)),
    "row-mix": ("float", "row-mix", set(OPERATORS) - {"embedding"}),
    "row-rotation": ("float", "row-rotation", LINEAR),
    "stip": ("float", "feature-permutation", LINEAR),
    "cloak": ("float", "feature-rotation", LINEAR),
    "float-noise": ("float", "float-noise", LINEAR),
    "quantized-clear": ("int8", None, LINEAR),
    "shielded": ("int8", "pad", LINEAR | {"lm_head"}),
    "shielded-prefill": ("int8", "pad", LINEAR | {"lm_head"}),
    "two-server": ("int8", "shares", LINEAR),
    "clear-segment": ("float", None, {"lm_head", "segment"}),
    "attested-segment": ("float", None, {"lm_head", "segment"}),
    "stip-segment": ("float", "stip-segment", {"lm_head", "segment"}),
    "cloak-segment": ("float", "cloak-segment", {"segment"}),
}
PROTECTED = ("shielded", "shielded-prefill", "two-server")


@each_row("name", builtin_policies())
def test_builtin_policies_place_what_their_names_say(name: str) -> None:
    policy, (arithmetic, mask, leaving) = load_policy(name), BUILTIN[name]
    for layers in (1, 2, 80):
        policy.check(layers)
    assert (policy.name, policy.arithmetic) == (name, arithmetic)
    assert {operator for operator, _ in policy.leaving()} == leaving
    assert {placed.mask and placed.mask.name for _, placed in policy.leaving()} <= {mask}
    assert [one.name for one in policy.masks] == ([mask] if mask else [])
    assert policy.services == (2 if mask == "shares" else min(1, len(leaving)))
    assert policy.splits_phases == (name == "shielded")
    assert policy.one_rpc_per_module == (name in ("tsqp", "tsqp-permuted"))
    # What protects a prompt is verified, and baselines are not.
    verified = "freivalds" if name in PROTECTED else "none"
    assert {placed.verify for _, placed in policy.leaving()} <= {verified}
    assert policy.verified == (name in PROTECTED)


def test_the_default_policy_keeps_prefill_and_pads_everything_else() -> None:
    policy = load_policy("shielded")
    for operator in (*LINEAR, "lm_head"):
        assert [str(placed) for placed in policy.operators[operator]] == [
            "prefill tee",
            "decode gpu under pad verified",
        ]


# ----------------------------------------------------------------------------------- placements


def test_each_mask_with_its_options_counts_once_and_says_how_many_services_it_needs() -> None:
    nine = of(ROWS, dummy_rows=9)
    placed = {"qkv_proj": under(nine), "o_proj": under(nine), "down_proj": under(ROWS)}
    assert policy_of(placed).masks == [RowPermutation(dummy_rows=9), RowPermutation()]
    both = {"o_proj": under("shares"), "down_proj": under("pad")}
    assert policy_of(both, **INT8).services == 2


@each_row(
    ("text", "first", "last", "inside", "outside"),
    [
        (3, 3, 3, [3], [0, 2, 4]),
        ("3", 3, 3, [3], [2, 4]),
        ("0", 0, 0, [0], [1]),
        ("1-3", 1, 3, [1, 2, 3], [0, 4]),
        ("2-", 2, None, [2, 3, 4000], [0, 1]),
        ("2-2", 2, 2, [2], [1, 3]),
        ("9999-", 9999, None, [9999], [9998]),
    ],
)
def test_a_range_of_layers_includes_both_ends(
    text: Any, first: int, last: int | None, inside: list[int], outside: list[int]
) -> None:
    layers = Placement(place="tee", layers=text).layers
    assert layers == LayerRange(first, last)
    assert all(layer in layers for layer in inside)
    assert not any(layer in layers for layer in outside)
    assert LayerRange.parse(str(layers)) == layers


@each_row(
    "text", ["", "-", "-3", "a", "1-2-3", "1 - 2", "10000", "1-10000", "1,2", "5-3", "5-4", True]
)
def test_what_is_no_range_of_layers(text: object) -> None:
    with pytest.raises(PolicyError, match=r"o_proj: layers: got .* (such as|not run backwards)"):
        policy_of({"o_proj": {**TEE, "layers": text}})


# ------------------------------------------------------------------------------------- segments


@each_row(
    ("head", "segment", "joined"),
    [
        (CLEAR, CLEAR, True),
        (STIP, STIP, True),
        (CLEAR, STIP, False),
        ("tee", CLEAR, False),
        (CLEAR, CLEAR | {"layers": "0-1"}, False),
    ],
)
def test_the_lm_head_is_part_of_a_segment_under_the_same_mask(
    head: Any, segment: dict[str, Any], joined: bool
) -> None:
    policy = policy_of({"segment": segment, "lm_head": head})
    assert [one.head for one in policy.segments(LAYERS)] == [joined]


# -------------------------------------------------------------------------------------- refused

Changes = dict[str, Any]

# Operators, other fields, and the error: where, behind the policy, and what it got.
REFUSED: list[tuple[Changes, Changes, str, str]] = [
    # what leaves has to say how
    *(({name: "gpu"}, {}, f"{name}: mask", "nothing") for name in OPERATORS),
    ({"o_proj": {"place": "gpu", "mask": "none"}}, {}, "o_proj: verify", "nothing"),
    ({"o_proj": {"place": "gpu", "verify": "none"}}, {}, "o_proj: mask", "nothing"),
    ({"o_proj": {"place": "gpu", "mask": Pad()}}, {}, "o_proj: verify", "nothing"),
    ({"o_proj": [TEE, {"place": "gpu", "layers": "1-"}]}, {}, "o_proj: layers 1-: mask", "nothing"),
    ({"o_proj": under(None)}, {}, "o_proj: mask", "None"),
    ({"o_proj": CLEAR | {"verify": None}}, {}, "o_proj: verify", "None"),
    # masks
    ({"o_proj": under("nope")}, {}, "o_proj: mask", "'nope'"),
    ({"o_proj": under("")}, {}, "o_proj: mask", "''"),
    ({"o_proj": under(3)}, {}, "o_proj: mask", "3"),
    ({"o_proj": under(False)}, {}, "o_proj: mask", "False"),
    ({"o_proj": under({"dummy_rows": 3})}, {}, "o_proj: mask", "a table without a name"),
    ({"o_proj": under(of(ROWS, dummy_row=3))}, {}, f"o_proj: mask: {ROWS}: dummy_row", "3"),
    ({"o_proj": under(of(ROWS, dummy_rows=0))}, {}, f"o_proj: mask: {ROWS}: dummy_rows", "0"),
    ({"o_proj": under(of(ROWS, dummy_rows="a"))}, {}, f"o_proj: mask: {ROWS}: dummy_rows", "'a'"),
    ({"o_proj": TEE | {"mask": "row-mix"}}, {}, "o_proj", 'mask row-mix with place = "tee"'),
    *(
        ({operator: under(mask)}, settings, operator, f"mask {mask}")
        for operator, mask, settings in (
            ("attn_scores", FEATURES, {}),
            ("attn_scores", "row-rotation", {}),
            ("embedding", "row-mix", {}),
            ("attn_values", "pad", INT8),
            ("embedding", "pad", INT8),
            ("embedding", "shares", INT8),
            ("segment", "row-rotation", {}),
            ("segment", "feature-rotation", {}),
            ("lm_head", "cloak-segment", {}),
        )
    ),
    *(
        ({operator: under(mask)}, {"arithmetic": said}, operator, f'arithmetic = "{said}"')
        for operator, mask, said in (
            ("o_proj", "pad", "float"),
            ("lm_head", "pad", "float"),
            ("o_proj", "shares", "float"),
            ("down_proj", "row-mix", "int8"),
            ("o_proj", "feature-rotation", "int8"),
        )
    ),
    ({"o_proj": [under("pad", layers="4-")]}, {}, "o_proj: layers 4-", 'arithmetic = "float"'),
    (
        {"o_proj": [under("nope", layers="4-", phase="decode")]},
        *({}, "o_proj: layers 4- decode: mask", "'nope'"),
    ),
    # checks
    ({"o_proj": CLEAR | {"verify": "hash"}}, {}, "o_proj: verify", "'hash'"),
    ({"o_proj": CLEAR | {"verify": True}}, {}, "o_proj: verify", "True"),
    (
        {"o_proj": [TEE | {"phase": "prefill", "verify": "freivalds"}]},
        *({}, "o_proj: prefill", 'verify = "freivalds" with place = "tee"'),
    ),
    (
        {"o_proj": under(of("feature-rotation", sigma=0.1), verify="freivalds")},
        *({}, "o_proj", 'verify = "freivalds" under feature-rotation block=128 delta=1e-05 sigma'),
    ),
    # layers, phases, places, keys
    ({"embedding": TEE | {"layers": 0}}, {}, "embedding: layers 0", "layers 0"),
    ({"lm_head": [TEE | {"layers": "0-"}]}, {}, "lm_head: layers 0-", "layers 0-"),
    ({"o_proj": TEE | {"phase": "warmup"}}, {}, "o_proj: phase", "'warmup'"),
    ({"o_proj": {"mask": "row-mix"}}, {}, "o_proj: place", "nothing"),
    *(({"lm_head": place}, {}, "lm_head: place", repr(place)) for place in ("cpu", "GPU", "")),
    ({"lm_head": [TEE, {"place": "cpu"}]}, {}, "lm_head: placement 2: place", "'cpu'"),
    ({"o_proj": TEE | {"masks": "pad"}}, {}, "o_proj: masks", "'pad'"),
    ({"o_proj": CLEAR | {"verifies": "freivalds"}}, {}, "o_proj: verifies", "'freivalds'"),
    ({"o_proj": []}, {}, "o_proj", "[]"),
    ({"o_proj": 3}, {}, "o_proj", "3"),
    ({"o_proj": [True]}, {}, "o_proj", "True"),
    ({"o_proj": ["tee"]}, {}, "o_proj", "'tee'"),
    ({"lm_head": [TEE, 3]}, {}, "lm_head: placement 2", "3"),
    ({"mlp": CLEAR}, {}, "operators", "'mlp'"),
    *(({name: None}, {}, "operators", f"nothing for {name}") for name in OPERATORS),
    ({"segment": CLEAR, "lm_head": None}, {}, "operators", "nothing for lm_head"),
    # the policy itself
    ({}, {"arithmetics": "int8"}, "arithmetics", "'int8'"),
    ({}, {"arithmetic": "int4"}, "arithmetic", "'int4'"),
    ({}, {"name": "a b"}, "policy: name", "'a b'"),
    ({}, {"summary": "x" * 201}, "summary", "'" + "x" * 39),
    ({}, {"decode_share": 0.3}, "decode_share", 'without prefill = "stock"'),
    ({}, {"decode_share": 1.5, "prefill": "stock"}, "decode_share", "1.5"),
    ({"o_proj": CLEAR}, {"prefill": "stock", **INT8}, "prefill", "'stock'"),
    ({}, {"prefill": "stock", **INT8}, "prefill", "'stock'"),
    (
        {"o_proj": CLEAR},
        {"arithmetic": "int8-dynamic"},
        *("o_proj", 'place = "gpu" with arithmetic = "int8-dynamic"'),
    ),
    # attested services
    ({"o_proj": CLEAR | {"place": "attested"}}, {}, "o_proj", 'place = "attested"'),
    *(
        ({}, {"service": {"attested": kind}}, "service: attested", repr(kind))
        for kind in ("nvidia", "snp+tdx", "", 1)
    ),
    ({}, {"service": {"attested": "snp", "nonce": "none"}}, "service: nonce", "'none'"),
    # segments
    ({"segment": TEE}, {}, "segment", 'place = "tee"'),
    ({"segment": CLEAR | {"verify": "freivalds"}}, {}, "segment", 'verify = "freivalds"'),
    ({"segment": CLEAR | {"phase": "decode"}}, {}, "segment: decode", "phase decode"),
    ({"segment": CLEAR}, INT8, "segment", 'arithmetic = "int8"'),
    ({"segment": CLEAR | {"window": {"sinks": 4}}}, {}, "segment: window: recent", "nothing"),
    ({"segment": CLEAR | {"window": {"recent": 0}}}, {}, "segment: window: recent", "0"),
    ({"lm_head": CLEAR | {"window": {"recent": 5}}}, {}, "lm_head", "window"),
]


@each_row(("operators", "settings", "where", "got"), REFUSED)
def test_a_policy_that_cannot_work_is_refused_by_its_field(
    operators: Changes, settings: Changes, where: str, got: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        policy_of(operators, **settings)
    assert caught.value.where.removeprefix("policy n: ") == where
    assert caught.value.got.startswith(got)


# Beside a model of three layers: the same.
MISFITS: list[tuple[Changes, str, str]] = [
    ({"o_proj": [TEE | {"layers": "0-2"}, TEE | {"layers": 3}]}, "o_proj", "layers 3"),
    ({"o_proj": TEE | {"layers": "0-3"}}, "o_proj", "layers 0-3"),
    ({"o_proj": [TEE | {"layers": "0-2"}, TEE | {"layers": "3-"}]}, "o_proj", "layers 3-"),
    (
        {"qkv_proj": [TEE | {"layers": 0}, CLEAR | {"layers": 2}]},
        *("qkv_proj: layer 1", "0 placements in prefill"),
    ),
    (
        {"down_proj": [TEE | {"phase": "prefill"}, CLEAR | {"phase": "decode", "layers": "1-"}]},
        *("down_proj: layer 0", "0 placements in decode"),
    ),
    (
        {"qkv_proj": [TEE | {"layers": "0-1"}, CLEAR | {"layers": "1-"}]},
        *("qkv_proj: layer 1", "2 placements in prefill (layers 0-1 tee; layers 1- gpu)"),
    ),
    (
        {"qkv_proj": [TEE, CLEAR | {"phase": "decode"}]},
        *("qkv_proj: layer 0", "2 placements in decode (tee; decode gpu)"),
    ),
    ({"lm_head": TEE | {"phase": "decode"}}, "lm_head", "0 placements in prefill"),
    # a server whose weights are transformed for one mask has no others
    ({"o_proj": under(FEATURES), "down_proj": CLEAR}, "down_proj", f"no mask beside {FEATURES} "),
    (
        {"o_proj": under(FEATURES), "lm_head": under("row-mix")},
        "lm_head",
        f"row-mix beside {FEATURES}",
    ),
    ({"o_proj": under("feature-rotation"), "embedding": CLEAR}, "embedding", "no mask beside feat"),
    (
        {"o_proj": under("feature-rotation"), "down_proj": under(FEATURES)},
        *("down_proj", f"{FEATURES} block=null beside feature-rotation"),
    ),
    (
        {
            "o_proj": under(of(FEATURES, block=8)),
            "down_proj": under(of(FEATURES, block=4)),
        },
        *("down_proj", f"{FEATURES} block=4 beside {FEATURES} block=8"),
    ),
    # segments
    ({"segment": CLEAR | {"layers": "0-1"}}, "qkv_proj: layer 2", "0 placements"),
    ({"segment": CLEAR, "o_proj": "tee"}, "o_proj: layer 0", "1 placements"),
    (
        {"segment": [CLEAR | {"layers": "0-1"}, CLEAR | {"layers": "1-"}]},
        *("segment: layer 1", "2 placements"),
    ),
    ({"segment": CLEAR | {"layers": "0-9"}}, "segment", "layers 0-9"),
    ({"segment": STIP, "lm_head": CLEAR}, "lm_head", "no mask beside stip-segment"),
    (
        {"segment": [STIP | {"layers": "0-1"}, CLEAR | {"layers": "2-"}]},
        *("segment: layers 2-", "no mask beside stip-segment"),
    ),
    (
        {
            **ALL_IN_LAYER_0,
            "segment": STIP | {"layers": "1-"},
            "lm_head": STIP | {"phase": "decode"},
        },
        *("lm_head", "0 placements in prefill"),
    ),
    (
        {
            **{name: TEE | {"layers": "2-"} for name in OPERATORS[1:-1]},
            "segment": STIP | {"layers": "0-1"},
            "lm_head": STIP,
        },
        *("lm_head", "mask stip-segment behind no segment of the last layers under the same"),
    ),
]


@each_row(("operators", "where", "got"), MISFITS)
def test_a_policy_that_does_not_fit_the_model_is_refused_with_operator_and_layer(
    operators: Changes, where: str, got: str
) -> None:
    # Attention needs no weights, so it may be in the clear beside any mask.
    policy = policy_of(
        {"attn_scores": CLEAR} | operators if "segment" not in operators else operators
    )
    with pytest.raises(PolicyError) as caught:
        policy.check(LAYERS)
    assert caught.value.where == f"policy n: {where}"
    assert caught.value.got.startswith(got)


def test_a_copy_that_was_not_validated_states_its_protection_too() -> None:
    """pydantic's `model_copy` runs no validators: such a policy is refused before it is used."""
    policy = load_policy("tee-only")
    leaves = Placement(place="tee").model_copy(update={"place": "gpu"})
    changed = policy.model_copy(update={"operators": policy.operators | {"o_proj": (leaves,)}})
    with pytest.raises(PolicyError, match="policy tee-only: o_proj: mask: got nothing"):
        changed.check(4)
    with pytest.raises(ValidationError):
        policy.name = "other"  # type: ignore[misc]


def test_a_policy_written_in_python_is_refused_by_an_error_of_ours() -> None:
    leaves = Placement(place="gpu", layers=LayerRange(1, None), mask=Shares(), verify="none")
    stays = Placement(place="tee", layers=LayerRange(0, 0))
    policy = policy_of({"o_proj": (stays, leaves)}, **INT8)
    assert policy.at("o_proj", 1, "decode").mask == Shares()
    with pytest.raises(ValidationError, match="mask"):
        Placement(place="gpu", verify="none")
    with pytest.raises(PolicyError, match=r"^policy: name: got nothing, expected a value$"):
        Policy(summary="s", operators=dict.fromkeys(OPERATORS, "tee"))  # type: ignore[call-arg]
    with pytest.raises(PolicyError, match=r"^policy: got 3, expected "):
        Policy.model_validate(3)
    with pytest.raises(PolicyError, match=": o_proj: place: got 'cpu', expected 'tee', 'gpu' or"):
        Policy.model_validate_json('{"name": "n", "summary": "", "operators": {"o_proj": "cpu"}}')


# --------------------------------------------------------------------------------- policy files

TEXT = (files("tee_side") / "policy" / "builtin" / "shielded.toml").read_text(encoding="utf-8")


def test_a_policy_file_is_found_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tsqp.toml").write_text(TEXT.replace('name = "shielded"', 'name = "mine"'))
    monkeypatch.chdir(tmp_path)
    assert load_policy("tsqp.toml") == load_policy(str(tmp_path / "tsqp.toml"))
    assert (load_policy("tsqp.toml").name, load_policy("tsqp").name) == ("mine", "tsqp")
    assert load_policy("tsqp.toml").operators == load_policy("shielded").operators


@each_row("name", ["nope", "", "..", "TSQP"])
def test_an_unknown_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load_policy(name)
    assert caught.value.got == repr(name)
    assert all(builtin in caught.value.expected for builtin in builtin_policies())


PAD = 'mask = "pad", verify = "freivalds"'


@each_row(
    ("old", "new", "message"),
    [
        (PAD, 'verify = "freivalds"', "policy shielded: qkv_proj: decode: mask: got nothing, "),
        (PAD, 'mask = "pad"', "policy shielded: qkv_proj: decode: verify: got nothing, expected"),
        (
            PAD,
            'mask = "pda"',
            "policy shielded: qkv_proj: decode: mask: got 'pda', expected one of",
        ),
        (
            'embedding = "tee"',
            'gate_proj = "tee"',
            "policy shielded: operators: got 'gate_proj', expected one of embedding, qkv_proj,"
            " attn_scores, attn_values, o_proj, gate_up_proj, down_proj, lm_head (did you mean"
            " gate_up_proj?)",
        ),
        (
            "arithmetic =",
            "arithmetics =",
            "policy shielded: arithmetics: got 'int8', expected no such key (did you mean arit",
        ),
        ('name = "shielded"\n', "", "policy: name: got nothing, expected a value"),
        (TEXT, "", "policy: name: got nothing"),
        (TEXT, "[operators]", "policy: name: got nothing"),
        (TEXT, 'name = "x"\nsummary = \n', "got invalid TOML (Invalid value (at line 2,"),
        (TEXT, f"a = {'9' * 5000}", "got invalid TOML ("),
    ],
)
def test_a_policy_file_is_refused_with_its_path(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "p.toml"
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(PolicyError) as caught:
        load_policy(str(path))
    assert str(caught.value).startswith(f"{path}: {message}")


def test_what_is_no_policy_file_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    said = {"missing.toml": "No such file", "binary.toml": "text that is not UTF-8", "": "Is a dir"}
    for name, got in said.items():
        with pytest.raises(PolicyError) as caught:
            load_policy(str(tmp_path / name))
        assert caught.value.where == str(tmp_path / name)
        assert caught.value.got.startswith(got)
