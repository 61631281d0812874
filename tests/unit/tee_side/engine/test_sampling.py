"""Sampling keeps the tokens, and gives them the probabilities, that transformers would."""

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tee_side.engine.reading import MAX_TOP, logprobs_of
from tee_side.engine.request import SamplingSettings
from tee_side.engine.sampling import AskedSampling, penalize, warp
from tee_side.engine.step import Sampler
from tests.kit.rows import each_row

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=8, max_size=40).map(torch.tensor)
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def _transformers_scores(
    logits: torch.Tensor, previous: list[int], settings: SamplingSettings
) -> torch.Tensor:
    processors = LogitsProcessorList()
    if settings.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    processors.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        processors.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        processors.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        processors.append(MinPLogitsWarper(settings.min_p))
    scores: torch.Tensor = processors(torch.tensor([previous]), logits[None].clone())
    return scores[0]


def _our_scores(
    logits: torch.Tensor, previous: list[int], settings: SamplingSettings
) -> torch.Tensor:
    seen = torch.zeros(len(logits)).index_fill(0, torch.tensor(previous), 1)
    return warp(penalize(logits, seen > 0, torch.zeros(len(logits)), settings), settings)


# Each alone, and all together; temperature with them all.
@pytest.mark.parametrize("alone", [*OFF, "temperature", "all"])
@settings(max_examples=40)
@given(
    logits=LOGITS,
    settings=st.builds(
        SamplingSettings,
        temperature=st.floats(0.05, 5),
        top_k=st.integers(1, 12),
        top_p=st.floats(0.01, 1),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0.1, 10),
    ),
    data=st.data(),
)
def test_scores_are_those_of_transformers(
    alone: str, logits: torch.Tensor, settings: SamplingSettings, data: st.DataObject
) -> None:
    previous = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=20))
    off = {name: value for name, value in OFF.items() if alone not in (name, "all")}
    settings = settings.model_copy(update=off)
    ours = _our_scores(logits, previous, settings)
    theirs = _transformers_scores(logits, previous, settings)
    assert torch.equal(ours.sort().values, theirs.sort().values)
    # The sort of transformers' top-p is not stable: which of equal tokens it leaves out is chance.
    moved = ours.isinf() != theirs.isinf()
    uncut = settings.model_copy(update={"top_k": 0, "top_p": 1.0, "min_p": 0.0})
    scores, survivors = _our_scores(logits, previous, uncut), ours.isfinite()
    assert len(scores[moved].unique()) <= 1
    if not moved.any():
        assert torch.equal(ours.softmax(-1), theirs.softmax(-1))
    # One of the most likely always stays, and what was cut off is never drawn.
    assert scores[survivors].max() == scores.max()
    assert survivors[Sampler(settings, len(previous)).sample(logits, previous)]


def _draw(settings: SamplingSettings, count: int = 30) -> list[int]:
    sampler = Sampler(settings, 0)
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    return [sampler.sample(logits, []) for _ in range(count)]


def test_a_seed_repeats_the_same_tokens_and_none_draws_its_own() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    seeded, unseeded = SamplingSettings(temperature=1, seed=7), SamplingSettings(temperature=1)
    assert _draw(seeded) == _draw(seeded)
    assert _draw(seeded) != _draw(SamplingSettings(temperature=1, seed=8))
    assert _draw(unseeded) != _draw(unseeded)
    # Samples of one request have seeds that follow its own.
    for seed, sample, expected in ((7, 0, 7), (7, 2, 9), (2**63 - 1, 1, 0)):
        asked = AskedSampling(SamplingSettings(seed=seed), 0, sample)
        assert asked._generator.initial_seed() == expected
    # The global generator is left alone.
    assert torch.equal(torch.get_rng_state(), state)


def test_a_token_without_probability_is_never_drawn_at_either_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    sampler = Sampler(SamplingSettings(temperature=1, seed=0), 0)
    for uniform, token_id in ((0.0, 1), (0.49, 1), (0.5, 3), (1 - 2**-53, 3)):
        number = torch.tensor(uniform, dtype=torch.float64)
        monkeypatch.setattr(torch, "rand", lambda *_, number=number, **__: number)
        assert sampler.sample(logits, []) == token_id


@given(
    scores=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    prompt=st.lists(st.integers(0, 3), max_size=8),
    answer=st.lists(st.integers(0, 3), max_size=8),
    frequency=st.sampled_from([-2, -0.5, 0, 1, 2]),
    presence=st.sampled_from([-2, -0.5, 0, 1, 2]),
    bias=st.dictionaries(st.integers(0, 3), st.sampled_from([-100, -1, 0.5, 100])),
)
def test_penalties_and_bias_are_those_of_openai_over_the_generated_tokens_only(
    scores: list[int],
    prompt: list[int],
    answer: list[int],
    frequency: float,
    presence: float,
    bias: dict[int, float],
) -> None:
    """Token by token, so that what one sampler has read before counts once; and all at once."""
    settings = SamplingSettings(
        frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias
    )
    sampler = Sampler(settings, len(prompt))
    for length in range(len(answer) + 1):
        counts = [answer[:length].count(token_id) for token_id in range(4)]
        expected = [
            score + bias.get(token_id, 0) - count * frequency - (count > 0) * presence
            for token_id, (score, count) in enumerate(zip(scores, counts, strict=True))
        ]
        for one in (sampler, Sampler(settings, len(prompt))):
            token_id = one.sample(torch.tensor(scores), [*prompt, *answer[:length]])
            assert token_id == expected.index(max(expected))


@each_row("temperature", [0.0, 1.0])
def test_a_grammar_hides_before_everything_else_and_takes_what_was_drawn(
    temperature: float,
) -> None:
    settings = SamplingSettings(
        temperature=temperature,
        top_k=1,
        repetition_penalty=2,
        presence_penalty=2,
        logit_bias={4: -100.0, 0: 100.0},
        seed=0,
    )
    ids, left = [0], [4, 2, 4]

    def hide(scores_V: torch.Tensor) -> torch.Tensor:
        others = torch.arange(len(scores_V)) != left[0]
        return scores_V.masked_fill(others, -torch.inf)

    grammar: Any = SimpleNamespace(hide=hide, advance=left.remove)
    sampler = Sampler(settings, 1, grammar)
    for _ in range(3):
        ids.append(sampler.sample(torch.tensor([9.0, 3.0, -1.0, 3.0, 0.0]), ids))
    assert (ids, left) == ([0, 4, 2, 4], [])


@given(
    logits=st.lists(st.floats(-40, 40, width=16), min_size=1, max_size=60).map(torch.tensor),
    count=st.integers(0, MAX_TOP),
    data=st.data(),
)
def test_the_likeliest_come_in_order_and_of_equals_the_lower_id_first(
    logits: torch.Tensor, count: int, data: st.DataObject
) -> None:
    """Values of 16 bits are often equal. A token's own number is the same float as its entry."""
    token_id = data.draw(st.integers(0, len(logits) - 1))
    found = logprobs_of(logits, token_id, count)
    expected = torch.log_softmax(logits, -1).tolist()
    order = sorted(range(len(logits)), key=lambda i: (-expected[i], i))[:count]
    assert found.top == tuple((i, expected[i]) for i in order)
    assert (found.token_id, found.logprob) == (token_id, expected[token_id])
