"""A site under pads in two passes gives what its stages give one after the other, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from protocol.errors import ActivationRangeError
from protocol.integer import ring_product
from tee_side.native import sites as native_sites
from tee_side.protect.calibration import Calibration, SiteScales
from tee_side.protect.masks.mask import Factors
from tee_side.protect.masks.pad import Pad
from tee_side.protect.padded import PaddedSite
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import DynamicSite, IntegerSite, IntegerSites
from tee_side.protect.verification import ExactCheck
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.rows import each_row


@pytest.fixture(params=[kernels for kernels in KERNELS if kernels != "torch"])
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_kernels(request.param):
        yield request.param


class Parts:
    """A weight, its site (`head`: with scales of its own for each row), its check, and a pad."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        rows: int = 3,
        *,
        bias: bool = True,
        head: bool = False,
    ) -> None:
        self.weight = torch.randint(-127, 128, (75, 130)).to(torch.int8)
        limit = (2**31 - 1) / float(self.weight.double().norm(dim=1).max())
        scales = SiteScales(0.01, torch.rand(75), limit, 1.0)
        bias_O = torch.randn(75).to(dtype) if bias else None
        place: Any = (0, "o_proj")
        sites = IntegerSites(
            Calibration({place: scales}, "", "", 1),
            {} if bias_O is None else {place: bias_O},
            dtype,
        )
        self.site = DynamicSite(torch.rand(75), bias_O, dtype) if head else sites[place]
        self.check = ExactCheck.draw(self.weight, Randomness())
        r = Randomness().ring(rows, 130)
        self.factors = Factors(r, ring_product(r, self.weight))
        self.x = torch.randn(rows, 130).to(dtype)

    def padded(self, *, checked: bool = True) -> PaddedSite:
        pads: Any = SimpleNamespace(draw=lambda site, _: {7: self.factors}[site])
        return PaddedSite(self.site, 7, pads, self.check if checked else None)


@each_row(
    ("dtype", "rows", "bias", "checked", "head"),
    [
        (torch.float32, 9, False, True, False),
        (torch.bfloat16, 1, True, True, False),
        (torch.float32, 3, True, False, False),
        (torch.bfloat16, 1, True, True, True),
        (torch.float32, 5, True, True, True),
    ],
)
def test_both_passes_equal_the_stages(
    compiled: str, dtype: torch.dtype, rows: int, bias: bool, checked: bool, head: bool
) -> None:
    """And what torch computes without compiled kernels, and the TEE without a pad."""
    made = Parts(dtype, rows, bias=bias, head=head)
    site, factors, x = made.site, made.factors, made.x
    if head:
        x *= (10.0 ** torch.arange(rows)[:, None]).to(dtype)
        x[0] = 0.0 if rows > 1 else x[0]
    hidden = made.padded(checked=checked).hide(x)
    encoded = site.encode(x)
    (sent,) = Pad().mask(encoded, factors).sent
    assert torch.equal(hidden.encoded, encoded)
    assert torch.equal(hidden.sent[0], cast(torch.Tensor, sent))
    y = ring_product(hidden.sent[0], made.weight)
    revealed = hidden.reveal([y])
    assert revealed is not None
    assert torch.equal(revealed, site.decode(y - factors.u, x))
    with using_kernels("torch"):
        site.compiled = False
        alone = site.scales.encode(x) if isinstance(site, IntegerSite) else site.encode(x)
        assert torch.equal(encoded, alone)
        assert torch.equal(revealed, site.decode(ring_product(alone, made.weight), x))
    if isinstance(site, DynamicSite):
        assert int(encoded.abs().max()) == 127
        here = native_sites.linear8(x, made.weight, site.factor_O, site.bias_O)
        assert torch.equal(revealed, here)


@each_row(("dtype", "head"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_wrong_product_is_not_revealed(compiled: str, dtype: torch.dtype, head: bool) -> None:
    made = Parts(dtype, 4, head=head)
    hidden = made.padded().hide(made.x)
    right = ring_product(hidden.sent[0], made.weight)
    assert hidden.reveal([right]) is not None
    for row, column, error in ((0, 0, 1), (3, 74, -(2**31)), (2, 16, 256)):
        wrong = right.clone()
        wrong[row, column] += error
        assert hidden.reveal([wrong]) is None
        assert made.padded(checked=False).hide(made.x).reveal([wrong]) is not None
    # Neither in a traceback nor in a log.
    assert repr(hidden) == str(hidden) == "Padded()"


@each_row(
    ("head", "value"),
    [(False, 1e9), (False, math.nan), (False, math.inf), (True, math.nan), (True, -math.inf)],
)
def test_an_input_out_of_range_is_refused_before_it_is_sent(
    compiled: str, head: bool, value: float
) -> None:
    made = Parts(head=head)
    made.x[1, 129] = value
    said = "lm_head: input row" if head else "o_proj in layer 0: length of an input row"
    for hide in (made.padded().hide, made.site.encode):
        with pytest.raises(ActivationRangeError, match=said):
            hide(made.x)
    one = Parts(rows=1)
    if isinstance(one.site, IntegerSite):  # the limit is that of the ring
        norm = float(one.x.norm()) / one.site.scales.input_scale
        one.padded().hide(one.x * (one.site.scales.row_limit / norm * 0.99))
        with pytest.raises(ActivationRangeError):
            one.padded().hide(one.x * (one.site.scales.row_limit / norm * 1.01))
