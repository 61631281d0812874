"""Checks products of integers that a service computed, in far fewer operations than they take.

Freivalds' check: a service that returns y for x W is asked nothing more; the TEE compares y s with
x (W s) for secret vectors s. W s is prepared once a run, from the TEE's own copy of
the weights, so that a row costs I + O multiplications a vector instead of I * O.

Both sides of the comparison are sums modulo 2^64, which wrap as processors do, in any order. That
is exact where it matters: entries of s are uniform over 2^32 consecutive integers, and an entry of
y that is wrong is off by less than 2^32 and not by 0, which is an odd number times 2^31 at most. So
for any other entries of s, one of its values at most makes both sides equal: a wrong y passes
one vector with probability 2^-32 at most, and both with 2^-64 (docs/verification.md).

A service learns one bit from a check, accepted or refused, and refused ends its part in the run.

`SiteSecrets` are drawn once a run, for each linear operator that the policy verifies. A
`ResultCheck` is what the results of one operator under one mask are checked with. Products of
integers are checked here; an installed package registers what checks products of floats.

Shape suffixes: T rows, I in_features, O out_features, k secret vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from protocol.errors import PolicyError
from protocol.integer import LARGEST_OF_DIGITS, int8_product, to_digits
from protocol.messages import Arithmetic
from protocol.native import choice
from tee_side.native import kernels
from tee_side.protect.masks.mask import Mask
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import Weights
from tee_side.words import Site

if TYPE_CHECKING:
    from tee_side.protect.recomputation import Claim, InTime

# How many secret vectors: what the compiled kernels take. A wrong product of integers passes one
# with probability 2^-32 at most, a check with 2^-64. What is promised is 2^-40: 2^24 attempts at
# each of the products of a run are within it.
VECTORS = 2

# Outputs of a block of the weight whose products with digits fit int32.
_BLOCK_OUTPUTS = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class ExactCheck:
    """The check of one linear operator's products of integers.

    Right for what `IntegerSite.encode` gives, which keeps x W within 32 bits: a product that
    wrapped is refused like any other wrong one.
    """

    # int32 [k, O]: s. int64 [k, I]: W^T s, and its signed halves, int32 [k, I], low + 2^32 high.
    # Not in a traceback or a log: with them a service can make products that pass.
    vectors_kO: torch.Tensor = field(repr=False)
    low_kI: torch.Tensor = field(repr=False)
    high_kI: torch.Tensor = field(repr=False)

    @staticmethod
    def draw(weight_OI: torch.Tensor, randomness: Randomness) -> ExactCheck:
        """Draw vectors for a weight, int8 [O, I]."""
        s_kO = randomness.ring(VECTORS, len(weight_OI))
        product_kI = torch.zeros(VECTORS, weight_OI.shape[1], dtype=torch.int64)
        blocks = zip(s_kO.split(_BLOCK_OUTPUTS, 1), weight_OI.split(_BLOCK_OUTPUTS), strict=True)
        for part_kO, block_OI in blocks:
            # Four balanced digits are right modulo 2^32; the fifth says where they are 2^32 less.
            carry = (part_kO > LARGEST_OF_DIGITS).to(torch.int8)
            digits = torch.cat((to_digits(part_kO), carry[None]))
            parts = int8_product(digits.flatten(0, 1), block_OI.t()).view(len(digits), VECTORS, -1)
            for place, part_kI in enumerate(parts):
                product_kI += part_kI.long() << 8 * place
        low_kI = product_kI.to(torch.int32)
        high_kI = (product_kI - low_kI) >> 32
        return ExactCheck(s_kO, low_kI, high_kI.to(torch.int32))

    def holds(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> bool:
        """Say whether y = x W, both int32; False for a wrong y but for a chance of 2^-64."""
        return torch.equal(sums(y_TO, self.vectors_kO), sums(x_TI, self.low_kI, self.high_kI))


def sums(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [T, N] times vectors, low + 2^32 high [k, N], modulo 2^64: int64 [T, k].

    All are int32; without `high` it is zeros.
    """
    if choice().compiled:
        return kernels.expect(x, low, high)
    vectors = low.long() if high is None else low.long() + (high.long() << 32)
    return x.long() @ vectors.t()


GROUP = "tsqp.checks"


class ResultCheck(Protocol):
    """Checks the results of one operator under one mask."""

    def holds(self, x: Any, y: torch.Tensor, sent: Sequence[Any]) -> bool:
        """Say whether y is the plain result for x. `sent`: what crossed instead of x.

        Raises ActivationRangeError for an input that is not finite.
        """

    def wrong(self, claims: Sequence[Claim], in_time: InTime) -> Sequence[int]:
        """Return which claims of a refused result are wrong, by computing each once more.

        Raises what `in_time` raises; ModelError and ManifestError for weights that cannot be read
        again; ActivationRangeError where what was sent is not finite.
        """


class Unverified:
    """Stands where a `ResultCheck` would, for what a policy sends with verify = "none"."""


# Said by name: nothing that is missing by mistake looks like it.
UNVERIFIED = Unverified()


class SiteSecrets(Protocol):
    """What one linear operator that a policy verifies is checked with; drawn once a run."""

    @classmethod
    def draw(cls, site: Site, weights: Weights, randomness: Randomness) -> Self:
        """Read the weight of a site, and draw its secret vectors. Raises ModelError."""

    def under(self, mask: Mask | None) -> ResultCheck:
        """Return what checks the site's results under a mask."""


def find_checks(policy: str, arithmetic: Arithmetic) -> type[SiteSecrets]:
    """Return how products are checked: of integers here, of floats by an installed package.

    Raises PolicyError that says what to install, and PluginError for a package that does not load.
    """
    if arithmetic == "int8":
        return LinearCheck
    from tee_side.plugins import load_entry_point, one_entry_point

    if (entry := one_entry_point(GROUP, arithmetic)) is None:
        raise PolicyError(
            f'policy {policy}: verify = "freivalds"',
            "products of floats, without a package that checks them",
            f"an installed package that registers {arithmetic!r} in the entry points"
            f' {GROUP}, as tsqp does, or arithmetic = "int8"',
        )
    found: type[SiteSecrets] = load_entry_point(entry)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class LinearCheck:
    """The `SiteSecrets` and `ResultCheck` of a site in integers, whose products have no bias.

    `exact`: what x [T, I] and y [T, O] are checked with.
    """

    exact: ExactCheck = field(repr=False)
    weights: Weights
    site: Site

    @classmethod
    def draw(cls, site: Site, weights: Weights, randomness: Randomness) -> Self:
        """Read the weight of a site where it is not held, and draw its vectors.

        Raises ModelError, KernelError.
        """
        if weights.integers is None:
            raise LookupError("integers without their scales")
        found = weights.integers.weights(site).weight
        return cls(ExactCheck.draw(found, randomness), weights, site)

    def under(self, mask: Mask | None) -> LinearCheck:
        """See `SiteSecrets.under`: integers come back exactly, whatever the mask is."""
        return self

    def holds(self, x: torch.Tensor, y: torch.Tensor, sent: Sequence[torch.Tensor] = ()) -> bool:
        """See `ResultCheck.holds`."""
        return self.exact.holds(x, y)

    def wrong(self, claims: Sequence[Claim], in_time: InTime) -> Sequence[int]:
        """See `ResultCheck.wrong`."""
        # Of use to a refused result alone.
        from tee_side.protect.recomputation import wrong_integers

        return wrong_integers(self.weights, self.site, claims, in_time)
