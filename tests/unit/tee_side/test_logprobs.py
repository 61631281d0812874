"""Log-probabilities: one number a token, an order that never depends on chance or company."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tee_side.engine.logprobs import MAX_TOP, logprobs_of, prompt_logprobs


@given(
    logits=st.lists(st.floats(-40, 40, width=16), min_size=1, max_size=60).map(torch.tensor),
    count=st.integers(0, MAX_TOP),
    data=st.data(),
)
def test_the_likeliest_come_in_order_and_of_equals_the_lower_id_first(
    logits: torch.Tensor, count: int, data: st.DataObject
) -> None:
    """Values of 16 bits are often equal."""
    token_id = data.draw(st.integers(0, len(logits) - 1))
    found = logprobs_of(logits, token_id, count)
    expected = torch.log_softmax(logits, -1).tolist()
    order = sorted(range(len(logits)), key=lambda i: (-expected[i], i))[:count]
    assert found.top == tuple((i, expected[i]) for i in order)
    assert (found.token_id, found.logprob) == (token_id, expected[token_id])


def test_a_tokens_own_number_is_the_same_float_as_its_entry() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(2)).bfloat16()
    best = int(logits.argmax())
    found = logprobs_of(logits, best, MAX_TOP)
    assert len(found.top) == MAX_TOP
    assert dict(found.top)[best] == found.logprob
    assert found.logprob == float(logits.float().log_softmax(-1)[best])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_bit_for_bit_what_it_gives_alone(dtype: torch.dtype) -> None:
    """Rows of odd sizes do not begin where memory is aligned; batches are cut into threads."""
    generator = torch.Generator().manual_seed(3)
    for size in (1, 3, 7, 31, 320, 1021, 32_003):
        for rows in (1, 2, 5, 33):
            logits = (4 * torch.randn(rows, size, generator=generator)).to(dtype)
            ids = torch.randint(size, (rows,), generator=generator).tolist()
            together = prompt_logprobs(logits, ids, 5)
            alone = tuple(logprobs_of(logits[i].clone(), ids[i], 5) for i in range(rows))
            assert together == alone


def test_rows_and_tokens_that_do_not_match_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        prompt_logprobs(torch.zeros(2, 4), [1], 0)
