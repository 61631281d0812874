"""Static cloaks of weights: undone with the public weights beside those that the server was given.

A service with W' = R W P, R and P secret, has the public W as well. What W and W' have in
common, columns but for the order of their elements or eigenvectors, gives P, and so the rows. What
a rotation leaves needs no P: how long rows are, and what comes out of each module.

Shape suffixes: R rows, N candidates, I in_features, O out_features, V directions, M what is
measured of a row.
"""

from functools import reduce
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from protocol.model.checkpoint import Checkpoint
from protocol.model.weights import CPU, FusedLinear, load_linear
from tee_side.words import is_linear
from tsqp.lab.leak.attack import View, Where
from tsqp.lab.leak.matching import FeatureMatcher, Matching
from tsqp.mask_kinds import gain_of

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


def beside(view: View, where: Where) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Return the public weights beside those that the service was given, and the fold of a place.

    Of both each module of an operator [O, I], float64, without biases, since a provisioned server
    has none. Of a segment they are those of the first layer's MLP, which has more outputs than a
    row has features: of narrow heads there are fewer, and directions that no output depends on are
    not found. The fold [I] is what rows are divided by before they are cloaked: the gain of the
    RMSNorm in front where that explains the size of the service's weights, 1 where the public ones
    do.
    Raises ModelError, and LookupError for places of no layer's linear operator or segment.
    """
    layer, operator = where
    if operator == "segment":
        operator = "gate_up_proj"
    if layer is None or not is_linear(operator):
        raise LookupError(f"place {where}: got no linear operator of a layer, expected one")
    public = _modules(view.public.linear(layer, operator))
    ones_I = public[0].new_ones(public[0].shape[1])
    if view.policy.feature_mask is None:
        return public, public, ones_I
    served = _modules(
        load_linear(
            Checkpoint(view.served),
            view.public.config,
            layer,
            operator,
            dtype=torch.float64,
            device=CPU,
        )
    )
    gain = gain_of(view.public.config, view.public.light.light[layer], operator)
    if gain is None:
        return public, served, ones_I
    gain_I, weight_OI = gain.double(), torch.cat(public)
    least = _SMALLEST_GAIN * gain_I.abs().max()
    folds = [ones_I, gain_I.abs().clamp(min=least).copysign(gain_I)]
    size = float(torch.cat(served).norm())
    fold_I = min(folds, key=lambda fold_I: abs(float((weight_OI * fold_I).norm()) - size))
    return public, served, fold_I


def _modules(linear: FusedLinear) -> list[torch.Tensor]:
    return [linear.weight[rows].double() for rows in linear.rows.values()]


# --------------------------------------------------------------------------------- permutations


class Reordered(FeatureMatcher):
    """Rows put back into the order of the public features.

    A feature is found by the elements of its column in each module, in ascending order: whatever
    the order of rows is.
    """

    def __init__(self, view: View, where: Where) -> None:
        super().__init__()
        public, served, _ = beside(view, where)
        public_IO, served_IO = (
            torch.cat([module.sort(dim=0).values for module in modules]).t()
            for modules in (public, served)
        )
        # The product behind cdist is as wide as I: a block at a time.
        blocks = public_IO.split(_COLUMNS_AT_ONCE)
        nearest = [torch.cdist(block, served_IO).argmin(dim=1) for block in blocks]
        self._places_I = torch.cat(nearest)

    def of_observed(self, rows_RI: torch.Tensor) -> torch.Tensor:
        """Return rows with their features in order."""
        return rows_RI[:, self._places_I]


# ------------------------------------------------------------------------------------ rotations


def directions(
    public: list[torch.Tensor], served: list[torch.Tensor], fold_I: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Match eigenvectors of W^T W, all modules together, by the order of their eigenvalues.

    A rotation of a module's output leaves W^T W; one of the input turns its eigenvectors.

    Returns the same directions in the public basis and in the server's, each with what it counts:
    [I, V], which times a row are its coordinates there; those of the public basis take the fold in.
    And whether the signs belong together, but for one sign of them all.
    """
    folded = [module * fold_I for module in public]
    sizes_I, public_II = _eigenvectors(torch.cat(folded))
    served_sizes_I, served_II = _eigenvectors(torch.cat(served))
    outputs = sum(len(module) for module in public)
    kept = min(len(sizes_I), outputs, int((sizes_I**2 > _NO_WEIGHT * sizes_I[0] ** 2).sum()))
    # By how much the rounding of the served weights turned each direction. Rounding by E turns a
    # singular vector towards another by about ||u E v|| / (their singular values' difference); how
    # large that is, the singular values themselves show.
    rounding = (sizes_I[:kept] - served_sizes_I[:kept]).square().mean().sqrt()
    gaps_VI = (sizes_I[:kept, None] - sizes_I).abs()
    gaps_VI.fill_diagonal_(float("inf"))
    tiny = torch.finfo(gaps_VI.dtype).tiny
    angles_VI = (rounding / gaps_VI.clamp(min=tiny)).clamp(max=1e6)
    angles_V = torch.linalg.vector_norm(angles_VI, dim=1)
    counts_V = 1 / (1 + (angles_V / _HALF_ANGLE).square())
    public_IV, served_IV = public_II[:, :kept], served_II[:, :kept]
    signed = len(public) > 1
    if signed:
        # Each module's own W^T W between two directions has the sign of both; products of public
        # and served ones are a matrix s_i s_j times what is not negative, so its first eigenvector
        # has s, the sign that makes each served direction the public one, but for one of all.
        products_VV = reduce(
            torch.add,
            (
                _correlations(ours @ public_IV) * _correlations(theirs @ served_IV)
                for ours, theirs in zip(folded, served, strict=True)
            ),
        )
        first_V = torch.linalg.eigh(products_VV).eigenvectors[:, -1]
        served_IV = served_IV * torch.where(first_V < 0, -1.0, 1.0)
    return public_IV / fold_I[:, None] * counts_V, served_IV * counts_V, signed


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


