"""Pads that are used again, or mixed from a few, are read; fresh ones are guessed by chance."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from tests.kit.leaks import (
    FIRST_PLACE,
    VOCABULARY,
    begun,
    first_view,
    linear,
    recorded,
    scores_of,
    view_of,
)
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import TOP, Attack, View, Work
from tsqp.lab.leak.attacks.pads import LowDimensionalPads, PadBasis, PadReuse
from tsqp.lab.leak.laboratory import weakened_policies
from tsqp.lab.leak.matching import FIRST
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.trace import Trace

FEATURES = 48
Found = dict[tuple[int, int], tuple[int, ...]]


def sessions(count: int, tokens: int) -> torch.Tensor:
    """Return token ids [sessions, tokens], random but for token 0 in front."""
    ids = torch.randint(1, VOCABULARY, (count, tokens))
    ids[:, 0] = 0
    return ids


def integers(public: PublicModel, ids: torch.Tensor) -> torch.Tensor:
    """Return what the TEE makes of tokens, before pads."""
    return public.encode((0, "qkv_proj"), public.dictionary_VD)[ids]


def ring(*shape: int) -> torch.Tensor:
    """Return uniform ring elements."""
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def mixed(basis_KI: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return random sums of a few pads."""
    return (ring(*shape, len(basis_KI), 1) * basis_KI).sum(-2).to(torch.int32)


def view(
    public: PublicModel, rows_STI: torch.Tensor, prompt: int = 4, policy: str = "shielded-prefill"
) -> View:
    """Return hand-made traces as an attack gets them: a prompt's rows, then one by one."""
    traces = [
        Trace(tuple(linear(FIRST, part) for part in (rows_TI[:prompt], *rows_TI[prompt:].split(1))))
        for rows_TI in rows_STI
    ]
    return view_of(public, *traces, policy=policy)


def read(attack: Attack, seen: View) -> Found:
    """Return the guesses for each session and token that the attack says it read."""
    assert attack.refuses(seen) is None
    return {
        (reading.session, token): reading.guesses[token]
        for reading in attack.read(seen, Work())
        for token in reading.tokens
    }


def share(found: Found, ids: torch.Tensor, among: Iterable[tuple[int, int]] | None = None) -> float:
    """Return how much of what was read is right, of all or among some tokens."""
    asked = list(found if among is None else among)
    return sum(found[s, t][0] == int(ids[s][t]) for s, t in asked) / len(asked)


@each_row("part", [0.2, 0.5, 1.0])
def test_rows_that_share_a_pad_are_read_and_the_others_are_not(
    public: PublicModel, part: float
) -> None:
    ids, shared = sessions(6, 30), torch.rand(6, 30) < part
    mask = torch.where(shared[..., None], ring(FEATURES), ring(6, 30, FEATURES))
    found = read(PadReuse(), view(public, integers(public, ids) + mask))
    reused = {(s, t) for s, t in shared.nonzero().tolist()}
    assert share(found, ids, reused) == 1
    if others := found.keys() - reused:
        assert share(found, ids, others) < 0.05


def test_a_pad_bank_that_was_restored_gives_pairs_of_rows_which_are_read(
    public: PublicModel,
) -> None:
    """Decode alone, from another token each: nothing is known of any row."""
    ids = torch.randint(1, VOCABULARY, (2, 40))
    rows = integers(public, ids) + ring(1, 40, FEATURES)
    found = read(PadReuse(), view(public, rows, prompt=1, policy="shielded"))
    differ = {(s, t) for s in range(2) for t in range(40) if ids[0, t] != ids[1, t]}
    assert len(differ) > 70
    assert share(found, ids, differ) == 1


@each_row("attack", [PadReuse(), LowDimensionalPads()], ids=lambda attack: str(attack.name))
def test_fresh_pads_are_read_as_often_as_chance_has_it(public: PublicModel, attack: Attack) -> None:
    ids = sessions(30, 40)
    found = read(attack, view(public, ring(30, 40, FEATURES)))
    assert all(len(guess) == TOP for guess in found.values())
    assert len(found) >= 30 * 39
    # Chance is 1 of 128. Five standard errors of 1,170 tokens are 1.3 % more.
    assert share(found, ids) < 0.021
    first = [guess[0] for guess in found.values()]
    # No token is guessed for so many rows that its own frequency would count as a success.
    assert max(map(first.count, set(first))) < 0.03 * len(first)


@each_row("dimensions", [1, 2, 5, 10, 12])
def test_pads_of_few_dimensions_are_learnt_from_two_rows_more(
    public: PublicModel, dimensions: int
) -> None:
    ids, basis_KI = sessions(dimensions + 2, 8), ring(dimensions, FEATURES)
    rows = integers(public, ids) + mixed(basis_KI, dimensions + 2, 8)
    found = read(LowDimensionalPads(), view(public, rows))
    # The first token is assumed, and so is not said to be read.
    assert found.keys() == {(s, t) for s in range(dimensions + 2) for t in range(1, 8)}
    assert share(found, ids) == 1


def test_a_basis_is_the_identity_at_its_pivots_and_takes_pads_away() -> None:
    basis_KI = ring(4, FEATURES)
    pads_NI = mixed(basis_KI, 8)
    assert not PadBasis.learn(pads_NI[:4]).closed
    learnt = PadBasis.learn(pads_NI)
    assert (learnt.closed, len(learnt.pivots)) == (True, 4)
    assert torch.equal(learnt.rows_KI[:, learnt.pivots], torch.eye(4, dtype=torch.int32))
    plain = ring(5, FEATURES)
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
