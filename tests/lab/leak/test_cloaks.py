"""What rotations, permutations and mixtures leave of rows, in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kit.leaks import (
    FIRST_PLACE,
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
from tsqp.lab.leak.attacks.attention import AttentionKeys
from tsqp.lab.leak.attacks.rotations import follow
from tsqp.lab.leak.attacks.row_space import RowSpace, SubspaceMembership
from tsqp.lab.leak.attacks.static_cloak import directions
from tsqp.lab.leak.matching import FIRST, Observed
from tsqp.lab.leak.public import PublicModel


def orthogonal(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]


def distances(rows_RI: torch.Tensor, candidates_NI: torch.Tensor) -> torch.Tensor:
    """Return how far candidates are from the span of some rows."""
    return RowSpace().distances(Observed(FIRST, rows_RI, 0, len(rows_RI), 1e-3), 0, candidates_NI)


@each_row("equal", [0, 1])
def test_one_module_gives_as_many_coordinates_as_it_says_and_no_signs(equal: int) -> None:
    """8 outputs, 8 directions of 20; of two that are equal one."""
    public, q_II = torch.randn(8, 20).double(), orthogonal(20)
    public[:equal] = public[7]
    found = directions([public], [orthogonal(8) @ public @ q_II], torch.ones(20).double())
    x_RI = torch.randn(5, 20).double()
    ours_RV, theirs_RV = x_RI @ found.public_IV, x_RI @ q_II @ found.served_IV
    assert not found.signed
    assert ours_RV.shape == (5, 8 - equal)
    assert torch.allclose(ours_RV.abs(), theirs_RV.abs(), atol=1e-9)


def test_directions_that_rounding_has_mixed_hardly_count() -> None:
    """Two singular values nearly coincide: their eigenvectors are anywhere between the two."""
    sizes = torch.tensor([8, 7, 6, 5.0001, 5, 4, 3, 2], dtype=torch.float64)
    public = orthogonal(8) @ torch.diag(sizes) @ orthogonal(8)
    served = public @ orthogonal(8) + 1e-3 * torch.randn(8, 8).double()
    counts = directions([public], [served], torch.ones(8).double()).served_IV.norm(dim=0)
    assert counts[[3, 4]].max() < 0.1
    assert counts[[0, 1, 2, 5, 6, 7]].min() > 0.9


def test_a_second_token_that_fits_as_well_is_given_up_later() -> None:
    """Two candidates have the same product with the first row; only the third row tells."""
    table_VI = torch.nn.functional.normalize(torch.randn(50, 16), dim=1) * 4
    # Mirrored at the first token's row: its product with that row stays.
    first_I = table_VI[3] / table_VI[3].norm()
    table_VI[4] = 2 * (table_VI[9] @ first_I) * first_I - table_VI[9]
    for ids in ([3, 4, 20], [3, 9, 20], [3, 7, 5, 7, 3]):
        found = follow(table_VI[ids] @ orthogonal(16).float(), table_VI, 3, Work())
        assert list(found.token_ids) == [guesses[0] for guesses in found.guesses] == ids


def test_a_distance_is_the_sine_of_the_angle_to_the_span(public: PublicModel) -> None:
    """Near the span, too, where most digits cancel; rows that repeat span no more by rounding."""
    for angle in (1.0, 0.3, 1e-2, 1e-4):
        candidates = torch.tensor([[3.0, 4.0, 5.0 * torch.tensor(angle).tan(), 0.0]])
        found = distances(torch.eye(4)[:2], candidates)
        assert float(found[0]) == pytest.approx(float(torch.tensor(angle).sin()), rel=1e-3)
    assert torch.isinf(distances(torch.randn(8, 8), torch.randn(5, 8))).all()
    mixed = torch.randn(48, 7) @ public.dictionary_VD[[5, 9, 5, 9, 5, 9, 5]]
    assert (distances(mixed, public.dictionary_VD) < 1e-3).nonzero()[:, 0].tolist() == [5, 9]


@each_row(("shield", "read"), [(30, 3), (48, 0)])
def test_mixed_rows_are_read_while_they_leave_room(
    model: SavedModel, public: PublicModel, tmp_path: Path, shield: int, read: int
) -> None:
    """48 shield rows fill 48 dimensions: no candidate is more likely than another."""
    mask = {"name": "row-rotation", "shield_rows": shield}
    policy = policy_with(qkv_proj={"place": "gpu", "mask": mask, "verify": "none"})
    played = recorded(model, policy, tmp_path, begun(7))
    truths = [session.truth for session in played.sessions]
    found = scores_of(SubspaceMembership(), first_view(public, played), truths)
    assert found[FIRST_PLACE].answer.hits == read
    assert found["layer 1 qkv_proj"].guessed == (10 if read else 0)


@each_row("kind", ["qwen2", "qwen3"])
def test_keys_have_biases_and_norms_of_heads(tmp_path: Path, kind: str) -> None:
    (tmp_path / kind).mkdir()
    model = make_begun_model(tmp_path / kind, kind)
    played = recorded(model, "tsqp", tmp_path / "played", begun(7))
    view = first_view(PublicModel(model.directory), played)
    truths = [session.truth for session in played.sessions]
    (found,) = scores_of(AttentionKeys(), view, truths).values()
    assert (found.top1.hits, found.top1.n) == (10, 10)
