"""Readings are counted as they should be, and what counts as read is beyond luck."""

import itertools

import pytest
import torch

from tests.kit.leaks import leak_of, run_of, score_of, truth_of
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import AttackError, Reading
from tsqp.lab.leak.model import LUCK, Control, Rate, Score, by_luck, needed, wilson
from tsqp.lab.leak.recording import Truth
from tsqp.lab.leak.score import harm, score

# A prompt of three tokens, and an answer of three, the last of which went through no model.
TRUTH = truth_of([10, 11, 12, 20, 21], 3, last=22)
OTHER = truth_of([10, 31, 12, 40, 41], 3, last=42)
RIGHT = {0: (10,), 1: (11,), 2: (12,), 3: (20,), 4: (21,), 5: (22,)}
Guesses = dict[int, tuple[int, ...]]


def one(guesses: Guesses, tokens: range = range(6), *others: Truth) -> Score:
    (found,) = score([Reading("here", 0, tokens, guesses)], (TRUTH, *others))
    return found


@each_row(
    ("guesses", "tokens", "expected"),
    [
        # top1, top5, prompt, answer, whole: hits and tries.
        (RIGHT, range(6), [(6, 6), (6, 6), (3, 3), (3, 3), (1, 1)]),
        # What was tried alone counts; a prompt that was not tried to its end is not counted.
        (RIGHT, range(2, 4), [(2, 2), (2, 2), (1, 1), (1, 1), (0, 0)]),
        (RIGHT, range(3), [(3, 3), (3, 3), (3, 3), (0, 0), (1, 1)]),
        # What has no guess is not read.
        ({0: (10,), 3: (20,), 4: ()}, range(6), [(2, 6), (2, 6), (1, 3), (1, 3), (0, 1)]),
        # One wrong token of the prompt is no whole one.
        ({**RIGHT, 2: (99,)}, range(6), [(5, 6), (5, 6), (2, 3), (3, 3), (0, 1)]),
        # The first guess counts, and the first five.
        (
            {0: (1, 10), 1: (1, 2, 3, 4, 11), 2: (1, 2, 3, 4, 5, 12)},
            range(3),
            [(0, 3), (2, 3), (0, 3), (0, 0), (0, 1)],
        ),
        # What is behind the last token is none, such as a row that a mask added.
        (RIGHT, range(4, 9), [(2, 2), (2, 2), (0, 0), (2, 2), (0, 0)]),
    ],
)
def test_readings_are_counted(
    guesses: Guesses, tokens: range, expected: list[tuple[int, int]]
) -> None:
    found = one(guesses, tokens)
    rates = (found.top1, found.top5, found.prompt, found.answer, found.whole)
    assert [(rate.hits, rate.n) for rate in rates] == expected


def test_guesses_and_different_tokens_are_counted() -> None:
    """What repeats is one of a kind; what was given up is no guess."""
    truth = Truth((7, 7, 8), (9, 9), (7, 7, 8, 9, 9), 3)
    reading = Reading("here", 0, range(5), {0: (7,), 1: (7,), 2: (1,), 3: (9,)})
    (found,) = score([reading], [truth])
    assert (found.top1.hits, found.kinds, found.guessed, found.gave_up) == (3, 2, 4, False)
    assert one({0: (10,), 1: ()}, range(3)).gave_up
    # Places stay apart, in the order of their appearance.
    readings = [Reading(*place, range(6), RIGHT) for place in (("b", 0), ("a", 0), ("b", 1))]
    both = score(readings, (TRUTH, OTHER))
    assert [(s.where, s.top1.hits, s.top1.n) for s in both] == [("b", 8, 12), ("a", 6, 6)]


@each_row("readings", [[("x", 0, 0), ("x", 0, 0)], [("x", 1, 0)], [("x", -1, 0)], [("x", 0, -1)]])
def test_readings_that_would_be_counted_wrongly_are_refused(
    readings: list[tuple[str, int, int]],
) -> None:
    made = [Reading(where, session, range(first, 2), {}) for where, session, first in readings]
    with pytest.raises(AttackError, match="reading of session"):
        score(made, [TRUTH])


SHORT, LONG = truth_of([10], 1, last=11), truth_of([10, 11, 12, 20, 0], 3, last=0)


