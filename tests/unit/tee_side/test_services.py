"""Services that stand in for each other: who is asked, what is sent again, and what is raised."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.channel import Exchange
from protocol.errors import (
    AbsentError,
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
from protocol.messages import LMHeadRequest, Request, SegmentRequest
from protocol.pending import OversizedRequestError
from protocol.prepared import PreparedRequest
from protocol.tensors import from_torch
from tee_side.remote.services import connected, member, replicas
from tee_side.remote.services.plan import ReplicaGroup
from tee_side.remote.services.replicas import aggregate_errors
from tests.kit import fakes as services_fakes
from tests.kit.fakes import World, ask, service_error, wrong
from tsqp.lab.link import Link

WAITING = "start a gpu-service there; {} says how long it is waited for"
PASSING = [
    ErrorCode.QUEUE_FULL,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.SHUTTING_DOWN,
    ErrorCode.UNAVAILABLE,
    ErrorCode.INTERNAL,
    ErrorCode.MALFORMED_MESSAGE,
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The only clock that anything here goes by: sleeping sets it forward, and takes no time."""
    found = SimpleNamespace(now=1000.0, slept=[])
    found.monotonic = lambda: found.now

    def sleep(seconds: float) -> None:
        found.slept.append(seconds)
        # A little more: what is compared with a moment afterwards has been rounded.
        found.now += seconds + 1e-5

    found.sleep = sleep
    for module in (member, replicas, connected, services_fakes):
        monkeypatch.setattr(module, "time", found)
    return found


@pytest.fixture
def world(clock: SimpleNamespace) -> Iterator[World]:
    made = World()
    yield made
    for services in made.made:
        services.close()
    assert all(connection.closed for connection in made.opened)


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """Return what was logged: event, endpoint and detail."""
    found = []
    for record in caplog.records:
        fields = record.fields  # type: ignore[attr-defined]
        found.append((record.getMessage(), fields["endpoint"], fields.get("detail", "")))
    return found


def mismatch() -> ModelMismatchError:
    return ModelMismatchError("model at b: model_digest", got="other", expected="ours")


# ------------------------------------------------------------------------------- a healthy run


def test_a_healthy_run_asks_one_service_alone(world: World) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    for value in range(5):
        exchange = replicas.call(ask(value))
        assert exchange.endpoint == "a"
    assert len(a.got) == 5
    assert not b.got
    assert (a.connections, b.connections) == (1, 1)
    assert replicas.traffic.round_trips == 5 + 2


def test_unknown_ids_are_a_mistake_and_abandoned_ones_are_forgotten(world: World) -> None:
    world.add("a")
    replicas = world.replicas("a")
    first, second = replicas.submit(ask(1)), replicas.submit(ask(2))
    replicas.abandon(first)
    replicas.abandon(12345)
    with pytest.raises(KeyError):
        replicas.wait(first)
    replicas.wait(second)
    with pytest.raises(KeyError):
        replicas.wait(second)


def test_a_message_limit_is_that_of_the_service_that_names_it(world: World) -> None:
    """One that claims to take next to nothing must not stop what others take."""
    world.add("a", max_message_bytes=104)
    world.add("b", max_message_bytes=1)
    replicas = world.replicas("b", "a")
    assert replicas.call(ask(elements=26)).endpoint == "a"
    # Nobody takes it: that is what the error says.
    with pytest.raises(ProtocolError) as caught:
        replicas.call(ask(elements=27))
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED
    assert replicas.call(ask(elements=25)).endpoint == "a"


