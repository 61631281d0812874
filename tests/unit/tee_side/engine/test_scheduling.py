"""Which request is next, which rows and pads a step has, and on whose operators it runs."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from protocol.errors import DeadlineExceededError, LimitError, PadsExhaustedError
from tee_side.engine import step
from tee_side.engine.drafts import Drafts
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.request import Request
from tee_side.engine.step import Part, Sequence, compose, fail_step, run_step
from tee_side.model.batch import Batch
from tee_side.model.operators import forward
from tee_side.policy.placement import Policy
from tee_side.protect.pads.source import Pads
from tee_side.serve.background import WaitingQueue
from tests.kit.model import LoopbackChannel, Models, Tee, token_ids
from tests.kit.rows import each_row


def _queue(*requests: str, limit: int = 100) -> WaitingQueue[str]:
    queue: WaitingQueue[str] = WaitingQueue(limit)
    for request in requests:
        queue.add(request[0], request)
    return queue


def _served(queue: WaitingQueue[str], turns: int, **tokens: int) -> list[str]:
    """Serve so many requests, each with 10 tokens, or as many as its owner asks for."""
    found = []
    while len(found) < turns and (request := queue.first()):
        queue.remove(request[0], request)
        queue.served[request[0]] += tokens.get(request[0], 10)
        found.append(request)
    return found


@each_row("been_here", ["never", "before"])
def test_one_that_comes_late_has_saved_nothing_up(been_here: str) -> None:
    queue = _queue(*(f"a{n}" for n in range(40)))
    if been_here == "before":
        queue.add("b", "b first")
        _served(queue, 1)
    _served(queue, 20, a=50)
    for number in range(10):
        queue.add("b", f"b{number}")
    assert Counter(one[0] for one in _served(queue, 10)) == {"a": 5, "b": 5}


def test_a_full_queue_takes_a_place_from_the_owner_with_most_and_no_more() -> None:
    queue = _queue("b1", "b2", "b3", "b4", limit=4)
    with pytest.raises(LimitError, match=r"\(--max-waiting\): got 4, expected < 4") as caught:
        queue.add("b", "b5")
    assert caught.value.retryable
    assert [queue.add("carol", name) for name in ("c1", "c2")] == ["b4", "b3"]
    for owner in ("b", "carol"):
        with pytest.raises(LimitError):
            queue.add(owner, "another")
    assert len(queue) == 4
    # One more than the other has is no reason.
    with pytest.raises(LimitError):
        _queue("b1", "b2", "c1", limit=3).add("c", "c2")


class Bench:
    """Sequences of one engine, by number, and steps that are composed of them."""

    def __init__(self, models: Models, policy: Policy | str, **settings: Any) -> None:
        self.tee = models("llama").tee(policy, **settings)
        settings = EngineSettings(speculative_tokens=4)
        self.engine = Engine(self.tee.model, self.tee.lanes, settings)
        self.sequences: list[Sequence] = []

    @property
    def pads(self) -> Pads:
        (found,) = self.tee.assembly.pads.values()
        return found

    def stock(self, tokens: int) -> None:
        store = self.pads.store
        if (missing := tokens - store.available) > 0:
            self.pads.fill(missing)
        elif missing < 0:
            store.release(store.take(-missing))

    def prompt(self, tokens: int, owner: str = "", **wanted: Any) -> None:
        given: dict[str, Any] = {"max_new_tokens": 20, "stop_ids": frozenset(), **wanted}
        request = Request(prompt_ids=tuple(token_ids(tokens)), owner=owner, **given)
        self.sequences += self.engine.admit(request)

    def decode(self, count: int, **wanted: Any) -> None:
        for _ in range(count):
            self.prompt(12, **wanted)
            sequence = self.sequences[-1]
            sequence.cache.commit(12)
            sequence.append(5)
            sequence.drafts = cast("Drafts", SimpleNamespace(propose=lambda most: [7] * most))

    def compose(self, refuse: Any = fail_step, tokens: int = 512, guesses: int = 0) -> list[Part]:
        lane = self.tee.lanes[0]
        return compose(self.sequences, lane, refuse, step_tokens=tokens, speculative_tokens=guesses)

    def found(
        self, step_tokens: int = 512, guesses: int = 0
    ) -> list[tuple[str, bool, dict[int, tuple[int, int]]]]:
        """Return the parts of a step: phase, pads, own tokens and guesses by sequence."""
        found = []
        for part in self.compose(fail_step, step_tokens, guesses):
            rows = part.rows
            assert len(part.batch.token_ids_T) == sum(len(r.take.ids) for r in rows)
            counts = {self.sequences.index(r.sequence): (r.tokens, r.take.drafts) for r in rows}
            found.append((part.phase, part.pads, counts))
        return found


def test_a_step_has_no_more_rows_than_its_budget(saved_model: Models) -> None:
    bench = Bench(saved_model, "shielded-prefill")
    bench.stock(128)
    bench.decode(3)
    for owner in "aab":
        bench.prompt(20, owner)
    wanted = 3 * (1 + 4) + 3 * 20
    for step_tokens in range(1, 80):
        rows = [n for *_, part in bench.found(step_tokens, guesses=4) for n in part.values()]
        assert sum(map(sum, rows)) == min(step_tokens, wanted)


def test_owners_share_a_step_alike(saved_model: Models) -> None:
    bench = Bench(saved_model, "tee-only")
    for tokens, owner in ((16, "one"), (16, "one"), (10, "two")):
        bench.prompt(tokens, owner)
    found = {}
    for step_tokens in (12, 36, 2, 1):
        ((_, _, rows),) = bench.found(step_tokens)
        found[step_tokens] = {number: tokens for number, (tokens, _) in rows.items()}
    assert found == {
        12: {0: 6, 2: 6},  # however many an owner has
        36: {0: 16, 1: 10, 2: 10},  # what one leaves over goes to the first of the others
        2: {0: 1, 2: 1},
        1: {0: 1},
    }


def test_no_more_is_guessed_than_may_follow_and_others_leave_over(saved_model: Models) -> None:
    bench = Bench(saved_model, "tee-only")
    for new_tokens in (2, 3, 4, 20):
        bench.decode(1, max_new_tokens=new_tokens)
    ((_, _, rows),) = bench.found(guesses=4)
    # One was generated, and the step gives one more whatever is guessed.
    assert [drafts for _, drafts in rows.values()] == [0, 1, 2, 4]
    ((_, _, rows),) = bench.found(9, guesses=4)
    assert [drafts for _, drafts in rows.values()] == [0, 1, 2, 2]


def test_guesses_are_made_while_pads_are_plenty(saved_model: Models) -> None:
    """Half of those that are kept ready must be left: a guess may come to nothing."""
    bench = Bench(saved_model, "shielded")
    bench.decode(3)
    half = 64  # of 128
    for stock, guessed in ((half + 4, 0), (half + 5, 1), (half + 10, 2), (half + 15, 3)):
        bench.stock(stock)
        ((_, _, rows),) = bench.found(guesses=4)
        assert [drafts for _, drafts in rows.values()] == [4] * guessed + [0] * (3 - guessed)


def test_those_that_get_no_pads_are_computed_here_or_refused_and_the_others_go_on(
    saved_model: Models,
) -> None:
    here = Bench(saved_model, "shielded", when_out="tee")
    here.stock(2)
    here.decode(4)
    first, rest = dict.fromkeys((0, 1), (1, 0)), dict.fromkeys((2, 3), (1, 0))
    assert here.found() == [("decode", "stock", first), ("decode", "none", rest)]
    # A step that is computed here is counted once.
    assert (here.pads.in_tee, here.pads.waited) == (1, 0)
    assert here.pads.store.available == 2
    bench = Bench(saved_model, "shielded", when_out="fail")
    bench.stock(2)
    bench.decode(3)
    bench.prompt(5)
    refuse = Mock()
    parts = bench.compose(refuse)
    ((refused, error),) = [call.args for call in refuse.call_args_list]
    assert refused is bench.sequences[2]
    assert isinstance(error, PadsExhaustedError)
    assert error.expected.startswith("1 (tee-runner pads make")
    rows = [[bench.sequences.index(one.sequence) for one in part.rows] for part in parts]
    assert rows == [[0, 1], [3]]


def test_a_prompt_gets_pads_for_all_of_its_rows_or_for_none(saved_model: Models) -> None:
    """And a smaller one behind it gets what it left."""
    bench = Bench(saved_model, "shielded-prefill", when_out="tee")
    bench.stock(9)
    bench.prompt(10)
    bench.prompt(9)
    assert bench.found() == [("prefill", "none", {0: (10, 0)}), ("prefill", "stock", {1: (9, 0)})]
    bench.pads.when_out = "fail"
    refuse = Mock()
    (part,) = bench.compose(refuse)
    assert [call.args[0] for call in refuse.call_args_list] == bench.sequences[:1]
    assert [one.sequence for one in part.rows] == bench.sequences[1:]


def test_drafts_are_what_followed_the_longest_end_the_last_time() -> None:
    found = []
    for prompt, answer, most in (
        ([1, 2, 3, 1, 2, 4, 0], [1, 2], 3),  # the last time, not the first
        ([1, 2, 3, 4, 0, 2, 3, 5], [1, 2, 3], 1),  # the longer end
        ([1, 2], [3, 1, 2], 6),  # what was guessed goes on itself
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [2, 1], 6),  # never before
    ):
        drafts = Drafts(prompt)
        for token_id in answer:
            drafts.append(token_id)
        found.append(drafts.propose(most))
    assert found == [[4, 0, 1], [4], [3, 1, 2, 3, 1, 2], [3, 1], []]


def _batch(tee: Tee, *parts: tuple[int, int]) -> Batch:
    """Return a batch of sequences with so many rows, and so many tokens left for later steps."""
    return Batch.of(
        [
            (tee.cache(rows + left), token_ids(rows, seed), left)
            for seed, (rows, left) in enumerate(parts)
        ]
    )


def _mixed(tee: Tee) -> list[Part]:
    """Rows of every table: two that decode, ten of a prompt, one that gets no pads."""
    decode, prompt, withheld = (_batch(tee, *p) for p in ([(1, 0)] * 2, [(10, 0)], [(1, 0)]))
    return [Part(decode, "decode"), Part(prompt, "prefill"), Part(withheld, "decode", "none")]


def test_each_part_runs_on_its_own_table_and_lane_and_the_largest_is_cut(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, Any]] = []

    def noted(batch: Batch, model: Any, ops: Any) -> Any:
        seen.append((len(batch.token_ids_T), ops))
        return forward(batch, model, ops)

    monkeypatch.setattr(step, "forward", noted)
    tee = saved_model("llama").tee("shielded", micro_batches=2)
    together = run_step(_mixed(tee), tee.lanes)
    one, two, three, four, *_ = tee.lanes
    assert [lane.spare for lane in tee.lanes[:4]] == [False, False, True, True]
    assert sorted(seen, key=lambda one: one[0]) == [
        (1, four.tables["decode", "none"]),
        (2, one.tables["decode", "stock"]),
        (5, two.tables["prefill", "stock"]),
        (5, three.tables["prefill", "stock"]),
    ]
    # Side by side they give what each gives alone.
    for part, found in zip(_mixed(tee), together, strict=True):
        (alone,) = run_step([part], tee.lanes)
        assert torch.equal(found[0], alone[0])
    assert [len(found) for found, _ in together] == [2, 1, 1]


def test_a_step_that_fails_leaves_no_pads_behind(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller steps afterwards have fewer lanes: the others would keep them for ever."""
    tee = saved_model("llama").tee("shielded-prefill", micro_batches=2)
    (pads,) = tee.assembly.pads.values()
    lost = DeadlineExceededError("loopback", got="no reply", expected="one")
    monkeypatch.setattr(LoopbackChannel, "wait", Mock(side_effect=lost))
    with pytest.raises(DeadlineExceededError):
        run_step([Part(_batch(tee, (40, 0)), "prefill")], tee.lanes)
    assert pads.store.available + pads.store.room == pads.store.capacity
