"""Static cloaks of weights: undone with the public weights beside those that the server was given.

A service with W' = R W P, R and P secret, has the public W as well. What W and W' have in
common, columns but for the order of their elements or eigenvectors, gives P, and so the rows. What
a rotation leaves needs no P: how long rows are, and what comes out of each module.

Shape suffixes: R rows, N candidates, I in_features, O out_features, V directions, M what is
measured of a row.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import torch
from torch.nn.functional import normalize

from protocol.model.checkpoint import Checkpoint
from protocol.model.weights import CPU, FusedLinear, load_linear
from tee_side.words import Site, is_linear
from tsqp.lab.leak.attack import View
from tsqp.lab.leak.matching import FeatureMatcher, Matcher, Matching
from tsqp.lab.leak.trace import Where

T = TypeVar("T")

# Smaller gains are folded as this part of the largest, as `FeatureRotation` does.
_SMALLEST_GAIN = 1e-3
# Of the largest eigenvalue: directions below have no weight to speak of, only rounding.
_NO_WEIGHT = 1e-12
# An eigenvector that is off by this angle, in radians, counts half.
_HALF_ANGLE = 0.1
_COLUMNS_AT_ONCE = 1024
# Rows of these operators come from no RMSNorm, which would have made all of them equally long.
_FREE_LENGTH = ("o_proj", "down_proj", "segment")
# A few norms of many candidates lie closer together than whole rows do.
_STRICTER = 50.0


class PublicAndServed:
    """The public weights beside those that the service was given. Raises ModelError.

    A module is [O, I], float64; biases are left out, since a provisioned server has none.
    """

    def __init__(self, view: View) -> None:
        self._public, self._cloaked = view.public, view.policy.feature_mask is not None
        self._served = Checkpoint(view.served)

    def public(self, site: Site) -> list[torch.Tensor]:
        """Return each module of the public operator."""
        layer, operator = site
        if operator == "lm_head":
            return [self._public.lm_head_VD.double()]
        return _modules(self._public.linear(layer, operator))

    def served(self, site: Site) -> list[torch.Tensor]:
        """Return each module of the service's operator."""
        if not self._cloaked:
            return self.public(site)
        config = self._public.config
        return _modules(load_linear(self._served, config, *site, dtype=torch.float64, device=CPU))

    def fold(self, site: Site) -> torch.Tensor:
        """Return what rows are divided by before they are cloaked: [I], float64.

        The gain of the RMSNorm in front where that explains the size of the service's weights, 1
        where the public ones do.
        """
        layer, operator = site
        norms = self._public.light.norms[layer]
        gains = {"qkv_proj": norms.input_layernorm, "gate_up_proj": norms.post_attention_layernorm}
        public = torch.cat(self.public(site))
        ones_I = public.new_ones(public.shape[1])
        if operator not in gains or not self._cloaked:
            return ones_I
        gain_I = gains[operator].double()
        least = _SMALLEST_GAIN * gain_I.abs().max()
        folds = [ones_I, gain_I.abs().clamp(min=least).copysign(gain_I)]
        size = torch.cat(self.served(site)).norm()
        return min(folds, key=lambda fold_I: float(((public * fold_I).norm() - size).abs()))


def _modules(linear: FusedLinear) -> list[torch.Tensor]:
    return [linear.weight[rows].double() for rows in linear.rows.values()]


def site_beside(where: Where) -> Site:
    """Return whose weights tell how the rows of a place are cloaked.

    Of a segment that is the first layer's MLP, which has more outputs than a row has features: of
    narrow heads there are fewer, and directions that no output depends on are not found.
    Raises LookupError for places of no layer's linear operator or segment.
    """
    layer, operator = where
    if operator == "segment" and layer is not None:
        return layer, "gate_up_proj"
    if layer is None or not is_linear(operator):
        raise LookupError(f"place {where}: got no linear operator of a layer, expected one")
    return layer, operator


