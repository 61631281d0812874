"""Names of single tokens in log-probabilities."""

from __future__ import annotations

import json

from tee_side.serve.token_names import TokenNames, number
from tests.kit.serve import tokenizer


def test_no_two_tokens_have_the_same_name_and_names_add_up_to_the_text() -> None:
    names = TokenNames(tokenizer())
    found = [json.loads(names.of(token_id)[0]) for token_id in range(1024)]
    assert len(set(found)) == 1024
    ids = tokenizer().encode("The cat, 12 mice")
    assert "".join(found[one] for one in ids) == "<|begin_of_text|>The cat, 12 mice"


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    names = TokenNames(tokenizer())
    found = [names.of(one) for one in tokenizer().encode("😀")[2:]]
    assert [json.loads(name) for name, _ in found] == [
        f"bytes:\\x{b:02x}" for b in "😀".encode()[1:]
    ]
    assert [json.loads(listed) for _, listed in found] == [[b] for b in "😀".encode()[1:]]


def test_an_id_without_a_token_has_a_name_and_no_bytes() -> None:
    assert TokenNames(tokenizer()).of(5000) == ('"token_id:5000"', "null")


def test_a_logprob_is_written_so_that_the_same_float_is_read() -> None:
    for value in (-0.1, -1e-30, 0.0, -123.456789012345):
        assert json.loads(number(value)) == value
    assert number(float("-inf")) == "-9999.0"
