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
Shape suffixes: T rows, I in_features, O out_features, k secret vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from protocol.integer import LARGEST_OF_DIGITS, int8_product, to_digits
from protocol.native import choice
from tee_side.native import sites
from tee_side.protect.randomness import Randomness

# How many secret vectors: what the compiled kernels take.
VECTORS = 2
# A wrong product of integers passes a check with probability 2^-64 at most. What is promised is
# 2^-40: 2^24 attempts at each of the products of a run are within it.
SECURITY_BITS = 32 * VECTORS

# Outputs of a block of the weight whose products with digits fit int32.
_BLOCK_OUTPUTS = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class ExactCheck:
    """The check of one linear operator's products of integers.

    Right while x passes the range check of `SiteScales.encode`, which keeps x W within 32 bits: a
    product that wrapped is refused like any other wrong one.
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

    @property
    def nbytes(self) -> int:
        """Memory that the vectors and their products take."""
        return self.vectors_kO.nbytes + self.low_kI.nbytes + self.high_kI.nbytes

    def expected(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return what y s must be for x, int32: int64 [T, k]."""
        if not choice().compiled:
            products_kI = self.low_kI.long() + (self.high_kI.long() << 32)
            return x_TI.long() @ products_kI.t()
        return sites.expect(x_TI, self.low_kI, self.high_kI)

    def holds(
        self, x_TI: torch.Tensor, y_TO: torch.Tensor, sent: Sequence[torch.Tensor] = ()
    ) -> bool:
        """Say whether y = x W, both int32; False for a wrong y but for a chance of 2^-64.

        `sent`: not looked at.
        """
        expected_Tk = self.expected(x_TI)
        if not choice().compiled:
            return torch.equal(y_TO.long() @ self.vectors_kO.t().long(), expected_Tk)
        return sites.same(y_TO, self.vectors_kO, expected_Tk)
