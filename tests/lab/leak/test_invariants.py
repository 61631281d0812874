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
from tsqp.lab.leak.attack import TOP, Attack, Work
from tsqp.lab.leak.attacks.noise import NoiseAveraging
from tsqp.lab.leak.attacks.pads import LowDimensionalPads, PadReuse
from tsqp.lab.leak.matching import FIRST
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.trace import Trace, Where


@each_row("attack", [PadReuse(), LowDimensionalPads()], ids=lambda attack: str(attack.name))
def test_fresh_pads_are_read_as_often_as_chance_has_it(public: PublicModel, attack: Attack) -> None:
    # A prompt's rows, then one by one.
    rows_STI = torch.randint(-(2**31), 2**31, (30, 40, 48)).to(torch.int32)
    steps = [[rows_TI[:4], *rows_TI[4:].split(1)] for rows_TI in rows_STI]
    traces = [Trace(tuple(linear(FIRST, rows_TI) for rows_TI in one)) for one in steps]
    view = view_of(public, *traces, policy="shielded-prefill")
    assert attack.refuses(view) is None
    guesses = [guess for one in attack.read(view, Work()) for guess in one.guesses.values()]
    assert all(len(guess) == TOP for guess in guesses)
    assert len(guesses) >= 30 * 39
    # No token is guessed for so many rows that its own frequency would count as a success.
    first = [guess[0] for guess in guesses]
    assert max(map(first.count, set(first))) < 0.03 * len(first)
    # Chance is 1 of 128. Five standard errors of 1,170 tokens are 1.3 % more.
    ids = torch.randint(VOCABULARY, (len(first),)).tolist()
    assert sum(map(int.__eq__, first, ids)) < 0.021 * len(first)


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
