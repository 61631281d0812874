"""The start of a run: which services must be there, what is waited for, and what people hear."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest

from protocol.errors import (
    DeadlineExceededError,
    ErrorCode,
    ModelMismatchError,
    ServiceError,
    SettingsError,
)
from tee_side.remote.services import member
from tee_side.remote.services.plan import ReplicaGroup
from tests.kit.fakes import FakeConnection, World, ask, service_error
from tests.kit.rows import each_row

ENDING = service_error(ErrorCode.SHUTTING_DOWN)
MISMATCH = ModelMismatchError("model at b: model_digest", got="other", expected="ours")


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
    assert [one.getMessage() for one in caplog.records] == ["service_missing"]
    # It is used as soon as it is there and needed.
    a.up, b.up, c.up, b.answers, c.comes_back = True, False, False, deque(["lost"]), float("inf")
    c.answers = deque(["lost"])
    assert services.call(ask()).endpoint == "a"


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
    found = world.replicas("a", "b")
    assert [one.session is not None for one in found.members] == [True] * 2
    assert looks["a"] == 2
