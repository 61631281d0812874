"""What waits, for whom, and what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_side.queues import FairQueue, QueueLimits
from gpu_side.transport.listener import Incoming

MANY = QueueLimits(requests=1000, bytes=10**9, total_requests=10**6, total_bytes=10**12)


def _message(client: str, number: int = 0, size: int = 4) -> Incoming:
    return Incoming(
        (client.encode(), b""), [memoryview(bytes(3)), memoryview(bytes(size - 3))], number
    )


def _names(queue: FairQueue) -> list[tuple[str, int]]:
    return [(taken.route[0].decode(), taken.received_ns) for taken in queue.drain()]


def _filled(limits: QueueLimits, *messages: Incoming) -> FairQueue:
    queue = FairQueue(limits)
    for message in messages:
        assert queue.put(message) == ()
    return queue


def test_clients_are_served_in_turn_and_each_in_its_own_order() -> None:
    queue = _filled(
        MANY,
        *(_message("a", n) for n in range(4)),
        *(_message("b", n) for n in range(2)),
        _message("c", 0),
    )
    assert (queue.requests, queue.bytes) == (7, 28)
    assert _names(queue) == [
        ("a", 0),
        ("b", 0),
        ("c", 0),
        ("a", 1),
        ("b", 1),
        ("a", 2),
        ("a", 3),
    ]
    assert not queue
    assert (queue.requests, queue.bytes) == (0, 0)


def test_one_that_comes_again_and_again_waits_for_one_of_another_with_many() -> None:
    queue = _filled(MANY, *(_message("flood", n) for n in range(50)))
    served = []
    for _ in range(10):
        queue.put(_message("modest"))
        served += [queue.take().route[0], queue.take().route[0]]
    assert served.count(b"modest") == 10
    assert {tuple(sorted(served[n : n + 2])) for n in range(0, 20, 2)} == {(b"flood", b"modest")}


def test_who_had_its_turn_without_waiting_goes_to_the_end() -> None:
    queue = _filled(MANY, _message("a", 1), _message("a", 2), _message("b"))
    queue.note_served(_message("a"))
    assert _names(queue) == [("b", 0), ("a", 1), ("a", 2)]
    # But alone it need not wait for anybody.
    queue.put(_message("b"))
    queue.note_served(_message("b"))
    assert queue.take().route[0] == b"b"


def test_all_connections_of_a_key_are_one_client() -> None:
    queue = FairQueue(QueueLimits(requests=3))
    for n, connection in enumerate("abc"):
        assert queue.put(_message(connection, n)._replace(key=b"one")) == ()
    (refused,) = queue.put(_message("d", 3)._replace(key=b"one"))
    assert (refused.limit, refused.incoming.received_ns) == ("requests", 3)
    queue.put(_message("e", 4)._replace(key=b"other"))
    # The replies still go to the connections.
    assert _names(queue) == [("a", 0), ("e", 4), ("b", 1), ("c", 2)]


def test_an_empty_queue_has_nothing_to_take() -> None:
    with pytest.raises(IndexError):
        FairQueue(MANY).take()


def test_a_client_has_its_own_number_of_requests() -> None:
    queue = _filled(QueueLimits(requests=2), _message("a"), _message("a"), _message("b"))
    (refused,) = queue.put(_message("a", 7))
    assert refused == (refused.incoming, "requests", 1, 0)
    assert refused.incoming.received_ns == 7
    assert queue.requests == 3
    assert queue.put(_message("b")) == ()
    queue.take()
    assert queue.put(_message("a")) == ()


def test_a_client_has_its_own_number_of_bytes() -> None:
    queue = _filled(QueueLimits(bytes=100), _message("a", size=60), _message("b", size=100))
    (refused,) = queue.put(_message("a", 7, size=41))
    assert refused == (refused.incoming, "bytes", 41, 40)
    assert queue.bytes == 160
    assert queue.put(_message("a", size=40)) == ()
    assert queue.take().route[0] == b"a"
    assert queue.put(_message("a", size=61))[0].available == 60
    assert queue.put(_message("a", size=60)) == ()


def test_a_message_that_fills_all_of_it_fits() -> None:
    queue = FairQueue(QueueLimits(bytes=100, total_bytes=100))
    assert queue.put(_message("a", size=100)) == ()
    assert queue.put(_message("b", size=4))[0].limit == "total_bytes"


def test_where_all_are_too_many_the_one_with_most_gives_up_its_newest() -> None:
    limits = QueueLimits(requests=5, total_requests=6)
    queue = _filled(
        limits, *(_message("a", n) for n in range(4)), *(_message("b", n) for n in range(2))
    )
    (refused,) = queue.put(_message("c", 9))
    assert refused[1:] == ("total_requests", 1, 0)
    assert (refused.incoming.route[0], refused.incoming.received_ns) == (b"a", 3)
    # It would have more than others, or as many: refused itself.
    (refused,) = queue.put(_message("a", 9))
    assert (refused.incoming.route[0], refused.incoming.received_ns) == (b"a", 9)
    (refused,) = queue.put(_message("b", 9))
    assert (refused.incoming.route[0], refused.incoming.received_ns) == (b"b", 9)
    assert queue.requests == 6
    assert _names(queue) == [("a", 0), ("b", 0), ("c", 9), ("a", 1), ("b", 1), ("a", 2)]


def test_a_clients_only_message_is_not_given_up() -> None:
    limits = QueueLimits(total_requests=3)
    queue = _filled(limits, *(_message(name) for name in "abc"))
    (refused,) = queue.put(_message("d", 9))
    assert (refused.incoming.route[0], refused.limit, refused.available) == (
        b"d",
        "total_requests",
        0,
    )


def test_where_all_have_too_many_bytes_the_one_with_most_gives_up_as_many_as_it_takes() -> None:
    limits = QueueLimits(bytes=100, total_bytes=150)
    queue = _filled(limits, *(_message("a", n, size=10) for n in range(10)))
    assert queue.put(_message("b", size=50)) == ()
    refused = queue.put(_message("c", size=25))
    assert [(one.incoming.received_ns, one.limit) for one in refused] == [
        (9, "total_bytes"),
        (8, "total_bytes"),
        (7, "total_bytes"),
    ]
    assert (queue.requests, queue.bytes) == (9, 145)
    # More than what may be taken from others: this one is refused, and says what is left.
    (last,) = queue.put(_message("d", 9, size=90))
    assert (last.incoming.route[0], last.requested) == (b"d", 90)
    assert last.available == limits.total_bytes - queue.bytes


def test_nobody_gives_up_anything_for_one_that_does_not_fit_then() -> None:
    limits = QueueLimits(bytes=100, total_bytes=300)
    full = [_message(name, n, size) for name in "abc" for n, size in enumerate((80, 20))]
    queue = _filled(limits, *full)
    # The newest of all three are 60 bytes.
    (refused,) = queue.put(_message("d", 9, size=90))
    assert (refused.incoming.route[0], *refused[1:]) == (b"d", "total_bytes", 90, 0)
    assert (queue.requests, queue.bytes) == (6, 300)
    refused_of = [one.incoming.route[0] for one in queue.put(_message("d", 9, size=60))]
    assert refused_of == [b"a", b"b", b"c"]
    assert _names(queue) == [("a", 0), ("b", 0), ("c", 0), ("d", 9)]


def test_who_has_nothing_waiting_finds_room_for_a_fair_share_of_the_bytes() -> None:
    """Four clients with one message each may fill all of it, by the default limits."""
    limits = QueueLimits(bytes=100, total_bytes=400)
    queue = _filled(limits, *(_message(name, n, size=100) for n, name in enumerate("abcd")))
    (refused,) = queue.put(_message("e", 9, size=80))
    assert (refused.incoming.route[0], *refused[1:]) == (b"a", "total_bytes", 100, 0)
    assert (queue.requests, queue.bytes) == (4, 380)
    assert _names(queue) == [("b", 1), ("c", 2), ("d", 3), ("e", 9)]
    # Who gave up its last is forgotten, and may come again.
    assert queue.put(_message("a", size=100)) == ()
    assert _names(queue) == [("a", 0)]


def test_a_message_beyond_a_fair_share_costs_nobody_its_last() -> None:
    limits = QueueLimits(bytes=100, total_bytes=400)
    queue = _filled(limits, *(_message(name, size=100) for name in "abcd"))
    (refused,) = queue.put(_message("e", 9, size=81))
    assert (refused.incoming.route[0], *refused[1:]) == (b"e", "total_bytes", 81, 0)


def test_who_has_something_waiting_costs_nobody_its_last() -> None:
    limits = QueueLimits(bytes=100, total_bytes=400)
    full = [_message("a", size=96), *(_message(name, size=100) for name in "bcd")]
    queue = _filled(limits, *full, _message("e"))
    (refused,) = queue.put(_message("e", 9))
    assert (refused.incoming.route[0], *refused[1:]) == (b"e", "total_bytes", 4, 0)


def test_who_gives_up_bytes_makes_room_in_number_too() -> None:
    limits = QueueLimits(total_requests=5, total_bytes=100)
    many = [_message("a", n, size=5) for n in range(3)]
    large = [_message("b", n, size=40) for n in range(2)]
    queue = _filled(limits, *many, *large)
    (refused,) = queue.put(_message("c", 9, size=40))
    assert (refused.incoming.route[0], *refused[1:]) == (b"b", "total_bytes", 40, 0)
    assert (queue.requests, queue.bytes) == (5, 95)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(3, 60)) | st.none(), min_size=1, max_size=120
    )
)
def test_whatever_comes_limits_hold_and_nothing_is_lost(
    steps: list[tuple[str, int] | None],
) -> None:
    limits = QueueLimits(requests=4, bytes=90, total_requests=8, total_bytes=200)
    queue = FairQueue(limits)
    waiting: dict[int, Incoming] = {}
    for number, step in enumerate(steps):
        if step is None:
            if queue:
                taken = queue.take()
                # The oldest of its client.
                own = [n for n, one in waiting.items() if one.route == taken.route]
                assert taken.received_ns == min(own)
                del waiting[taken.received_ns]
            continue
        name, size = step
        waiting[number] = _message(name, number, size)
        before = {one.route[0] for n, one in waiting.items() if n != number}
        share = limits.total_bytes // (len(before) + 1)
        lost = [refused.incoming.received_ns for refused in queue.put(waiting[number])]
        # One that is refused costs nobody else anything.
        assert number not in lost or lost == [number]
        if name.encode() not in before and size <= share:
            assert lost != [number]
        # Their last only who have more than a fair share.
        for one in lost:
            own = [n for n, other in waiting.items() if other.route == waiting[one].route]
            assert min(own) < one or one == number or sum(map(len, waiting[one].frames)) > share
        for one in lost:
            del waiting[one]
        assert queue.requests == len(waiting) <= limits.total_requests
        sizes = {n: sum(f.nbytes for f in one.frames) for n, one in waiting.items()}
        assert queue.bytes == sum(sizes.values()) <= limits.total_bytes
        for client in {one.route for one in waiting.values()}:
            own = [n for n, one in waiting.items() if one.route == client]
            assert len(own) <= limits.requests
            assert sum(sizes[n] for n in own) <= limits.bytes
    assert sorted(taken.received_ns for taken in queue.drain()) == sorted(waiting)


def test_who_has_as_many_bytes_as_who_comes_would_have_gives_up_nothing() -> None:
    """Or the two would take turns in pushing each other out."""
    limits = QueueLimits(total_bytes=100)
    queue = _filled(
        limits, *(_message("a", n, size=30) for n in range(2)), _message("b", 2, size=30)
    )
    (refused,) = queue.put(_message("b", 9, size=30))
    assert (refused.incoming.route[0], refused.incoming.received_ns) == (b"b", 9)
    assert refused[1:] == ("total_bytes", 30, 10)
    # With a byte less it has fewer.
    (refused,) = queue.put(_message("b", 9, size=29))
    assert (refused.incoming.route[0], refused.incoming.received_ns) == (b"a", 1)
