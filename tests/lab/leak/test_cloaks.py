"""What rotations, permutations and mixtures leave of rows, in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tee_side.protect.masks.mask import MaskedProduct, RowMask
from tee_side.protect.randomness import Randomness
from tests.kit.leaks import (
    begun,
    first_view,
    make_begun_model,
    policy_with,
    recorded,
    scores_of,
)
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import Work
from tsqp.lab.leak.attacks.attention import Keys, invariant, shares
from tsqp.lab.leak.attacks.rotations import ModuleNorms, Products, follow
from tsqp.lab.leak.attacks.row_space import RowSpace, SubspaceMembership
from tsqp.lab.leak.attacks.static_cloak import Coordinates, Weights, directions, places
from tsqp.lab.leak.attacks.vocabulary import Sorted
from tsqp.lab.leak.matching import FIRST, FIRST_SEGMENT, Observed
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.trace import Where
from tsqp.lab.research.draws import orthogonal as drawn_orthogonal
from tsqp.lab.research.draws import permutation
from tsqp.lab.research.row_mix import RowMix
from tsqp.lab.research.row_permutation import RowPermutation
from tsqp.lab.research.row_rotation import RowRotation


def orthogonal(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]


def modules(*sizes: int, features: int = 20) -> list[torch.Tensor]:
    return [torch.randn(size, features, dtype=torch.float64) for size in sizes]


def observed(rows_RI: torch.Tensor) -> Observed:
    return Observed(FIRST, rows_RI, 0, len(rows_RI), 1e-3)


# ------------------------------------------------------------------------- weights in two forms


def test_sorted_columns_give_the_permutation() -> None:
    """Rows are shuffled in each module, too, and that does not matter."""
    public, order_I = modules(12, 6), torch.randperm(20)
    served = [w[torch.randperm(len(w))][:, order_I] for w in public]
    x_I = torch.randn(20)
    assert torch.equal(x_I[order_I][places(public, served)], x_I)
    rows = torch.randn(4, 9)
    again = Sorted().of_observed(FIRST, rows[:, torch.randperm(9)])
    assert torch.equal(Sorted().of_candidates(FIRST, rows), again)


def test_eigenvectors_give_coordinates_with_signs() -> None:
    """All but one sign for all. Rows cross as x diag(g)^-1 Q, beside weights R W diag(g) Q."""
    public, q_II = modules(12, 30), orthogonal(20)
    gain_I = torch.linspace(0.5, 2, 20, dtype=torch.float64)
    served = [orthogonal(len(w)) @ (w * gain_I) @ q_II for w in public]
    found = directions(public, served, gain_I)
    (x_RI,) = modules(5)
    ours_RV, theirs_RV = x_RI @ found.public_IV, (x_RI / gain_I) @ q_II @ found.served_IV
    assert found.signed
    assert ours_RV.shape == (5, 20)
    sign = torch.sign((ours_RV * theirs_RV).sum())
    assert torch.allclose(ours_RV, sign * theirs_RV, atol=1e-9)


@each_row("equal", [0, 1])
def test_one_module_gives_as_many_coordinates_as_it_says_and_no_signs(equal: int) -> None:
    """8 outputs, 8 directions of 20; of two that are equal one."""
    (public,), q_II = modules(8), orthogonal(20)
    public[:equal] = public[7]
    found = directions([public], [orthogonal(8) @ public @ q_II], torch.ones(20).double())
    (x_RI,) = modules(5)
    ours_RV, theirs_RV = x_RI @ found.public_IV, x_RI @ q_II @ found.served_IV
    assert not found.signed
    assert ours_RV.shape == (5, 8 - equal)
    assert torch.allclose(ours_RV.abs(), theirs_RV.abs(), atol=1e-9)


def test_directions_that_rounding_has_mixed_hardly_count() -> None:
    """Two singular values nearly coincide: their eigenvectors are anywhere between the two."""
    sizes = torch.tensor([8, 7, 6, 5.0001, 5, 4, 3, 2], dtype=torch.float64)
    public = orthogonal(8) @ torch.diag(sizes) @ orthogonal(8)
    served = public @ orthogonal(8) + 1e-3 * torch.randn(8, 8, dtype=torch.float64)
    found = directions([public], [served], torch.ones(8).double())
    counts = found.served_IV.norm(dim=0)
    assert counts[[3, 4]].max() < 0.1
    assert counts[[0, 1, 2, 5, 6, 7]].min() > 0.9


@each_row(("policy", "folded"), [("cloak", True), ("stip", False)])
def test_weights_say_whether_the_gain_is_folded_in_and_norms_stay(
    model: SavedModel, public: PublicModel, tmp_path: Path, policy: str, folded: bool
) -> None:
    """The rotation folds, the permutation does not; no name of a mask is looked at."""
    view = first_view(public, recorded(model, policy, tmp_path / policy, begun(3)))
    weights = Weights(view)
    fold_I = weights.fold((1, "gate_up_proj"))
    gain_I = public.light.norms[1].post_attention_layernorm.double()
    assert torch.allclose(fold_I, gain_I if folded else torch.ones_like(gain_I))
    matcher = ModuleNorms(weights)
    rows: list[tuple[Where, int]] = [((0, "qkv_proj"), 3), ((1, "down_proj"), 2)]
    for place, measured in rows:
        call = view.traces[0].steps[0].at(place)
        assert call is not None
        plain_1I = public.states(public.nothing(), [0]).inputs[place]
        ours = matcher.of_candidates(place, plain_1I)
        assert ours.shape == (1, measured)
        assert torch.allclose(ours, matcher.of_observed(place, call.rows[:1]), atol=1e-5)
        assert not torch.allclose(plain_1I, call.rows[:1], atol=0.1)


def test_gains_that_are_folded_into_weights_are_taken_out_of_a_segments_rows(
    tmp_path: Path,
) -> None:
    """Of narrow heads, all queries, keys and values of a token are fewer than its features."""
    (tmp_path / "model").mkdir()
    model = make_begun_model(tmp_path / "model", head_dim=4)
    public, prompts = PublicModel(model.directory), begun(12)
    view = first_view(public, recorded(model, "cloak-segment", tmp_path / "played", prompts))
    matcher, call = Coordinates(Weights(view)), view.traces[0].steps[0].at(FIRST_SEGMENT)
    assert call is not None
    ours = matcher.of_candidates(FIRST_SEGMENT, public.embedding_VD[prompts[0]])
    theirs = matcher.of_observed(FIRST_SEGMENT, call.rows)
    assert ours.shape == theirs.shape == (12, public.config.hidden_size)
    assert float(min((ours - theirs).norm(), (ours + theirs).norm())) <= 1e-2 * float(ours.norm())


# --------------------------------------------------------------------------------------- angles


def table(count: int, size: int) -> torch.Tensor:
    """Rows of one length, as behind an RMSNorm whose gain was folded."""
    return torch.nn.functional.normalize(torch.randn(count, size), dim=1) * size**0.5


def test_inner_products_of_rotated_rows_give_the_tokens() -> None:
    """Tokens that come twice, too; a second token that fits as well is given up later."""
    table_VI, ids = table(200, 32), [3, 77, 5, 77, 3, 199, 0]
    found = follow(table_VI[ids] @ orthogonal(32).float(), table_VI, 3, Work())
    assert list(found.token_ids) == [guesses[0] for guesses in found.guesses] == ids
    assert all(len(set(guesses)) == 5 for guesses in found.guesses[1:])
    # Mirrored at the first token's row: its product with that row stays.
    first_I = table_VI[3] / table_VI[3].norm()
    table_VI[4] = 2 * (table_VI[9] @ first_I) * first_I - table_VI[9]
    for second in (4, 9):
        found = follow(table_VI[[3, second, 20]] @ orthogonal(32).float(), table_VI, 3, Work())
        assert found.token_ids == (3, second, 20)


def test_a_row_costs_a_product_for_each_new_beginning() -> None:
    """Not one for each of the rows before it; what is forgotten holds no memory."""
    vocabulary, size = 300, 16
    table_VI = table(vocabulary, size)
    ids = torch.randperm(vocabulary)[:42]
    rows = table_VI[ids] @ orthogonal(size).float()

    def count(rows_RI: torch.Tensor) -> float:
        with FlopCounterMode(display=False) as counter:
            follow(rows_RI, table_VI, int(ids[0]), Work())
        between_rows = 2 * size * len(rows_RI) ** 2
        return (counter.get_total_flops() - between_rows) / (2 * size * vocabulary)

    begun_with = count(rows[:12])
    assert 0 < begun_with <= 11 * 16
    assert 0 < count(rows) - begun_with <= 2 * 30 + 14
    products = Products(table_VI)
    products.need([4, 9, 4])
    products.need([30, 9])
    assert list(products.known) == [9, 30]
    held = [known.untyped_storage().nbytes() for known in products.known.values()]
    assert held == [vocabulary * 4] * 2
    expected = table_VI[[30, 9, 30]] @ table_VI.t()
    assert torch.allclose(products.of([30, 9, 30]), expected, atol=1e-4)


# ------------------------------------------------------------------------------- the rows' span


def test_a_distance_is_the_sine_of_the_angle_to_the_span() -> None:
    """Near the span, too, where most digits cancel."""
    for angle in (1.0, 0.3, 1e-2, 1e-4):
        slope = torch.tensor(angle).tan()
        candidates = torch.tensor([[3.0, 4.0, 5.0 * slope, 0.0]])
        found = RowSpace().distances(observed(torch.eye(4)[:2]), 0, candidates)
        assert float(found[0]) == pytest.approx(float(torch.tensor(angle).sin()), rel=1e-3)
    full = RowSpace().distances(observed(torch.randn(8, 8)), 0, torch.randn(5, 8))
    assert torch.isinf(full).all()


def test_rows_that_repeat_span_no_more_and_each_request_has_its_own_span(
    public: PublicModel,
) -> None:
    rows = torch.randn(48, 7) @ public.dictionary_VD[[5, 9, 5, 9, 5, 9, 5]]
    distances_V = RowSpace().distances(observed(rows), 0, public.dictionary_VD)
    assert (distances_V < 1e-3).nonzero()[:, 0].tolist() == [5, 9]
    matcher, candidates = RowSpace(), torch.eye(4)
    for row in (0, 3, 0):
        found = matcher.distances(observed(torch.eye(4)[row : row + 1]), 0, candidates)
        assert found.tolist() == pytest.approx([float(other != row) for other in range(4)])


@each_row(("shield", "first", "deep"), [(30, 3, True), (48, 0, False)])
def test_a_mask_is_read_while_its_rows_leave_room(
    model: SavedModel, public: PublicModel, tmp_path: Path, shield: int, first: int, deep: bool
) -> None:
    """48 shield rows fill 48 dimensions: no candidate is more likely than another."""
    mask = {"name": "row-rotation", "shield_rows": shield}
    sent = {"place": "gpu", "mask": mask, "verify": "none"}
    policy = policy_with(qkv_proj=sent)
    played = recorded(model, policy, tmp_path, begun(7))
    truths = [session.truth for session in played.sessions]
    found = scores_of(SubspaceMembership(), first_view(public, played), truths)
    assert found["layer 0 qkv_proj"].answer.hits == first
    one = found["layer 1 qkv_proj"]
    assert (one.top1.hits, one.guessed) == ((10, 10) if deep else (0, 0))


# ------------------------------------------------------------------------------- keys of layer 0


class FeatureTurn(RowRotation):
    """A mask that is not known: positions shuffled, features rotated."""

    name = "feature-turn"

    def mask_product(
        self, a_BMJ: torch.Tensor, b_BJN: torch.Tensor, randomness: Randomness
    ) -> MaskedProduct:
        q_JJ = drawn_orthogonal(randomness, a_BMJ.shape[2]).float()
        order_N = permutation(randomness, b_BJN.shape[2])
        back_N = order_N.argsort()
        return MaskedProduct(
            a_BMJ @ q_JJ, (q_JJ.T @ b_BJN)[:, :, order_N], lambda y: y[..., back_N]
        )


@each_row("mask", [RowPermutation(), RowMix(), FeatureTurn()], ids=lambda mask: str(mask.name))
def test_what_is_compared_of_keys_survives_the_mask(mask: RowMask) -> None:
    """Of each position, at whatever place it crosses; and positions stay apart."""
    plain, left = torch.randn(3, 8, 5), invariant(mask)
    sent = mask.mask_product(torch.ones(3, 2, 8), plain, Randomness(bytes(32)))
    plain_SX, observed_SX = (left.of(b.permute(2, 0, 1)) for b in (plain, sent.b))
    assert not torch.allclose(plain, sent.b, atol=0.01)
    assert not left.ordered
    distances_SS = torch.cdist(plain_SX, observed_SX)
    assert distances_SS.amin(1).max() < 1e-3
    assert distances_SS.topk(2, dim=1, largest=False).values[:, 1].min() > 0.1


def test_of_one_head_scaled_features_say_nothing() -> None:
    assert torch.allclose(shares(torch.randn(4, 1, 8)), torch.ones(4, 8))
    assert invariant(None).ordered


@each_row("kind", ["llama", "qwen2", "qwen3"])
def test_keys_are_those_that_cross(tmp_path: Path, kind: str) -> None:
    """With biases, norms of heads and RoPE, at every position."""
    (tmp_path / kind).mkdir()
    model = make_begun_model(tmp_path / kind, kind)
    (prompt,) = begun(7)
    played = recorded(model, "tsqp", tmp_path / "played", [prompt], 1)
    call = played.sessions[0].traces[0].steps[0].at((0, "attn_scores"))
    assert call is not None
    keys = Keys(PublicModel(model.directory))
    for position, token in enumerate(prompt):
        crossed_KC = call.tensors[1][:, :, position]
        assert torch.allclose(keys.at(position)[token], crossed_KC, atol=1e-5)
