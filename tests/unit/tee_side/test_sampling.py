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

from tee_side.engine.sampling import Sampler, SamplingSettings, penalize_repetition, warp
from tests.tables import each_row

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
    return warp(penalize_repetition(logits, previous, settings.repetition_penalty), settings)


def _check_equal(logits: torch.Tensor, previous: list[int], settings: SamplingSettings) -> None:
    ours = _our_scores(logits, previous, settings)
    theirs = _transformers_scores(logits, previous, settings)
    assert torch.equal(ours.isinf(), theirs.isinf())
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
    assert logits[survivors].max() == logits.max()


@given(logits=LOGITS, seed=st.integers(0, 2**63 - 1))
def test_only_surviving_tokens_are_drawn(logits: torch.Tensor, seed: int) -> None:
    settings = SamplingSettings(temperature=1, top_k=3, seed=seed)
    survivors = warp(logits, settings).isfinite()
    assert survivors[Sampler(settings).sample(logits, [])]


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(SamplingSettings(temperature=1, seed=1))
    drawn = torch.tensor([sampler.sample(probabilities.log(), []) for _ in range(4000)])
    frequencies = drawn.bincount(minlength=4) / 4000
    torch.testing.assert_close(frequencies, probabilities, rtol=0, atol=0.03)


def _draw(settings: SamplingSettings, count: int = 30) -> list[int]:
    sampler = Sampler(settings)
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
    assert Sampler(settings).sample(logits, []) == int(logits.argmax())


def test_the_repetition_penalty_applies_to_greedy_decoding_too() -> None:
    logits, settings = torch.tensor([3.0, 2.0, -1.0]), SamplingSettings(repetition_penalty=2.0)
    assert Sampler(settings).sample(logits, []) == 0
    assert Sampler(settings).sample(logits, [0]) == 1


def test_a_temperature_close_to_zero_takes_the_most_likely_token() -> None:
    logits = torch.tensor([1.0, 30.0, 29.0])
    assert Sampler(SamplingSettings(temperature=1e-38, seed=1)).sample(logits, []) == 1


def test_the_logits_that_were_given_are_not_changed() -> None:
    logits = torch.tensor([3.0, 2.0, -1.0])
    settings = SamplingSettings(temperature=0.5, top_k=1, repetition_penalty=2.0, seed=0)
    Sampler(settings).sample(logits, [0, 2])
    assert logits.tolist() == [3.0, 2.0, -1.0]


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = torch.linspace(-3, 3, 200).bfloat16()
    settings = SamplingSettings(temperature=0.7, top_p=0.9, seed=5)
    drawn = [Sampler(settings).sample(x, []) for x in (logits, logits.float())]
    assert drawn[0] == drawn[1]


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
        {"seed": -1},
        {"seed": 2**63},
        {"topk": 5},
    ],
)
def test_settings_out_of_range_or_unknown_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        SamplingSettings.model_validate(wrong)


def test_the_smallest_top_p_leaves_the_most_likely_token() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    settings = SamplingSettings(temperature=1.0, top_p=1e-9)
    assert warp(logits, settings).isfinite().tolist() == [False, True, False]
