"""Which rows a step has, on which tables, and which of them get pads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from protocol.errors import PadsExhaustedError
from tee_side.engine.composer import Composed, compose
from tee_side.engine.drafts import Drafts
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.request import Request
from tee_side.engine.sequence import Sequence
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.pads.source import Pads, WhenOut
from tests.kit.model import SavedModel, Tee, token_ids

Models = Callable[..., SavedModel]

# Rows of a sequence in a part: tokens of its own, and guesses behind them.
Found = list[tuple[str, bool, dict[int, tuple[int, int]]]]


class Guesses:
    """Has a guess for every token that it is asked for."""

    def propose(self, most: int) -> list[int]:
        return [7] * most


class Bench:
    """Sequences of one engine, by number, and steps that are composed of them."""

    def __init__(self, tee: Tee, *, guesses: bool = False) -> None:
        self.tee = tee
        settings = EngineSettings(step_tokens=512, speculative_tokens=4 if guesses else 0)
        self.engine = Engine(tee.model, tee.lanes, settings)
        self.sequences: list[Sequence] = []

    @property
    def pads(self) -> Pads:
        (found,) = self.tee.assembly.pads.values()
        return found

    def stock(self, tokens: int) -> None:
        """Have pads for so many tokens."""
        assert self.pads._maker is not None
        store = self.pads._store
        if (missing := tokens - store.available) > 0:
            self.pads._maker.fill(store, missing)
        elif missing < 0:
            store.release(store.take(-missing))

    def prompt(self, tokens: int, owner: str = "", **wanted: Any) -> None:
        """Admit a request whose prompt is to be computed."""
        given: dict[str, Any] = {"max_new_tokens": 20, "stop_ids": frozenset(), **wanted}
        request = Request(prompt_ids=tuple(token_ids(tokens)), owner=owner, **given)
        self.sequences += self.engine.admit(request)

    def decode(self, count: int, **wanted: Any) -> None:
        """Admit requests whose prompt has been computed."""
        for _ in range(count):
            self.prompt(12, **wanted)
            sequence = self.sequences[-1]
            sequence.cache.commit(12)
            sequence.append(5)
            if self.engine.settings.speculative_tokens:
                sequence.drafts = cast(Drafts, Guesses())

    def compose(self, step_tokens: int = 512, guesses: int = 0) -> Composed:
        return compose(
            self.sequences, self.tee.lanes[0], step_tokens=step_tokens, speculative_tokens=guesses
        )

    def found(self, step_tokens: int = 512, guesses: int = 0) -> Found:
        """Return the parts of a step: phase, whether pads are withheld, rows by sequence."""
        composed = self.compose(step_tokens, guesses)
        assert composed.refused == []
        for part, rows in zip(composed.parts, composed.rows, strict=True):
            assert len(part.batch.token_ids_T) == sum(r.tokens + len(r.drafts) for r in rows)
        return [
            (
                part.phase,
                part.withheld,
                {self.sequences.index(r.sequence): (r.tokens, len(r.drafts)) for r in rows},
            )
            for part, rows in zip(composed.parts, composed.rows, strict=True)
        ]


def _bench(models: Models, policy: str | Policy = "shielded", **settings: Any) -> Bench:
    guesses = settings.pop("guesses", False)
    return Bench(models("llama").tee(policy, **settings), guesses=guesses)


# ------------------------------------------------------------------------------------ whose rows


def test_what_decodes_goes_first_wherever_it_stands(saved_model: Models) -> None:
    bench = _bench(saved_model, "tee-only")
    bench.prompt(30)
    bench.decode(2)
    assert bench.found(10) == [("decode", False, {1: (1, 0), 2: (1, 0), 0: (8, 0)})]
    assert bench.found(1) == [("decode", False, {1: (1, 0)})]


def test_a_step_has_no_more_rows_than_its_budget(saved_model: Models) -> None:
    bench = _bench(saved_model, "shielded-prefill", guesses=True)
    bench.stock(128)
    bench.decode(3)
    for owner in "aab":
        bench.prompt(20, owner)
    for step_tokens in range(1, 80):
        rows = [n for *_, part in bench.found(step_tokens, guesses=4) for n in part.values()]
        wanted = 3 * (1 + 4) + 3 * 20
        assert sum(map(sum, rows)) == min(step_tokens, wanted)


def test_no_sequences_no_parts(saved_model: Models) -> None:
    assert _bench(saved_model).found() == []


@pytest.mark.parametrize(
    ("step_tokens", "rows"),
    [
        (12, {0: 6, 2: 6}),  # however many an owner has
        (36, {0: 16, 1: 10, 2: 10}),  # what one leaves over goes to the first of the others
        (2, {0: 1, 2: 1}),
        (1, {0: 1}),
    ],
)
def test_owners_share_a_step_alike(
    saved_model: Models, step_tokens: int, rows: dict[int, int]
) -> None:
    bench = _bench(saved_model, "tee-only")
    bench.prompt(16, "one")
    bench.prompt(16, "one")
    bench.prompt(10, "two")
    ((_, _, found),) = bench.found(step_tokens)
    assert {number: tokens for number, (tokens, _) in found.items()} == rows


def test_other_samples_wait_for_the_prompt(saved_model: Models) -> None:
    bench = _bench(saved_model, "tee-only")
    bench.prompt(5, samples=3)
    assert bench.found() == [("prefill", False, {0: (5, 0)})]


def test_logits_are_wanted_of_what_is_complete_and_goes_on(saved_model: Models) -> None:
    bench = _bench(saved_model, "tee-only")
    bench.prompt(5)
    bench.prompt(6, max_new_tokens=0, pooling="last")
    bench.prompt(7)
    (part,) = bench.compose(13).parts
    assert (part.batch.output_rows, part.batch.read_rows) == ((4,), (10,))


# -------------------------------------------------------------------------------------- guesses


def test_guesses_are_made_while_pads_are_plenty(saved_model: Models) -> None:
    """Half of those that are kept ready must be left: a guess may come to nothing."""
    bench = _bench(saved_model, "shielded", guesses=True)
    bench.decode(3)
    half = 64  # of 128
    for stock, guessed in ((half + 4, 0), (half + 5, 1), (half + 10, 2), (half + 15, 3)):
        bench.stock(stock)
        ((_, _, rows),) = bench.found(guesses=4)
        assert [drafts for _, drafts in rows.values()] == [4] * guessed + [0] * (3 - guessed)


def test_no_more_is_guessed_than_may_follow(saved_model: Models) -> None:
    bench = _bench(saved_model, "tee-only", guesses=True)
    for new_tokens in (2, 3, 4, 20):
        bench.decode(1, max_new_tokens=new_tokens)
    ((_, _, rows),) = bench.found(guesses=4)
    # One was generated, and the step gives one more whatever is guessed.
    assert [drafts for _, drafts in rows.values()] == [0, 1, 2, 4]


def test_guesses_take_what_others_leave_over(saved_model: Models) -> None:
    bench = _bench(saved_model, "tee-only", guesses=True)
    bench.decode(3)
    ((_, _, rows),) = bench.found(8, guesses=4)
    assert list(rows.values()) == [(1, 4), (1, 1), (1, 0)]


# ----------------------------------------------------------------------------------------- pads


def test_where_a_run_waits_pads_are_made_before_anything_runs(saved_model: Models) -> None:
    bench = _bench(saved_model, "shielded", when_out="wait")
    bench.stock(1)
    bench.decode(3)
    assert bench.found() == [("decode", False, dict.fromkeys(range(3), (1, 0)))]
    assert (bench.pads.waited, bench.pads.in_tee) == (1, 0)
    assert bench.pads._store.available >= 3
    assert bench.found() == [("decode", False, dict.fromkeys(range(3), (1, 0)))]
    assert bench.pads.waited == 1


def test_those_that_get_no_pads_are_computed_here_beside_the_others(saved_model: Models) -> None:
    bench = _bench(saved_model, "shielded", when_out="tee")
    bench.stock(2)
    bench.decode(4)
    first, rest = dict.fromkeys((0, 1), (1, 0)), dict.fromkeys((2, 3), (1, 0))
    assert bench.found() == [("decode", False, first), ("decode", True, rest)]
    # A step that is computed here is counted once.
    assert (bench.pads.in_tee, bench.pads.waited) == (1, 0)
    assert bench.pads._store.available == 2


def test_those_that_get_no_pads_are_refused_and_the_others_go_on(saved_model: Models) -> None:
    bench = _bench(saved_model, "shielded", when_out="fail")
    bench.stock(2)
    bench.decode(3)
    bench.prompt(5)
    composed = bench.compose()
    (refused, error), *more = composed.refused
    assert more == []
    assert refused is bench.sequences[2]
    assert isinstance(error, PadsExhaustedError)
    assert error.expected.startswith("1 (tee-runner pads make")
    rows = [[bench.sequences.index(one.sequence) for one in part] for part in composed.rows]
    assert rows == [[0, 1], [3]]


@pytest.mark.parametrize("when_out", ["tee", "fail"])
def test_a_prompt_gets_pads_for_all_of_its_rows_or_for_none(
    saved_model: Models, when_out: WhenOut
) -> None:
    """And a smaller one behind it gets what it left."""
    bench = _bench(saved_model, "shielded-prefill", when_out=when_out)
    bench.stock(9)
    bench.prompt(10)
    bench.prompt(9)
    if when_out == "tee":
        assert bench.found() == [
            ("prefill", True, {0: (10, 0)}),
            ("prefill", False, {1: (9, 0)}),
        ]
    else:
        composed = bench.compose()
        assert [sequence for sequence, _ in composed.refused] == bench.sequences[:1]
        assert [one.sequence for one in composed.rows[0]] == bench.sequences[1:]


@pytest.mark.parametrize("spare", [-1, 0])
def test_a_prompt_leaves_where_decode_keeps_its_share_whatever_happens_without(
    saved_model: Models, spare: int
) -> None:
    """A quarter of 128; one that decodes in the same step counts."""
    policy = load_policy("shielded-prefill")
    given = {name: getattr(policy, name) for name in policy.model_fields_set}
    stock = {"name": "from-stock", "prefill": "stock", "decode_share": 0.25}
    bench = _bench(saved_model, Policy.model_validate(given | stock), when_out="fail")
    bench.decode(1)
    bench.prompt(13)
    bench.stock(32 + 1 + 13 + spare)
    found = [(withheld, list(rows)) for _, withheld, rows in bench.found()]
    assert found == ([(False, [0, 1])] if spare == 0 else [(False, [0]), (True, [1])])
    assert bench.pads.in_tee == (spare < 0)


def test_a_policy_without_pads_has_one_table_for_all(saved_model: Models) -> None:
    bench = _bench(saved_model, "quantized-clear")
    bench.decode(2)
    bench.prompt(9)
    assert len(bench.found()) == 1
