"""The search for what may not leave the runner finds it.

What is searched is the row `secrets` of the scorecard, whose short form is one of its tests.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.kit.rows import each_row
from tests.soak.canaries import FAULTS, PLACES, POLICIES, Canaries, Faults, Session
from tests.soak.secrets import are_hit, expected_places, hit_requests


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"the answer: qvxzkjwphm!", "prompt"),
        (b"x=" + b"qvxzkjwphm".hex().encode(), "prompt"),
        (b"tensor([ 9, 14, 15, 16,\n 17, 18, 19, 20])", "token ids"),
        (b"\0\0" + b"".join(n.to_bytes(8, "little") for n in range(11, 22)), "token ids"),
        (b"[0.5000, 1.2500,  -3.0000, 4.0000]", "activation"),
        (b"key " + b"\x00\x01\x02\x03" * 8, "key"),
        (b"it said \xc3\xa9]kR mq;w3", "answer"),
    ],
)
def test_the_search_finds(content: bytes, kind: str) -> None:
    canaries = Canaries()
    canaries.add_prompt(["qvxzkjwphm"], list(range(11, 23)))
    canaries.add_activation(torch.tensor([0.5, 1.25, -3.0, 4.0, 7.0]))
    canaries.add_secret(b"\x00\x01\x02\x03" * 8)
    canaries.add_answer("\u00e9]kR mq;w3", [31, 32])
    assert kind in canaries.found_in(content)
    assert not canaries.found_in(b"nothing of it 1, 2, 3, 0.5, 1.25")


@pytest.mark.parametrize("said", ["", "kR mq;w", "a a a a a a"])
def test_an_answer_that_may_stand_anywhere_by_chance_is_not_looked_for(said: str) -> None:
    canaries = Canaries()
    canaries.add_answer(said, list(range(12)))
    assert canaries.patterns == []


@each_row("before", range(9))
@pytest.mark.parametrize("length", [3, 4, 5, 11])
def test_a_pattern_is_found_wherever_it_begins(before: int, length: int) -> None:
    pattern = b"qvxzkjwphma"[:length]
    canaries = Canaries()
    canaries.patterns += [("prompt", pattern), ("key", b"qvxzkjwphmb"), ("key", b"none of it")]
    assert canaries.found_in(b"-" * before + pattern) == ["prompt"]
    assert canaries.found_in(b"-" * before + pattern + b"qvxzqvxz") == ["prompt"]
    assert canaries.found_in(b"-" * before + pattern[:-1]) == []
    assert canaries.found_in(b"- " * before + b" \n".join(bytes([c]) for c in pattern)) == [
        "prompt"
    ]


@pytest.mark.parametrize("requests", [1, 8, 9, 12, 32, 40])
def test_in_time_every_fault_is_at_every_request(requests: int) -> None:
    session = object.__new__(Session)
    session.policy, session.armed = "tsqp", Counter()
    session.requests = Counter({"tsqp": requests})
    made = {session._next_fault() for _ in range(8 * len(FAULTS) * requests)}
    everywhere = {(fault, at) for fault in FAULTS for at in range(1, requests + 1)}
    # It takes its whole deadline, so there are fewer of it.
    assert {fault for fault, _ in everywhere - made} <= {"no reply"}
    assert "no reply" in {fault for fault, _ in made}
    assert made <= everywhere


def test_the_first_generation_has_no_fault_and_shows_how_many_requests_there_are() -> None:
    session = object.__new__(Session)
    session.policy, session.armed, session.requests = "tsqp", Counter(), Counter()
    faults = Faults(random.Random(1))
    faults.arm("tsqp", *session._next_fault(), "")
    for _ in range(3):
        assert faults._sending(None, [b"request"]) == [b"request"]
    assert (faults.count, faults.made) == (3, Counter())


def test_a_fault_is_counted_where_it_was_made() -> None:
    faults = Faults(random.Random(1))
    faults.arm("tsqp", "cut request", 2, "")
    sent = [faults._sending(None, [b"head", b"body"]) for _ in range(3)]
    assert sent == [[b"head", b"body"], [b"head", b"bod"], [b"head", b"body"]]
    assert faults.made == Counter({("tsqp", "cut request", 2): 1})


def _found(last: int) -> dict[str, object]:
    faults = [[name, "lost connection", at, 1] for name in POLICIES for at in range(1, last + 1)]
    return {"faults": faults, "requests": dict.fromkeys(POLICIES, 8)}


@pytest.mark.parametrize(("last", "short", "full"), [(1, 0, 0), (2, 1, 0), (7, 1, 0), (8, 1, 1)])
def test_every_request_is_to_be_hit(last: int, short: int, full: int) -> None:
    positions = hit_requests(_found(last))
    assert set(positions.values()) == {(last, 8)}
    assert are_hit(positions, full=False) == bool(short)
    assert are_hit(positions, full=True) == bool(full)


@pytest.mark.parametrize("full", [False, True])
def test_a_policy_that_generated_nothing_was_not_hit(full: bool) -> None:
    positions = hit_requests(_found(8))
    del positions["two-server"]
    assert not are_hit(positions, full=full)


def test_the_full_form_looks_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.secrets.find_spec", lambda name: None)
    monkeypatch.setattr("tests.soak.secrets.SHARED", Path("/nowhere"))
    assert expected_places(full=True) == set(PLACES)
    assert set(PLACES) - expected_places(full=False) == {"metrics", "shared memory"}
    monkeypatch.undo()
    there = Path("/dev/shm").is_dir()
    assert ("shared memory" in expected_places(full=False)) == there
