"""What pads and noise leave of rows, in numbers."""

from __future__ import annotations

import torch

from protocol.messages import FUSED_MODULES
from tests.kit.leaks import (
    FIRST_PLACE,
    VOCABULARY,
    begun,
    linear,
    planted,
    policy_with,
    scores_of,
    truth_of,
    view_of,
)
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import TOP, Attack, View, Work
from tsqp.lab.leak.attacks.noise import NoiseAveraging
from tsqp.lab.leak.attacks.pads import LowDimensionalPads, PadBasis, PadReuse
from tsqp.lab.leak.matching import FIRST
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


@each_row("part", [0.2, 1.0])
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


# ---------------------------------------------------------------------------------------- noise

TOKENS, PROMPT, ALL = 16, 8, "all places"
PLACES: list[Where] = [(layer, operator) for layer in (0, 1) for operator in FUSED_MODULES]


@each_row(
    ("sigma", "first", "everything"),
    [(0.3, (32, 32), (32, 32)), (2.0, (0, 20), (31, 32)), (1000.0, (0, 2), (0, 4))],
)
def test_what_one_row_does_not_tell_all_places_together_do(
    public: PublicModel, sigma: float, first: tuple[int, int], everything: tuple[int, int]
) -> None:
    """Under noise that drowns everything the token in front alone is known."""

    def noisy(rows_RI: torch.Tensor, _where: Where) -> torch.Tensor:
        return rows_RI + sigma * torch.randn_like(rows_RI)

    texts = begun(TOKENS, TOKENS)
    traces = [planted(public, ids, PROMPT, PLACES, noisy) for ids in texts]
    mask = {"name": "float-noise", "sigma": sigma}
    sent = {"place": "gpu", "mask": mask, "verify": "none"}
    view = view_of(public, *traces, policy=policy_with(**dict.fromkeys(FUSED_MODULES, sent)))
    found = scores_of(NoiseAveraging(), view, [truth_of(ids, PROMPT) for ids in texts])
    assert first[0] <= found[FIRST_PLACE].top1.hits <= first[1]
    assert everything[0] <= found[ALL].top1.hits <= everything[1]
