"""Recovery against the strength of noise, beside what the noise does to the output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from protocol.errors import SettingsError
from protocol.validation import validate_file
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import Mask
from tsqp.lab.leak.model import AttackRun, Point, Rate
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.research.rotations import RotationMask

_SIGMA = "sigma"


@dataclass(frozen=True)
class Harm:
    """Perplexity of a text, and the error of logits: relative, root of the mean square."""

    perplexity: float
    output_error: float


def noisy_mask(policy: Policy) -> Mask | None:
    """Return the mask whose strength can be changed: the one with an option `sigma`, if any."""
    return next((mask for mask in policy.masks if _SIGMA in type(mask).model_fields), None)


def is_noisy(policy: Policy) -> bool:
    """Whether what crosses under a policy has noise in it."""
    sigmas = [getattr(mask, _SIGMA, None) for mask in policy.masks]
    return any(isinstance(sigma, int | float) and sigma > 0 for sigma in sigmas)


def with_sigma(policy: Policy, sigma: float) -> Policy:
    """Return a policy with another strength of noise.

    Raises SettingsError if its mask does not take it.
    """

    def changed(mask: Mask | None) -> Mask | None:
        if mask is None or _SIGMA not in type(mask).model_fields:
            return mask
        strong = {**mask.model_dump(), _SIGMA: sigma}
        where = f"sigma of a curve, policy {policy.name}"
        return validate_file(type(mask), strong, where, SettingsError)

    return policy.model_copy(
        update={
            "operators": {
                operator: tuple(
                    one.model_copy(update={"mask": changed(one.mask)}) for one in placements
                )
                for operator, placements in policy.operators.items()
            }
        }
    )


def strength(policy: Policy, sigma: float, public: PublicModel) -> float:
    """Return epsilon of a row where the mask can state it, sigma otherwise.

    Of a segment's first layer: the rows of the embedding have a longest one.
    """
    mask = noisy_mask(policy)
    if not isinstance(mask, RotationMask):
        return sigma
    lengths_V = torch.linalg.vector_norm(public.embedding_VD, dim=1)
    return mask.epsilon(mask.longest_row(public.config, lambda: float(lengths_V.max())))


def parameter(policy: Policy) -> str:
    """Name what `strength` is."""
    return "epsilon" if isinstance(noisy_mask(policy), RotationMask) else _SIGMA


def harm(
    texts: Sequence[Sequence[int]], plain: Sequence[torch.Tensor], noisy: Sequence[torch.Tensor]
) -> Harm:
    """Compare logits [T, V] of each text with those without noise."""
    loss, tokens, error, size = 0.0, 0, 0.0, 0.0
    for ids, plain_TV, noisy_TV in zip(texts, plain, noisy, strict=True):
        following = torch.tensor(list(ids[1:]))
        log_TV = noisy_TV[:-1].log_softmax(-1)
        loss -= float(log_TV.gather(1, following[:, None]).sum())
        tokens += len(following)
        error += float((noisy_TV - plain_TV).square().sum())
        size += float(plain_TV.square().sum())
    return Harm(math.exp(min(loss / tokens, 700.0)), math.sqrt(error / size))


def point_of(
    policy: Policy, sigma: float, runs: Sequence[AttackRun], found: Harm, public: PublicModel
) -> Point:
    """Return the point of one strength: the best attack's rate."""
    scored = [(run, run.best) for run in runs if run.worked]
    best = max(
        ((run, one) for run, one in scored if one is not None),
        key=lambda pair: pair[1].strength,
        default=None,
    )
    return Point(
        strength=strength(policy, sigma, public),
        sigma=sigma,
        rate=best[1].top1 if best else Rate(hits=0, n=0),
        attack=best[0].attack if best else "none",
        where=best[1].where if best else "none",
        chance=best[1].chance if best else 0.0,
        perplexity=found.perplexity,
        output_error=found.output_error,
    )
