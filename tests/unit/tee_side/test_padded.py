"""A site under pads in two passes gives what its stages give one after the other, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch

from protocol.errors import ActivationRangeError
from protocol.integer import ring_product
from tee_side.native import sites as native_sites
from tee_side.protect.calibration import Calibration, SiteScales
from tee_side.protect.masks.mask import Factors
from tee_side.protect.masks.pad import Pad
from tee_side.protect.padded import PaddedSite
from tee_side.protect.pads.source import PadLane
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import DynamicSite, IntegerSite, IntegerSites
from tee_side.protect.verification import ExactCheck
from tests.kit.kernels import KERNELS, using_kernels

SITE = (0, "o_proj")
DTYPES = (torch.float32, torch.bfloat16)


class Once:
    """Stands where a `PadLane` would."""

    def __init__(self, factors: Factors) -> None:
        self.factors = factors

    def draw(self, site: int, rows: int) -> Factors:
        assert site == 7
        return self.factors


@pytest.fixture(params=[kernels for kernels in KERNELS if kernels != "torch"])
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_kernels(request.param):
        yield request.param


def _parts(
    dtype: torch.dtype, rows: int, bias: bool
) -> tuple[IntegerSite, ExactCheck, Factors, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    weight = torch.randint(-127, 128, (75, 130)).to(torch.int8)
    largest = float(weight.double().norm(dim=1).max())
    scales = SiteScales(0.01, torch.rand(75), (2**31 - 1) / largest, 1.0)
    calibration = Calibration({SITE: scales}, "0" * 64, "0" * 64, 1)  # type: ignore[dict-item]
    biases = {SITE: torch.randn(75).to(dtype)} if bias else {}
    site = IntegerSites(calibration, biases, dtype)[SITE]  # type: ignore[arg-type, index]
    r = Randomness().ring(rows, 130)
    factors = Factors(r, ring_product(r, weight))
    x = torch.randn(rows, 130).to(dtype)
    return site, ExactCheck.draw(weight, Randomness()), factors, x, weight


def _padded(
    site: IntegerSite | DynamicSite, check: ExactCheck | None, factors: Factors
) -> PaddedSite:
    return PaddedSite(site, 7, cast("PadLane", Once(factors)), check)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "bias", "checked"), [(1, True, True), (9, False, True), (3, True, False)]
)
def test_both_passes_equal_the_stages(
    compiled: str, dtype: torch.dtype, rows: int, bias: bool, checked: bool
) -> None:
    site, check, factors, x, weight = _parts(dtype, rows, bias)
    hidden = _padded(site, check if checked else None, factors).hide(x)
    encoded = site.encode(x)
    (sent,) = Pad().mask(encoded, factors).sent
    assert torch.equal(hidden.encoded, encoded)
    assert torch.equal(hidden.sent[0], sent)
    y = ring_product(sent, weight)
    revealed = hidden.reveal([y])
    assert revealed is not None
    assert torch.equal(revealed, site.decode(y - factors.u, x))
    with using_kernels("torch"):
        assert torch.equal(encoded, site.scales.encode(x))
        alone = IntegerSite.decode(_without_kernels(site), y - factors.u, x)
        assert torch.equal(revealed, alone)


def _without_kernels(site: IntegerSite) -> IntegerSite:
    site.compiled = False
    return site


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_product_is_not_revealed(compiled: str, dtype: torch.dtype) -> None:
    site, check, factors, x, weight = _parts(dtype, 4, bias=False)
    hidden = _padded(site, check, factors).hide(x)
    right = ring_product(hidden.sent[0], weight)
    assert hidden.reveal([right]) is not None
    for row, column, error in ((0, 0, 1), (3, 74, -(2**31)), (2, 16, 256)):
        wrong = right.clone()
        wrong[row, column] += error
        assert hidden.reveal([wrong]) is None
        assert _padded(site, None, factors).hide(x).reveal([wrong]) is not None


@pytest.mark.parametrize("value", [1e9, float("nan"), float("inf")])
def test_an_input_out_of_range_is_refused_before_it_is_sent(compiled: str, value: float) -> None:
    site, check, factors, x, _ = _parts(torch.float32, 3, bias=False)
    x[1, 129] = value
    with pytest.raises(ActivationRangeError, match="o_proj in layer 0: length of an input row"):
        _padded(site, check, factors).hide(x)


def test_the_limit_is_that_of_the_ring(compiled: str) -> None:
    site, check, factors, x, _ = _parts(torch.float32, 1, bias=False)
    norm = float(x.norm()) / site.scales.input_scale
    for share in (0.99, 1.01):
        larger = x * (site.scales.row_limit / norm * share)
        if share < 1:
            _padded(site, check, factors).hide(larger)
        else:
            with pytest.raises(ActivationRangeError):
                _padded(site, check, factors).hide(larger)


def test_nothing_secret_is_shown(compiled: str) -> None:
    site, check, factors, x, _ = _parts(torch.float32, 1, bias=False)
    text = repr(_padded(site, check, factors).hide(x))
    assert "encoded" not in text
    assert "u_TO" not in text


def _head(dtype: torch.dtype, rows: int) -> tuple[DynamicSite, ExactCheck, torch.Tensor, Factors]:
    """Return a site of rows with scales of their own: site, check, weight, a pad."""
    torch.manual_seed(rows)
    weight = torch.randint(-127, 128, (83, 130)).to(torch.int8)
    r = Randomness().ring(rows, 130)
    site = DynamicSite(torch.rand(83), torch.randn(83).to(dtype), dtype)
    return site, ExactCheck.draw(weight, Randomness()), weight, Factors(r, ring_product(r, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
def test_rows_under_scales_of_their_own_are_the_same_wherever_they_are_multiplied(
    compiled: str, dtype: torch.dtype, rows: int
) -> None:
    """Under a pad, in the clear, and in the TEE: compiled and by torch."""
    site, check, weight, factors = _head(dtype, rows)
    x = (torch.randn(rows, 130) * 10.0 ** torch.arange(rows)[:, None]).to(dtype)
    x[0] = 0.0 if rows > 1 else x[0]
    hidden = _padded(site, check, factors).hide(x)
    (sent,) = hidden.sent
    assert torch.equal(sent - factors.r, site.encode(x))
    assert int(site.encode(x).abs().max()) == 127
    revealed = hidden.reveal([ring_product(sent, weight)])
    assert revealed is not None
    assert torch.equal(revealed, site.decode(ring_product(site.encode(x), weight), x))
    here = native_sites.linear8(x, weight, site.factor_O, site.bias_O)
    assert torch.equal(revealed, here)
    with using_kernels("torch"):
        alone = DynamicSite(site.factor_O, site.bias_O, dtype)
        assert not alone.compiled
        assert torch.equal(here, alone.decode(ring_product(alone.encode(x), weight), x))
    wrong = ring_product(sent, weight)
    wrong[-1, 3] += 1
    assert hidden.reveal([wrong]) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_under_a_scale_of_its_own_must_be_finite(compiled: str, value: float) -> None:
    site, check, _, factors = _head(torch.float32, 3)
    x = torch.randn(3, 130)
    x[1, 129] = value
    for hide in (_padded(site, check, factors).hide, site.encode):
        with pytest.raises(ActivationRangeError, match="lm_head: input row"):
            hide(x)
