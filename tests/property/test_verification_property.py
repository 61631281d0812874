"""For any weights, inputs and errors: a right product passes, and a wrong one does not."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.integer import ring_product
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import MAX_SUM
from tee_side.protect.verification import ExactCheck

seeds = st.integers(0, 2**32 - 1)
elements = st.integers(-(2**31), 2**31 - 1)


@st.composite
def products(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight, and inputs of any direction and size whose sums fit 32 bits."""
    out_features, in_features = draw(st.integers(2, 70)), draw(st.integers(2, 70))
    generator = torch.Generator().manual_seed(draw(seeds))
    largest = draw(st.integers(0, 127))
    shape = (out_features, in_features)
    weight = torch.randint(-largest, largest + 1, shape, generator=generator).to(torch.int8)
    x = torch.randn(draw(st.integers(1, 4)), in_features, generator=generator).double()
    if draw(st.booleans()):
        x[:, 1:] = 0  # one direction: the largest single element that there can be
    limit = MAX_SUM // max(1, int(weight.long().abs().sum(1).max())) * draw(st.floats(0, 1))
    x = x / x.abs().amax(1, keepdim=True) * limit
    return weight, x.to(torch.int32)


@given(
    products(), st.lists(st.tuples(seeds, elements), min_size=1, max_size=6), elements.filter(bool)
)
@settings(max_examples=100, deadline=None)
def test_any_right_product_passes_and_any_wrong_one_is_refused(
    product: tuple[torch.Tensor, torch.Tensor], errors: list[tuple[int, int]], added: int
) -> None:
    """Some elements are replaced by any others that fit 32 bits; each time with new secrets.

    Or an error is added in the ring, as a service adds it to what it cannot see.
    """
    weight, x = product
    right = ring_product(x, weight)
    seed = errors[0][0]
    assert ExactCheck.draw(weight, Randomness(seed.to_bytes(4, "big") * 8)).holds(x, right)
    wrong = right.clone().flatten()
    for where, value in errors:
        wrong[where % len(wrong)] = value
    wrong = wrong.view_as(right)
    expected = torch.equal(wrong, right)
    assert ExactCheck.draw(weight, Randomness()).holds(x, wrong) == expected
    wrapped = right.clone().flatten()
    wrapped[seed % len(wrapped)] += added
    assert not ExactCheck.draw(weight, Randomness()).holds(x, wrapped.view_as(right))
