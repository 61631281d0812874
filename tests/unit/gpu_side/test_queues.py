"""What waits, for which client, in which order, and what does not fit."""

from __future__ import annotations

from gpu_side.queues import FairQueue, QueueLimits
from gpu_side.transport.listener import Incoming
from tests.kit.rows import each_row

MANY = QueueLimits(requests=1000, bytes=10**9, total_requests=10**6, total_bytes=10**12)


def _message(client: str, number: int = 0, size: int = 4) -> Incoming:
    frames = [memoryview(bytes(3)), memoryview(bytes(size - 3))]
    return Incoming((client.encode(), b""), frames, number)


def _taken(queue: FairQueue) -> list[tuple[str, int]]:
    return [(taken.route[0].decode(), taken.received_ns) for taken in queue.drain()]


def test_a_client_that_had_its_turn_without_waiting_goes_to_the_end() -> None:
    queue = FairQueue(MANY)
    for client, number in (("a", 1), ("a", 2), ("b", 0)):
        queue.put(_message(client, number))
    queue.note_served(_message("a"))
    assert _taken(queue) == [("b", 0), ("a", 1), ("a", 2)]
    # But alone it need not wait for others.
    queue.put(_message("b"))
    queue.note_served(_message("b"))
    assert queue.take().route[0] == b"b"


def test_all_connections_of_a_key_are_one_client() -> None:
    queue = FairQueue(QueueLimits(requests=3))
    of_one = [_message(name, number)._replace(key=b"one") for number, name in enumerate("abcd")]
    queue.note_served(of_one[0])
    assert [bool(queue.put(one)) for one in of_one] == [False] * 3 + [True]
    queue.put(_message("e", 4)._replace(key=b"other"))
    # The replies still go to the connections.
    assert _taken(queue) == [("e", 4), ("a", 0), ("b", 1), ("c", 2)]


def test_what_was_taken_makes_room_for_its_client() -> None:
    queue = FairQueue(QueueLimits(bytes=100))
    queue.put(_message("a", 1, 60))
    queue.put(_message("a", 2, 40))
    assert queue.take().received_ns == 1
    assert queue.put(_message("a", 3, 60)) == ()


NUMBER = QueueLimits(requests=5, total_requests=6)
FEW = QueueLimits(bytes=100, total_bytes=400)
FEWER = QueueLimits(bytes=100, total_bytes=300)
LITTLE = QueueLimits(bytes=100, total_bytes=150)
LEAST = QueueLimits(total_bytes=100)
BOTH = QueueLimits(total_requests=5, total_bytes=100)


@each_row(
    # `a60`: 60 bytes of the client a. Refused are clients with the number of their message.
    ("limits", "waiting", "comes", "refused", "why"),
    [
        # A client has its own number of requests, and of bytes.
        (QueueLimits(requests=2), "a4 a4 b4", "a4", "a99", ("requests", 1, 0)),
        (QueueLimits(requests=2), "a4 a4 b4", "b4", "", None),
        (FEW, "a60 b100", "a41", "a99", ("bytes", 41, 40)),
        (FEW, "a60 b100", "a40", "", None),
        (QueueLimits(bytes=100, total_bytes=100), "", "a100", "", None),
        # Where all are too many, the client with the most gives up its newest.
        (NUMBER, "a4 a4 a4 a4 b4 b4", "c4", "a3", ("total_requests", 1, 0)),
        # A client that would have more than the others, or as many, is refused itself.
        (NUMBER, "a4 a4 a4 a4 b4 b4", "a4", "a99", ("total_requests", 1, 0)),
        (NUMBER, "a4 a4 a4 b4 b4 c4", "b4", "b99", ("total_requests", 1, 0)),
        (QueueLimits(total_requests=3), "a4 b4 c4", "d4", "d99", ("total_requests", 1, 0)),
        # As many as it takes in bytes, and none where that is not enough.
        (LITTLE, f"{'a10 ' * 10} b45", "c25", "a9 a8", ("total_bytes", 10, 0)),
        (LITTLE, f"{'a10 ' * 10} b45", "c96", "c99", ("total_bytes", 96, 5)),
        (FEWER, "a80 a20 b80 b20 c80 c20", "d90", "d99", ("total_bytes", 90, 0)),
        (FEWER, "a80 a20 b80 b20 c80 c20", "d60", "a1 b3 c5", ("total_bytes", 20, 0)),
        # A client with nothing waiting finds room for its fair share, no other and no larger one.
        (FEW, "a100 b100 c100 d100", "e80", "a0", ("total_bytes", 100, 0)),
        (FEW, "a100 b100 c100 d100", "e81", "e99", ("total_bytes", 81, 0)),
        (FEW, "a96 b100 c100 d100 e4", "e4", "e99", ("total_bytes", 4, 0)),
        # Room in bytes is room in number, too.
        (BOTH, "a5 a5 a5 b40 b40", "c40", "b4", ("total_bytes", 40, 0)),
        # Of two with as many bytes none gives up any, or they would push each other out in turn.
        (LEAST, "a30 a30 b30", "b30", "b99", ("total_bytes", 30, 10)),
        (LEAST, "a30 a30 b30", "b29", "a1", ("total_bytes", 30, 0)),
    ],
)
def test_what_does_not_fit(
    limits: QueueLimits, waiting: str, comes: str, refused: str, why: tuple[str, int, int] | None
) -> None:
    queue = FairQueue(limits)
    sizes = {n: (word[0], int(word[1:])) for n, word in enumerate(waiting.split())}
    for number, (client, size) in sizes.items():
        assert queue.put(_message(client, number, size)) == ()
    sizes[99] = client, size = comes[0], int(comes[1:])
    found = {
        f"{one.incoming.route[0].decode()}{one.incoming.received_ns}": one[1:]
        for one in queue.put(_message(client, 99, size))
    }
    assert found == dict.fromkeys(refused.split(), why)
    left = sizes.keys() - {int(name[1:]) for name in found}
    assert (queue.requests, queue.bytes) == (len(left), sum(sizes[number][1] for number in left))
    assert sorted(number for _, number in _taken(queue)) == sorted(left)
    # With nothing waiting all of them have their limits for themselves again.
    for name, _ in sizes.values():
        assert queue.put(_message(name, 0, min(100, limits.bytes))) == ()
        assert _taken(queue) == [(name, 0)]
