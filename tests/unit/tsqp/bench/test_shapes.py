"""Shapes of published models: their parameter counts are known to the last one."""

from __future__ import annotations

import math

import pytest

from protocol.errors import SettingsError
from tsqp.lab.bench.random_model import model_tensors
from tsqp.lab.bench.shapes import SHAPES, find_shape

# As their model cards and checkpoints have them, a tied LM head counted once.
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-2-7b": 6_738_415_616,
    "tinyllama-1.1b": 1_100_048_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "mistral-7b": 7_248_023_552,
}


def test_every_shape_has_the_published_number_of_parameters() -> None:
    counted = {
        name: sum(math.prod(size) for size in model_tensors(shape.config()).values())
        for name, shape in SHAPES.items()
    }
    assert counted == PARAMETERS


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_ends_a_sequence_and_no_layer_has_a_window(name: str) -> None:
    config = find_shape(name).config()
    assert config.eos_token_ids == frozenset()
    assert set(config.sliding_windows) == {None}
    assert config.dtype == "bfloat16"
    assert config.num_attention_heads * config.head_dim >= config.hidden_size
    assert config.context_length >= 2048


def test_rope_of_llama_3() -> None:
    config = find_shape("llama-3.2-1b").config()
    assert (config.rope.rope_type, config.rope.factor) == ("llama3", 32.0)
    assert (config.rope.rope_theta, config.context_length) == (500000.0, 131072)
    assert find_shape("llama-3.1-8b").config().rope.factor == 8.0


def test_other_numbers_of_layers() -> None:
    shape = find_shape("qwen2.5-0.5b")
    small = shape.with_layers(3)
    assert small.config() == shape.config().model_copy(
        update={"num_hidden_layers": 3, "sliding_windows": (None,) * 3}
    )
    assert shape.config().num_hidden_layers == 24


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"--shape: got 'llama-9', .*llama-3\.2-1b, .*mistral"):
        find_shape("llama-9")
