"""What the page says that an attacker reads: all in the clear, and of random words nothing."""

from __future__ import annotations

import pytest
import torch

from protocol.model.checkpoint import EMBEDDING, Checkpoint, norm_names
from protocol.model.config import read_config
from tsqp.cli.program import model_directory
from tsqp.page.reading import Reader

DEMO = model_directory("demo")
MESSAGES = [{"role": "user", "content": "Tell me a story about a lamp and a small fox."}]
ANSWER = "Once upon a time there was a lamp."


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(DEMO)


def rows_of(ids: list[int]) -> torch.Tensor:
    """Return what the first layer is given for tokens, but for the length of each row."""
    config, checkpoint = read_config(DEMO), Checkpoint(DEMO)
    gain_D = torch.empty(config.hidden_size)
    checkpoint.copy_into(norm_names(config, 0)["input_layernorm"], gain_D)
    table_VD = checkpoint.rows(EMBEDDING, 0, config.vocab_size).float()
    return table_VD[ids] * gain_D


def words(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count, 192), generator=generator).to(torch.int32)


def test_rows_in_the_clear_are_recovered(reader: Reader) -> None:
    prompt_ids = reader.prompt_ids(MESSAGES)
    found = reader.read([rows_of(prompt_ids)], prompt_ids, ANSWER)
    assert found is not None
    assert found.better
    assert (found.rows, found.right) == (len(prompt_ids), len(prompt_ids))
    assert MESSAGES[0]["content"] in found.text


def test_tokens_of_the_answer_count_wherever_they_stand(reader: Reader) -> None:
    answer_ids = reader._matcher.tokenizer.encode(ANSWER, add_special_tokens=False)
    found = reader.read([rows_of(answer_ids).flip(0)], [], ANSWER)
    assert found is not None
    assert found.right == len(answer_ids)


@pytest.mark.parametrize("seed", range(5))
def test_rows_under_pads_are_no_better_than_chance(reader: Reader, seed: int) -> None:
    prompt_ids = reader.prompt_ids(MESSAGES)
    found = reader.read([words(30, seed), words(20, seed + 100)], prompt_ids, ANSWER)
    assert found is not None
    assert not found.better
    assert found.rows == 50
    assert 0 < found.chance < found.limit


def test_of_no_rows_nothing_is_read_and_long_texts_are_cut(reader: Reader) -> None:
    assert reader.read([], [1, 2], ANSWER) is None
    found = reader.read([words(1024, 1)], [1, 2], ANSWER)
    assert found is not None
    assert len(found.text) == 1203
    assert found.text.endswith("...")
