"""The demo's verdict: what is compared, and that it can be negative."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tee_side.engine.tokenizer import Tokenizer
from tee_side.policy.placement import builtin_policies, load_policy
from tsqp.cli.program import model_directory
from tsqp.demo.verdict import (
    CLEAR_INTEGERS,
    Tokens,
    agreeing,
    clear_reference,
    compare_floats,
    compare_integers,
    compare_served,
)

IDS = [5, 6, 7]
LOGITS = torch.arange(12, dtype=torch.float32).reshape(3, 4)


def tokens(name: str, ids: list[int], logits: torch.Tensor = LOGITS) -> Tokens:
    return Tokens(name, ids, logits)


def test_floats_may_differ_by_rounding() -> None:
    near = LOGITS + torch.tensor([0, 0, 1e-3, 0])
    check = compare_floats(tokens("p", IDS, near), tokens("reference", IDS))
    assert check.passed
    assert check.policy == "p"
    assert "3 token ids identical to reference; largest logit difference 1.0e-03" in check.finding


@pytest.mark.parametrize(("ids", "first"), [([9, 6, 7], 0), ([5, 6, 9], 2), ([5, 6], 2)])
def test_floats_with_other_tokens_fail(ids: list[int], first: int) -> None:
    for ours, theirs in ((ids, IDS), (IDS, ids)):
        check = compare_floats(tokens("p", ours, LOGITS[: len(ours)]), tokens("reference", theirs))
        assert not check.passed
        assert f"NOT identical from token {first} on" in check.finding


def test_logits_are_compared_as_far_as_the_context_is_the_same() -> None:
    other = LOGITS + torch.tensor([[0.0], [0.5], [100.0]])
    check = compare_floats(tokens("p", [5, 9, 7], other), tokens("reference", IDS))
    assert "largest logit difference 5.0e-01" in check.finding


def test_a_chat_must_have_the_same_bytes_token_by_token() -> None:
    wanted = tokens("clear", IDS)
    served = [Tokenizer(model_directory("demo")).token_bytes(token_id) for token_id in IDS]
    check = compare_served("p", served, wanted)
    assert (check.policy, check.passed) == ("p, served", True)
    assert check.finding == "3 tokens of a chat over HTTP identical to clear"
    # The same text is not enough.
    for other, first in ((served[:2], 2), ([b"", *served[1:]], 0), ([b"".join(served)], 0)):
        check = compare_served("p", other, wanted)
        assert not check.passed
        assert f"NOT identical from token {first} on" in check.finding


def test_integers_must_be_equal_bit_for_bit() -> None:
    clear, reference = tokens("clear", IDS), tokens("reference", IDS)
    check = compare_integers(tokens("p", IDS, LOGITS.clone()), clear, reference)
    assert check.passed
    assert "bit for bit, to clear" in check.finding
    assert check.remark == "all 3 are those of reference, too"
    last_bit = LOGITS.clone()
    last_bit[2, 3] = torch.nextafter(last_bit[2, 3], torch.tensor(100.0))
    check = compare_integers(tokens("p", IDS, last_bit), clear, reference)
    assert not check.passed
    assert "logits NOT identical to clear" in check.finding
    check = compare_integers(tokens("p", [5, 6, 8]), clear, reference)
    assert not check.passed
    assert "token ids NOT identical from token 2 on to clear" in check.finding


def test_integers_may_choose_other_tokens_than_floats() -> None:
    reference = tokens("reference", [5, 8, 7, 9])
    check = compare_integers(tokens("p", IDS), tokens("clear", IDS), reference)
    assert check.passed
    assert "2 of 3 are those of reference; the first that differs is number 2" in check.remark


@pytest.mark.parametrize("name", [n for n in builtin_policies() if n != CLEAR_INTEGERS])
def test_masked_integers_are_compared_with_clear_ones(name: str, tmp_path: Path) -> None:
    policy = load_policy(name)
    if policy.arithmetic == "int8":
        assert clear_reference(policy, tmp_path) == CLEAR_INTEGERS


def test_clear_integers_are_compared_with_those_in_the_tee(tmp_path: Path) -> None:
    reference = load_policy(clear_reference(load_policy(CLEAR_INTEGERS), tmp_path))
    assert reference.arithmetic == "int8"
    assert not reference.services


def test_agreeing_counts_from_the_start() -> None:
    assert agreeing([1, 2, 3], [1, 2, 4]) == 2
    assert agreeing([1, 2], [1, 2, 4]) == 2
    assert agreeing([], [1]) == 0