@each_row(
    ("guesses", "others", "chance"),
    [
        # 10 and 12 are in the same places of the other text.
        (RIGHT, (OTHER,), 2 / 6),
        ({1: (31,), 3: (40,)}, (OTHER,), 2 / 6),
        # Averaged over the others; without a guess nothing is hit.
        ({0: (10,), 2: (12,)}, (OTHER, truth_of([10, 50, 51, 52, 53], 3, 54)), 1.5 / 6),
        # The session itself has no say, nor a shorter one behind its end.
        (RIGHT, (), 0.0),
        (RIGHT, (SHORT, LONG), 4 / 6),
    ],
)
def test_chance_is_what_the_guesses_hit_in_other_sessions(
    guesses: Guesses, others: tuple[Truth, ...], chance: float
) -> None:
    found = one(guesses, range(6), *others)
    assert found.chance == pytest.approx(chance)
    assert found.excess_high == pytest.approx(found.top1.high - chance)
    assert found.excess_low == pytest.approx(found.top1.low - chance)


@each_row(
    ("hits", "n", "low", "high"),
    [
        # R. G. Newcombe (1998), Statistics in Medicine 17, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (0, 20, 0.0, 0.1611),
        (20, 20, 1 - 0.1611, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_intervals_are_wilsons(hits: int, n: int, low: float, high: float) -> None:
    assert wilson(hits, n) == pytest.approx((low, high), abs=5e-5)
    rate = Rate(hits=hits, n=n)
    assert (rate.low, rate.high) == wilson(hits, n)
    # Where all or none were hit, an end is exact.
    assert (rate.low == 0.0, rate.high == 1.0) == (hits == 0, hits == n)


@each_row(
    ("hits", "n", "chance", "expected"),
    [
        (0, 10, 0.1, 1.0),
        (1, 30, 0.001, 1 - 0.999**30),
        (3, 4, 0.5, 5 / 16),
        (1, 5, 0.0, 0.0),
        (133, 4440, 0.03, 0.51907),
    ],
)
def test_luck_is_the_binomial_tail(hits: int, n: int, chance: float, expected: float) -> None:
    assert by_luck(hits, n, chance) == pytest.approx(expected, abs=1e-4)


@each_row(("margin", "chance"), itertools.product((0.1, 0.005), (0.0, 0.03, 1 / 128_256)))
def test_of_as_many_tokens_as_are_needed_luck_does_not_end_above_the_margin(
    margin: float, chance: float
) -> None:
    n = needed(margin, chance)
    if chance == 0:
        assert wilson(0, n)[1] <= margin < wilson(0, n - 1)[1]
        return

    def lucky(tokens: int) -> float:
        hits = next(h for h in range(tokens) if wilson(h, tokens)[1] - chance > margin)
        return by_luck(hits, tokens, chance)

    assert max(lucky(n), lucky(2 * n)) <= LUCK / 100
    # Nor is it many more than it takes.
    assert lucky(int(0.9 * n)) > LUCK / 1000


READ = score_of(30, 40, chance=0.005)
LUCKY = score_of(5, 40, chance=0.01)
NOTHING = score_of(0, 2000)
OTHERS = [score_of(0, 40, where=f"place {number}", chance=0.01) for number in range(99)]
GIVEN_UP = score_of(1, 192, where="there", guessed=6)


@each_row(
    ("run", "above_chance", "excess_high"),
    [
        (run_of("a", READ), True, READ.excess_high),
        (run_of("a", NOTHING), False, NOTHING.excess_high),
        # Five of forty is beyond doubt at one place, and not at one of a hundred.
        (run_of("a", LUCKY), True, LUCKY.excess_high),
        (run_of("a", LUCKY, *OTHERS), False, None),
        # One token that is guessed alike everywhere is one stroke of luck; a large share is none.
        (run_of("a", score_of(10, 860, kinds=2)), False, None),
        (run_of("a", score_of(172, 860, kinds=1)), True, None),
        # An attack that fails where it must work is no evidence, unless it reads here.
        (run_of("a", NOTHING, worked=False), False, 1.0),
        (run_of("a", READ, worked=False), True, READ.excess_high),
        # What it gave up on it did not fail to read; what was read before that counts.
        (run_of("a", GIVEN_UP), False, 1.0),
        (run_of("a", NOTHING, GIVEN_UP), False, NOTHING.excess_high),
        (run_of("a", score_of(90, 192, guessed=93)), True, None),
        (run_of("a", worked=True), False, 1.0),
        (run_of("a", refused="no activations crossed", control=None), False, None),
    ],
)
def test_a_rate_counts_as_read_beyond_luck(
    run: object, above_chance: bool, excess_high: float | None
) -> None:
    found = leak_of(run, blind=1 / 1024)  # type: ignore[arg-type]
    assert found.above_chance == above_chance
    if excess_high is not None:
        assert found.excess_high == excess_high


def test_one_attack_that_failed_or_a_place_that_none_tried_spoils_what_the_others_prove() -> None:
    works = run_of("a", NOTHING)
    assert leak_of(works, run_of("b", NOTHING, worked=False)).excess_high == 1.0
    assert leak_of(works, untried=("layer 1 o_proj (mine)",)).excess_high == 1.0
    assert leak_of(works, run_of("b", GIVEN_UP)).excess_high == NOTHING.excess_high
    assert leak_of(run_of("a", refused="no", control=None)).excess_high is None


@each_row(
    ("hits", "n", "worked"),
    [(18, 20, True), (17, 20, False), (19, 19, False), (0, 0, False), (90, 100, True)],
)
def test_a_control_of_enough_tokens_works_place_by_place(hits: int, n: int, worked: bool) -> None:
    rate = Rate(hits=hits, n=n)
    control = Control(attack="a", policy="published", where="here", rate=rate, published=0.9)
    assert (control.works_at(), control.works_at("here")) == (worked, worked)
    places = {"there": Rate(hits=20, n=20), "here": rate}
    elsewhere = control.model_copy(update={"places": places})
    assert (elsewhere.works_at("there"), elsewhere.works_at("here")) == (True, worked)
    run = run_of("a", NOTHING, score_of(0, 2000, where="there"), control=elsewhere)
    assert [one.where for one in run.meaningful] == ["here", "there"][not worked :]


def test_the_best_reads_most_and_is_the_simplest_of_equals() -> None:
    """A lower chance makes no attack a better one; all of one part is not hidden by trying both."""
    runs = [
        run_of("dear", score_of(999, 999), compared=10**9),
        run_of("plain", score_of(999, 999), compared=10**6),
        run_of("searched", score_of(999, 999), modelled=10**6),
        run_of("almost", score_of(998, 999)),
    ]
    answers = score_of(40, 40, prompt=Rate(hits=0, n=0), answer=Rate(hits=40, n=40))
    part = [run_of("logits", answers), run_of("nearest", NOTHING)]
    found = [leak_of(*order).best for order in (runs, runs[::-1], part)]
    assert [best and best[0].attack for best in found] == ["plain", "plain", "logits"]
    # What may be luck is compared with chance.
    seldom, often = score_of(30, 1000, chance=0.001), score_of(40, 1000, chance=0.03)
    assert seldom.strength > often.strength


def test_perplexity_is_that_of_the_tokens_that_follow() -> None:
    """Uniform logits say as much as the vocabulary is large; the last row says nothing."""
    flat, sure = torch.zeros(3, 8), torch.full((3, 8), -50.0)
    sure[0, 1] = sure[1, 2] = 50.0
    half, short = sure.clone(), torch.full((2, 8), -50.0)
    half[0, 3] = short[0, 1] = 50.0
    for noisy, perplexity in ((flat, 8.0), (sure, 1.0), (half, 2**0.5)):
        assert harm([[0, 1, 2]], [flat + 1], [noisy])[0] == pytest.approx(perplexity)
    # A mean over all tokens, not over texts.
    found = harm([[0, 1, 2], [0, 1]], [flat + 1, short], [flat, short])
    assert found[0] == pytest.approx(8 ** (2 / 3))
    # The error is relative to the logits.
    plain = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    noisy = plain + torch.tensor([[0.0, 0.0], [0.6, 0.8]])
    assert harm([[0, 1]], [plain], [noisy])[1] == pytest.approx(0.2)
