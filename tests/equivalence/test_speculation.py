"""Guessed tokens change how many steps an answer takes, and no bit of it under integers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tee_side.engine.engine import Counts, Engine, EngineSettings
from tee_side.engine.request import Request, SamplingSettings
from tee_side.engine.step import Sequence as Running
from tee_side.engine.tokenizer import Tokenizer
from tests.equivalence.tolerances import FLOAT32_STEPS, Tolerance
from tests.kit.model import Models, Tee, token_ids
from tests.kit.rows import each_row

# What is guessed is what followed the last tokens before.
REPEATED = token_ids(6) * 4
NEW_TOKENS = 28
SAMPLINGS = {
    "greedy": SamplingSettings(),
    "seed": SamplingSettings(temperature=0.4, top_p=0.9, repetition_penalty=1.1, seed=3),
}


class Answer(NamedTuple):
    sequence: Running
    ids: list[int]
    logits_NV: torch.Tensor
    counts: Counts
    # How many tokens the first sequence had after each step.
    ends: list[int]


def _tee(models: Models, policy: str, dtype: str = "float32") -> Tee:
    tee = models("llama").tee(policy, dtype)
    for pads in tee.assembly.pads.values():
        pads.fill(pads.store.capacity)
    return tee


def _answers(
    tee: Tee,
    guesses: int,
    prompts: Sequence[list[int]] = (REPEATED,),
    *,
    tokenizer: Tokenizer | None = None,
    **wanted: Any,
) -> list[Answer]:
    settings = EngineSettings(step_tokens=64, speculative_tokens=guesses)
    engine = Engine(tee.model, tee.lanes, settings, tokenizer)
    request: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop_ids": frozenset(), **wanted}
    sequences = [engine.admit(Request(prompt_ids=tuple(ids), **request))[0] for ids in prompts]
    seen: dict[Running, list[torch.Tensor]] = {sequence: [] for sequence in sequences}
    ends = []
    while engine.running:
        for sampled in engine.step():
            seen[sampled.sequence].append(sampled.logits_V)
        ends.append(len(sequences[0].token_ids))
        for sequence in engine.running:
            # What was guessed wrong is forgotten: one token is pending, as without guesses.
            if sequence.phase == "decode":
                assert sequence.pending == 1
                assert sequence.cache.length == len(sequence.ids) - 1
    return [
        Answer(one, one.token_ids, torch.stack(logits), engine.counts, ends)
        for one, logits in seen.items()
    ]


def _assert_same(found: Answer, expected: Answer, tolerance: Tolerance | None = None) -> None:
    """`tolerance`: of logits whose products are of floats; None for the same bits."""
    assert found.ids == expected.ids
    assert found.sequence.finish_reason == expected.sequence.finish_reason
    if tolerance is None:
        assert torch.equal(found.logits_NV, expected.logits_NV)
    else:
        tolerance.check(found.logits_NV, expected.logits_NV)


@each_row(
    ("policy", "dtype", "sampling"),
    [
        ("tee-only", "float32", "greedy"),
        ("shielded", "bfloat16", "seed"),
        ("dealt", "bfloat16", "seed"),
        ("quantized-clear", "float16", "seed"),
    ],
)
def test_with_and_without_guesses_answers_are_the_same(
    saved_model: Models, policy: str, dtype: str, sampling: str
) -> None:
    prompts = [REPEATED, token_ids(9, seed=4) * 3]
    wanted = {"sampling": SAMPLINGS[sampling]}
    expected = [
        _answers(_tee(saved_model, policy, dtype), 0, [prompt], **wanted)[0] for prompt in prompts
    ]
    # All at once.
    found = _answers(_tee(saved_model, policy, dtype), 4, prompts, **wanted)
    for one, other in zip(found, expected, strict=True):
        # Products of more rows add floats in another order.
        _assert_same(one, other, FLOAT32_STEPS if policy == "tee-only" else None)
    assert found[0].counts.draft_tokens > expected[0].counts.draft_tokens == 0


def test_a_length_a_stop_token_and_a_stop_string_end_within_guesses(
    saved_model: Models, tmp_path: Path
) -> None:
    tee = _tee(saved_model, "quantized-clear")
    raw = tokenizers.Tokenizer(WordLevel({f"w{n:03}": n for n in range(320)}, unk_token="w000"))
    raw.pre_tokenizer = Whitespace()
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    (whole,), (found,) = _answers(tee, 0), _answers(tee, 4)
    # Right guesses save steps, and wrong ones are made.
    assert 0 < found.counts.accepted_tokens < found.counts.draft_tokens
    assert whole.counts.steps - found.counts.steps == found.counts.accepted_tokens
    assert found.counts.generation_tokens == whole.counts.generation_tokens == NEW_TOKENS
    # An answer may end within what was guessed right: not with the last token of a step.
    for place in sorted(set(range(1, NEW_TOKENS)) - set(found.ends))[:2]:
        last = whole.ids[place - 1]
        for wanted, reason in (
            ({"max_new_tokens": place}, "length"),
            ({"stop_ids": frozenset({last})}, "stop"),
            ({"stop": (tokenizer.decode([last]),)}, "stop"),
        ):
            (expected,), (found,) = (
                _answers(tee, n, tokenizer=tokenizer, **wanted) for n in (0, 4)
            )
            assert found.sequence.finish_reason == reason
            assert len(found.ids) <= place
            _assert_same(found, expected)