def test_a_request_that_a_lone_service_does_not_take_is_refused_at_once(world: World) -> None:
    world.add("a", max_message_bytes=100)
    replicas = world.replicas("a")
    with pytest.raises(OversizedRequestError):
        replicas.submit(ask(elements=26))
    replicas.call(ask(elements=25))


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_who_was_stopped_looks_at_what_has_come_before_giving_up(
    world: World, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """For a minute, while the reply to its first Init was on its way."""
    world.add(*names)
    arrived = services_fakes.FakeConnection.arrived
    looks = Counter[str]()

    def stopped(connection: services_fakes.FakeConnection, *arguments: Any) -> bool:
        looks[connection.endpoint] += 1
        if looks.total() == 1:
            clock.now += 60.0
            return False
        return arrived(connection, *arguments)

    # The handshake itself has more time than that.
    monkeypatch.setattr(member, "_HANDSHAKE_S", 3600.0)
    monkeypatch.setattr(services_fakes.FakeConnection, "arrived", stopped)
    replicas = world.replicas(*names)
    assert [one.session is not None for one in replicas.members] == [True] * len(names)
    assert looks["a"] == 2


# ------------------------------------------------------------------------------------ failover


@pytest.mark.parametrize("fault", ["lost", "lost at submit"])
def test_a_lost_service_costs_a_resend_of_the_same_request(world: World, fault: str) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque([fault])
    request = ask(3)
    assert replicas.call(request).endpoint == "b"
    assert b.got == [request]
    assert b.got[0] is request  # these very tensors
    # From now on it is asked first, though the other may be back.
    assert replicas.call(ask(4)).endpoint == "b"
    assert replicas.endpoint == "b"


def test_a_started_request_is_sent_again_as_it_was(world: World) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    hidden = torch.arange(8.0).view(2, 4)
    prepared = PreparedRequest(LMHeadRequest(hidden_states=from_torch(hidden)), (2, 4), "float32")
    a.answers.append("lost")
    exchange = replicas.wait(replicas.start(prepared, hidden))
    assert exchange.endpoint == "b"
    assert torch.equal(prepared.output(exchange), hidden)
    assert a.got == b.got == [prepared.request(hidden)]


@pytest.mark.parametrize("code", PASSING)
def test_an_error_reply_is_asked_elsewhere(world: World, code: ErrorCode) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque([service_error(code)])
    assert replicas.call(ask()).endpoint == "b"
    assert len(a.got) == len(b.got) == 1


def segment(start: int) -> SegmentRequest:
    """Return a request about one row of a session, behind so many tokens."""
    part = torch.tensor([[1, 2, start, 1, start + 1, 0, 0]])
    return SegmentRequest(
        first_layer=0,
        last_layer=1,
        hidden_states=from_torch(torch.zeros(1, 4)),
        parts=from_torch(part),
        outputs=from_torch(torch.tensor([0])),
    )


@pytest.mark.parametrize("request_of", [ask, lambda: segment(0)])
def test_a_session_that_nothing_asked_for_is_asked_for_elsewhere(
    world: World, request_of: Callable[[], Request]
) -> None:
    """One that says so of what needs no session must not keep the others from being asked."""
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque([service_error(ErrorCode.UNKNOWN_SESSION)])
    assert replicas.call(request_of()).endpoint == "b"
    assert len(a.got) == len(b.got) == 1


def test_a_lost_session_is_the_requests_own_affair(world: World) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque([service_error(ErrorCode.UNKNOWN_SESSION)])
    with pytest.raises(ServiceError) as caught:
        replicas.call(segment(7))
    assert caught.value.code is ErrorCode.UNKNOWN_SESSION
    assert not b.got
    assert replicas.call(ask()).endpoint == "a"
    replicas.turn_away()
    assert replicas.call(ask()).endpoint == "b"
    replicas.turn_away()
    assert replicas.call(ask()).endpoint == "a"


def test_all_that_was_in_flight_is_sent_again_in_order(world: World) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque(["lost"])
    requests = [ask(value) for value in range(6)]
    ids = [replicas.submit(request) for request in requests]
    for request, request_id in zip(requests, ids, strict=True):
        exchange = replicas.wait(request_id)
        assert exchange.endpoint == "b"
        assert exchange.response.output is request.hidden_states
    assert b.got == requests


def test_what_had_arrived_before_the_loss_is_not_asked_again(world: World) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    first, second = replicas.submit(ask(1)), replicas.submit(ask(2))
    a.answers = deque([service_error(ErrorCode.INTERNAL)])
    replicas.wait(first)
    assert replicas.wait(second).endpoint == "a"
    assert len(b.got) == 1


def test_a_service_that_shuts_down_answers_what_it_has_and_gets_nothing_new(world: World) -> None:
    a, _ = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque([service_error(ErrorCode.SHUTTING_DOWN), "good"])
    ids = [replicas.submit(ask(value)) for value in range(2)]
    assert replicas.wait(ids[0]).endpoint == "b"
    assert not world.opened[0].closed
    third = replicas.submit(ask(2))
    assert replicas.wait(ids[1]).endpoint == "a"
    assert world.opened[0].closed  # nothing is left to come
    assert replicas.wait(third).endpoint == "b"
    assert len(a.got) == 2


def test_a_full_queue_is_asked_again_where_nobody_else_is(world: World) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers = deque([service_error(ErrorCode.QUEUE_FULL)] * 4)
    replicas.call(ask())
    assert len(a.got) == 5


def test_a_full_queue_until_the_deadline_is_a_deadline_exceeded(
    world: World, clock: SimpleNamespace
) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers = deque([service_error(ErrorCode.QUEUE_FULL)] * 10_000)
    with pytest.raises(DeadlineExceededError) as caught:
        replicas.call(ask(), 1.0)
    assert caught.value.got.startswith("no reply within 1 s (a: error reply QUEUE_FULL")
    # It is asked less and less often, and no later than there is time.
    assert clock.slept == pytest.approx(
        [0.01, 0.02, 0.04, 0.08, 0.16, 0.2, 0.2, 0.2, 0.09], rel=1e-3
    )
    assert len(a.got) == 9
    assert clock.now == pytest.approx(1001.0, abs=1e-3)


def test_a_lone_service_that_comes_back_is_asked_after_a_new_handshake(
    world: World, clock: SimpleNamespace
) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers, a.up, a.comes_back = deque(["lost"]), False, clock.now + 0.1
    request = ask(7)
    assert replicas.call(request).endpoint == "a"
    assert a.got == [request, request]
    assert a.connections >= 2
    # Nothing is sent over a connection on which the handshake has not been made.
    assert a.events[:2] == ["Init", "request"]
    assert a.events[-2:] == ["Init", "request"]
    assert set(a.events[2:-2]) <= {"Init"}


def test_a_lone_service_that_stays_away_is_one_error_at_the_deadline(
    world: World, clock: SimpleNamespace
) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers, a.up = deque(["lost"]), False
    with pytest.raises(DeadlineExceededError) as caught:
        replicas.call(ask(), 0.2)
    assert clock.now == pytest.approx(1000.2, abs=1e-3)
    assert caught.value.where == "LMHead at a"
    assert caught.value.got == "no reply within 0.2 s (a: a lost connection)"
    assert caught.value.retryable


@pytest.mark.parametrize("code", [ErrorCode.INTERNAL, ErrorCode.QUEUE_FULL])
def test_whoever_refuses_is_not_asked_first_any_more(world: World, code: ErrorCode) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque([service_error(code)] * 100)
    for _ in range(5):
        assert replicas.call(ask()).endpoint == "b"
    assert len(a.got) == 1
    assert len(b.got) == 5


def test_whoever_had_no_room_is_asked_after_those_who_were_not_asked(
    world: World, clock: SimpleNamespace
) -> None:
    """However long this process was kept from asking them: longer than the pause, here."""
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque([service_error(ErrorCode.QUEUE_FULL)] * 100)

    def slow() -> float:
        clock.now += 0.05
        return float(clock.now)

    clock.monotonic = slow
    assert replicas.call(ask()).endpoint == "b"
    assert (len(a.got), len(b.got)) == (1, 1)


@pytest.mark.parametrize("fault", ["lost", "lost at submit"])
def test_a_request_that_ends_every_connection_is_given_up(
    world: World, clock: SimpleNamespace, fault: str
) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers = deque([fault] * 1000)
    with pytest.raises(EndpointError, match="lost"):
        replicas.call(ask(), 60.0)
    assert len(a.answers) == 1000 - 5
    # Between attempts, and not for what cannot come.
    assert max(clock.slept) < 1.0
    # It is about that request alone.
    a.answers.clear()
    assert replicas.call(ask()).endpoint == "a"


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_services_that_always_say_that_they_are_about_to_end(
    world: World, names: tuple[str, ...]
) -> None:
    """Each passes Init and wants to be left: no connection for every time that they say it."""
    services = world.add(*names)
    replicas = world.replicas(*names)
    for service in services:
        service.answers = deque([service_error(ErrorCode.SHUTTING_DOWN)] * 1000)
    for _ in range(2):
        with pytest.raises(ServiceError) as caught:
            replicas.call(ask(), 60.0)
        assert caught.value.code is ErrorCode.SHUTTING_DOWN
    assert [len(service.got) for service in services] == [10] * len(names)
    assert world.most_open == 1


def test_one_connection_at_most_is_left_to_a_service_that_ends_and_does_not(world: World) -> None:
    """With several in flight: of each connection one is told to go, the others are not answered."""
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers = deque([service_error(ErrorCode.SHUTTING_DOWN)] * 1000)
    ids = [replicas.submit(ask(value)) for value in range(8)]
    for request_id in ids:
        with pytest.raises(ServiceError):
            replicas.wait(request_id)
    assert world.most_open == 2
    assert a.connections <= 1 + 5 * len(ids)


def test_a_drained_connection_is_closed_with_the_last_that_is_abandoned(world: World) -> None:
    a, _ = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque([service_error(ErrorCode.SHUTTING_DOWN)])
    first, second = replicas.submit(ask(1)), replicas.submit(ask(2))
    replicas.wait(first)
    assert not world.opened[0].closed
    replicas.abandon(second)
    assert world.opened[0].closed


@pytest.mark.parametrize("code", [ErrorCode.QUEUE_FULL, ErrorCode.DEADLINE_EXCEEDED])
def test_what_never_passes_is_an_error_at_the_deadline(world: World, code: ErrorCode) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers = deque([service_error(code)] * 10_000)
    with pytest.raises(DeadlineExceededError, match=code.value):
        replicas.call(ask(), 0.2)
    assert a.connections == world.most_open == 1


def test_whose_time_is_up_does_not_send_others_first(world: World) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    first, second = replicas.submit(ask(1), 0.0), replicas.submit(ask(2))
    a.answers = deque(["lost"])
    with pytest.raises(DeadlineExceededError):
        replicas.wait(first)
    assert not b.got
    assert replicas.wait(second).endpoint == "b"


def test_a_full_queue_names_its_limits(world: World) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers = deque([service_error(ErrorCode.QUEUE_FULL)] * 10_000)
    limits = r"QUEUE_FULL \(it queues 8 requests and 4096 bytes of one client\)"
    with pytest.raises(DeadlineExceededError, match=limits):
        replicas.call(ask(), 0.1)


def test_what_each_of_several_said_is_one_line(world: World) -> None:
    a, b, c = world.add("a", "b", "c")
    replicas = world.replicas("a", "b", "c")
    a.answers = deque([service_error(ErrorCode.INTERNAL)])
    b.answers = deque([service_error(ErrorCode.UNAVAILABLE)])
    c.answers = deque([ReplyError("c", got="Linear", expected="LMHead")])
    with pytest.raises(ReplyError) as caught:
        replicas.call(ask())
    assert str(caught.value) == (
        "LMHead at a and b and c: got a: error reply INTERNAL; b: error reply UNAVAILABLE;"
        " c: Linear, expected one of them that answers"
    )
    # Each was asked once: what a service refuses it refuses again.
    assert [len(one.got) for one in (a, b, c)] == [1, 1, 1]


def test_an_error_of_all_of_them_keeps_its_code(world: World) -> None:
    services = world.add("a", "b")
    replicas = world.replicas("a", "b")
    for service in services:
        service.answers = deque([service_error(ErrorCode.INVALID_FIELD)])
    with pytest.raises(ServiceError) as caught:
        replicas.call(ask())
    assert caught.value.code is ErrorCode.INVALID_FIELD


def test_a_refusal_is_about_one_request(world: World) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers = deque([service_error(ErrorCode.INTERNAL)])
    with pytest.raises(ServiceError, match="INTERNAL"):
        replicas.call(ask())
    replicas.call(ask())


def test_a_service_that_is_silent_is_asked_again_only_after_a_handshake(world: World) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque([DeadlineExceededError("a", got="no reply", expected="one")])
    with pytest.raises(DeadlineExceededError):
        replicas.call(ask(), 0.0)
    assert replicas.call(ask()).endpoint == "b"
    b.answers, b.up = deque(["lost"]), False
    assert replicas.call(ask()).endpoint == "a"
    assert a.events == ["Init", "request", "Init", "request"]


def test_the_wall_clock_may_jump(world: World, clock: SimpleNamespace) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    jumps = iter(range(10**6))
    clock.time = lambda: float((-1) ** next(jumps) * 10**9)
    a.answers = deque([service_error(ErrorCode.QUEUE_FULL)])
    replicas.call(ask(), 2.0)
    a.answers, a.up = deque(["lost"]), False
    began = clock.now
    with pytest.raises(DeadlineExceededError):
        replicas.call(ask(), 0.1)
    assert clock.now - began == pytest.approx(0.1, abs=1e-3)


def test_what_is_sent_again_has_what_is_left_of_its_time(
    world: World, clock: SimpleNamespace
) -> None:
    """However often it is lost, and whoever comes back: a deadline is that of the request."""
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    for connection in world.opened:
        wait = connection.wait

        def slowly(request_id: int, wait: Any = wait) -> Exchange:
            clock.now += 2.0
            found: Exchange = wait(request_id)
            return found

        connection.wait = slowly  # type: ignore[method-assign]
    a.answers, b.answers, a.up = deque(["lost"]), deque(["lost"]), False
    a.comes_back = clock.now + 4.5
    assert replicas.call(ask()).endpoint == "b"
    assert a.given_s == [5.0]
    assert b.given_s == pytest.approx([3.0, 1.0], abs=0.3)


def test_a_handshake_that_is_not_answered_is_begun_again(
    world: World, clock: SimpleNamespace
) -> None:
    """A service may take a connection, and be gone before it reads what came over it."""
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers, a.swallows = deque(["lost"]), 1
    assert replicas.call(ask(), 60.0).endpoint == "a"
    assert a.events == ["Init", "request", "Init", "Init", "request"]
    assert a.connections == 3
    assert clock.now == pytest.approx(1005.1, abs=0.1)


def test_a_modelled_link_lies_over_each_of_them(world: World) -> None:
    world.link = Link(gbps=None, rtt_us=2000.0)
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque(["lost"])
    ids = [replicas.submit(ask(value)) for value in range(3)]
    for request_id in ids:
        exchange = replicas.wait(request_id)
        assert exchange.endpoint == "b"
        assert exchange.elapsed_ns >= 2_000_000
    assert len(b.got) == 3
    assert replicas.traffic.round_trips == 3 + 2


# ----------------------------------------------------------------------------- what people hear


def test_what_becomes_of_a_service_is_logged(
    world: World, caplog: pytest.LogCaptureFixture, clock: SimpleNamespace
) -> None:
    """With a stand-in the run goes on: this is all that an operator hears of it."""
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    assert not caplog.records  # a healthy start says nothing
    a.answers, a.up, a.comes_back = deque(["lost"]), False, clock.now + 0.3
    replicas.call(ask())
    b.answers, b.up = deque([service_error(ErrorCode.SHUTTING_DOWN)]), False
    exchange = replicas.call(ask())
    assert exchange.endpoint == "a"
    b.up = True
    replicas.distrust(exchange, wrong())
    replicas.call(ask())
    assert events(caplog) == [
        ("service_lost", "a", "a: got a lost connection, expected a service"),
        ("service_draining", "b", str(service_error(ErrorCode.SHUTTING_DOWN))),
        ("waiting_for_service", "a", WAITING.format("--request-timeout-s")),
        ("waiting_for_service", "b", WAITING.format("--request-timeout-s")),
        ("service_ready", "a", ""),
        ("service_quarantined", "a", str(wrong())),
        ("service_ready", "b", ""),
    ]


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_the_gravest_of_what_services_said_is_the_kind_of_the_error(order: tuple[int, ...]) -> None:
    """A wrong result must not be reported as something less."""
    kinds: list[TsqpError] = [
        wrong(),
        mismatch(),
        ReplyError("reply", got="Linear", expected="LMHead"),
    ]
    for gravest in range(3):
        said = {str(index): kinds[index] for index in order if index >= gravest}
        said["other"] = service_error(ErrorCode.INTERNAL)
        assert type(aggregate_errors("LMHead", said, None)) is type(kinds[gravest])


# --------------------------------------------------------------------------------- quarantine


def test_a_wrong_result_ends_a_service_for_the_rest_of_the_run(world: World) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    request = ask()
    exchange = replicas.call(request)
    replicas.distrust(exchange, wrong())
    assert replicas.call(request).endpoint == "b"
    b.answers, b.up, a.up = deque(["lost"]), False, True
    with pytest.raises(DeadlineExceededError) as caught:
        replicas.call(request, 0.1)
    assert "a: a wrong product; b: a lost connection" in caught.value.got
    assert len(a.got) == 1


def test_what_a_liar_said_of_other_requests_is_not_used(world: World) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    ids = [replicas.submit(ask(value)) for value in range(3)]
    replicas.distrust(replicas.wait(ids[0]), wrong())
    assert [replicas.wait(request_id).endpoint for request_id in ids[1:]] == ["b", "b"]
    assert len(a.got) == 3
    assert len(b.got) == 2


def test_the_last_one_that_lies_is_the_error_itself(world: World) -> None:
    world.add("a", "b")
    replicas = world.replicas("a", "b")
    replicas.distrust(replicas.call(ask()), wrong())
    error = wrong()
    with pytest.raises(VerificationError) as caught:
        replicas.distrust(replicas.call(ask()), error)
    assert caught.value is error
    with pytest.raises(VerificationError, match="a: a wrong product; b: a wrong product"):
        replicas.submit(ask())


@pytest.mark.parametrize(
    "error",
    [
        ProtocolError("reply", got="x", expected="y", code=ErrorCode.MALFORMED_MESSAGE),
        ReplyError("reply", got="Linear", expected="LMHead"),
    ],
    ids=["bytes", "operator"],
)
def test_bad_bytes_end_a_service_for_the_rest_of_the_run(world: World, error: TsqpError) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers = deque([error])
    assert replicas.call(ask()).endpoint == "b"
    b.answers = deque(["lost"])
    assert replicas.call(ask()).endpoint == "b"
    assert a.connections == 1


@pytest.mark.parametrize(
    "error",
    [
        ProtocolError("reply", got="x", expected="y", code=ErrorCode.MALFORMED_MESSAGE),
        ReplyError("reply", got="Linear", expected="LMHead"),
    ],
    ids=["bytes", "operator"],
)
def test_bad_bytes_before_a_loss_end_a_service_for_the_rest_of_the_run(
    world: World, error: TsqpError
) -> None:
    """Its last bytes are looked at when the loss is noticed; it is no lost one that may be back."""
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    ids = [replicas.submit(ask(value)) for value in range(3)]

    def refuse(_id: int, _until: float = 0.0) -> bool:
        raise error

    world.opened[0].arrived = refuse  # type: ignore[method-assign]
    a.answers = deque(["lost"])
    assert [replicas.wait(request_id).endpoint for request_id in ids] == ["b"] * 3
    b.answers = deque(["lost"])
    assert replicas.call(ask()).endpoint == "b"
    assert a.connections == 1
    b.answers = deque([service_error(ErrorCode.INTERNAL)])
    with pytest.raises(type(error), match=f"a: {error.got}; b: error reply INTERNAL"):
        replicas.call(ask())


def test_a_service_that_comes_back_with_another_model_is_refused(world: World) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers, a.held = deque(["lost"]), mismatch()
    with pytest.raises(ModelMismatchError, match="model_digest"):
        replicas.call(ask())
    assert a.events == ["Init", "request", "Init"]
    # Also when it has the right one again: it may have anything the next time.
    a.held = None
    with pytest.raises(ModelMismatchError):
        replicas.call(ask())


def test_a_liar_is_not_believed_over_an_earlier_connection_either(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests in flight one is caught over a new connection, the other waits on the old."""
    monkeypatch.setattr("tee_side.remote.services.connected._GRACE_S", 0.0)
    a, b = world.add("a", "b")
    b.up = False
    replicas = world.replicas("a", "b")
    a.answers = deque([service_error(ErrorCode.SHUTTING_DOWN)])
    first, second = replicas.submit(ask(1)), replicas.submit(ask(2))
    exchange = replicas.wait(first)
    draining, new = (one for one in world.opened if one.endpoint == "a")
    assert exchange.endpoint == "a"
    assert not draining.closed
    b.up = True
    replicas.distrust(exchange, wrong())
    assert draining.closed
    assert new.closed
    assert replicas.wait(second).endpoint == "b"


def test_what_a_liar_said_before_its_connection_was_lost_is_not_used(world: World) -> None:
    a, _ = world.add("a", "b")
    replicas = world.replicas("a", "b")
    ids = [replicas.submit(ask(value)) for value in range(3)]
    exchange = replicas.wait(ids[0])
    # The others' replies have come when the connection is lost.
    connection = world.opened[0]
    connection.arrived = lambda _id, _until=0.0: True  # type: ignore[method-assign]
    a.answers = deque(["lost"])
    assert replicas.wait(ids[1]).endpoint == "b"
    replicas.distrust(exchange, wrong())
    connection.wait = lambda _id: exchange  # type: ignore[method-assign]
    assert replicas.wait(ids[2]).endpoint == "b"


def test_a_service_with_another_model_is_not_believed_over_an_earlier_connection(
    world: World,
) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers, a.held = deque([service_error(ErrorCode.SHUTTING_DOWN)]), mismatch()
    ids = [replicas.submit(ask(value)) for value in range(2)]
    for request_id in ids:
        with pytest.raises(ModelMismatchError):
            replicas.wait(request_id)
    assert len(a.got) == 2


# --------------------------------------------------------------------------------------- roles


SHARES = (ReplicaGroup(1, 0, 0, ("a", "c")), ReplicaGroup(2, 0, 0, ("b", "d")))


def test_a_share_goes_to_its_own_services_whatever_fails(world: World) -> None:
    services = world.add("a", "b", "c", "d")
    first, second = world.connect(*SHARES).at(0)
    for service in services:
        service.answers = deque(["lost", "good", service_error(ErrorCode.SHUTTING_DOWN), "lost"])
    for _ in range(20):
        assert first.call(ask(1)).endpoint in ("a", "c")
        assert second.call(ask(2)).endpoint in ("b", "d")
    for service, share in zip(services, (ask(1), ask(2), ask(1), ask(2)), strict=True):
        assert service.got
        assert all(
            bytes(r.hidden_states.data) == bytes(share.hidden_states.data) for r in service.got
        )


def test_one_process_with_both_shares_is_refused_at_start(world: World) -> None:
    world.add("a", "b", instance="one")
    with pytest.raises(SettingsError, match="a and b, one and the same"):
        world.connect(ReplicaGroup(1, 0, 0, ("a",)), ReplicaGroup(2, 0, 0, ("b",)))


def test_a_process_that_had_one_share_never_gets_the_other(world: World) -> None:
    a, b, _, d = world.add("a", "b", "c", "d")
    first, second = world.connect(*SHARES).at(0)
    # The process behind a is gone from there, and turns up where b was.
    a.answers, a.up = deque(["lost"]), False
    assert first.call(ask()).endpoint == "c"
    b.answers, b.instance = deque(["lost"]), "a"
    assert second.call(ask()).endpoint == "d"
    d.answers, d.up = deque(["lost"]), False
    with pytest.raises(DeadlineExceededError, match="b: a and b, one and the same"):
        second.call(ask(), 0.2)
    assert len(b.got) == 1


@pytest.mark.parametrize(
    "groups",
    [
        (ReplicaGroup(1, 0, 0, ("a", "b")),),
        (ReplicaGroup(1, 0, 0, ("a",)), ReplicaGroup(1, 1, 1, ("b",))),
    ],
    ids=["stand-ins", "layers"],
)
def test_one_process_at_two_endpoints_is_refused_at_start(
    world: World, groups: tuple[ReplicaGroup, ...]
) -> None:
    """Else one that lied would be asked again under its other name."""
    world.add("a", "b", instance="one")
    with pytest.raises(SettingsError) as caught:
        world.connect(*groups, layers=len(groups))
    assert str(caught.value) == "--gpu: got a and b, one and the same, expected each service once"


def test_a_caught_liar_is_not_asked_under_another_name(
    world: World, clock: SimpleNamespace
) -> None:
    _, b, c = world.add("a", "b", "c")
    replicas = world.replicas("a", "b", "c")
    replicas.distrust(replicas.call(ask()), wrong())
    # Where b was, whoever was caught at a answers now.
    b.answers, b.instance = deque(["lost"]), "a"
    assert replicas.call(ask()).endpoint == "c"
    c.answers, c.up, c.comes_back = deque(["lost"]), False, clock.now + 0.2
    assert replicas.call(ask()).endpoint == "c"
    assert len(b.got) == 1
    assert b.events[-1] == "Init"


def test_a_claimed_name_is_held_against_the_newcomer_alone(
    world: World, clock: SimpleNamespace
) -> None:
    a, b = world.add("a", "b")
    replicas = world.replicas("a", "b")
    a.answers, a.instance = deque(["lost", "lost"]), "b"
    assert replicas.call(ask()).endpoint == "b"
    # b is lost once: a is tried, claims to be b, and is left out; b comes back under its own name.
    b.answers, b.up, b.comes_back = deque(["lost"]), False, clock.now + 0.2
    assert replicas.call(ask()).endpoint == "b"
    assert replicas.call(ask()).endpoint == "b"
    assert a.events == ["Init", "request", "Init"]


def test_a_process_may_come_back_where_it_was(world: World) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    for instance in ("a", "another", "a"):
        a.answers, a.instance = deque(["lost"]), instance
        assert replicas.call(ask()).endpoint == "a"


# -------------------------------------------------------------------------------------- layers


def test_each_layer_is_asked_where_it_is(world: World) -> None:
    world.add("a", "b", "c")
    services = world.connect(
        ReplicaGroup(1, 0, 1, ("a",)),
        ReplicaGroup(1, 2, 3, ("b",)),
        ReplicaGroup(2, 0, 3, ("c",)),
        layers=4,
    )
    asked = [[channel.call(ask()).endpoint for channel in services.at(n)] for n in range(4)]
    assert asked == [["a", "c"], ["a", "c"], ["b", "c"], ["b", "c"]]
    checked = {name: set(service.checked_layers) for name, service in world.services.items()}
    assert checked == {"a": {(0, 1)}, "b": {(2, 3)}, "c": {(0, 3)}}


def test_it_waits_while_a_layer_has_no_service(
    world: World, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, c = world.add("a", "b", "c")
    groups = ReplicaGroup(1, 0, 0, ("a", "b")), ReplicaGroup(1, 1, 1, ("c",))
    services = world.connect(*groups, layers=2)
    a.answers, a.up = deque(["lost"]), False
    seen: list[bool] = []
    monkeypatch.setattr(replicas, "log_waiting", lambda *_: seen.append(services.waits))
    services.at(0)[0].call(ask())
    assert not seen  # b stands in
    c.answers, c.up = deque(["lost"]), False
    with pytest.raises(DeadlineExceededError):
        services.at(1)[0].call(ask())
    assert seen == [True]
    assert not services.waits  # nothing does any more
    c.comes_back = clock.now + 0.3
    services.at(1)[0].call(ask())
    assert not services.waits


# --------------------------------------------------------------------------------------- start


def test_a_missing_replica_is_left_out_with_a_warning(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tee_side.remote.services.connected._GRACE_S", 0.05)
    a, b = world.add("a", "b")
    a.up = False
    replicas = world.replicas("a", "b")
    (record,) = [one for one in caplog.records if one.getMessage() == "service_missing"]
    assert record.fields["endpoint"] == "a"
    assert replicas.call(ask()).endpoint == "b"
    # It is used as soon as it is there and needed.
    a.up, b.up, b.answers = True, False, deque(["lost"])
    assert replicas.call(ask()).endpoint == "a"


@pytest.mark.parametrize(("after_s", "told"), [(0.5, False), (1.5, True)])
def test_a_start_that_takes_long_says_once_what_it_waits_for(
    world: World,
    clock: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    after_s: float,
    told: bool,
) -> None:
    world.add("a", up=False)
    world.services["a"].comes_back = clock.now + after_s
    services = world.connect(ReplicaGroup(1, 0, 0, ("a",)), connect_s=10.0)
    assert services.at(0)[0].call(ask()).endpoint == "a"
    said = [("waiting_for_service", "a", WAITING.format("--connect-timeout-s"))]
    assert events(caplog) == (said if told else [])
    if told:
        assert caplog.records[0].fields["at_most_s"] == 9  # type: ignore[attr-defined]


@pytest.mark.parametrize(("error", "waits_s"), [(EndpointError, 0.0), (AbsentError, 1.0)])
def test_a_start_waits_for_a_lone_service_that_is_away_and_not_for_one_that_refuses(
    world: World, clock: SimpleNamespace, error: type[EndpointError], waits_s: float
) -> None:
    (a,) = world.add("a", held=error("a", got="one thing", expected="another"))
    began = clock.now
    with pytest.raises(error, match="one thing"):
        world.replicas("a")
    assert (len(a.nonces) > 1) is (waits_s > 0)
    assert clock.now - began == pytest.approx(waits_s, abs=0.1)


def test_a_request_whose_service_is_gone_says_once_what_it_waits_for(
    world: World, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a", timeout_s=60.0)
    a.answers, a.up = deque(["lost"]), False
    with pytest.raises(DeadlineExceededError):
        replicas.call(ask())
    assert [name for name, _, _ in events(caplog)] == ["service_lost", "waiting_for_service"]
    assert caplog.records[1].fields["at_most_s"] == 60  # type: ignore[attr-defined]
    assert clock.now == pytest.approx(1060.0, abs=0.5)


def test_nobody_there_is_a_deadline_exceeded_that_names_all(world: World) -> None:
    world.add("a", "b", up=False)
    with pytest.raises(DeadlineExceededError, match=r"^Init at a and b: got no reply within 1 s, "):
        world.replicas("a", "b")


def test_what_those_that_are_not_ready_at_start_said_is_one_line(world: World) -> None:
    _, b = world.add("a", "b", up=False)
    b.up, b.held = True, service_error(ErrorCode.SHUTTING_DOWN)
    with pytest.raises(DeadlineExceededError) as caught:
        world.replicas("a", "b")
    said = "no reply within 1 s (b: error reply SHUTTING_DOWN)"
    assert (caught.value.where, caught.value.got) == ("Init at a and b", said)


def test_a_lone_service_that_is_not_ready_at_start_says_so_itself(world: World) -> None:
    (a,) = world.add("a")
    a.held = service_error(ErrorCode.SHUTTING_DOWN)
    with pytest.raises(ServiceError) as caught:
        world.replicas("a")
    assert caught.value is a.held


def test_a_replica_with_another_model_is_refused_at_start(world: World) -> None:
    _, b = world.add("a", "b")
    b.held = mismatch()
    with pytest.raises(ModelMismatchError):
        world.replicas("a", "b")


# ---------------------------------------------------------------------------------- interrupted


def test_an_interrupted_wait_leaves_nothing_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers = deque([KeyboardInterrupt()])  # type: ignore[list-item]
    first = replicas.submit(ask(1))
    with pytest.raises(KeyboardInterrupt):
        replicas.wait(first)
    with pytest.raises(KeyError):
        replicas.wait(first)
    assert replicas.call(ask(2)).endpoint == "a"
    assert a.connections == 1


def test_a_request_that_was_interrupted_on_its_way_ends_its_connection(world: World) -> None:
    """Half of it may have been sent, and the next would be taken for the rest."""
    (a,) = world.add("a")
    replicas = world.replicas("a")
    waiting = replicas.submit(ask(1))
    connection = world.opened[0]

    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    a.answers = deque(["good"])
    connection.submit = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        replicas.submit(ask(2))
    assert connection.closed
    # What was in flight is asked again, over a new one.
    assert replicas.wait(waiting).endpoint == "a"
    assert a.connections == 2


def test_an_interrupted_handshake_closes_its_connection(world: World) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers, a.held = deque(["lost"]), KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        replicas.call(ask())
    a.held = None
    assert replicas.call(ask()).endpoint == "a"


def test_an_error_of_one_request_is_not_that_of_another(world: World) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    a.answers, a.up = deque(["lost"]), False
    first, second = replicas.submit(ask(1), 0.05), replicas.submit(ask(2), 3.0)
    with pytest.raises(DeadlineExceededError):
        replicas.wait(first)
    a.up = True
    assert replicas.wait(second).endpoint == "a"


def test_the_only_error_of_a_lone_service_is_its_own(world: World) -> None:
    (a,) = world.add("a")
    replicas = world.replicas("a")
    error = ReplyError("reply", got="Linear", expected="LMHead")
    a.answers = deque([error])
    with pytest.raises(ReplyError) as caught:
        replicas.call(ask())
    assert caught.value is error
    assert not isinstance(caught.value, EndpointError)
