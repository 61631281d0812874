"""What pads, noise, rotations and mixtures leave of rows, in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protocol.messages import FUSED_MODULES
from tests.kit.leaks import (
    FIRST_PLACE,
    VOCABULARY,
    begun,
    first_view,
    linear,
    make_begun_model,
    planted,
    policy_with,
    recorded,
    scores_of,
    truth_of,
    view_of,
)
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import TOP, Attack, View, Work
from tsqp.lab.leak.attacks.attention import Keys
from tsqp.lab.leak.attacks.noise import NoiseAveraging
from tsqp.lab.leak.attacks.pads import LowDimensionalPads, PadBasis, PadReuse
from tsqp.lab.leak.attacks.rotations import follow
from tsqp.lab.leak.attacks.row_space import RowSpace
from tsqp.lab.leak.laboratory import weakened_policies
from tsqp.lab.leak.matching import FIRST, Observed
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.trace import Trace, Where

# ----------------------------------------------------------------------------------------- pads

FEATURES = 48
Found = dict[tuple[int, int], tuple[int, ...]]


def ring(*shape: int) -> torch.Tensor:
    """Return uniform ring elements."""
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def mixed(basis_KI: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return random sums of a few pads."""
    return (ring(*shape, len(basis_KI), 1) * basis_KI).sum(-2).to(torch.int32)


