"""Vocabulary matching reads what its invariant survives, at every place, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tee_side.policy.placement import load_policy
from tests.kit.model import token_ids
from tests.unit.tsqp.leak.leaks import (
    Change,
    Models,
    as_it_is,
    planted,
    recorded_scores,
    scores_of,
    share,
    tiny,
    truth_of,
    view_of,
)
from tsqp.lab.leak.attack import Attack
from tsqp.lab.leak.attacks.vocabulary import (
    BothMatching,
    FeatureMatching,
    PlainMatching,
    RowMatching,
    Sorted,
)
from tsqp.lab.leak.model import Score
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, play
from tsqp.lab.leak.trace import Trace

IDS, PROMPT = token_ids(12), 8
# A token that comes twice, in one step and again behind it.
REPEATED = [*IDS[:3], IDS[1], *IDS[4:9], IDS[1], *IDS[10:]]
ORDERED = (PlainMatching, FeatureMatching)


@pytest.fixture
def public(saved_model: Models) -> PublicModel:
    return PublicModel(tiny(saved_model).directory)


def shuffled_rows(rows_RI: torch.Tensor) -> torch.Tensor:
    """Shuffle rows, otherwise for each request."""
    return rows_RI[torch.randperm(len(rows_RI))]


def shuffled_features(rows_RI: torch.Tensor) -> torch.Tensor:
    """Shuffle the hidden axis, in the same order in every request, as a static mask does."""
    order = torch.randperm(rows_RI.shape[1], generator=torch.Generator().manual_seed(5))
    return rows_RI[:, order]


def shuffled_both(rows_RI: torch.Tensor) -> torch.Tensor:
    """Shuffle both."""
    return shuffled_rows(shuffled_features(rows_RI))


def with_dummies(rows_RI: torch.Tensor) -> torch.Tensor:
    """Shuffle rows among mixtures of them."""
    mixed = [0.6 * rows_RI[:1] - 0.8 * rows_RI[-1:], 0.9 * rows_RI[-1:] + 0.3 * rows_RI[:1]]
    return shuffled_rows(torch.cat([rows_RI, *mixed]))


def noise(rows_RI: torch.Tensor) -> torch.Tensor:
    """Leave nothing."""
    return torch.randn_like(rows_RI)


CHANGES: dict[str, Change] = {
    "nothing": as_it_is,
    "rows": shuffled_rows,
    "dummies": with_dummies,
    "features": shuffled_features,
    "both": shuffled_both,
    "noise": noise,
}
READ = {
    PlainMatching: {"nothing"},
    RowMatching: {"nothing", "rows", "dummies"},
    FeatureMatching: {"nothing", "features"},
    BothMatching: {"nothing", "rows", "dummies", "features", "both"},
}


def run(public: PublicModel, attack: Attack, change: Change, ids: list[int]) -> dict[str, Score]:
    view = view_of(public, planted(public, ids, PROMPT, change))
    return scores_of(attack, view, [truth_of(ids, PROMPT)])


@pytest.mark.parametrize("ids", [IDS, REPEATED], ids=["once", "repeated"])
@pytest.mark.parametrize(
    ("kind", "change"), [(k, c) for k, found in READ.items() for c in sorted(found)]
)
def test_what_the_invariant_survives_is_read(
    public: PublicModel, kind: type[Attack], change: str, ids: list[int]
) -> None:
    """Every token at every place; rows in no order are not looked up in the first layer."""
    found = run(public, kind(), CHANGES[change], ids)
    assert len(found) == 8
    first = found.pop("layer 0 qkv_proj")
    tried = PROMPT if kind in (PlainMatching, FeatureMatching) else 0
    assert (first.answer.hits, first.answer.n, first.prompt.n) == (4, 4, tried)
    assert first.prompt.hits == (PROMPT if kind in ORDERED else 0)
    assert {(one.top1.hits, one.top1.n) for one in found.values()} == {(12, 12)}


@pytest.mark.parametrize(
    ("kind", "change"),
    # Among dummies no row is taken for that of its place, so deeper places are read all the same.
    [(k, c) for k, found in READ.items() for c in CHANGES if c not in found and c != "dummies"],
)
def test_what_it_does_not_survive_is_not_read(
    public: PublicModel, kind: type[Attack], change: str
) -> None:
    """But for a row alone, which is in order, and one that is found among dummies."""
    for where, one in run(public, kind(), CHANGES[change], IDS).items():
        alone = one.answer.hits if change in ("rows", "dummies", "both") else 0
        assert one.top1.hits - alone <= 3, where


@pytest.mark.parametrize("noisy", [0, 2, 5, 8])
def test_a_share_that_is_noise_is_a_share_that_is_not_read(public: PublicModel, noisy: int) -> None:
    def spoiled(rows_RI: torch.Tensor) -> torch.Tensor:
        if len(rows_RI) < PROMPT:
            return rows_RI
        return torch.cat([torch.randn_like(rows_RI[:noisy]), rows_RI[noisy:]])

    found = run(public, FeatureMatching(), spoiled, IDS)["layer 0 qkv_proj"]
    assert (found.top1.hits, found.top1.n) == (12 - noisy, 12)


@pytest.mark.parametrize(
    ("attack", "policy"),
    [
        (PlainMatching(), "attention-in-tee"),
        (PlainMatching(), "tsqp"),
        (RowMatching(), "tsqp-permuted"),
        (FeatureMatching(), "stip"),
        (BothMatching(), "tsqp-permuted"),
        (BothMatching(), "stip"),
    ],
)
def test_policies_are_read(
    saved_model: Models, tmp_path: Path, attack: Attack, policy: str
) -> None:
    """Real recordings, through the masks themselves."""
    directory = tiny(saved_model).directory
    prompts = [token_ids(PROMPT, seed) for seed in range(2)]
    recording = play(load_policy(policy), prompts, PlaySettings(directory, tmp_path, 5))
    found = recorded_scores(attack, PublicModel(directory), recording)
    # Features shuffled behind a folded gain are others than those of the public model.
    deep = [share(one) for where, one in found.items() if where != "layer 0 qkv_proj"]
    assert len(deep) == 7
    assert max(deep) == 1


def test_sorted_rows_are_one_for_every_order_of_features() -> None:
    rows = torch.randn(4, 9)
    same = Sorted().of_candidates((0, "qkv_proj"), rows)
    assert torch.equal(same, Sorted().of_observed((0, "qkv_proj"), shuffled_features(rows)))
    assert same.shape == rows.shape


@pytest.mark.parametrize("attack", [kind() for kind in READ])
def test_nothing_that_crossed_is_refused(public: PublicModel, attack: Attack) -> None:
    assert attack.refuses(view_of(public, Trace(()))) == "no activations crossed"


@pytest.fixture
def light(public: PublicModel, tmp_path: Path) -> Callable[[], PublicModel]:
    """Return the public model without its linear weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    def made() -> PublicModel:
        shutil.copyfile(public.directory / "config.json", tmp_path / "config.json")
        tensors = load_file(public.directory / "model.safetensors")
        kept = {name: one for name, one in tensors.items() if "proj" not in name}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return PublicModel(tmp_path)

    return made


def test_without_linear_weights_only_the_first_layer_is_read(
    public: PublicModel, light: Callable[[], PublicModel]
) -> None:
    seen = light()
    assert not seen.has_layers
    trace = planted(public, IDS, PROMPT)
    found = scores_of(PlainMatching(), view_of(seen, trace), [truth_of(IDS, PROMPT)])
    assert list(found) == ["layer 0 qkv_proj"]
    assert share(found["layer 0 qkv_proj"]) == 1
