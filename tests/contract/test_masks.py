"""The one contract suite that every mask passes: built-in ones, and files of a user's own."""

import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tee_side.protect.masks.mask import Mask, Pad, ProvisionedMask, all_masks, find_mask
from tee_side.protect.randomness import Randomness
from tee_side.protect.verification import ExactCheck
from tee_side.words import PRODUCTS, Operator
from tests.kit.masks import FEATURES, ROWS, Change, Trial, apply, key, supported
from tsqp.lab.research.float_check import FloatCheck, ProductCheck, Tolerance

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*mask*.py"))

# Built-in masks, and those that installed packages register: our own research baselines among them.
NAMED = {name: find_mask(name) for name in all_masks().names()}
OWN = {mask.name: mask for mask in (find_mask(str(path)) for path in EXAMPLES)}
MASKS = {**NAMED, **OWN}

# Options other than the defaults that must not change the result either.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "row-permutation": [{"dummy_rows": 1}],
    "row-rotation": [{"shield_rows": 1}],
    "feature-permutation": [{"block": 10}],
    "feature-rotation": [{"block": 10}, {"block": 4096}],
    "cloak-segment": [{"block": 4096}],
    "float-noise": [{"sigma": 0.01}],
    "pad": [{"pads": "dealt"}],
}

DEALT = Pad(pads="dealt")  # by two dealers

INSTANCES: dict[str, Mask] = {
    " ".join([name, *(f"{k}={v}" for k, v in options.items())]): mask(**options)
    for name, mask in MASKS.items()
    for options in [{}, *OPTIONS.get(name, [])]
}


class Case(NamedTuple):
    """A mask on an operator's input of so many rows."""

    mask: Mask
    operator: Operator
    rows: int

    @property
    def is_verified(self) -> bool:
        """Not embeddings, which are compared for equality, and segments, which nothing verifies."""
        return self.operator != "embedding" and self.mask.kind != "segment"

    @property
    def is_default(self) -> bool:
        """Whether the mask has no option of its own."""
        return self.mask == type(self.mask)()

    def trial(self, **settings: Any) -> Trial:
        """Apply the mask, with randomness that is the same in every run."""
        randomness = Randomness(key(f"{self.mask!r} {self.operator} {self.rows}"))
        return apply(*self, randomness, **settings)


def result_is_the_plain_one(case: Case) -> None:
    trial = case.trial()
    assert trial.result.shape == trial.plain.shape
    if case.mask.tolerance == 0:
        assert torch.equal(trial.result, trial.plain)
    assert trial.error <= case.mask.tolerance


def result_does_not_depend_on_luck(case: Case) -> None:
    """A mixture that can come out nearly singular fails for some keys and not for others."""
    for seed in range(4 if case.is_default else 1):
        randomness = Randomness(key(f"{case.operator} {case.rows} {seed}"))
        trial = apply(*case, randomness, site_key=key(f"site {seed}"))
        assert trial.error <= case.mask.tolerance
        assert not case.is_verified or _holds(case, trial, trial.result)


def _times(*factors: tuple[Any, float]) -> Change:
    """Return what multiplies parts of a tensor."""

    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for part, factor in factors:
            x[part] *= factor
        return x

    return change


# A channel 1,000 times as large, and one row of several.
OUTLIERS = _times((np.s_[..., 3], 1000), (np.s_[..., 1:2, :], 1000))
# Every other channel down to where float32 is about to end, and one zero.
PARTLY_TINY = _times((np.s_[..., ::2], 1e-30), (np.s_[..., 0], 0))


def outliers_and_tiny_values_do_not_spoil_the_result(case: Case) -> None:
    for change in (OUTLIERS, PARTLY_TINY, _times((np.s_[...], 1e-6)), torch.zeros_like):
        trial = case.trial(change=change)
        error = (trial.result.double() - trial.plain.double()).abs().max()
        # Noise of a fixed size brings a rounding of its own, whatever the size of the input.
        most = max(float(trial.plain.double().abs().max()), trial.noise)
        assert error <= case.mask.tolerance * most, change
        # Of integers no site makes such outliers: their sums wrap.
        if case.is_verified and not (change is OUTLIERS and case.mask.arithmetic == "int8"):
            assert _holds(case, trial, trial.result), change


