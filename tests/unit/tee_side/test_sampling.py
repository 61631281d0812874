"""Sampling keeps the tokens, and gives them the probabilities, that transformers would."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from pydantic import ValidationError
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from protocol.errors import PromptError
from tee_side.engine.sampling import (
    Sampler,
    SamplingSettings,
    penalize,
    require_known_ids,
    settings_of_sample,
    warp,
)
from tests.kit.rows import each_row

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40).map(torch.tensor)


def _transformers_scores(
    logits: torch.Tensor, previous: list[int], settings: SamplingSettings
) -> torch.Tensor:
    """In the order in which `generate` puts its processors."""
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


def _check_equal(logits: torch.Tensor, previous: list[int], settings: SamplingSettings) -> None:
    ours = _our_scores(logits, previous, settings)
    theirs = _transformers_scores(logits, previous, settings)
    assert torch.equal(ours.sort().values, theirs.sort().values)
    # The sort of transformers' top-p is not stable: which of equal tokens it leaves out is chance.
    moved = ours.isinf() != theirs.isinf()
    uncut = settings.model_copy(update={"top_k": 0, "top_p": 1.0, "min_p": 0.0})
    assert len(_our_scores(logits, previous, uncut)[moved].unique()) <= 1
    if not moved.any():
        assert torch.equal(ours.softmax(-1), theirs.softmax(-1))


@given(logits=LOGITS, temperature=st.floats(0.05, 5))
def test_temperature_equals_transformers(logits: torch.Tensor, temperature: float) -> None:
    _check_equal(logits, [0], SamplingSettings(temperature=temperature))


@given(logits=LOGITS, top_k=st.integers(1, 50))
def test_top_k_equals_transformers(logits: torch.Tensor, top_k: int) -> None:
    _check_equal(logits, [0], SamplingSettings(temperature=1, top_k=top_k))


@given(logits=LOGITS, top_p=st.floats(0.01, 1))
def test_top_p_equals_transformers(logits: torch.Tensor, top_p: float) -> None:
    _check_equal(logits, [0], SamplingSettings(temperature=1, top_p=top_p))


@given(logits=LOGITS, min_p=st.floats(0, 1))
def test_min_p_equals_transformers(logits: torch.Tensor, min_p: float) -> None:
    _check_equal(logits, [0], SamplingSettings(temperature=1, min_p=min_p))


@given(logits=LOGITS, penalty=st.floats(0.1, 10), data=st.data())
def test_repetition_penalty_equals_transformers(
    logits: torch.Tensor, penalty: float, data: st.DataObject
) -> None:
    previous = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=60))
    settings = SamplingSettings(temperature=1, repetition_penalty=penalty)
    _check_equal(logits, previous, settings)


@given(
    logits=LOGITS,
    settings=st.builds(
        SamplingSettings,
        temperature=st.floats(0.05, 5),
        top_k=st.integers(0, 20),
        top_p=st.floats(0.01, 1),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0.1, 10),
    ),
    data=st.data(),
)
def test_all_together_are_applied_in_the_order_of_transformers(
    logits: torch.Tensor, settings: SamplingSettings, data: st.DataObject
) -> None:
    previous = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=20))
    _check_equal(logits, previous, settings)


def test_of_equal_tokens_at_the_edge_of_top_p_the_first_leave() -> None:
    """Whatever the size: torch's own sort is stable for short rows alone."""
    for size in (3, 20, 5000):
        logits = torch.full((size,), -50.0)
        logits[-3:] = 1.0
        kept = warp(logits, SamplingSettings(temperature=1, top_p=0.5)).isfinite().nonzero()[:, 0]
        assert kept.tolist() == [size - 2, size - 1]


