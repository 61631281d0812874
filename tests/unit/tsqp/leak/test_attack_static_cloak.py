"""Cloaks of weights, planted and real, are undone by the public weights beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.masks.mask import FeatureMask
from tests.kit.model import make_model, token_ids
from tsqp.cli.program import model_directory
from tsqp.lab.leak.attack import Attack, View, Work
from tsqp.lab.leak.attacks.static_cloak import (
    CloakedPermutation,
    CloakedRotation,
    Weights,
    directions,
    places,
)
from tsqp.lab.leak.model import Score
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, Recording, play
from tsqp.lab.leak.score import score
from tsqp.lab.research.feature_rotation import FeatureRotation


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PublicModel:
    """A random model whose gains differ."""
    directory = tmp_path_factory.mktemp("tiny")
    make_model(directory)
    return PublicModel(directory)


def under(mask: FeatureMask) -> Policy:
    """The policy cloak with another mask."""
    policy = load_policy("cloak")
    operators = {
        operator: tuple(p.model_copy(update={"mask": mask if p.mask else None}) for p in placements)
        for operator, placements in policy.operators.items()
    }
    return policy.model_copy(update={"operators": operators})


def view_of(public: PublicModel, played: Recording) -> View:
    """What the first service saw; every token is to be searched."""
    traces = tuple(session.traces[0] for session in played.sessions)
    return View(traces, public, played.policy, played.served, len(traces), 1000)


def run(
    public: PublicModel,
    attack: Attack,
    policy: Policy | str,
    folder: Path,
    prompts: list[list[int]] | None = None,
) -> dict[str, Score]:
    """Prompts under a policy, and what an attack reads in them, by place."""
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    ids = prompts or [token_ids(12, seed, public.vocab_size) for seed in range(2)]
    folder.mkdir(exist_ok=True)
    played = play(chosen, ids, PlaySettings(public.directory, folder, new_tokens=6))
    view = view_of(public, played)
    assert attack.refuses(view) is None
    truths = [session.truth for session in played.sessions]
    return {one.where: one for one in score(attack.read(view, Work()), truths)}


def orthogonal(size: int, seed: int) -> torch.Tensor:
    """A random rotation, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def random_modules(*sizes: int, in_features: int) -> list[torch.Tensor]:
    """Random weights."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(size, in_features, generator=generator, dtype=torch.float64) for size in sizes
    ]


def test_sorted_columns_give_the_permutation() -> None:
    """Rows are shuffled in each module, too, and that does not matter."""
    public = random_modules(12, 6, in_features=20)
    generator = torch.Generator().manual_seed(1)
    order_I = torch.randperm(20, generator=generator)
    served = [w[torch.randperm(len(w), generator=generator)][:, order_I] for w in public]
    x_I = torch.randn(20, generator=generator)
    assert torch.equal(x_I[order_I][places(public, served)], x_I)


def test_eigenvectors_give_coordinates_with_signs() -> None:
    """All but one sign for all. Rows cross as x diag(g)^-1 Q, beside weights R W diag(g) Q."""
    public = random_modules(12, 30, in_features=20)
    gain_I = torch.linspace(0.5, 2, 20, dtype=torch.float64)
    q_II = orthogonal(20, 1)
    served = [
        orthogonal(len(w), seed) @ (w * gain_I) @ q_II for seed, w in enumerate(public, start=2)
    ]
    found = directions(public, served, gain_I)
    x_RI = torch.randn(5, 20, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ours_RV = x_RI @ found.public_IV
    theirs_RV = (x_RI / gain_I) @ q_II @ found.served_IV
    assert found.signed
    assert ours_RV.shape == (5, 20)
    sign = torch.sign((ours_RV * theirs_RV).sum())
    assert torch.allclose(ours_RV, sign * theirs_RV, atol=1e-9)


def test_one_module_gives_coordinates_without_signs() -> None:
    """And only those that it has weight for: 8 outputs, 8 directions of 20."""
    public = random_modules(8, in_features=20)
    q_II = orthogonal(20, 1)
    served = [orthogonal(8, 2) @ public[0] @ q_II]
    found = directions(public, served, torch.ones(20, dtype=torch.float64))
    x_RI = torch.randn(5, 20, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ours_RV, theirs_RV = x_RI @ found.public_IV, x_RI @ q_II @ found.served_IV
    assert not found.signed
    assert ours_RV.shape == (5, 8)
    assert torch.allclose(ours_RV.abs(), theirs_RV.abs(), atol=1e-9)


def test_a_weight_that_says_less_gives_fewer_directions() -> None:
    """Two outputs are the same: of 8, 7 say something."""
    public = random_modules(8, in_features=20)
    public[0][1] = public[0][0]
    served = [orthogonal(8, 2) @ public[0] @ orthogonal(20, 1)]
    found = directions(public, served, torch.ones(20, dtype=torch.float64))
    assert found.public_IV.shape == found.served_IV.shape == (20, 7)
    # Of a served weight that says less than the public one nothing is infinite.
    served = [orthogonal(8, 2) @ public[0] @ orthogonal(20, 1)]
    found = directions(
        random_modules(8, in_features=20), served, torch.ones(20, dtype=torch.float64)
    )
    assert found.served_IV.shape == (20, 8)
    assert found.served_IV.isfinite().all()
    assert found.public_IV.isfinite().all()


def test_directions_that_rounding_has_mixed_hardly_count() -> None:
    """Two singular values nearly coincide: their eigenvectors are anywhere between the two."""
    sizes = torch.tensor([8, 7, 6, 5.0001, 5, 4, 3, 2], dtype=torch.float64)
    public = [orthogonal(8, 1) @ torch.diag(sizes) @ orthogonal(8, 2)]
    noise = torch.randn(8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    served = [public[0] @ orthogonal(8, 4) + 1e-3 * noise]
    found = directions(public, served, torch.ones(8, dtype=torch.float64))
    counts = found.served_IV.norm(dim=0)
    assert counts[[3, 4]].max() < 0.1
    assert counts[[0, 1, 2, 5, 6, 7]].min() > 0.9


@pytest.mark.parametrize(("policy", "folded"), [("cloak", True), ("stip", False)])
def test_weights_say_whether_the_gain_is_folded_in(
    tiny: PublicModel, tmp_path: Path, policy: str, folded: bool
) -> None:
    """The rotation folds, the permutation does not; no name of a mask is looked at."""
    played = play(load_policy(policy), [[1, 2]], PlaySettings(tiny.directory, tmp_path, 1))
    fold_I = Weights(view_of(tiny, played)).fold((1, "gate_up_proj"))
    gain_I = tiny.light.norms[1].post_attention_layernorm.double()
    assert torch.allclose(fold_I, gain_I if folded else torch.ones_like(gain_I))


@pytest.mark.parametrize(
    ("attack", "policy"),
    [(CloakedPermutation(), "stip"), (CloakedRotation(), "cloak"), (CloakedRotation(), "stip")],
)
def test_every_place_is_read(
    tiny: PublicModel, tmp_path: Path, attack: Attack, policy: str
) -> None:
    """Eigenvectors undo a permutation, too: it is orthogonal."""
    scores = run(tiny, attack, policy, tmp_path)
    assert len(scores) == 12
    assert scores["layer 0 qkv_proj"].top1.n == 34
    # A token's own part in what attention returns may be nothing.
    own = [one for where, one in scores.items() if not where.endswith("o_proj")]
    assert [one.top1.hits for one in own] == [34] * 9


@pytest.mark.usefixtures("same_draws")
def test_columns_say_nothing_of_a_rotation(tiny: PublicModel, tmp_path: Path) -> None:
    """So what the eigenvectors read is not what a search would guess anyway."""
    scores = run(tiny, CloakedPermutation(), "cloak", tmp_path)
    assert all(one.top1.hits <= 0.2 * one.top1.n for one in scores.values())


def test_noise_that_drowns_rows_is_not_read(tiny: PublicModel, tmp_path: Path) -> None:
    """And nothing fails."""
    weak = run(tiny, CloakedRotation(), under(FeatureRotation(sigma=0.25)), tmp_path / "weak")
    strong = run(tiny, CloakedRotation(), under(FeatureRotation(sigma=64)), tmp_path / "strong")
    first = "layer 0 qkv_proj"
    assert weak[first].top1.hits >= 0.9 * weak[first].top1.n
    assert strong[first].top1.hits <= 0.2 * strong[first].top1.n
    assert len(strong) == 12


def test_weights_in_the_clear_are_refused(tiny: PublicModel, tmp_path: Path) -> None:
    """Other attacks read those."""
    settings = PlaySettings(tiny.directory, tmp_path, 1)
    view = view_of(tiny, play(load_policy("attention-in-tee"), [[1, 2]], settings))
    for attack in (CloakedPermutation(), CloakedRotation()):
        assert attack.refuses(view) == "weights are not cloaked"


@pytest.mark.parametrize("attack", [CloakedPermutation(), CloakedRotation()])
def test_the_control_is_read(tmp_path: Path, attack: Attack) -> None:
    """The demo model under the policy that the attack must break."""
    public = PublicModel(model_directory("demo"))
    text = (public.directory / "validation.txt").read_text(encoding="utf-8")
    stories = [story for story in text.split("<|begin_of_text|>") if story.strip()]
    prompts = [public.tokenizer.encode(story)[:24] for story in stories[:2]]
    scores = run(public, attack, attack.control, tmp_path, prompts)
    assert len(scores) == 20
    assert all(one.top1.hits >= attack.published * one.top1.n for one in scores.values())
