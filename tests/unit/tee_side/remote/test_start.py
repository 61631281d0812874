"""The start of a run: which services must be there, what is waited for, and what people hear."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.errors import (
    AbsentError,
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ModelMismatchError,
    ServiceError,
    SettingsError,
)
from tee_side.remote.services import member, replicas
from tee_side.remote.services.plan import ReplicaGroup
from tests.kit.fakes import FakeConnection, World, ask, service_error, stopped_clock, wrong
from tests.kit.rows import each_row

WAITING = "start a gpu-service there; {} says how long it is waited for"
ENDING = service_error(ErrorCode.SHUTTING_DOWN)
MISMATCH = ModelMismatchError("model at b: model_digest", got="other", expected="ours")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    return stopped_clock(monkeypatch)


@pytest.fixture
def world(clock: Any) -> Iterator[World]:
    made = World()
    yield made
    for services in made.made:
        services.close()
    assert all(connection.closed for connection in made.opened)


def _events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """Return what was logged: event, endpoint and detail."""
    fields: list[Any] = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    names = [record.getMessage() for record in caplog.records]
    return [
        (name, one["endpoint"], one.get("detail", ""))
        for name, one in zip(names, fields, strict=True)
    ]


def test_each_layer_and_share_is_asked_where_it_is(world: World) -> None:
    world.add("a", "b", "c")
    services = world.connect(
        ReplicaGroup(1, 0, 1, ("a",)),
        ReplicaGroup(1, 2, 3, ("b",)),
        ReplicaGroup(2, 0, 3, ("c",)),
        layers=4,
    )
    asked = [[channel.call(ask()).endpoint for channel in services.at(n)] for n in range(4)]
    assert asked == [["a", "c"], ["a", "c"], ["b", "c"], ["b", "c"]]
    checked = {name: {layers for layers, _ in one.checked} for name, one in world.services.items()}
    assert checked == {"a": {(0, 1)}, "b": {(2, 3)}, "c": {(0, 3)}}
    assert services.connected == 3


@each_row(
    ("groups", "said"),
    [
        # Else one that lied would be asked again under its other name.
        ([ReplicaGroup(1, 0, 0, ("a", "b"))], "each service once"),
        ([ReplicaGroup(1, 0, 0, ("a",)), ReplicaGroup(1, 1, 1, ("b",))], "each service once"),
        (
            [ReplicaGroup(1, 0, 0, ("a",)), ReplicaGroup(2, 0, 0, ("b",))],
            "two that do not collude",
        ),
    ],
)
def test_one_process_at_two_endpoints_is_refused(groups: list[ReplicaGroup], said: str) -> None:
    world = World()
    world.add("a", "b", instance="one")
    with pytest.raises(SettingsError) as caught:
        world.connect(*groups, layers=2)
    assert str(caught.value) == f"--gpu: got a and b, one and the same, expected {said}"


@each_row(
    ("changes", "error", "where", "got"),
    [
        (
            {"a": {"up": False}, "b": {"up": False}},
            *(DeadlineExceededError, "Init at a and b", "no reply within 1 s"),
        ),
        (
            {"a": {"up": False}, "b": {"held": ENDING}},
            DeadlineExceededError,
            *("Init at a and b", "no reply within 1 s (b: error reply SHUTTING_DOWN)"),
        ),
        # A lone one says so itself.
        ({"a": {"held": ENDING}}, ServiceError, ENDING.where, ENDING.got),
        ({"a": {}, "b": {"held": MISMATCH}}, ModelMismatchError, MISMATCH.where, "other"),
    ],
)
def test_what_keeps_a_run_from_its_start_is_one_error(
    changes: dict[str, dict[str, Any]], error: Any, where: str, got: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stopped_clock(patch)
        world = World()
        for name, settings in changes.items():
            world.add(name, **settings)
        with pytest.raises(error) as caught:
            world.replicas(*changes)
    assert (caught.value.where, caught.value.got) == (where, got)


@pytest.mark.parametrize(("error", "waits_s"), [(EndpointError, 0.0), (AbsentError, 1.0)])
def test_a_lone_service_that_is_away_is_waited_for_and_one_that_refuses_is_not(
    world: World, clock: Any, error: type[EndpointError], waits_s: float
) -> None:
    (a,) = world.add("a", held=error("a", got="one thing", expected="another"))
    began = clock.now
    with pytest.raises(error, match="one thing"):
        world.replicas("a")
    assert (len(a.nonces) > 1) is (waits_s > 0)
    assert clock.now - began == pytest.approx(waits_s, abs=0.1)


def test_every_group_is_waited_for(world: World, clock: Any) -> None:
    _, b = world.add("a", "b")
    b.up, b.comes_back = False, clock.now + 3.0
    services = world.connect(
        ReplicaGroup(1, 0, 0, ("a",)), ReplicaGroup(1, 1, 1, ("b",)), layers=2, connect_s=10.0
    )
    assert services.at(1)[0].call(ask()).endpoint == "b"


def test_a_missing_replica_is_left_out_with_a_warning_after_a_moment(
    world: World, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = world.add("a", "b", "c")
    a.up, c.up = False, False
    # It gets the time that others take, and a moment of grace.
    c.comes_back, began = clock.now + 0.5, clock.now
    services = world.replicas("a", "b", "c")
    assert clock.now - began == pytest.approx(1.0, abs=0.1)
    assert [name for name, endpoint, _ in _events(caplog) if endpoint == "a"] == ["service_missing"]
    assert services.call(ask()).endpoint == "b"
    # It is used as soon as it is there and needed.
    a.up, b.up, c.up, b.answers, c.comes_back = True, False, False, deque(["lost"]), float("inf")
    c.answers = deque(["lost"])
    assert services.call(ask()).endpoint == "a"


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_a_process_that_was_stopped_looks_at_what_has_come_before_giving_up(
    world: World, clock: Any, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """For a minute, while the reply to its first Init was on its way."""
    world.add(*names)
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
    found = world.replicas(*names)
    assert [one.session is not None for one in found.members] == [True] * len(names)
    assert looks["a"] == 2


# ----------------------------------------------------------------------------- what people hear


def test_what_becomes_of_a_service_is_logged(
    world: World, caplog: pytest.LogCaptureFixture, clock: Any
) -> None:
    """With a stand-in the run goes on: this is all that an operator hears of it."""
    a, b = world.add("a", "b")
    found = world.replicas("a", "b")
    assert not caplog.records  # a healthy start says nothing
    a.answers, a.up, a.comes_back = deque(["lost"]), False, clock.now + 0.3
    found.call(ask())
    b.answers, b.up = deque([ENDING]), False
    exchange = found.call(ask())
    assert exchange.endpoint == "a"
    b.up = True
    found.distrust(exchange, wrong())
    found.call(ask())
    assert _events(caplog) == [
        ("service_lost", "a", "a: got a lost connection, expected a service"),
        ("service_draining", "b", str(ENDING)),
        ("waiting_for_service", "a", WAITING.format("--request-timeout-s")),
        ("waiting_for_service", "b", WAITING.format("--request-timeout-s")),
        ("service_ready", "a", ""),
        ("service_quarantined", "a", str(wrong())),
        ("service_ready", "b", ""),
    ]


def test_it_waits_while_a_layer_has_no_service(
    world: World, clock: Any, monkeypatch: pytest.MonkeyPatch
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
    assert seen == [True]  # once, however long
    assert not services.waits  # nothing does any more
    c.comes_back = clock.now + 0.3
    services.at(1)[0].call(ask())
    assert not services.waits
