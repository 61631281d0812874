"""The exact check, and where it stands: honest products pass, wrong ones do not."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import ModelError
from protocol.integer import ring_product
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.weights import load_quantized
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import IntegerSites
from tee_side.protect.verification import (
    VECTORS,
    ExactCheck,
    LinearCheck,
    Unverified,
    Weights,
    find_checks,
)
from tee_side.remote.call import CallPlan
from tee_side.words import Operator
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.model import Models, SavedModel, Tee, token_ids, with_results
from tests.kit.rows import each_row
from tsqp.lab.research.float_check import FloatSecrets

# What no sum of integers is larger than, as `tee_side.protect.sites` chooses them.
LIMIT = 2**31 - 1


def _with(y: torch.Tensor, row: int, column: int, value: torch.Tensor | float) -> torch.Tensor:
    y = y.clone()
    y[row, column] = value
    return y


@pytest.mark.parametrize("kernels", KERNELS)
@each_row("shape", [(7, 300), (2, 2), (1024, 33), (2**17 + 3, 3)])
def test_an_honest_product_passes_and_one_wrong_element_anywhere_does_not(
    kernels: str, shape: tuple[int, int]
) -> None:
    """Vocabularies among them, which are larger than a block of the weight."""
    weight = torch.randint(-127, 128, shape).to(torch.int8)
    rows = 600 if shape[0] < 2**10 else 2
    # As large as leaves every sum within the limit, by the lengths of rows.
    largest = max(1.0, float(weight.double().norm(dim=1).max()))
    x = torch.nn.functional.normalize(torch.randn(rows, shape[1], dtype=torch.float64))
    x = (x * LIMIT * 0.995 / largest).to(torch.int32)
    with using_kernels(kernels):
        check, y = ExactCheck.draw(weight, Randomness()), ring_product(x, weight)
        assert check.vectors_kO.shape == (VECTORS, shape[0])
        assert check.low_kI.dtype == check.high_kI.dtype == check.vectors_kO.dtype == torch.int32
        products_kI = check.low_kI.long() + (check.high_kI.long() << 32)
        assert torch.equal(products_kI, check.vectors_kO.long() @ weight.long())
        # Guards the test: the product is what int64 says, and next to the largest that there is.
        assert torch.equal(y.long(), x.long() @ weight.long().t())
        assert check.holds(x, y)
        for row in {0, 1, 255 % rows, 256 % rows, rows - 1}:
            for column in (0, shape[0] - 1):
                assert not check.holds(x, _with(y, row, column, y[row, column] + 1))


@pytest.mark.parametrize("kernels", KERNELS)
@each_row(
    ("value", "outputs"),
    [(None, 2**14), (-(2**31), 2**14 + 1), (2**31 - 1, 2**14 + 1), (-(2**31), 131_071)],
)
def test_the_check_is_exact_at_the_largest_numbers_that_there_are(
    kernels: str, value: int | None, outputs: int
) -> None:
    """The largest sums, which wrap at 2^64: x at the limit of the ring, y of 32 bits."""
    weight = torch.full((outputs, 1), 127, dtype=torch.int8)
    drawn = ExactCheck.draw(weight, Randomness())
    secrets = torch.full_like(drawn.vectors_kO, value or 0)
    product_kI = secrets.long() @ weight.long()
    low_kI = product_kI.to(torch.int32)
    fixed = ExactCheck(secrets, low_kI, ((product_kI - low_kI) >> 32).to(torch.int32))
    for sign in (1, -1):
        with using_kernels(kernels):
            check = drawn if value is None else fixed
            # |x w| < 2^31, as near as whole numbers get.
            x = torch.tensor([[sign * (LIMIT // 127)]], dtype=torch.int32)
            y = torch.full((1, outputs), int(x) * 127, dtype=torch.int32)
            assert check.holds(x, y)
            assert not check.holds(x, _with(y, 0, outputs - 1, y[0, -1] + 1))
            for extreme in (-(2**31), LIMIT):
                assert not check.holds(x, torch.full_like(y, extreme))


def test_secrets_are_uniform_fresh_and_as_many_as_is_promised() -> None:
    weight, one = torch.zeros(60_000, 1, dtype=torch.int8), Randomness()
    first, second = ExactCheck.draw(weight, one), ExactCheck.draw(weight, one)
    others = (second, ExactCheck.draw(weight, Randomness()))
    assert VECTORS == 2
    for other in others:
        assert float((first.vectors_kO == other.vectors_kO).double().mean()) < 1e-3
    for shift in (0, 12, 24):
        parts = (first.vectors_kO >> shift) & 0xFF
        counts = torch.bincount(parts.flatten(), minlength=256).double()
        expected = parts.numel() / 256
        # Chi-squared with 255 degrees of freedom: six deviations above its mean.
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert chi < 255 + 6 * math.sqrt(2 * 255)
    for text in (repr(first), str(first)):
        assert text == "ExactCheck()"


ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def model(saved_model: Models) -> SavedModel:
    return saved_model("llama")


@each_row("verify", ["none", "freivalds"])
def test_results_are_believed_only_where_the_policy_says_so(model: SavedModel, verify: Any) -> None:
    """An object that is named, at all operators that leave: no check is merely missing."""
    given: dict[Operator, object] = {}
    make = CallPlan.__init__

    def noted(self: CallPlan, **settings: Any) -> None:
        given[settings["operator"]] = settings["check"]
        make(self, **settings)

    policy = with_results("shielded", verify)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallPlan, "__init__", noted)
        model.tee(policy).logits(token_ids(3), phase="decode")
    assert given.keys() == {operator for operator, _ in policy.leaving()}
    assert {isinstance(one, Unverified) for one in given.values()} == {verify == "none"}


def _secrets(model: SavedModel, policy: Policy, integers: IntegerSites | None = None) -> Any:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    if policy.arithmetic == "int8" and integers is None:
        integers = IntegerSites(config, checkpoint, {}, torch.float32)
    weights = Weights(config, checkpoint, torch.float32, integers)
    checks = find_checks(policy.name, policy.served_arithmetic)
    verified = policy.sites(3, lambda placed: placed.verify != "none")
    return {site: checks.draw(site, weights, Randomness()) for site in verified}


def test_secrets_are_those_of_what_is_verified_and_no_more(model: SavedModel) -> None:
    linear = {(layer, operator) for layer in range(3) for operator in FUSED_MODULES}
    for name, sites, kind in (
        ("shielded", linear | {(2, "lm_head")}, LinearCheck),
        ("published", linear, FloatSecrets),
    ):
        secrets = _secrets(model, with_results(name, "freivalds"))
        assert secrets.keys() == sites
        assert {type(one) for one in secrets.values()} == {kind}
        # Not in a traceback, nor in a log.
        for one in (secrets, secrets[0, "o_proj"].under(None)):
            for text in (repr(one), str(one)):
                assert not re.search(r"tensor\(|ExactCheck|FloatCheck|vectors_kO=|Randomness", text)
                assert re.search("Checkpoint|Tolerance", text)  # guards the test
    assert _secrets(model, load_policy("attention-in-tee")) == {}


def test_two_runs_have_no_secret_in_common_and_micro_batches_of_one_share_theirs(
    model: SavedModel,
) -> None:
    """A generator with a known key for masks is no way to known secrets."""
    tees: list[Tee] = [
        model.tee("shielded", randomness=Randomness(bytes(32)), micro_batches=2) for _ in range(2)
    ]
    first, second = (tee.assembly._secrets for tee in tees)
    assert first
    for site, check in first.items():
        equal = check.exact.vectors_kO == second[site].exact.vectors_kO
        assert float(equal.double().mean()) < 0.1
    tees[0].assembly.lanes(lambda _layer: tees[0].channels)
    assert tees[0].assembly._secrets is first


def test_weights_other_than_those_met_before_are_refused(model: SavedModel) -> None:
    """The bound of the sums rests on these very weights."""
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    integers = IntegerSites(config, checkpoint, {}, torch.float32)
    held = load_quantized(checkpoint, config, 1, "o_proj")
    integers.take_scales((1, "o_proj"), replace(held, scale=held.scale * 1.01))
    with pytest.raises(ModelError, match="o_proj in layer 1: scales of the weights"):
        _secrets(model, load_policy("dealt"), integers)


def test_nothing_that_the_trusted_side_runs_looks_at_the_environment() -> None:
    """So that no variable can switch a check off; options are those of `RunnerSettings`."""
    files = [file for part in ("tee_side", "protocol") for file in (ROOT / part).rglob("*.py")]
    assert len(files) > 50
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    assert [f for f, text in texts.items() if re.search(r"os\.environ|\bgetenv", text)] == []