def bfloat16_stays_bfloat16_and_close(case: Case) -> None:
    trial = case.trial(dtype=torch.bfloat16)
    assert {sent.dtype for sent in trial.sent} == {torch.bfloat16}
    assert trial.result.dtype == torch.bfloat16
    assert trial.result.isfinite().all()
    # Eight bits of mantissa, rounded at several places: measured at most 0.01.
    assert trial.error <= 0.05


def unmasking_changes_neither_its_inputs_nor_its_mind(case: Case) -> None:
    """A repeated request, and the search for a liar, use what was sent and answered."""
    trial = case.trial()
    before = [tensor.clone() for tensor in (*trial.replies, *trial.sent, *trial.inputs)]
    again = trial.unmask(*trial.replies)
    for tensor, same in zip((*trial.replies, *trial.sent, *trial.inputs), before, strict=True):
        assert torch.equal(tensor, same)
    assert torch.equal(again, trial.result)


# What a service may send instead of the right replies; of integers and floats alike.
LIES: dict[str, Change] = {
    "sign": lambda y: -y,
    "zeros": torch.zeros_like,
    "low-rank": lambda y: y + torch.arange(1, y.shape[-1] + 1).to(y.dtype) * 3,
    "shifted": lambda y: y.roll(1, dims=-1),
}
INTEGER_LIES: dict[str, Change] = {
    **LIES,
    "one element by 1": lambda y: torch.cat((y[:-1], y[-1:] + _unit(y.shape[-1])), 0),
    "x(1 + 1e-3)": lambda y: (y.double() * 1.001).round().to(y.dtype),
}


def _unit(size: int) -> torch.Tensor:
    return torch.eye(size, dtype=torch.int32)[:1]


def _holds(case: Case, trial: Trial, result: torch.Tensor) -> bool:
    """Check a result as the operators do, with secrets of its own."""
    randomness, mask = Randomness(), case.mask
    tolerance = Tolerance.of(trial.inputs[0].dtype, mask) if mask.arithmetic == "float" else None
    if case.operator in PRODUCTS:
        assert tolerance is not None
        return ProductCheck(tolerance, randomness).holds(trial.inputs, result, [])
    assert trial.weight is not None
    (x_TI,) = trial.inputs
    if tolerance is None:
        return ExactCheck.draw(trial.weight.to(torch.int8), randomness).holds(x_TI, result)
    check = FloatCheck.draw(trial.weight, randomness)
    return check.holds(x_TI, result, trial.sent, tolerance)


def declared_error_is_not_refused(case: Case) -> None:
    """All of it in one element of the smallest row; what is declared is of the whole tensor."""
    trial = case.trial(change=_times((np.s_[..., 0, :], 1e-4)))
    result = trial.plain.clone()
    result[..., 0, 5] += case.mask.tolerance * float(trial.plain.abs().max())
    for _ in range(2):
        assert _holds(case, trial, result.to(trial.result.dtype))


def lies_are_refused(case: Case) -> None:
    """Each reply by itself is changed, and the plain result is what is checked."""
    trial = case.trial()
    for name, lie in (INTEGER_LIES if case.mask.arithmetic == "int8" else LIES).items():
        for liar in range(len(trial.replies)):
            replies = list(trial.replies)
            replies[liar] = lie(replies[liar])
            assert not _holds(case, trial, trial.unmask(*replies)), (name, liar)


def what_crosses_is_not_the_plain_tensor(case: Case) -> None:
    trial = case.trial()
    linear = case.operator in FEATURES
    assert len(trial.sent) == ((3 if case.mask == DEALT else 1) if linear else len(trial.inputs))
    for sent in trial.sent:
        for plain in trial.inputs:
            assert sent.shape != plain.shape or not torch.equal(sent, plain)
        assert sent.dtype == trial.inputs[0].dtype
        assert sent.data_ptr() not in {plain.data_ptr() for plain in trial.inputs}