def _correlations(columns_OV: torch.Tensor) -> torch.Tensor:
    """Return the cosines between columns: strong directions do not drown the others' signs."""
    unit_OV = normalize(columns_OV, dim=0)
    return unit_OV.t() @ unit_OV


class Coordinates(FeatureMatcher):
    """Rows by their coordinates in directions that public and served weights share.

    Without their signs, where a single module does not tell them.
    """

    def __init__(self, view: View, where: Where) -> None:
        super().__init__()
        public, served, fold_I = beside(view, where)
        public_IV, served_IV, self._signed = directions(public, served, fold_I)
        if where[1] == "segment":  # whose rows come from no norm
            public_IV = public_IV * fold_I[:, None]
        self._public_IV, self._served_IV = public_IV.float(), served_IV.float()

    def of_candidates(self, states_NI: torch.Tensor) -> torch.Tensor:
        """Return coordinates in the public basis."""
        return self._told(states_NI @ self._public_IV)

    def of_observed(self, rows_RI: torch.Tensor) -> torch.Tensor:
        """Return coordinates in the served basis."""
        return self._told(rows_RI @ self._served_IV)

    def pairwise(self, rows_RX: torch.Tensor, table_NX: torch.Tensor) -> torch.Tensor:
        """See `FeatureMatcher.pairwise`. The one sign of all coordinates is the nearer one.

        Without signs that is the positive one: nothing is nearer to a negative row.
        """
        return torch.minimum(
            super().pairwise(rows_RX, table_NX), super().pairwise(-rows_RX, table_NX)
        )

    def _told(self, coordinates_NV: torch.Tensor) -> torch.Tensor:
        return coordinates_NV if self._signed else coordinates_NV.abs()


# ------------------------------------------------------------------------------------------- norms


class ModuleNorms(FeatureMatcher):
    """Logarithms of norms: of each module's output, and of the row where they differ.

    Outputs are without biases: a provisioned service has none.
    """

    def __init__(self, view: View, where: Where) -> None:
        super().__init__()
        public, served, fold_I = beside(view, where)
        # What the service's rows are not divided by, its weights are multiplied with.
        factor = fold_I if where[1] == "segment" else 1.0
        self._public = [(weight * factor).float() for weight in public]
        self._served = [weight.float() for weight in served]
        self._with_rows = where[1] in _FREE_LENGTH

    def of_candidates(self, states_NI: torch.Tensor) -> torch.Tensor:
        """Return norms under the public weights: [N, M]."""
        return self._norms(states_NI, self._public)

    def of_observed(self, rows_RI: torch.Tensor) -> torch.Tensor:
        """Return norms under the weights that the service was given: [R, M]."""
        return self._norms(rows_RI, self._served)

    def pairwise(self, rows_RX: torch.Tensor, table_NX: torch.Tensor) -> torch.Tensor:
        """See `FeatureMatcher.pairwise`: of logarithms, so relative as they are.

        Without `cdist`, whose rounding is larger than what tells candidates apart.
        """
        each_RN = [torch.linalg.vector_norm(table_NX - row_X, dim=1) for row_X in rows_RX]
        return _STRICTER * torch.stack(each_RN)

    def _norms(self, rows_RI: torch.Tensor, modules: list[torch.Tensor]) -> torch.Tensor:
        parts = [rows_RI @ weight_OI.t() for weight_OI in modules]
        parts += [rows_RI] if self._with_rows else []
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
    compares: ClassVar[type[Reordered] | type[Coordinates] | type[ModuleNorms]]

    def matcher(self, view: View, where: Where) -> FeatureMatcher:
        """Return what compares by the weights of a place."""
        return self.compares(view, where)


class CloakedPermutation(_StaticCloak):
    """Matches the columns of public and served weights, and puts features back in order."""

    name: ClassVar[str] = "column-matching"
    control: ClassVar[str] = "stip"
    compares = Reordered


class CloakedRotation(_StaticCloak):
    """Matches the eigenvectors of public and served weights, and compares rows along them."""

    name: ClassVar[str] = "eigenvectors"
    control: ClassVar[str] = "cloak"
    compares = Coordinates


class NormDictionary(_StaticCloak):
    """Compares the norms of what each module answers with those of the public model's.

    An orthogonal map leaves norms. One for each of q, k and v names a token in layer 0 already, of
    a model of 4B, too. Deeper, candidates are run behind what was read.
    """

    name: ClassVar[str] = "norms"
    control: ClassVar[str] = "attention-in-tee"
    needs: ClassVar[tuple[str, ...]] = (
        "integers",
        "no public weights to compare with",
        "no activations crossed",
    )
    compares = ModuleNorms
