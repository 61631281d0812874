"""What masks draw beside ring elements, all from the generator that they get.

The same key gives the same floats on every machine up to the last bit of log, cos and QR.
"""

import math

import torch

from tee_side.protect.randomness import Randomness

_MANTISSA_BITS = 53


def normal(randomness: Randomness, *shape: int) -> torch.Tensor:
    """Return float64 elements, standard normal (Box and Muller 1958).

    Their radius comes from a uniform of 53 bits that is never 0, so |x| <= 8.58, and what a true
    normal has beyond that (probability 1e-17) is missing.
    """
    count = math.prod(shape)
    drawn = uniform(randomness, 2, (count + 1) // 2)
    radius = (drawn[0] + 2.0**-_MANTISSA_BITS).log().mul(-2).sqrt()
    angle = drawn[1] * (2 * math.pi)
    return torch.cat((radius * angle.cos(), radius * angle.sin()))[:count].reshape(shape)


def signs(randomness: Randomness, *shape: int) -> torch.Tensor:
    """Return int8 elements, -1 or 1 with equal probability."""
    return (randomness.elements(shape, torch.int8) & 1) * 2 - 1


def integers(randomness: Randomness, high: int, *shape: int) -> torch.Tensor:
    """Return int64 elements over 0 .. high - 1, each within high / 2^63 of equally likely.

    Raises ValueError unless 1 <= high < 2^32.
    """
    if not 1 <= high < 2**32:
        raise ValueError(f"integers: got {high}, expected 1 .. 2^32 - 1")
    return (randomness.elements(shape, torch.int64) & (2**63 - 1)) % high


def uniform(
    randomness: Randomness,
    *shape: int,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return floats, uniform over [low, high), drawn as multiples of 2^-53 of the range.

    Rounding to a narrower `dtype`, or of low + (high - low) * x, may give `high` itself. Raises
    ValueError unless low < high and both are finite.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"uniform: got [{low}, {high}), expected finite low < high")
    bits = randomness.elements(shape, torch.int64).bitwise_and(2**_MANTISSA_BITS - 1)
    return (low + (high - low) * (bits.double() * 2.0**-_MANTISSA_BITS)).to(dtype)


def permutation(randomness: Randomness, n: int) -> torch.Tensor:
    """Return int64 [n], uniform over the permutations of 0 .. n - 1.

    The order of n keys of 64 bits; keys that collide are drawn again, all of them, because how a
    sort breaks ties is not random.
    """
    while True:
        keys, order = torch.sort(randomness.elements((n,), torch.int64))
        if not torch.any(keys[1:] == keys[:-1]):
            return order


def orthogonal(randomness: Randomness, n: int) -> torch.Tensor:
    """Return float64 [n, n], orthogonal, Haar-distributed (Mezzadri, arXiv math-ph/0609050).

    The signs of R's diagonal are moved into Q; without that, LAPACK's choice of them shows.
    """
    q, r = torch.linalg.qr(normal(randomness, n, n))
    flips = torch.where(r.diagonal() < 0, -1.0, 1.0)
    rotation: torch.Tensor = q * flips
    return rotation