class _BesideWeights(FeatureMatcher, Generic[T]):
    """Compares rows by what public and served weights tell of a place, found out once for each."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self._weights = PublicAndServed(view)
        self._found: dict[Where, T] = {}

    def told(self, where: Where) -> T:
        """Return what the weights tell."""
        if where not in self._found:
            self._found[where] = self.find(where, site_beside(where))
        return self._found[where]

    @abstractmethod
    def find(self, where: Where, site: Site) -> T:
        """Find it out; `site`: whose weights tell."""


# --------------------------------------------------------------------------------- permutations


class Reordered(_BesideWeights[torch.Tensor]):
    """Rows put back into the order of the public features."""

    def find(self, where: Where, site: Site) -> torch.Tensor:
        """Return for each public feature where the server has it: [I].

        By the elements of its column in each module, in ascending order: whatever the order of
        rows is.
        """
        public_IO, served_IO = (
            torch.cat([module.sort(dim=0).values for module in modules]).t()
            for modules in (self._weights.public(site), self._weights.served(site))
        )
        # The product behind cdist is as wide as I: a block at a time.
        blocks = public_IO.split(_COLUMNS_AT_ONCE)
        return torch.cat([torch.cdist(block, served_IO).argmin(dim=1) for block in blocks])

    def of_observed(self, where: Where, rows_RI: torch.Tensor) -> torch.Tensor:
        """Return rows with their features in order."""
        return rows_RI[:, self.told(where)]


# ------------------------------------------------------------------------------------ rotations


@dataclass(frozen=True, eq=False)
class Directions:
    """The same directions in the public basis and in the server's, each with what it counts.

    `public_IV`, `served_IV`: times a row, its coordinates there; those of the public basis take
    the fold in. `signed`: whether the signs belong together, but for one sign of them all.
    """

    public_IV: torch.Tensor
    served_IV: torch.Tensor
    signed: bool


def directions(
    public: list[torch.Tensor], served: list[torch.Tensor], fold_I: torch.Tensor
) -> Directions:
    """Match eigenvectors of W^T W, all modules together, by the order of their eigenvalues.

    A rotation of a module's output leaves W^T W; one of the input turns its eigenvectors.
    """
    folded = [module * fold_I for module in public]
    sizes_I, public_II = _eigenvectors(torch.cat(folded))
    served_sizes_I, served_II = _eigenvectors(torch.cat(served))
    outputs = sum(len(module) for module in public)
    kept = min(len(sizes_I), outputs, int((sizes_I**2 > _NO_WEIGHT * sizes_I[0] ** 2).sum()))
    angles_V = _angles(sizes_I, served_sizes_I, kept)
    counts_V = 1 / (1 + (angles_V / _HALF_ANGLE).square())
    public_IV, served_IV = public_II[:, :kept], served_II[:, :kept]
    signed = len(public) > 1
    if signed:
        served_IV = served_IV * _signs(folded, public_IV, served, served_IV)
    return Directions(public_IV / fold_I[:, None] * counts_V, served_IV * counts_V, signed)


def _eigenvectors(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return singular values [I] of a weight, the largest first, and directions [I, min(O, I)].

    Of a weight with fewer outputs than inputs by way of the outputs, whose products are smaller:
    an eighth of the work where there are half as many. Values without a direction are 0.
    """
    O, I = weight_OI.shape  # noqa: E741
    if O >= I:
        squares_I, basis_II = torch.linalg.eigh(weight_OI.t() @ weight_OI)
        return squares_I.flip(0).clamp(min=0).sqrt(), basis_II.flip(1)
    squares_O, outputs_OO = torch.linalg.eigh(weight_OI @ weight_OI.t())
    sizes_O = squares_O.flip(0).clamp(min=0).sqrt()
    basis_IO = normalize(weight_OI.t() @ outputs_OO.flip(1), dim=0)
    return torch.cat([sizes_O, sizes_O.new_zeros(I - O)]), basis_IO


def _angles(sizes_I: torch.Tensor, served_I: torch.Tensor, kept: int) -> torch.Tensor:
    """Estimate by how much each direction was turned by the rounding of the served weights: [kept].

    Rounding by E turns a singular vector towards another by about ||u E v|| / (their singular
    values' difference); how large that is, the singular values themselves show.
    """
    rounding = (sizes_I[:kept] - served_I[:kept]).square().mean().sqrt()
    gaps_VI = (sizes_I[:kept, None] - sizes_I).abs()
    gaps_VI.fill_diagonal_(float("inf"))
    tiny = torch.finfo(gaps_VI.dtype).tiny
    angles_VI = (rounding / gaps_VI.clamp(min=tiny)).clamp(max=1e6)
    angles_V: torch.Tensor = torch.linalg.vector_norm(angles_VI, dim=1)
    return angles_V


def _signs(
    public: list[torch.Tensor],
    public_IV: torch.Tensor,
    served: list[torch.Tensor],
    served_IV: torch.Tensor,
) -> torch.Tensor:
    """Return the sign [V] that makes each served direction the public one, but for one of all.

    Each module's own W^T W between two directions has the sign of both; products of public and
    served ones are a matrix s_i s_j times what is not negative, so its first eigenvector has s.
    """
    products_VV = torch.zeros(public_IV.shape[1], public_IV.shape[1], dtype=public_IV.dtype)
    for module, served_module in zip(public, served, strict=True):
        ours_VV, theirs_VV = (
            _correlations(weight @ basis)
            for weight, basis in ((module, public_IV), (served_module, served_IV))
        )
        products_VV += ours_VV * theirs_VV
    first_V = torch.linalg.eigh(products_VV).eigenvectors[:, -1]
    return torch.where(first_V < 0, -1.0, 1.0)


def _correlations(columns_OV: torch.Tensor) -> torch.Tensor:
    """Return the cosines between columns: strong directions do not drown the others' signs."""
    unit_OV = normalize(columns_OV, dim=0)
    return unit_OV.t() @ unit_OV


