"""Segments are read: in front of layer 0 by look-ups, deeper by searches, whatever their mask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tee_side.policy.placement import Policy, load_policy
from tests.kit.model import make_model, token_ids
from tests.unit.tsqp.leak.test_attack_static_cloak import view_of
from tsqp.cli.program import model_directory
from tsqp.lab.leak.attack import Attack, View, Work
from tsqp.lab.leak.attacks.direct import NearestEmbedding
from tsqp.lab.leak.attacks.noise import NoiseAveraging
from tsqp.lab.leak.attacks.pads import PadReuse
from tsqp.lab.leak.attacks.rotations import GramDictionary, NormDictionary
from tsqp.lab.leak.attacks.row_space import SubspaceMembership
from tsqp.lab.leak.attacks.static_cloak import (
    CloakedPermutation,
    CloakedRotation,
    Coordinates,
    Weights,
)
from tsqp.lab.leak.attacks.vocabulary import FeatureMatching, PlainMatching
from tsqp.lab.leak.matching import FIRST_SEGMENT
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, Recording, play
from tsqp.lab.leak.score import score

TEXTS = ("The quick brown fox jumps over the lazy dog.", "Once upon a time there was a king.")
# What reads it all, and what must not: it does not know the mask.
READ: dict[str, dict[type[Attack], bool]] = {
    "clear-segment": dict.fromkeys(
        (NearestEmbedding, PlainMatching, FeatureMatching, NormDictionary, GramDictionary), True
    ),
    "attested-segment": dict.fromkeys((NearestEmbedding, PlainMatching), True),
    "stip-segment": {
        **dict.fromkeys(
            (FeatureMatching, CloakedPermutation, NormDictionary, GramDictionary), True
        ),
        **dict.fromkeys((PlainMatching, NearestEmbedding), False),
    },
    "cloak-segment": {
        **dict.fromkeys((CloakedRotation, NormDictionary, GramDictionary), True),
        **dict.fromkeys(
            (PlainMatching, NearestEmbedding, FeatureMatching, CloakedPermutation), False
        ),
    },
}
DEEP: dict[str, type[Attack]] = {
    "clear-segment": PlainMatching,
    "stip-segment": FeatureMatching,
    "cloak-segment": CloakedRotation,
}


@pytest.fixture(scope="module")
def public() -> PublicModel:
    return PublicModel(model_directory("demo"))


def _played(public: PublicModel, policy: Policy, folder: Path) -> tuple[Recording, View]:
    prompts = [public.tokenizer.encode(text) for text in TEXTS]
    played = play(policy, prompts, PlaySettings(public.directory, folder, new_tokens=5))
    return played, view_of(public, played)


def _share(attack: Attack, played: Recording, view: View, where: str) -> float:
    assert attack.refuses(view) is None
    truths = [session.truth for session in played.sessions]
    (found,) = score(attack.read(view, Work()), truths)
    assert found.where == where
    assert found.top1.n == sum(len(truth.sent) for truth in truths)
    return found.top1.hits / found.top1.n


# By chance one rotation in a hundred has its readers guess a frequent token right.
@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("name", READ)
def test_a_segment_from_layer_0_is_read_by_look_ups(
    public: PublicModel, tmp_path: Path, name: str
) -> None:
    played, view = _played(public, load_policy(name), tmp_path)
    for attack, reads in READ[name].items():
        share = _share(attack(), played, view, "layer 0 segment")
        assert share >= 0.95 if reads else share <= 0.1, attack.name
    assert NoiseAveraging().refuses(view) == "no linear operator crossed"
    assert PadReuse().refuses(view) == "floats"


def test_of_a_plain_segment_the_row_space_names_decoded_tokens(
    public: PublicModel, tmp_path: Path
) -> None:
    """Those of a prompt are a set; of a transformed axis it says nothing, and says so."""
    for name in READ:
        (tmp_path / name).mkdir()
        played, view = _played(public, load_policy(name), tmp_path / name)
        attack = SubspaceMembership()
        if view.policy.masks:
            assert attack.refuses(view) == "the hidden axis is transformed"
            continue
        assert attack.refuses(view) is None
        (found,) = score(attack.read(view, Work()), [session.truth for session in played.sessions])
        assert (found.where, found.prompt.n) == ("layer 0 segment", 0)
        assert (found.answer.hits, found.answer.n) == (8, 8)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> PublicModel:
    """A random model whose norms have other gains for each feature, and whose heads are narrow.

    All queries, keys and values of a token together are fewer than its features.
    """
    directory = tmp_path_factory.mktemp("uneven")
    make_model(directory, head_dim=4)
    return PublicModel(directory)


def test_gains_that_are_folded_into_the_weights_are_taken_out_of_rows(
    uneven: PublicModel, tmp_path: Path
) -> None:
    """A segment's rows come from no norm: the coordinates of row and candidate are the same."""
    prompts = [token_ids(12, seed, uneven.vocab_size) for seed in range(2)]
    settings = PlaySettings(uneven.directory, tmp_path, new_tokens=2)
    played = play(load_policy("cloak-segment"), prompts, settings)
    view = view_of(uneven, played)
    matcher = Coordinates(Weights(view))
    (first, *_) = view.traces[0].steps
    call = first.at(FIRST_SEGMENT)
    assert call is not None
    ours = matcher.of_candidates(FIRST_SEGMENT, uneven.embedding_VD[prompts[0]])
    theirs = matcher.of_observed(FIRST_SEGMENT, call.rows)
    # Along every direction of the hidden axis, up to one sign.
    assert ours.shape == theirs.shape == (12, uneven.config.hidden_size)
    assert float(min((ours - theirs).norm(), (ours + theirs).norm())) <= 1e-2 * float(ours.norm())


@pytest.mark.parametrize("name", DEEP)
def test_a_segment_from_a_later_layer_is_read_by_a_search(
    public: PublicModel, tmp_path: Path, name: str
) -> None:
    whole = load_policy(name)
    (placed,) = whole.operators["segment"]
    first = {"embedding": "tee", "lm_head": "tee"} | {
        operator: {"place": "tee", "layers": "0-1"}
        for operator in (
            *("qkv_proj", "attn_scores", "attn_values"),
            *("o_proj", "gate_up_proj", "down_proj"),
        )
    }
    segment = {
        "place": "gpu",
        "mask": placed.mask.name if placed.mask else "none",
        "verify": "none",
        "layers": "2-",
    }
    policy = Policy.model_validate(
        {
            "name": f"deep-{name}",
            "summary": "later layers",
            "operators": {**first, "segment": segment},
        }
    )
    played, view = _played(public, policy, tmp_path)
    assert _share(DEEP[name](), played, view, "layer 2 segment") >= 0.95
