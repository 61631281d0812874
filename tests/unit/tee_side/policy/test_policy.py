"""Placement policies: what loads, where operators are placed, and what is refused, by field."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.errors import PolicyError
from tee_side.policy.placement import Placement, Policy, builtin_policies, load_policy
from tee_side.protect.masks.mask import Pad
from tee_side.words import OPERATORS, LayerRange
from tests.kit.model import CLEAR, policy_of
from tests.kit.rows import each_row
from tsqp.lab.research.row_masks import RowMix, RowPermutation
from tsqp.leakage_summary import leakage_summary

LAYERS = 3
LINEAR = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
TEE = {"place": "tee"}
INT8 = {"arithmetic": "int8"}
ROWS, FEATURES = "row-permutation", "feature-permutation"


def under(mask: object, **more: Any) -> dict[str, Any]:
    return {**CLEAR, "mask": mask, **more}


def of(name: str, **options: object) -> dict[str, object]:
    return {"name": name, **options}


STIP, CLOAK = under("stip-segment"), under("cloak-segment")


# Of each: its mask, and what leaves.
PROTECTED = {
    "shielded": ("pad", LINEAR | {"lm_head"}),
    "shielded-prefill": ("pad", LINEAR | {"lm_head"}),
    "dealt": ("pad", LINEAR | {"lm_head"}),
}


@each_row("name", builtin_policies())
def test_builtin_policies_place_what_their_names_say(name: str) -> None:
    policy = load_policy(name)
    for layers in (1, 2, 80):
        policy.check(layers)
    assert policy.name == name
    if name in PROTECTED:
        mask, leaving = PROTECTED[name]
        assert {operator for operator, _ in policy.leaving()} == leaving
        assert {placed.mask.name for _, placed in policy.leaving() if placed.mask} == {mask}
    # What protects a prompt is verified, and baselines are not.
    verified = "freivalds" if name in PROTECTED else "none"
    assert {placed.verify for _, placed in policy.leaving()} <= {verified}
    assert policy.verified == (name in PROTECTED)


@each_row(
    ("text", "first", "last", "inside", "outside"),
    [
        (3, 3, 3, [3], [0, 2, 4]),
        ("0", 0, 0, [0], [1]),
        ("1-3", 1, 3, [1, 2, 3], [0, 4]),
        ("2-", 2, None, [2, 3, 4000], [0, 1]),
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


@each_row("text", ["", "-3", "a", "1-2-3", "1 - 2", "10000", "1,2", "5-4", True])
def test_what_is_no_range_of_layers(text: object) -> None:
    with pytest.raises(PolicyError, match=r"o_proj: layers: got .* (such as|not run backwards)"):
        policy_of({"o_proj": {**TEE, "layers": text}})


Changes = dict[str, Any]

# Operators, other fields, and the error: where, behind the policy, and what it got.
REFUSED: list[tuple[Changes, Changes, str, str]] = [
    # what leaves has to say how
    *(({name: "gpu"}, {}, f"{name}: mask", "nothing") for name in OPERATORS),
    ({"o_proj": {"place": "gpu", "mask": "none"}}, {}, "o_proj: verify", "nothing"),
    ({"o_proj": under("nope")}, {}, "o_proj: mask", "'nope'"),
    ({"o_proj": under({"dummy_rows": 3})}, {}, "o_proj: mask", "a table without a name"),
    ({"o_proj": under(of(ROWS, dummy_row=3))}, {}, f"o_proj: mask: {ROWS}: dummy_row", "3"),
    ({"o_proj": TEE | {"mask": "row-mix"}}, {}, "o_proj", 'mask row-mix with place = "tee"'),
    *(
        ({operator: under(mask)}, settings, operator, f"mask {mask}")
        for operator, mask, settings in (
            ("attn_scores", "row-rotation", {}),
            ("embedding", "pad", INT8),
            ("segment", "feature-rotation", {}),
            ("lm_head", "cloak-segment", {}),
        )
    ),
    *(
        ({operator: under(mask)}, {"arithmetic": said}, operator, f'arithmetic = "{said}"')
        for operator, mask, said in (
            ("o_proj", "pad", "float"),
            ("down_proj", "row-mix", "int8"),
        )
    ),
    ({"o_proj": [under("pad", layers="4-")]}, {}, "o_proj: layers 4-", 'arithmetic = "float"'),
    ({"o_proj": under("shares")}, INT8, "o_proj: mask", "'shares'"),
    ({"o_proj": under(of("pad", pads="owner"))}, INT8, "o_proj: mask: pad: pads", "'owner'"),
    ({"o_proj": CLEAR | {"verify": "hash"}}, {}, "o_proj: verify", "'hash'"),
    (
        {"o_proj": [TEE | {"phase": "prefill", "verify": "freivalds"}]},
        *({}, "o_proj: prefill", 'verify = "freivalds" with place = "tee"'),
    ),
    (
        {"o_proj": under(of("feature-rotation", sigma=0.1), verify="freivalds")},
        *({}, "o_proj", 'verify = "freivalds" under feature-rotation block=128 delta=1e-05 sigma'),
    ),
    ({"lm_head": [TEE | {"layers": "0-"}]}, {}, "lm_head: layers 0-", "layers 0-"),
    ({"o_proj": TEE | {"phase": "warmup"}}, {}, "o_proj: phase", "'warmup'"),
    ({"o_proj": TEE | {"masks": "pad"}}, {}, "o_proj: masks", "'pad'"),
    ({"mlp": CLEAR}, {}, "operators", "'mlp'"),
    *(({name: None}, {}, "operators", f"nothing for {name}") for name in OPERATORS),
    ({}, {"arithmetics": "int8"}, "arithmetics", "'int8'"),
    ({}, {"decode_share": 0.3}, "decode_share", 'without prefill = "stock"'),
    ({"o_proj": CLEAR}, {"prefill": "stock", **INT8}, "prefill", "'stock'"),
    ({}, {"prefill": "stock", **INT8}, "prefill", "'stock'"),
    (
        {"o_proj": CLEAR},
        {"arithmetic": "int8-dynamic"},
        *("o_proj", 'place = "gpu" with arithmetic = "int8-dynamic"'),
    ),
    ({"o_proj": CLEAR | {"place": "attested"}}, {}, "o_proj", 'place = "attested"'),
    ({"segment": TEE}, {}, "segment", 'place = "tee"'),
    ({"segment": CLEAR | {"verify": "freivalds"}}, {}, "segment", 'verify = "freivalds"'),
    ({"segment": CLEAR | {"phase": "decode"}}, {}, "segment: decode", "phase decode"),
    ({"segment": CLEAR}, INT8, "segment", 'arithmetic = "int8"'),
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
    ({"o_proj": TEE | {"layers": "0-3"}}, "o_proj", "layers 0-3"),
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
    ({"lm_head": TEE | {"phase": "decode"}}, "lm_head", "0 placements in prefill"),
    ({"o_proj": under(FEATURES), "down_proj": CLEAR}, "down_proj", f"no mask beside {FEATURES} "),
    (
        {"o_proj": under(of(FEATURES, block=8)), "down_proj": under(of(FEATURES, block=4))},
        *("down_proj", f"{FEATURES} block=4 beside {FEATURES} block=8"),
    ),
    ({"segment": CLEAR | {"layers": "0-1"}}, "qkv_proj: layer 2", "0 placements"),
    ({"segment": CLEAR, "o_proj": "tee"}, "o_proj: layer 0", "1 placements"),
    ({"segment": STIP, "lm_head": CLEAR}, "lm_head", "no mask beside stip-segment"),
    (
        {"segment": [STIP | {"layers": "0-1"}, CLEAR | {"layers": "2-"}]},
        *("segment: layers 2-", "no mask beside stip-segment"),
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


@each_row(
    ("head", "goes"),
    [
        (CLEAR, True),
        ("tee", False),
        ([CLEAR | {"phase": "prefill"}, TEE | {"phase": "decode"}], False),
        (CLEAR | {"verify": "freivalds"}, False),
    ],
)
def test_the_head_goes_with_the_last_segment_where_it_is_placed_alike(
    head: Any, goes: bool
) -> None:
    (segment,) = policy_of({"segment": CLEAR, "lm_head": head}).segments(3)
    assert segment.head is goes


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
    leaves = Placement(
        place="gpu", layers=LayerRange(1, None), mask=Pad(pads="dealt"), verify="none"
    )
    stays = Placement(place="tee", layers=LayerRange(0, 0))
    assert policy_of({"o_proj": (stays, leaves)}, **INT8).at("o_proj", 1, "decode") == leaves
    both = {"o_proj": under(of("pad", pads="dealt")), "down_proj": under("pad")}
    assert policy_of(both, **INT8).services == 2
    assert policy_of({"o_proj": under("pad")}, **INT8).services == 1
    with pytest.raises(PolicyError, match=r"^policy: name: got nothing, expected a value$"):
        Policy(summary="s", operators=dict.fromkeys(OPERATORS, "tee"))  # type: ignore[call-arg]


TEXT = (files("tee_side") / "policy" / "builtin" / "shielded.toml").read_text(encoding="utf-8")


def test_a_policy_file_is_found_by_its_path_and_refused_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "published.toml").write_text(TEXT.replace('name = "shielded"', 'name = "mine"'))
    monkeypatch.chdir(tmp_path)
    assert load_policy("published.toml") == load_policy(str(tmp_path / "published.toml"))
    assert (load_policy("published.toml").name, load_policy("published").name) == (
        "mine",
        "published",
    )
    assert load_policy("published.toml").operators == load_policy("shielded").operators
    for old, new in (("tsqp-permuted", "published-permuted"), ("two-server", "dealt")):
        with pytest.raises(PolicyError, match=f"expected its new name, '{new}'"):
            load_policy(old)
    path = tmp_path / "p.toml"
    for text, message in (
        (
            TEXT.replace(', verify = "freivalds"', "", 1),
            "policy shielded: qkv_proj: decode: verify",
        ),
        (f"a = {'9' * 5000}", "got invalid TOML ("),
    ):
        path.write_text(text)
        with pytest.raises(PolicyError) as caught:
            load_policy(str(path))
        assert str(caught.value).startswith(f"{path}: {message}")


class Unbroken(RowMix):
    """A mask without a known attack, which is not the same as uniform numbers."""

    name = "unbroken"
    broken = False


UNIFORM = "the GPU sees uniform random numbers, lengths and timing"
EACH = "each of GPU and dealer sees uniform random numbers, lengths and timing"
HONEST = "; results are not verified, so this holds against a service that computes honestly"
RECOVERED = "from which the prompt and the answer can be recovered"
APART = "as long as service and dealer do not collude, now or later, and links are encrypted"
PUBLIC = "broken where the weights are public (tsqp masks says how)"
SHUFFLED = "the token ids of prompt and answer themselves, in random order among dummies"

EXACT = "; results are verified, and a service that lies is asked no more"
NEARLY = (
    "; results are verified within a tolerance, and a service that lies by more is asked no more"
)
WITHIN = "the GPU sees activations under unbroken, pad, not known to be broken; lengths and timing"
PADS, DEALT = under(Pad()), under(Pad(pads="dealt"))
CHECKED = under(Pad(), verify="freivalds")


@each_row(
    ("placed", "line"),
    [
        ({"o_proj": PADS, "down_proj": DEALT}, f"{EACH}, {APART}{HONEST}"),
        (
            {
                "embedding": under(RowPermutation()),
                "attn_scores": CLEAR,
                "attn_values": under(RowMix()),
                "o_proj": PADS,
                "down_proj": DEALT,
            },
            f"the GPU sees {SHUFFLED} (row-permutation); queries and keys in the clear -"
            f" {RECOVERED}; activations under row-mix, which is {PUBLIC}; activations under pad,"
            f" not known to be broken, {APART}",
        ),
        (
            {"attn_values": CLEAR, "o_proj": PADS},
            f"the GPU sees attention probabilities and values in the clear - {RECOVERED};"
            " activations under pad, not known to be broken",
        ),
        (
            {"embedding": CLEAR, "lm_head": CLEAR},
            "the GPU sees the token ids, the logits in the clear - the token ids and the logits:"
            " the prompt and the answer themselves",
        ),
        # Verified are all results or none.
        ({"o_proj": CHECKED, "down_proj": CHECKED}, UNIFORM + EXACT),
        ({"o_proj": CHECKED, "down_proj": PADS}, UNIFORM + HONEST),
        # Under a mask of floats a lie within the tolerance is accepted.
        (
            {"o_proj": CHECKED, "attn_scores": under(Unbroken(), verify="freivalds")},
            WITHIN + NEARLY,
        ),
    ],
)
def test_what_a_policy_discloses_is_complete_and_worst_first(placed: Changes, line: str) -> None:
    arithmetic = "int8" if "o_proj" in placed else "float"
    policy = policy_of(placed, arithmetic=arithmetic)
    assert leakage_summary(policy) == f"policy n: {line}"
    assert policy.verified == any(one == CHECKED for one in placed.values())


def test_links_in_the_clear_are_said_to_give_everything_away() -> None:
    line = leakage_summary(load_policy("dealt"), links_encrypted=False) or ""
    assert "an observer of all links, which are NOT encrypted, reads prompt and answer" in line
    assert "as long as" not in line
    shielded = load_policy("shielded")
    assert leakage_summary(shielded, links_encrypted=False) == leakage_summary(shielded)