def test_the_order_of_top_k_and_top_p_matters_and_top_k_is_first() -> None:
    """0.4 + 0.3 reach 0.75 only after top-k has taken the rest away."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    settings = SamplingSettings(temperature=1, top_k=3, top_p=0.75)
    assert warp(logits, settings).isfinite().tolist() == [True, True, False, False]
    alone = SamplingSettings(temperature=1, top_p=0.75)
    assert warp(logits, alone).isfinite().tolist() == [True, True, True, False]


@given(
    logits=LOGITS,
    settings=st.builds(
        SamplingSettings,
        temperature=st.floats(0.05, 5),
        top_k=st.integers(0, 20),
        top_p=st.floats(0.001, 1),
        min_p=st.floats(0, 1),
    ),
)
def test_one_of_the_most_likely_tokens_always_survives(
    logits: torch.Tensor, settings: SamplingSettings
) -> None:
    survivors = warp(logits, settings).isfinite()
    # Divided, logits that lay close together may be equal.
    scores = logits / settings.temperature
    assert scores[survivors].max() == scores.max()


@given(logits=LOGITS, seed=st.integers(0, 2**63 - 1))
def test_only_surviving_tokens_are_drawn(logits: torch.Tensor, seed: int) -> None:
    settings = SamplingSettings(temperature=1, top_k=3, seed=seed)
    survivors = warp(logits, settings).isfinite()
    assert survivors[Sampler(settings, 0).sample(logits, [])]


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(SamplingSettings(temperature=1, seed=1), 0)
    drawn = torch.tensor([sampler.sample(probabilities.log(), []) for _ in range(4000)])
    frequencies = drawn.bincount(minlength=4) / 4000
    torch.testing.assert_close(frequencies, probabilities, rtol=0, atol=0.03)


def _draw(settings: SamplingSettings, count: int = 30) -> list[int]:
    sampler = Sampler(settings, 0)
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    return [sampler.sample(logits, []) for _ in range(count)]


def test_a_seed_repeats_the_same_tokens_and_another_seed_does_not() -> None:
    settings = SamplingSettings(temperature=1, seed=7)
    assert _draw(settings) == _draw(settings)
    assert _draw(settings) != _draw(SamplingSettings(temperature=1, seed=8))


def test_without_a_seed_every_sampler_draws_its_own_tokens() -> None:
    settings = SamplingSettings(temperature=1)
    assert _draw(settings) != _draw(settings)


def test_sampling_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    _draw(SamplingSettings(temperature=1, seed=7))
    _draw(SamplingSettings(temperature=1))
    assert torch.equal(torch.get_rng_state(), state)


@given(logits=LOGITS)
def test_temperature_zero_takes_the_most_likely_token_whatever_else_is_set(
    logits: torch.Tensor,
) -> None:
    settings = SamplingSettings(temperature=0, top_k=5, top_p=0.5, min_p=0.5)
    assert Sampler(settings, 0).sample(logits, []) == int(logits.argmax())


def test_the_repetition_penalty_applies_to_greedy_decoding_too() -> None:
    logits, settings = torch.tensor([3.0, 2.0, -1.0]), SamplingSettings(repetition_penalty=2.0)
    assert Sampler(settings, 0).sample(logits, []) == 0
    assert Sampler(settings, 0).sample(logits, [0]) == 1


def test_a_temperature_close_to_zero_takes_the_most_likely_token() -> None:
    logits = torch.tensor([1.0, 30.0, 29.0])
    assert Sampler(SamplingSettings(temperature=1e-38, seed=1), 0).sample(logits, []) == 1


def test_the_logits_that_were_given_are_not_changed() -> None:
    logits = torch.tensor([3.0, 2.0, -1.0])
    settings = SamplingSettings(temperature=0.5, top_k=1, repetition_penalty=2.0, seed=0)
    Sampler(settings, 0).sample(logits, [0, 2])
    assert logits.tolist() == [3.0, 2.0, -1.0]


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = torch.linspace(-3, 3, 200).bfloat16()
    settings = SamplingSettings(temperature=0.7, top_p=0.9, seed=5)
    drawn = [Sampler(settings, 0).sample(x, []) for x in (logits, logits.float())]
    assert drawn[0] == drawn[1]


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
    """Token by token, so that what one sampler has read before counts once."""
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
        token_id = sampler.sample(torch.tensor(scores), [*prompt, *answer[:length]])
        assert token_id == expected.index(max(expected))


def test_a_bias_comes_before_the_repetition_penalty_as_in_transformers() -> None:
    settings = SamplingSettings(logit_bias={0: 2.0}, repetition_penalty=2.0)
    # (1 + 2) / 2 is below 2, 1 / 2 + 2 is above.
    assert Sampler(settings, 1).sample(torch.tensor([1.0, 2.0]), [0]) == 1


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6))
def test_a_sampler_that_read_token_by_token_draws_what_one_that_read_at_once_does(
    seed: int, rows: int
) -> None:
    settings = SamplingSettings(
        temperature=1, repetition_penalty=1.5, frequency_penalty=1, presence_penalty=-1, seed=seed
    )
    logits = torch.randn(8, generator=torch.Generator().manual_seed(seed))
    ids, sampler = [1, 5], Sampler(settings, 2)
    for _ in range(rows):
        ids.append(sampler.sample(logits, ids))
    at_once = Sampler(settings, 2)
    for _ in range(rows - 1):  # as many draws of the generator, of rows that do not count
        at_once._draw(logits)
    assert at_once.sample(logits, ids[:-1]) == ids[-1]


@each_row("token_id", [4, 2**40])
def test_a_bias_outside_the_vocabulary_is_refused_without_its_id(token_id: int) -> None:
    require_known_ids(SamplingSettings(logit_bias={3: 1.0}), 4)
    with pytest.raises(PromptError) as caught:
        require_known_ids(SamplingSettings(logit_bias={token_id: 1.0}), 4)
    assert str(caught.value) == "logit_bias: got an id outside the vocabulary, expected 0 to 3"


class _Only:
    """Allows one token after another."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def hide(self, scores_V: torch.Tensor) -> torch.Tensor:
        return scores_V.index_fill(
            0, torch.tensor([i for i in range(len(scores_V)) if i != self._ids[0]]), -torch.inf
        )

    def advance(self, token_id: int) -> None:
        assert self._ids.pop(0) == token_id


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
    ids: list[int] = [0]
    left = [4, 2, 4]
    sampler = Sampler(settings, 1, _Only(left))
    for _ in range(3):
        ids.append(sampler.sample(torch.tensor([9.0, 3.0, -1.0, 3.0, 0.0]), ids))
    assert (ids, left) == ([0, 4, 2, 4], [])