def two_calls_send_different_bytes(case: Case) -> None:
    """Provisioned masks are static: two keys must differ, and a key repeats itself."""
    randomness = Randomness(key("fresh"))
    one, two = (apply(*case, randomness, site_key=key("one")) for _ in range(2))
    if not isinstance(case.mask, ProvisionedMask):
        assert one.crossed != two.crossed
        return
    assert one.crossed == two.crossed
    other = apply(*case, randomness, site_key=key("two"))
    assert other.crossed != one.crossed


def what_crosses_is_drawn_from_the_generator_and_from_nothing_else(case: Case) -> None:
    first = case.trial()
    with pytest.MonkeyPatch.context() as patch:
        kept = torch.randn

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("randomness that is not from tee_side.protect.randomness")

        def seeded(*shape: int, generator: torch.Generator | None = None) -> torch.Tensor:
            if generator is None:  # what the harness draws has one
                refuse()
            return kept(*shape, generator=generator)

        for owner, names in OTHER_RANDOMNESS.items():
            for name in names.split():
                patch.setattr(owner, name, refuse)
        patch.setattr(torch, "randn", seeded)
        second = case.trial()
    # A second source that was not caught would show: all of it is a function of the key.
    assert second.crossed == first.crossed


OTHER_RANDOMNESS: dict[Any, str] = {
    torch: "rand randint randperm rand_like randn_like randint_like normal bernoulli multinomial"
    " poisson",
    torch.Tensor: "uniform_ normal_ random_ bernoulli_ exponential_ cauchy_",
    np.random: "rand randn random normal randint permutation shuffle default_rng",
    random: "random randrange randint shuffle sample gauss uniform",
    secrets: "token_bytes randbits randbelow",
}


# What each mask must do, and on which cases.
CONTRACT: dict[Callable[[Case], None], Callable[[Case], bool]] = {
    result_is_the_plain_one: lambda case: True,
    result_does_not_depend_on_luck: lambda case: True,
    unmasking_changes_neither_its_inputs_nor_its_mind: lambda case: True,
    what_crosses_is_not_the_plain_tensor: lambda case: True,
    two_calls_send_different_bytes: lambda case: True,
    what_crosses_is_drawn_from_the_generator_and_from_nothing_else: lambda case: True,
    outliers_and_tiny_values_do_not_spoil_the_result: lambda case: case.is_default,
    bfloat16_stays_bfloat16_and_close: lambda case: (
        case.is_default and case.operator != "embedding" and case.mask.arithmetic == "float"
    ),
    declared_error_is_not_refused: lambda case: (
        case.is_default and case.is_verified and case.mask.arithmetic == "float"
    ),
    lies_are_refused: lambda case: case.is_default and case.is_verified,
}


@pytest.mark.parametrize(
    ("mask", "operator"),
    [
        pytest.param(mask, operator, id=f"{label}-{operator}")
        for label, mask in INSTANCES.items()
        for operator in supported(type(mask))
    ],
)
def test_a_mask_keeps_the_contract(
    mask: Mask, operator: Operator, subtests: pytest.Subtests
) -> None:
    for rows in ROWS:
        case = Case(mask, operator, rows)
        for check, applies in CONTRACT.items():
            if applies(case):
                with subtests.test(f"{rows} rows: {check.__name__}"):
                    check(case)


def test_only_the_masks_of_the_core_are_exact_uniform_and_not_broken() -> None:
    core = {"pad"}
    assert set(all_masks().builtin) == core
    assert {name for name, mask in MASKS.items() if mask.uniform} == core
    assert {name for name, mask in NAMED.items() if not mask.broken} == core
    assert all(MASKS[name].tolerance == 0 for name in core)
