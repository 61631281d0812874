"""Whose turn it is among the requests that wait."""

from __future__ import annotations

from collections import Counter

import pytest

from protocol.errors import LimitError
from tee_side.engine.waiting import WaitingQueue


def _queue(*requests: str, limit: int = 100) -> WaitingQueue[str]:
    """Return a queue of requests; the first letter is the owner."""
    queue: WaitingQueue[str] = WaitingQueue(limit)
    for request in requests:
        queue.add(request[0], request)
    return queue


def _served(queue: WaitingQueue[str], turns: int, tokens: int | dict[str, int] = 10) -> list[str]:
    """Serve so many requests, each with as many tokens, or as many as its owner asks for."""
    found = []
    for _ in range(turns):
        request = queue.pop()
        queue.serve(request[0], tokens if isinstance(tokens, int) else tokens[request[0]])
        found.append(request)
    return found


def test_an_owners_requests_come_in_their_order() -> None:
    queue = _queue("a1", "a2", "a3")
    assert queue.first() == "a1"
    assert _served(queue, 3) == ["a1", "a2", "a3"]
    assert (len(queue), queue.first()) == (0, None)


def test_one_with_many_requests_does_not_keep_another_waiting() -> None:
    queue = _queue(*(f"a{n}" for n in range(9)), "b0", "b1")
    assert _served(queue, 5) == ["a0", "b0", "a1", "b1", "a2"]


def test_turns_are_shared_by_tokens_and_not_by_requests() -> None:
    queue = _queue(*(f"{owner}{n}" for n in range(100) for owner in "ab"), limit=200)
    turns = Counter(one[0] for one in _served(queue, 60, {"a": 50, "b": 10}))
    assert turns == {"a": 10, "b": 50}


def test_tokens_that_come_later_count_as_well() -> None:
    queue = _queue("a0", "a1", "b0", "b1")
    assert queue.pop() == "a0"
    queue.serve("a", 1)
    queue.serve("a", 30)
    assert _served(queue, 3) == ["b0", "b1", "a1"]


@pytest.mark.parametrize("been_here", [False, True])
def test_one_that_comes_late_has_saved_nothing_up(been_here: bool) -> None:
    queue = _queue(*(f"a{n}" for n in range(40)))
    if been_here:
        queue.add("b", "b first")
        _served(queue, 1)
    _served(queue, 20)
    for number in range(10):
        queue.add("b", f"b{number}")
    assert Counter(one[0] for one in _served(queue, 10)) == {"a": 5, "b": 5}


def test_nor_has_one_that_comes_when_nothing_waits() -> None:
    queue = _queue("a0")
    _served(queue, 1, 1000)
    for number in range(10):
        queue.add("b", f"b{number}")
        queue.add("a", f"a{number}")
    assert Counter(one[0] for one in _served(queue, 10)) == {"a": 5, "b": 5}


def test_one_that_was_served_much_waits_longer_for_its_next_turn() -> None:
    queue = _queue("a0", "b0")
    _served(queue, 2, {"a": 100, "b": 10})
    for number in range(9):
        queue.add("b", f"b{number}")
        queue.add("a", f"a{number}")
    assert [one[0] for one in _served(queue, 9)] == ["b"] * 9


def test_no_more_wait_than_the_limit() -> None:
    queue = _queue("a0", "b0", limit=2)
    with pytest.raises(LimitError, match=r"\(--max-waiting\): got 2, expected < 2") as caught:
        queue.add("c", "c0")
    assert caught.value.retryable
    assert _served(queue, 2) == ["a0", "b0"]
    queue.add("c", "c1")
    assert queue.first() == "c1"


def test_what_is_removed_has_no_turn() -> None:
    queue = _queue("a0", "a1", "b0")
    queue.remove("a", "a1")
    queue.remove("b", "b0")
    for owner, request in (("a", "a9"), ("b", "b0"), ("nobody", "a0")):
        queue.remove(owner, request)  # not here, or not any more
    assert len(queue) == 1
    assert _served(queue, 1) == ["a0"]
    assert queue.first() is None


def test_a_full_queue_takes_a_place_from_the_owner_with_most_and_no_more() -> None:
    queue: WaitingQueue[str] = WaitingQueue(4)
    for name in ("b1", "b2", "b3", "b4"):
        assert queue.add("bob", name) is None
    with pytest.raises(LimitError):
        queue.add("bob", "b5")
    assert queue.add("carol", "c1") == "b4"
    assert queue.add("carol", "c2") == "b3"
    for owner in ("bob", "carol"):
        with pytest.raises(LimitError):
            queue.add(owner, "another")
    assert queue.add("dave", "d1") in ("b2", "c2")
    assert len(queue) == 4