def test_every_token_takes_one_draw_of_the_generator() -> None:
    """So a draft that is refused, or a grammar, moves no later token of the same seed."""
    settings = SamplingSettings(temperature=1, seed=4)
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    short, long = torch.zeros(1), torch.zeros(100_000)
    first, second = Sampler(settings, 0), Sampler(settings, 0)
    assert first.sample(short, []) == 0
    second.sample(long, [])
    assert [first.sample(logits, []) for _ in range(9)] == [
        second.sample(logits, []) for _ in range(9)
    ]


def test_a_token_without_probability_is_never_drawn_at_either_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    sampler = Sampler(SamplingSettings(temperature=1, seed=0), 0)
    for uniform, token_id in ((0.0, 1), (0.49, 1), (0.5, 3), (1 - 2**-53, 3)):
        number = torch.tensor(uniform, dtype=torch.float64)
        monkeypatch.setattr(torch, "rand", lambda *_, number=number, **__: number)
        assert sampler.sample(logits, []) == token_id


def test_samples_of_one_request_have_seeds_that_follow_its_own() -> None:
    settings = SamplingSettings(temperature=1, seed=7, top_k=5)
    assert settings_of_sample(settings, 0) == settings
    assert settings_of_sample(settings, 2) == SamplingSettings(temperature=1, seed=9, top_k=5)
    last = SamplingSettings(temperature=1, seed=2**63 - 1)
    assert settings_of_sample(last, 1).seed == 0
    unseeded = SamplingSettings(temperature=1)
    drawn = [_draw(settings_of_sample(unseeded, index)) for index in (0, 1)]
    assert drawn[0] != drawn[1]


@each_row(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": 2.1},
        {"presence_penalty": -2.1},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"one": 1.0}},
        {"seed": -1},
        {"seed": 2**63},
        {"topk": 5},
    ],
)
def test_settings_out_of_range_or_unknown_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingSettings.model_validate(wrong)
    assert "input_value" not in str(caught.value)


def test_the_smallest_top_p_leaves_the_most_likely_token() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    settings = SamplingSettings(temperature=1.0, top_p=1e-9)
    assert warp(logits, settings).isfinite().tolist() == [False, True, False]
