"""What the pads of one token consist of: a site for every operator that is padded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from protocol.messages import FUSED_MODULES, Projection
from protocol.model.config import ModelConfig
from tee_side.words import PROJECTIONS, Site

WORD_BYTES = 4


def site_number(layer: int, operator: Projection) -> int:
    """Return layer * 5 + the operator's place in `PROJECTIONS`."""
    return layer * len(PROJECTIONS) + PROJECTIONS.index(operator)


@dataclass(frozen=True)
class SiteShape:
    """One operator of a layer, or the LM head. `out_features`: of all modules side by side."""

    layer: int
    operator: Projection
    in_features: int
    out_features: int

    @cached_property
    def number(self) -> int:
        """The site's number, as of `site_number`."""
        return site_number(self.layer, self.operator)

    @property
    def site(self) -> Site:
        """Layer and operator."""
        return self.layer, self.operator

    def __str__(self) -> str:
        return f"layer {self.layer} {self.operator}"


@dataclass(frozen=True)
class PadLayout:
    """The sites of one model, each once, in the order of their numbers; at least one.

    A token takes r, uint32 [in_features], and u = r W, uint32 [out_features], at every site.
    Raises ValueError for sites out of order, repeated or none.
    """

    sites: tuple[SiteShape, ...]

    def __post_init__(self) -> None:
        numbers = [site.number for site in self.sites]
        if not numbers or numbers != sorted(set(numbers)):
            raise ValueError(f"pad layout: got sites {numbers[:8]}, expected ascending numbers")

    @classmethod
    def of(cls, config: ModelConfig, placed: Iterable[Site] | None = None) -> PadLayout:
        """Return the layout of some (layer, operator) pairs of a model; None: of all of them."""
        if placed is None:
            layers = range(config.num_hidden_layers)
            placed = [(layer, operator) for layer in layers for operator in FUSED_MODULES]
            placed.append((layers[-1], "lm_head"))
        sites = []
        for layer, operator in placed:
            _, (outputs, inputs) = config.row_layout(operator)
            sites.append(SiteShape(layer, operator, inputs, outputs))
        return cls(tuple(sorted(sites, key=lambda site: site.number)))

    @cached_property
    def by_number(self) -> dict[int, SiteShape]:
        """Sites by their numbers."""
        return {site.number: site for site in self.sites}

    @property
    def token_bytes(self) -> int:
        """Bytes of u of one token at all sites; r is computed again, never kept."""
        return sum(site.out_features for site in self.sites) * WORD_BYTES
