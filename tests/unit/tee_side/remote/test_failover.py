"""Services that stand in for each other: at the start, which is asked, and what is raised."""

from collections import Counter, deque
from collections.abc import Callable
from itertools import permutations
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from protocol.channel import OversizedRequestError
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ModelMismatchError,
    ProtocolError,
    ReplyError,
    ServiceError,
    SettingsError,
    TsqpError,
    VerificationError,
)
from protocol.messages import SegmentRequest
from protocol.prepared import Payloads, PreparedRequest
from protocol.tensors import from_torch
from tee_side.remote.services import member
from tee_side.remote.services.connected import Services
from tee_side.remote.services.member import ConnectOptions
from tee_side.remote.services.plan import ReplicaGroup
from tee_side.remote.services.replicas import aggregate_errors
from tests.kit.fakes import (
    FakeConnection,
    FakeService,
    World,
    ask,
    call,
    service_error,
    stopped_clock,
    wrong,
)
from tests.kit.rows import each_row

FULL = service_error(ErrorCode.QUEUE_FULL)
ENDING = service_error(ErrorCode.SHUTTING_DOWN)
BROKEN = service_error(ErrorCode.INTERNAL)
# What is no reply to what was asked.
BAD_BYTES = ProtocolError("reply", got="x", expected="y", code=ErrorCode.MALFORMED_MESSAGE)
OTHER_METHOD = ReplyError("reply", got="Linear", expected="LMHead")
NO_URL = EndpointError("a", got="HTTP status 404", expected="gpu-service --http at this URL")
MISMATCH = ModelMismatchError("model at b: model_digest", got="other", expected="ours")


def _lone(world: World) -> tuple[FakeService, Any]:
    return (*world.add("a"), world.replicas("a"))


def _pair(world: World) -> tuple[FakeService, FakeService, Any]:
    return (*world.add("a", "b"), world.replicas("a", "b"))


def _segment(start: int) -> Any:
    parts = torch.tensor([[1, 2, start, 1, start + 1, 0, 0]])
    tensors = Payloads((torch.zeros(1, 4), parts, torch.tensor([0])))
    fields = dict(zip(("hidden_states", "parts", "outputs"), map(from_torch, tensors), strict=True))
    message = SegmentRequest(first_layer=0, last_layer=1, **fields)
    return PreparedRequest(message, (1, 4), "float32"), tensors


def test_a_healthy_run_asks_one_service_alone(world: World) -> None:
    a, b, replicas = _pair(world)
    for value in range(5):
        assert call(replicas, ask(value)).endpoint == "a"
    assert (len(a.got), len(b.got)) == (5, 0)
    assert (a.connections, b.connections) == (1, 1)
    # Abandoned requests are forgotten; an unknown one is a mistake.
    first, second = replicas.start(*ask(1)), replicas.start(*ask(2))
    replicas.abandon(first)
    replicas.wait(second)
    for gone in (first, second):
        with pytest.raises(KeyError):
            replicas.wait(gone)


def test_a_message_limit_is_that_of_the_service_that_names_it(world: World) -> None:
    """One that claims to take next to nothing must not stop what others take."""
    world.add("a", max_message_bytes=104)
    world.add("b", max_message_bytes=1)
    replicas = world.replicas("b", "a")
    assert call(replicas, ask(elements=26)).endpoint == "a"
    # None takes it: that is what the error says.
    with pytest.raises(ProtocolError) as caught:
        call(replicas, ask(elements=27))
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED
    assert call(replicas, ask(elements=25)).endpoint == "a"
    with pytest.raises(OversizedRequestError):
        world.replicas("a").start(*ask(elements=27))


