"""An attack of my own: which features of a row are its largest, and nothing else of it."""

from collections.abc import Iterator
from typing import ClassVar

import torch

from tsqp.lab.leak.attack import Attack, Reading, View, Work
from tsqp.lab.leak.matching import FIRST, FeatureMatcher, look_up

FEATURES = 24


class LargestFeatures(FeatureMatcher):
    """Rows as the signs of their largest features: no mask that only scales rows hides them."""

    def of_candidates(self, states_NI: torch.Tensor) -> torch.Tensor:
        """Return 1 or -1 at each row's largest features, 0 elsewhere."""
        largest = states_NI.abs().topk(min(FEATURES, states_NI.shape[-1]), dim=-1).indices
        kept = torch.zeros_like(states_NI).scatter_(-1, largest, 1.0)
        return kept * states_NI.sign()


class LargestFeaturesAttack(Attack):
    """Look every row of the first layer up by its largest features."""

    name: ClassVar[str] = "largest-features"
    control: ClassVar[str] = "attention-in-tee"
    published: ClassVar[float] = 0.9

    def refuses(self, view: View) -> str | None:
        """Say that no rows of the first layer crossed."""
        return None if FIRST in view.linear_places("qkv_proj") else "layer 0 stays"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Compare each row with every token's."""
        yield from look_up(view, LargestFeatures(), work)