def rows_of(public: PublicModel, sessions: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [sessions, tokens], random but for token 0 in front, and their integers."""
    ids = torch.randint(1, VOCABULARY, (sessions, tokens))
    ids[:, 0] = 0
    return ids, public.encode((0, "qkv_proj"), public.dictionary_VD)[ids]


def view_at(public: PublicModel, rows_STI: torch.Tensor, policy: str = "shielded-prefill") -> View:
    """Return hand-made traces as an attack gets them: a prompt's rows, then one by one."""
    prompt = 4 if policy == "shielded-prefill" else 1
    traces = [[rows_TI[:prompt], *rows_TI[prompt:].split(1)] for rows_TI in rows_STI]
    messages = [tuple(linear(FIRST, rows) for rows in steps) for steps in traces]
    return view_of(public, *map(Trace, messages), policy=policy)


def read(attack: Attack, view: View) -> Found:
    """Return the guesses for each session and token that the attack says it read."""
    assert attack.refuses(view) is None
    return {
        (reading.session, token): reading.guesses[token]
        for reading in attack.read(view, Work())
        for token in reading.tokens
    }


def right(found: Found, ids: torch.Tensor) -> set[tuple[int, int]]:
    """Return the sessions and tokens that were read right."""
    return {(s, t) for (s, t), guess in found.items() if guess[0] == int(ids[s, t])}


@each_row("part", [0.2, 0.5, 1.0])
def test_rows_that_share_a_pad_are_read_and_the_others_are_not(
    public: PublicModel, part: float
) -> None:
    """Under one of two pads, each of which is used again."""
    (ids, rows), shared = rows_of(public, 6, 30), torch.rand(6, 30) < part
    used_again = ring(2, FEATURES)[torch.randint(2, (6, 30))]
    pads = torch.where(shared[..., None], used_again, ring(6, 30, FEATURES))
    found = read(PadReuse(), view_at(public, rows + pads))
    reused = {(s, t) for s, t in shared.nonzero().tolist()}
    assert reused <= right(found, ids)
    assert len(right(found, ids) - reused) <= 0.05 * 180


def test_a_pad_bank_that_was_restored_gives_pairs_of_rows_which_are_read(
    public: PublicModel,
) -> None:
    """Decode alone, from another token each: nothing is known of any row."""
    ids, rows = rows_of(public, 2, 40)
    found = read(PadReuse(), view_at(public, rows + ring(1, 40, FEATURES), "shielded"))
    differ = {(s, t) for s in range(2) for t in range(40) if ids[0, t] != ids[1, t]}
    assert len(differ) > 70
    assert differ <= right(found, ids)


@each_row("attack", [PadReuse(), LowDimensionalPads()], ids=lambda attack: str(attack.name))
def test_fresh_pads_are_read_as_often_as_chance_has_it(public: PublicModel, attack: Attack) -> None:
    ids, _ = rows_of(public, 30, 40)
    found = read(attack, view_at(public, ring(30, 40, FEATURES)))
    assert all(len(guess) == TOP for guess in found.values())
    assert len(found) >= 30 * 39
    # Chance is 1 of 128. Five standard errors of 1,170 tokens are 1.3 % more.
    assert len(right(found, ids)) < 0.021 * len(found)
    first = [guess[0] for guess in found.values()]
    # No token is guessed for so many rows that its own frequency would count as a success.
    assert max(map(first.count, set(first))) < 0.03 * len(first)


def test_a_basis_is_the_identity_at_its_pivots_and_takes_pads_away() -> None:
    basis_KI, plain = ring(4, FEATURES), ring(5, FEATURES)
    pads_NI = mixed(basis_KI, 8)
    assert not PadBasis.learn(pads_NI[:4]).closed
    learnt = PadBasis.learn(pads_NI)
    assert (learnt.closed, len(learnt.pivots)) == (True, 4)
    assert torch.equal(learnt.rows_KI[:, learnt.pivots], torch.eye(4, dtype=torch.int32))
    assert learnt.outside(plain).shape == (5, FEATURES - 4)
    assert torch.equal(learnt.outside(plain + mixed(basis_KI, 5)), learnt.outside(plain))
    # Of even multiples the pad is known but for the highest bit.
    pad_I = ring(FEATURES) | 1
    learnt = PadBasis.learn(torch.stack([2 * pad_I, 4 * pad_I, 6 * pad_I]))
    assert (len(learnt.pivots), learnt.bits, learnt.closed) == (1, 31, True)
    assert not learnt.outside(5 * pad_I).any()


def test_integers_that_were_computed_in_bfloat16_are_read(
    model: SavedModel, public: PublicModel, tmp_path: Path
) -> None:
    (path,) = [path for path in weakened_policies() if Path(path).stem == "pad-reused"]
    played = recorded(model, path, tmp_path, begun(9, 6), dtype="bfloat16")
    truths = [session.truth for session in played.sessions]
    found = scores_of(PadReuse(), first_view(public, played), truths)[FIRST_PLACE]
    assert (found.top1.hits, found.top1.n) == (21, 21)


# ---------------------------------------------------------------------------------------- noise

TOKENS, PROMPT, ALL = 16, 8, "all places"
PLACES: list[Where] = [(layer, operator) for layer in (0, 1) for operator in FUSED_MODULES]
Sigmas = dict[str, float]
LARGE: Sigmas = dict.fromkeys(FUSED_MODULES, 40.0)


def hits(public: PublicModel, sigmas: Sigmas, known: Sigmas) -> tuple[int, int]:
    """Return what is read of noise of some sizes, taken for others, in layer 0 and everywhere."""

    def noisy(rows_RI: torch.Tensor, where: Where) -> torch.Tensor:
        return rows_RI + sigmas[where[1]] * torch.randn_like(rows_RI)

    texts = begun(TOKENS, TOKENS)
    traces = [planted(public, ids, PROMPT, PLACES, noisy) for ids in texts]
    masks = {name: {"name": "float-noise", "sigma": sigma} for name, sigma in known.items()}
    sent = {name: {"place": "gpu", "mask": mask, "verify": "none"} for name, mask in masks.items()}
    view = view_of(public, *traces, policy=policy_with(**sent))
    found = scores_of(NoiseAveraging(), view, [truth_of(ids, PROMPT) for ids in texts])
    return found[FIRST_PLACE].top1.hits, found[ALL].top1.hits


@each_row(
    ("sigma", "first", "everything"),
    [(0.3, (32, 32), (32, 32)), (2.0, (0, 20), (31, 32)), (1000.0, (0, 2), (0, 4))],
)
def test_what_one_row_does_not_tell_all_places_together_do(
    public: PublicModel, sigma: float, first: tuple[int, int], everything: tuple[int, int]
) -> None:
    """Under noise that drowns everything the token in front alone is known."""
    sigmas = dict.fromkeys(FUSED_MODULES, sigma)
    one, together = hits(public, sigmas, sigmas)
    assert first[0] <= one <= first[1]
    assert everything[0] <= together <= everything[1]


def test_places_count_by_how_little_noise_they_have(public: PublicModel) -> None:
    """And not as if they all had the same."""
    sigmas = {**LARGE, "gate_up_proj": 0.8}
    assert hits(public, sigmas, sigmas)[1] >= 31
    assert hits(public, sigmas, LARGE)[1] < 16


# -------------------------------------------------------------------------- rotations, mixtures


def distances(rows_RI: torch.Tensor, candidates_NI: torch.Tensor) -> torch.Tensor:
    """Return how far candidates are from the span of some rows."""
    return RowSpace().distances(Observed(FIRST, rows_RI, 0, len(rows_RI), 1e-3), 0, candidates_NI)


def test_a_second_token_that_fits_as_well_is_given_up_later() -> None:
    """Two candidates have the same product with the first row; only the third row tells."""
    table_VI = torch.nn.functional.normalize(torch.randn(50, 16), dim=1) * 4
    # Mirrored at the first token's row: its product with that row stays.
    first_I = table_VI[3] / table_VI[3].norm()
    table_VI[4] = 2 * (table_VI[9] @ first_I) * first_I - table_VI[9]
    turned_II = torch.linalg.qr(torch.randn(16, 16))[0]
    for ids in ([3, 4, 20], [3, 9, 20], [3, 7, 5, 7, 3]):
        found = follow(table_VI[ids] @ turned_II, table_VI, 3, Work())
        assert list(found.token_ids) == [guesses[0] for guesses in found.guesses] == ids


def test_a_distance_is_the_sine_of_the_angle_to_the_span(public: PublicModel) -> None:
    """Near the span, too, where most digits cancel; rows that repeat span no more by rounding."""
    for angle in (1.0, 0.3, 1e-2, 1e-4):
        candidates = torch.tensor([[3.0, 4.0, 5.0 * torch.tensor(angle).tan(), 0.0]])
        found = distances(torch.eye(4)[:2], candidates)
        assert float(found[0]) == pytest.approx(float(torch.tensor(angle).sin()), rel=1e-3)
    assert torch.isinf(distances(torch.randn(8, 8), torch.randn(5, 8))).all()
    again = torch.randn(48, 7) @ public.dictionary_VD[[5, 9, 5, 9, 5, 9, 5]]
    assert (distances(again, public.dictionary_VD) < 1e-3).nonzero()[:, 0].tolist() == [5, 9]


@each_row("kind", ["qwen2", "qwen3"])
def test_keys_are_those_that_cross(tmp_path: Path, kind: str) -> None:
    """With biases, norms of heads and RoPE, at every position."""
    (tmp_path / kind).mkdir()
    model, (prompt,) = make_begun_model(tmp_path / kind, kind), begun(7)
    played = recorded(model, "tsqp", tmp_path / "played", [prompt])
    call = played.sessions[0].traces[0].steps[0].at((0, "attn_scores"))
    assert call is not None
    keys = Keys(PublicModel(model.directory))
    for position, token in enumerate(prompt):
        crossed_KC = call.tensors[1][:, :, position]
        assert torch.allclose(keys.at(position)[token], crossed_KC, atol=1e-5)
