"""Segments in placement policies: what loads, how it is cut, and what is refused by which words."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import PolicyError
from tee_side.policy.placement import Policy, load_policy
from tee_side.words import OPERATORS
from tests.kit.rows import each_row
from tests.unit.tee_side.policy_texts import CLEAR, policy_of

LAYERS = 6
STIP = CLEAR | {"mask": "stip-segment"}
CLOAK = CLEAR | {"mask": "cloak-segment"}


def only(*segments: dict[str, Any], head: Any = "tee", **more: Any) -> Policy:
    """Return a policy whose layers are in these segments; `more`: what else is placed, or said."""
    placed = {name: more.pop(name) for name in OPERATORS if name in more}
    operators = {"embedding": "tee", "lm_head": head, "segment": list(segments), **placed}
    return Policy.model_validate({"name": "n", "summary": "s", "operators": operators, **more})


@each_row(
    ("name", "mask", "head"),
    [
        ("clear-segment", None, True),
        ("attested-segment", None, True),
        ("stip-segment", "stip-segment", True),
        ("cloak-segment", "cloak-segment", False),
    ],
)
def test_the_builtin_segments_have_all_layers(name: str, mask: str | None, head: bool) -> None:
    policy = load_policy(name)
    (segment,) = policy.segments(LAYERS)
    assert (segment.first, segment.last, segment.head) == (0, LAYERS - 1, head)
    found = segment.placed.mask
    assert (found and found.name) == mask
    assert policy.services == 1
    assert not policy.verified
    assert policy.at("down_proj", 3, "decode") is segment.placed
    assert (policy.feature_mask is None) == (mask is None)


def test_a_placement_says_its_window() -> None:
    window = {"window": {"sinks": 4, "recent": 64}}
    (segment,) = only(CLOAK | {"layers": "2-"} | window).operators["segment"]
    assert str(segment) == "layers 2- gpu under cloak-segment window 4+64"


def test_layers_beside_a_segment_are_placed_one_by_one() -> None:
    first = {"layers": "0-1", "place": "tee"}
    placed = {name: [first] for name in OPERATORS if name not in ("embedding", "lm_head")}
    policy = only(CLEAR | {"layers": "2-3"}, CLEAR | {"layers": "4-"}, head=CLEAR, **placed)
    policy.check(LAYERS)
    spans = [(one.first, one.last, one.head) for one in policy.segments(LAYERS)]
    assert spans == [(2, 3, False), (4, 5, True)]
    assert policy.at("o_proj", 1, "decode").place == "tee"
    assert policy.at("o_proj", 2, "decode").place == "gpu"


@each_row(
    ("head", "segment", "joined"),
    [
        (CLEAR, CLEAR, True),
        (STIP, STIP, True),
        ("tee", CLEAR, False),
        (CLEAR, CLEAR | {"layers": "0-4"}, False),
    ],
)
def test_the_lm_head_is_part_of_a_segment_under_the_same_mask(
    head: Any, segment: dict[str, Any], joined: bool
) -> None:
    assert [one.head for one in only(segment, head=head).segments(LAYERS)] == [joined]


@each_row(
    ("segment", "more", "where", "got"),
    [
        ({"place": "tee"}, {}, "segment", 'place = "tee"'),
        (CLEAR | {"verify": "freivalds"}, {}, "segment", 'verify = "freivalds"'),
        (CLEAR | {"phase": "decode"}, {}, "segment: decode", "phase decode"),
        (CLEAR, {"arithmetic": "int8"}, "segment", 'arithmetic = "int8"'),
        (CLEAR | {"mask": "row-rotation"}, {}, "segment", "mask row-rotation"),
        (CLEAR | {"mask": "feature-rotation"}, {}, "segment", "mask feature-rotation"),
        (CLEAR, {"head": CLOAK}, "lm_head", "mask cloak-segment"),
        (CLEAR | {"window": {"sinks": 4}}, {}, "segment: window: recent", "nothing"),
        (CLEAR | {"window": {"recent": 0}}, {}, "segment: window: recent", "0"),
        (CLEAR, {"head": CLEAR | {"window": {"recent": 5}}}, "lm_head", "window"),
    ],
)
def test_what_a_segment_cannot_be(
    segment: dict[str, Any], more: dict[str, Any], where: str, got: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        only(segment, **more)
    assert caught.value.where == f"policy n: {where}"
    assert caught.value.got == got


@each_row(
    ("segments", "more", "where", "expected"),
    [
        ([CLEAR | {"layers": "0-3"}], {}, "qkv_proj: layer 4", "exactly one"),
        ([CLEAR], {"o_proj": "tee"}, "o_proj: layer 0", "none, within a segment"),
        ([CLEAR | {"layers": "0-3"}, CLEAR | {"layers": "3-"}], {}, "segment: layer 3", "exactly"),
        ([CLEAR | {"layers": "0-9"}], {}, "segment", "layers within 0-5"),
        ([STIP], {"head": CLEAR}, "lm_head", "in the TEE, or under the same mask"),
        ([STIP | {"layers": "0-2"}, CLEAR | {"layers": "3-"}], {}, "segment: layers 3-", "in the"),
    ],
)
def test_what_does_not_fit_a_model(
    segments: list[dict[str, Any]], more: dict[str, Any], where: str, expected: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        only(*segments, **more).check(LAYERS)
    assert caught.value.where == f"policy n: {where}"
    assert expected in caught.value.expected


def test_a_masked_lm_head_is_behind_a_segment_of_the_last_layers() -> None:
    first = {"layers": "3-", "place": "tee"}
    placed = {name: [first] for name in OPERATORS if name not in ("embedding", "lm_head")}
    with pytest.raises(PolicyError) as caught:
        only(STIP | {"layers": "0-2"}, head=STIP, **placed).check(LAYERS)
    assert (
        caught.value.got == "mask stip-segment behind no segment of the last layers under the same"
    )


def test_a_policy_without_segments_has_none() -> None:
    assert policy_of().segments(LAYERS) == []
    with pytest.raises(PolicyError) as caught:
        Policy.model_validate({"name": "n", "summary": "s", "operators": {"embedding": "tee"}})
    assert caught.value.got.startswith("nothing for qkv_proj")
