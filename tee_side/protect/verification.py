"""Checks products of integers that a service computed, in far fewer operations than they take.

Freivalds' check: a service that returns y for x W is asked nothing more; the TEE compares y s with
x (W s) for secret vectors s. W s is prepared once a run, from the TEE's own copy of
the weights, so that a row costs I + O multiplications a vector instead of I * O. It is exact: the
entries of s are uniform b-bit integers, and a wrong y passes one vector with probability 2^-b at
most and all of them with 2^-`SECURITY_BITS`, whatever x and y are (docs/verification.md).

A service learns one bit from a check, accepted or refused, and refused ends its part in the run.
Shape suffixes: T rows, I in_features, O out_features, k secret vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from protocol.integer import exact_product
from tee_side.protect.randomness import Randomness

# A wrong product of integers passes a check with probability 2^-48 at most. What is promised is
# 2^-40: 2^8 attempts at each of the products of a run are within it.
SECURITY_BITS = 48

# With b = 23 - ceil(log2 O) bits an entry, y s and x (W s) stay within 2^53 each, in any order of
# summation: float64 holds all such integers.
_BITS_TOGETHER = 23
_RING_BITS = 32

# Elements of a block of rows in float64: 4 MB, which stay in a cache.
BLOCK_ELEMENTS = 2**19


def bits_of(out_features: int) -> int:
    """Return b, how many bits an entry of a secret vector has for so many outputs."""
    return _BITS_TOGETHER - math.ceil(math.log2(out_features))


def vectors_for(out_features: int) -> int:
    """Return k, how many secret vectors integers are checked with."""
    return math.ceil(SECURITY_BITS / bits_of(out_features))


@dataclass(frozen=True, slots=True, eq=False)
class ExactCheck:
    """The check of one linear operator's products of integers.

    Right while x passes the range check of `SiteScales.encode`, which keeps x W within 32 bits: a
    product that wrapped is refused like any other wrong one.
    """

    # float64 [k, O] and [k, I]: s and W^T s, one vector a row. Not in a traceback or a log: with
    # them a service can make products that pass.
    _vectors: torch.Tensor = field(repr=False)
    _products: torch.Tensor = field(repr=False)

    @staticmethod
    def draw(weight_OI: torch.Tensor, randomness: Randomness) -> ExactCheck:
        """Draw vectors for a weight, int8 [O, I]. Raises KernelError for 2^17 outputs or more."""
        out_features = len(weight_OI)
        # An arithmetic shift leaves b uniform bits, signed.
        shift = _RING_BITS - bits_of(out_features)
        s_kO = randomness.ring(vectors_for(out_features), out_features) >> shift
        product_kI = exact_product(s_kO, weight_OI.t())
        return ExactCheck(s_kO.double(), product_kI.double())

    @property
    def nbytes(self) -> int:
        """Memory that the vectors and their products take."""
        return self._vectors.nbytes + self._products.nbytes

    def holds(
        self, x_TI: torch.Tensor, y_TO: torch.Tensor, sent: Sequence[torch.Tensor] = ()
    ) -> bool:
        """Say whether y = x W, both int32; False for a wrong y but for a chance of 2^-48.

        `sent`: not looked at.
        """
        # In blocks of rows, so that what is float64 stays in a cache.
        size = max(1, BLOCK_ELEMENTS // max(x_TI.shape[1], y_TO.shape[1]))
        for start in range(0, max(1, x_TI.shape[0]), size):
            rows = slice(start, start + size)
            expected_kn = self._products @ x_TI[rows].double().t()
            # False for NaN, too.
            if not torch.equal(self._vectors @ y_TO[rows].double().t(), expected_kn):
                return False
        return True
