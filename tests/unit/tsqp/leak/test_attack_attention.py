"""Keys of the first layer are read through every mask of products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.masks.mask import MaskedProduct, RowMask
from tee_side.protect.randomness import Randomness
from tests.kit.model import make_model, token_ids
from tsqp.cli.program import model_directory
from tsqp.lab.leak.attack import View, Work
from tsqp.lab.leak.attacks.attention import AttentionKeys, Keys, invariant, shares
from tsqp.lab.leak.model import Score
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, Recording, play
from tsqp.lab.leak.score import score
from tsqp.lab.research.draws import orthogonal, permutation
from tsqp.lab.research.row_mix import RowMix
from tsqp.lab.research.row_permutation import RowPermutation
from tsqp.lab.research.row_rotation import RowRotation

POLICIES = ("tsqp", "tsqp-permuted", "row-mix")
K, C, S = 3, 8, 5


class FeatureTurn(RowRotation):
    """A mask that is not known: positions shuffled, features rotated."""

    name = "feature-turn"

    def mask_product(
        self, a_BMJ: torch.Tensor, b_BJN: torch.Tensor, randomness: Randomness
    ) -> MaskedProduct:
        """Turn features, shuffle positions."""
        q_JJ = orthogonal(randomness, a_BMJ.shape[2]).float()
        order_N = permutation(randomness, b_BJN.shape[2])
        back_N = order_N.argsort()
        return MaskedProduct(
            a_BMJ @ q_JJ, (q_JJ.T @ b_BJN)[:, :, order_N], lambda y: y[..., back_N]
        )


@pytest.fixture
def plain() -> torch.Tensor:
    """Random keys [K, C, S], as a product's second operand."""
    return torch.randn(K, C, S, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mask", [RowPermutation(), RowMix(), FeatureTurn()])
def test_what_is_compared_survives_the_mask(plain: torch.Tensor, mask: RowMask) -> None:
    """Of each position, at whatever place it crosses; and positions stay apart."""
    sent = mask.mask_product(torch.ones(K, 2, C), plain, Randomness(bytes(32)))
    left = invariant(mask)
    plain_SX, observed_SX = (left.of(b.permute(2, 0, 1)) for b in (plain, sent.b))
    assert not torch.allclose(plain, sent.b, atol=0.01)
    assert not left.ordered
    distances_SS = torch.cdist(plain_SX, observed_SX)
    assert distances_SS.amin(1).max() < 1e-3
    assert distances_SS.topk(2, dim=1, largest=False).values[:, 1].min() > 0.1


def test_in_the_clear_keys_are_compared_as_they_are(plain: torch.Tensor) -> None:
    """Position by position."""
    k_SKC = plain.permute(2, 0, 1)
    assert invariant(None).ordered
    assert torch.equal(invariant(None).of(k_SKC), k_SKC.reshape(S, K * C))


def test_shares_of_one_head_say_nothing() -> None:
    """There, scaling each feature by a secret factor leaves none."""
    k_NKC = torch.randn(4, 1, C, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(shares(k_NKC), torch.ones(4, C))


def view_of(public: PublicModel, played: Recording) -> View:
    """What the first service saw."""
    traces = tuple(session.traces[0] for session in played.sessions)
    return View(traces, public, played.policy, played.served, 0, 0)


def run(public: PublicModel, policy: str | Policy, folder: Path, prompts: list[list[int]]) -> Score:
    """Play, attack, score."""
    settings = PlaySettings(public.directory, folder, new_tokens=8)
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    played = play(chosen, prompts, settings)
    view, attack = view_of(public, played), AttentionKeys()
    assert attack.refuses(view) is None
    truths = [session.truth for session in played.sessions]
    (found,) = score(attack.read(view, Work()), truths)
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_keys_are_those_that_cross(tmp_path: Path, kind: str) -> None:
    """With biases, norms of heads and RoPE, at every position."""
    make_model(tmp_path, kind)
    public = PublicModel(tmp_path)
    prompt = token_ids(7)
    played = play(load_policy("tsqp"), [prompt], PlaySettings(tmp_path, tmp_path, 1))
    call = played.sessions[0].traces[0].steps[0].at((0, "attn_scores"))
    assert call is not None
    keys = Keys(public)
    for position, token in enumerate(prompt):
        crossed_KC = call.tensors[1][:, :, position]
        assert torch.allclose(keys.at(position)[token], crossed_KC, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_is_read(tmp_path: Path, policy: str) -> None:
    """Of prompts and of answers, in their order, though positions are shuffled.

    Where one has its prompt another has its answer.
    """
    make_model(tmp_path)
    prompts = [token_ids(length, seed) for seed, length in enumerate((20, 13, 7))]
    found = run(PublicModel(tmp_path), policy, tmp_path, prompts)
    assert found.where == "layer 0 attn_scores"
    assert (found.prompt.hits, found.prompt.n) == (40, 40)
    # The token that is sampled last has no key yet.
    assert (found.answer.hits, found.answer.n) == (21, 21)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("tsqp", "tsqp-permuted"), ("row-mix", "tsqp"), ("tsqp-permuted", "row-mix")],
)
def test_phases_have_masks_of_their_own(tmp_path: Path, prefill: str, decode: str) -> None:
    """What one of them leaves is not what the other does."""
    make_model(tmp_path)
    products = {
        operator: tuple(
            one.model_copy(update={"phase": phase})
            for phase, name in (("prefill", prefill), ("decode", decode))
            for one in load_policy(name).operators[operator]
        )
        for operator in ("attn_scores", "attn_values")
    }
    tsqp = load_policy("tsqp")
    policy = tsqp.model_copy(update={"operators": {**tsqp.operators, **products}})
    prompts = [token_ids(length, seed) for seed, length in enumerate((20, 13, 7))]
    found = run(PublicModel(tmp_path), policy, tmp_path, prompts)
    assert (found.prompt.hits, found.answer.hits, found.top1.n) == (40, 21, 61)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_demo_model_is_read(tmp_path: Path, policy: str) -> None:
    """The control, and two masks, over prompts and answers."""
    public = PublicModel(model_directory("demo"))
    text = (public.directory / "validation.txt").read_text(encoding="utf-8")
    stories = [story for story in text.split("<|begin_of_text|>") if story.strip()]
    prompts = [public.tokenizer.encode(story)[:24] for story in stories[:2]]
    found = run(public, policy, tmp_path, prompts)
    assert found.top1.n == 62
    assert found.top1.hits >= AttentionKeys.published * found.top1.n


def test_attention_that_stays_is_refused(tmp_path: Path) -> None:
    """No keys, no attack."""
    make_model(tmp_path)
    played = play(load_policy("attention-in-tee"), [[1, 2]], PlaySettings(tmp_path, tmp_path, 1))
    view = view_of(PublicModel(tmp_path), played)
    assert AttentionKeys().refuses(view) == "no keys of layer 0 crossed"