@each_row(
    ("answer", "request_of", "asked", "back"),
    [
        # The last: whether it is asked once the other one is lost, too.
        ("lost", ask, 1, True),
        ("lost at submit", ask, 0, True),
        (FULL, ask, 1, True),
        (service_error(ErrorCode.DEADLINE_EXCEEDED), ask, 1, True),
        (ENDING, ask, 1, True),
        (service_error(ErrorCode.UNAVAILABLE), ask, 1, True),
        (BROKEN, ask, 1, True),
        (service_error(ErrorCode.MALFORMED_MESSAGE), ask, 1, True),
        # One that says so of what needs no session must not keep the others from being asked.
        (service_error(ErrorCode.UNKNOWN_SESSION), ask, 1, True),
        (service_error(ErrorCode.UNKNOWN_SESSION), lambda: _segment(0), 1, True),
        (BAD_BYTES, ask, 1, False),
        (OTHER_METHOD, ask, 1, False),
    ],
)
def test_what_one_service_fails_at_another_is_asked(
    answer: Any, request_of: Callable[[], Any], asked: int, back: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock, world = stopped_clock(patch), World()
        a, b = world.add("a", "b")
        replicas = world.replicas("a", "b")
        a.answers, request = deque([answer]), request_of()
        assert call(replicas, request).endpoint == "b"
        assert (len(a.got), len(b.got)) == (asked, 1)
        assert b.got[0] is request[1]  # these very tensors
        # From now on it is asked first, though the other may be back.
        assert call(replicas, ask(4)).endpoint == replicas.endpoint == "b"
        assert len(a.got) == asked
        b.answers, b.up, b.comes_back = deque(["lost"]), False, clock.now + 0.5
        assert call(replicas, ask()).endpoint == ("a" if back else "b")
        # Of bad bytes the service is never asked again.
        assert a.connections > 1 or len(a.got) == asked + back


def test_a_lost_session_is_the_requests_own_affair(world: World) -> None:
    a, b, replicas = _pair(world)
    a.answers = deque([service_error(ErrorCode.UNKNOWN_SESSION)])
    with pytest.raises(ServiceError) as caught:
        call(replicas, _segment(7))
    assert caught.value.code is ErrorCode.UNKNOWN_SESSION
    assert not b.got
    for endpoint in ("a", "b", "a"):
        assert call(replicas, ask()).endpoint == endpoint
        replicas.turn_away()


def test_what_had_arrived_before_a_failure_is_not_asked_again(world: World) -> None:
    a, b, replicas = _pair(world)
    ids = [replicas.start(*ask(value)) for value in range(2)]
    connection = next(one for one in world.opened if one.endpoint == "a")
    last = connection._last_id
    connection.arrived = lambda number, _until=0.0: number == last  # type: ignore[method-assign]
    a.answers = deque(["lost"])
    assert replicas.wait(ids[0]).endpoint == "b"
    assert len(b.got) == 1
    replicas.abandon(ids[1])


def test_a_service_that_shuts_down_answers_what_it_has_and_gets_nothing_new(world: World) -> None:
    a, _, replicas = _pair(world)
    a.answers = deque([ENDING, "good"])
    ids = [replicas.start(*ask(value)) for value in range(3)]
    assert replicas.wait(ids[0]).endpoint == "b"
    assert not world.opened[0].closed
    fourth = replicas.start(*ask(3))
    assert replicas.wait(ids[1]).endpoint == "a"
    assert not world.opened[0].closed
    replicas.abandon(ids[2])
    assert world.opened[0].closed  # nothing is left to come
    assert replicas.wait(fourth).endpoint == "b"
    assert len(a.got) == 3


def test_a_full_queue_is_asked_again_less_and_less_often_until_the_deadline(
    world: World, clock: Any
) -> None:
    a, replicas = _lone(world)
    began = clock.now
    a.answers = deque([FULL] * 100)  # more than it may ask
    limits = r"QUEUE_FULL \(it queues 8 requests and 4096 bytes of one client\)"
    with pytest.raises(DeadlineExceededError, match=limits) as caught:
        call(replicas, ask(), 1.0)
    assert caught.value.got.startswith("no reply within 1 s (a: error reply QUEUE_FULL")
    assert clock.slept == pytest.approx(
        [0.01, 0.02, 0.04, 0.08, 0.16, 0.2, 0.2, 0.2, 0.09], rel=1e-3
    )
    assert len(a.got) == 9
    assert clock.now - began == pytest.approx(1.0, abs=1e-3)
    assert a.connections == world.most_open == 1


def test_a_lone_service_is_waited_for_until_the_deadline_and_asked_after_a_new_handshake(
    world: World, clock: Any
) -> None:
    a, replicas = _lone(world)
    a.answers, a.up, a.comes_back = deque(["lost"]), False, clock.now + 0.1
    request = ask(7)
    assert call(replicas, request).endpoint == "a"
    assert list(map(id, a.got)) == [id(request[1])] * 2
    # Nothing is sent over a connection on which the handshake has not been made.
    assert a.events[:2] == a.events[-2:] == ["Init", "request"]
    assert set(a.events[2:-2]) <= {"Init"}
    began = clock.now
    a.answers, a.comes_back = deque(["lost"]), float("inf")
    with pytest.raises(DeadlineExceededError) as caught:
        call(replicas, ask(), 0.2)
    assert clock.now - began == pytest.approx(0.2, abs=1e-3)
    assert caught.value.got == "no reply within 0.2 s (a: a lost connection)"
    assert caught.value.retryable


def test_a_handshake_that_is_not_answered_is_begun_again(world: World, clock: Any) -> None:
    """A service may take a connection, and be gone before it reads what came over it."""
    a, replicas = _lone(world)
    a.answers, a.swallows = deque(["lost"]), 1
    assert call(replicas, ask(), 60.0).endpoint == "a"
    assert a.events == ["Init", "request", "Init", "Init", "request"]
    assert a.connections == 3
    assert clock.now == pytest.approx(1005.1, abs=0.1)


@each_row("fault", ["lost", "lost at submit", ENDING])
def test_a_request_that_ends_every_connection_is_given_up(
    world: World, clock: Any, fault: Any
) -> None:
    a, replicas = _lone(world)
    a.answers = deque([fault] * 1000)
    with pytest.raises((EndpointError, ServiceError), match=r"lost|SHUTTING_DOWN"):
        call(replicas, ask(), 60.0)
    assert len(a.answers) >= 1000 - 10
    # Between attempts, and not for what cannot come.
    assert max(clock.slept) < 1.0
    if fault is ENDING:
        # Of each connection one is told to go, the others are not answered.
        for request_id in [replicas.start(*ask(value)) for value in range(8)]:
            with pytest.raises(ServiceError):
                replicas.wait(request_id)
            replicas.start(*ask())
    assert world.most_open <= 2
    # It is about that request alone.
    a.answers.clear()
    assert call(replicas, ask()).endpoint == "a"
    world.made[-1].close()


def test_each_request_has_its_own_deadline_and_is_sent_again_with_what_is_left_of_it(
    world: World, clock: Any
) -> None:
    a, b, replicas = _pair(world)
    first, second = replicas.start(*ask(1), 0.0), replicas.start(*ask(2), 4.0)
    a.answers = deque(["lost"])
    # One whose time is up does not send others first.
    with pytest.raises(DeadlineExceededError):
        replicas.wait(first)
    assert not b.got
    clock.now += 3.0
    assert replicas.wait(second).endpoint == "b"
    assert b.given_s == pytest.approx([1.0], abs=0.1)


@each_row("order", list(permutations(range(3))))
def test_the_gravest_of_what_services_said_is_the_kind_of_the_error(order: tuple[int, ...]) -> None:
    """A wrong result must not be reported as something less."""
    kinds: list[TsqpError] = [wrong(), MISMATCH, OTHER_METHOD]
    for gravest in range(3):
        said = {str(index): kinds[index] for index in order if index >= gravest}
        said["other"] = BROKEN
        assert type(aggregate_errors("LMHead", said, None)) is type(kinds[gravest])
    for other, kind in ((BAD_BYTES, ProtocolError), (BROKEN, ServiceError), (FULL, EndpointError)):
        assert type(aggregate_errors("LMHead", {"a": BROKEN, "b": other}, None)) is kind


def test_a_wrong_result_ends_a_service_for_the_rest_of_the_run(world: World) -> None:
    a, b, replicas = _pair(world)
    ids = [replicas.start(*ask(value)) for value in range(3)]
    replicas.distrust(replicas.wait(ids[0]), wrong())
    # Nor is what it said of other requests used.
    assert [replicas.wait(request_id).endpoint for request_id in ids[1:]] == ["b", "b"]
    assert (len(a.got), len(b.got)) == (3, 2)
    b.answers, b.up = deque(["lost"]), False
    with pytest.raises(DeadlineExceededError) as caught:
        call(replicas, ask(), 0.1)
    assert "a: a wrong product; b: a lost connection" in caught.value.got
    assert len(a.got) == 3
    # Of the last one that lies it is the error itself.
    b.up, error = True, wrong()
    with pytest.raises(VerificationError) as last:
        replicas.distrust(call(replicas, ask()), error)
    assert last.value is error
    with pytest.raises(VerificationError, match="a: a wrong product; b: a wrong product"):
        replicas.start(*ask())


def test_who_is_barred_on_one_thread_is_asked_on_no_other(world: World) -> None:
    """A dealer that a prompt caught lying is not asked for pads ahead, nor the other way round."""
    (a,), options = world.add("a"), ConnectOptions(world.open, world.verify, timeout_s=5.0)
    world.made += [Services([ReplicaGroup(0, 0, 0, ("a",))], 1, options) for _ in range(2)]
    for services in world.made:
        services.connect(1.0)
    first, second = (services.at(0)[0] for services in world.made)
    waits = second.start(*ask())
    with pytest.raises(VerificationError):
        first.distrust(call(first, ask()), wrong())
    second.wait(waits)  # what it was asked for before, and is verified as ever
    with pytest.raises(VerificationError, match="a wrong product"):
        second.start(*ask())
    assert len(a.got) == 2


def test_bad_bytes_before_a_loss_end_a_service_for_the_rest_of_the_run(world: World) -> None:
    """Its last bytes are looked at when the loss is noticed; it is no lost one that may be back."""
    for error in (BAD_BYTES, OTHER_METHOD):
        a, b, replicas = _pair(world)
        ids = [replicas.start(*ask(value)) for value in range(3)]
        connection = [one for one in world.opened if one.endpoint == "a"][-1]
        connection.arrived = Mock(side_effect=error)  # type: ignore[method-assign]
        a.answers = deque(["lost"])
        assert [replicas.wait(request_id).endpoint for request_id in ids] == ["b"] * 3
        b.answers = deque(["lost"])
        assert call(replicas, ask()).endpoint == "b"
        assert a.connections == 1
        b.answers = deque([BROKEN])
        with pytest.raises(type(error), match=f"a: {error.got}; b: error reply INTERNAL"):
            call(replicas, ask())


def test_what_a_liar_said_before_its_connection_was_lost_is_not_used(world: World) -> None:
    a, _, replicas = _pair(world)
    ids = [replicas.start(*ask(value)) for value in range(3)]
    exchange = replicas.wait(ids[0])
    # The others' replies have come when the connection is lost.
    connection = world.opened[0]
    connection.arrived = lambda _id, _until=0.0: True  # type: ignore[method-assign]
    a.answers = deque(["lost"])
    assert replicas.wait(ids[1]).endpoint == "b"
    replicas.distrust(exchange, wrong())
    connection.wait = lambda _id: exchange  # type: ignore[method-assign]
    assert replicas.wait(ids[2]).endpoint == "b"


def test_a_caught_liar_is_not_asked_under_another_name(world: World, clock: Any) -> None:
    _, b, c = world.add("a", "b", "c")
    replicas = world.replicas("a", "b", "c")
    replicas.distrust(call(replicas, ask()), wrong())
    # Where b was, what was caught at a answers now.
    b.answers, b.instance = deque(["lost"]), "a"
    assert call(replicas, ask()).endpoint == "c"
    c.answers, c.up, c.comes_back = deque(["lost"]), False, clock.now + 0.2
    assert call(replicas, ask()).endpoint == "c"
    assert len(b.got) == 1
    assert b.events[-1] == "Init"


def test_an_interrupt_leaves_nothing_behind(world: World) -> None:
    a, replicas = _lone(world)
    a.answers = deque([KeyboardInterrupt(), "lost"])
    with pytest.raises(KeyboardInterrupt):
        call(replicas, ask())
    assert a.connections == 1
    # In a handshake: its connection is closed.
    a.held = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        call(replicas, ask())
    assert all(connection.closed for connection in world.opened)
    assert not replicas.in_flight
    a.held = None
    assert call(replicas, ask()).endpoint == "a"


def test_a_request_that_was_interrupted_on_its_way_ends_its_connection(world: World) -> None:
    """Half of it may have been sent, and the next would be taken for the rest."""
    a, replicas = _lone(world)
    waiting = replicas.start(*ask(1))
    connection = world.opened[0]
    a.answers = deque(["good"])
    connection.start = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        replicas.start(*ask(2))
    assert connection.closed
    # What was in flight is asked again, over a new one.
    assert replicas.wait(waiting).endpoint == "a"
    assert a.connections == 2


def test_each_layer_and_share_is_asked_where_it_is(world: World) -> None:
    world.add("a", "b", "c")
    services = world.connect(
        ReplicaGroup(0, 0, 1, ("a",)),
        ReplicaGroup(0, 2, 3, ("b",)),
        ReplicaGroup(1, 0, 3, ("c",)),
        layers=4,
    )
    asked = [[call(channel, ask()).endpoint for channel in services.at(n)] for n in range(4)]
    assert asked == [["a", "c"], ["a", "c"], ["b", "c"], ["b", "c"]]
    checked = {name: set(one.checked) for name, one in world.services.items()}
    assert checked == {"a": {(0, 1)}, "b": {(2, 3)}, "c": {(0, 3)}}
    assert services.connected == 3


ONCE = "--gpu: got a and b, one and the same, expected each service once"
OWNERS = (
    "--dealer: got a and b, one and the same, expected services of two owners, who do not collude"
)


@each_row(
    ("groups", "said"),
    [
        # Else one that lied would be asked again under its other name.
        ([ReplicaGroup(0, 0, 0, ("a", "b"))], ONCE),
        ([ReplicaGroup(0, 0, 0, ("a",)), ReplicaGroup(0, 1, 1, ("b",))], ONCE),
        # Or be service and dealer.
        ([ReplicaGroup(0, 0, 0, ("a",)), ReplicaGroup(1, 0, 0, ("b",))], OWNERS),
    ],
)
def test_one_process_at_two_endpoints_is_refused(groups: list[ReplicaGroup], said: str) -> None:
    world = World()
    world.add("a", "b", instance="one")
    with pytest.raises(SettingsError) as caught:
        world.connect(*groups, layers=2)
    assert str(caught.value) == said


@each_row(
    ("changes", "error", "where", "got"),
    [
        (
            {"a": {"up": False}, "b": {"held": ENDING}},
            DeadlineExceededError,
            *("Init at a and b", "no reply within 1 s (b: error reply SHUTTING_DOWN)"),
        ),
        # A lone one says so itself.
        ({"a": {"held": ENDING}}, ServiceError, ENDING.where, ENDING.got),
        ({"a": {"held": NO_URL}}, EndpointError, NO_URL.where, NO_URL.got),
        ({"a": {}, "b": {"held": MISMATCH}}, ModelMismatchError, MISMATCH.where, "other"),
    ],
)
def test_what_keeps_a_run_from_its_start_is_one_error(
    world: World, changes: dict[str, dict[str, Any]], error: Any, where: str, got: str
) -> None:
    for name, settings in changes.items():
        world.add(name, **settings)
    with pytest.raises(error) as caught:
        world.replicas(*changes)
    assert (caught.value.where, caught.value.got) == (where, got)


def test_every_group_is_waited_for(world: World, clock: Any) -> None:
    _, b = world.add("a", "b")
    b.up, b.comes_back = False, clock.now + 3.0
    services = world.connect(
        ReplicaGroup(0, 0, 0, ("a",)), ReplicaGroup(0, 1, 1, ("b",)), layers=2, connect_s=10.0
    )
    assert call(services.at(1)[0], ask()).endpoint == "b"


def test_a_missing_replica_is_left_out_with_a_warning_after_a_moment(
    world: World, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = world.add("a", "b", "c")
    a.up, c.up = False, False
    # It gets the time that others take, and a moment of grace.
    c.comes_back, began = clock.now + 0.5, clock.now
    services = world.replicas("a", "b", "c")
    assert clock.now - began == pytest.approx(1.0, abs=0.1)
    assert [one.getMessage() for one in caplog.records] == ["service_missing"]
    # It is used as soon as it is there and needed.
    a.up, b.up, c.up, b.answers, c.comes_back = True, False, False, deque(["lost"]), float("inf")
    c.answers = deque(["lost"])
    assert call(services, ask()).endpoint == "a"


def test_a_process_that_was_stopped_looks_at_what_has_come_before_giving_up(
    world: World, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a minute, while the reply to its first Init was on its way."""
    world.add("a", "b")
    arrived, looks = FakeConnection.arrived, Counter[str]()

    def stopped(connection: FakeConnection, *arguments: Any) -> bool:
        looks[connection.endpoint] += 1
        if looks.total() == 1:
            clock.now += 60.0
            return False
        return arrived(connection, *arguments)

    # The handshake itself has more time than that.
    monkeypatch.setattr(member, "_HANDSHAKE_S", 3600.0)
    monkeypatch.setattr(FakeConnection, "arrived", stopped)
    assert [one.session is not None for one in world.replicas("a", "b").members] == [True] * 2
    assert looks["a"] == 2