class Coordinates(_BesideWeights[Directions]):
    """Rows by their coordinates in directions that public and served weights share.

    Without their signs, where a single module does not tell them.
    """

    def find(self, where: Where, site: Site) -> Directions:
        """Return the directions that both share."""
        weights, fold_I = self._weights, self._weights.fold(site)
        found = directions(weights.public(site), weights.served(site), fold_I)
        if where[1] != "segment":
            return found
        # Its rows come from no norm.
        return replace(found, public_IV=found.public_IV * fold_I[:, None])

    def of_candidates(self, where: Where, states_NI: torch.Tensor) -> torch.Tensor:
        """Return coordinates in the public basis."""
        return self._signed(where, states_NI @ self.told(where).public_IV.float())

    def of_observed(self, where: Where, rows_RI: torch.Tensor) -> torch.Tensor:
        """Return coordinates in the served basis."""
        return self._signed(where, rows_RI @ self.told(where).served_IV.float())

    def pairwise(self, rows_RX: torch.Tensor, table_NX: torch.Tensor) -> torch.Tensor:
        """See `FeatureMatcher.pairwise`. The one sign of all coordinates is the nearer one.

        Without signs that is the positive one: nothing is nearer to a negative row.
        """
        return torch.minimum(
            super().pairwise(rows_RX, table_NX), super().pairwise(-rows_RX, table_NX)
        )

    def _signed(self, where: Where, coordinates_NV: torch.Tensor) -> torch.Tensor:
        return coordinates_NV if self.told(where).signed else coordinates_NV.abs()


# ------------------------------------------------------------------------------------------- norms


class ModuleNorms(_BesideWeights[tuple[list[torch.Tensor], list[torch.Tensor]]]):
    """Logarithms of norms: of each module's output, and of the row where they differ.

    Outputs are without biases: a provisioned service has none.
    """

    def find(self, where: Where, site: Site) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the modules [O, I] as the public model has them, and as the service does."""
        weights = self._weights
        # What the service's rows are not divided by, its weights are multiplied with.
        fold_I = weights.fold(site) if where[1] == "segment" else 1.0
        public = [(weight * fold_I).float() for weight in weights.public(site)]
        return public, [weight.float() for weight in weights.served(site)]

    def of_candidates(self, where: Where, states_NI: torch.Tensor) -> torch.Tensor:
        """Return norms under the public weights: [N, M]."""
        public, _ = self.told(where)
        return _norms(where, states_NI, public)

    def of_observed(self, where: Where, rows_RI: torch.Tensor) -> torch.Tensor:
        """Return norms under the weights that the service was given: [R, M]."""
        _, served = self.told(where)
        return _norms(where, rows_RI, served)

    def pairwise(self, rows_RX: torch.Tensor, table_NX: torch.Tensor) -> torch.Tensor:
        """See `FeatureMatcher.pairwise`: of logarithms, so relative as they are.

        Without `cdist`, whose rounding is larger than what tells candidates apart.
        """
        each_RN = [torch.linalg.vector_norm(table_NX - row_X, dim=1) for row_X in rows_RX]
        return _STRICTER * torch.stack(each_RN)


def _norms(where: Where, rows_RI: torch.Tensor, modules: list[torch.Tensor]) -> torch.Tensor:
    parts = [rows_RI @ weight_OI.t() for weight_OI in modules]
    if where[1] in _FREE_LENGTH:
        parts.append(rows_RI)
    norms_RM = torch.stack([torch.linalg.vector_norm(part, dim=-1) for part in parts], dim=1)
    return norms_RM.double().clamp(min=1e-30).log()


# ------------------------------------------------------------------------------------- attacks


class _StaticCloak(Matching):
    """Undoes static cloaks beside public weights, as arXiv 2602.11088 does."""

    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = (
        "weights are not cloaked",
        "no public weights to compare with",
        "no activations crossed",
    )


class CloakedPermutation(_StaticCloak):
    """Matches the columns of public and served weights, and puts features back in order."""

    name: ClassVar[str] = "column-matching"
    control: ClassVar[str] = "stip"

    def matcher(self, view: View) -> Matcher:
        """Return what undoes the cloak of each place."""
        return Reordered(view)


class CloakedRotation(_StaticCloak):
    """Matches the eigenvectors of public and served weights, and compares rows along them."""

    name: ClassVar[str] = "eigenvectors"
    control: ClassVar[str] = "cloak"

    def matcher(self, view: View) -> Matcher:
        """Return what finds the eigenvectors of each place."""
        return Coordinates(view)


class NormDictionary(Matching):
    """Compares the norms of what each module answers with those of the public model's.

    An orthogonal map leaves norms. One for each of q, k and v names a token in layer 0 already, of
    a model of 4B, too. Deeper, candidates are run behind what was read.
    """

    name: ClassVar[str] = "norms"
    control: ClassVar[str] = "attention-in-tee"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = (
        "integers",
        "no public weights to compare with",
        "no activations crossed",
    )

    def matcher(self, view: View) -> Matcher:
        """Return what measures the modules of each place."""
        return ModuleNorms(view)
