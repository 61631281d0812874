"""The kept cases again, and that the fuzzer finds what it looks for.

New cases are made by the row `fuzz` of the scorecard, whose short form is one of its tests.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ErrorCode, ProtocolError
from tests.fuzz import wire_targets
from tests.fuzz.engine import (
    CORPUS,
    MAX_KEPT,
    MAX_KEPT_BYTES,
    Case,
    Fuzzer,
    Report,
    Target,
    decode_case,
    encode_case,
    read_corpus,
)
from tests.fuzz.mutate import Mutator
from tests.fuzz.targets import TARGETS, count_executions, keep, merge, shares
from tests.fuzz.wire_targets import framed_replies, framed_requests


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_kept_cases(target: Target) -> None:
    """Every one ends in a result or in an error of its own kind."""
    fuzzer = Fuzzer(target, 1, timed=False)
    assert not fuzzer.report.findings, "\n".join(map(str, fuzzer.report.findings))
    kept = read_corpus(target)
    assert kept, f"{target.name}: nothing in {CORPUS}"
    assert fuzzer.report.executions[target.name] == len(target.seeds()) + len(kept)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_seeds_are_read(target: Target) -> None:
    """A target whose seeds are refused would look at nothing but its first check."""
    outcomes = []
    for case in target.seeds():
        try:
            outcomes.append(target.execute(case))
        except target.errors as error:
            outcomes.append(f"refused: {error}")
    assert not all(outcome.startswith("refused") for outcome in outcomes), outcomes


def test_corpus_is_small_and_has_no_strangers() -> None:
    known = {f"{target.name}.txt" for target in TARGETS}
    assert {path.name for path in CORPUS.iterdir()} <= known
    for target in TARGETS:
        cases = read_corpus(target)
        assert len(cases) == len(set(cases)) <= MAX_KEPT
        assert all(sum(map(len, case)) <= MAX_KEPT_BYTES for case in cases)


def test_remembered_headers_are_used_by_their_targets() -> None:
    """The targets of known headers must reach what is remembered, or is expected."""
    known = {target.name: target for target in TARGETS}
    for case in framed_requests():
        known["request-framed-known"].execute(case)
    assert len(wire_targets._reader.known) >= 3
    taken = 0
    for case in framed_replies():
        known["reply-known"].execute(case)
        frames = [memoryview(bytearray(frame)) for frame in case]
        taken += any(one.expected(frames) is not None for one in wire_targets._expecting())
    assert taken >= 3


# -------------------------------------------------------------------------------- controls


class _TalkativeError(ProtocolError):
    """Says what it likes."""

    def __init__(self, text: str) -> None:
        super().__init__("here", got="it", expected="", code=ErrorCode.INVALID_FIELD)
        self.text = text

    def __str__(self) -> str:
        return self.text


def _reader(case: Case) -> str:
    """Read numbers, with a mistake of each kind that is looked for."""
    text = case[0]
    if text.startswith(b"key"):
        raise KeyError(text)
    if text.startswith(b"long"):
        raise _TalkativeError("x" * 10_000)
    if text.startswith(b"line"):
        raise _TalkativeError("two\nlines")
    if text.startswith(b"large"):
        return f"{len(bytearray(65 * 1024 * 1024))}"
    if not text.isdigit():
        raise _refusal("letters")
    return "digits"


def _refusal(got: str) -> ProtocolError:
    return ProtocolError("here", got=got, expected="digits", code=ErrorCode.INVALID_FIELD)


def _changed(mutator: Mutator, case: Case, other: Case) -> Case:
    return (mutator.pick((b"1", b"12", b"x", b"y")),)


READER = Target("control", lambda: [(b"12345678",)], _changed, _reader, (ProtocolError,))


_SLOW_S = 0.06


def _slow_reader(case: Case) -> str:
    until = time.thread_time() + _SLOW_S
    while time.thread_time() < until:
        pass
    return "read"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (b"key", "KeyError"),
        (b"long", "a text of"),
        (b"line", "a text of"),
        (b"large", "bytes"),
    ],
)
def test_mistakes_are_found(case: bytes, why: str, tmp_path: Path) -> None:
    fuzzer = Fuzzer(READER, 1, folder=tmp_path, timed=False)
    fuzzer.execute((b"x",))
    assert not fuzzer.report.findings
    fuzzer.execute((case,))
    (finding,) = fuzzer.report.findings
    assert why in finding.why
    assert finding.case == (case,)


def test_what_needs_too_much_time_of_the_processor_is_found(tmp_path: Path) -> None:
    target = Target("control", lambda: [(b"1",)], _changed, _slow_reader, (ProtocolError,))
    fuzzer = Fuzzer(target, 1, folder=tmp_path)
    (finding,) = fuzzer.report.findings
    assert finding.why.endswith(" ms")


def test_slowest_is_what_took_the_processor_longest_at_its_quickest(tmp_path: Path) -> None:
    """What only waited, as for a machine that is shared, neither counts nor hides what did not."""

    def read(case: Case) -> str:
        if case == (b"waits",):
            time.sleep(0.2)
        return "read" if case == (b"waits",) else _slow_reader(case)

    target = Target("control", lambda: [(b"1",)], _changed, read, (ProtocolError,))
    fuzzer = Fuzzer(target, 1, folder=tmp_path, timed=False)
    slowest_s = fuzzer.report.slowest_s
    assert slowest_s >= _SLOW_S
    fuzzer.execute((b"waits",))
    assert fuzzer.report.slowest_s == slowest_s
    assert not fuzzer.report.findings


def test_one_large_execution_among_many_is_found_by_its_batch(tmp_path: Path) -> None:
    """Also where its outcome is an old one, and it is none of those that are measured."""
    met: list[bytes] = []

    def read(case: Case) -> str:
        met.append(case[0])
        if len(met) % 50 == 0:
            held = bytearray(70 * 1024 * 1024)
            held[::4096] = b"x" * len(held[::4096])
        return "read"

    target = Target("control", lambda: [(b"1",)], _changed, read, (ProtocolError,))
    fuzzer = Fuzzer(target, 1, folder=tmp_path, timed=False)
    assert not fuzzer.report.findings
    fuzzer.run(60)
    assert fuzzer.report.peak_bytes > 64 * 1024 * 1024
    assert fuzzer.report.findings


def test_new_outcomes_are_kept_once_and_the_smaller_case_of_one_stays(tmp_path: Path) -> None:
    keep(READER, [(b"99999999",), (b"abcdefgh",), (b"z",), (b"7",)], tmp_path)
    assert sorted(read_corpus(READER, tmp_path)) == [(b"7",), (b"z",)]
    keep(READER, [(b"8",)], tmp_path)
    assert sorted(read_corpus(READER, tmp_path)) == [(b"7",), (b"z",)]


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=4).map(tuple))
def test_cases_are_written_and_read(case: Case) -> None:
    assert decode_case(encode_case(case)) == case


def test_a_seed_makes_the_same_cases() -> None:
    def made(seed: int) -> list[Case]:
        mutator = Mutator(seed)
        (target, *_) = TARGETS
        return [target.mutate(mutator, *framed_requests()[2:4]) for _ in range(50)]

    assert made(5) == made(5) != made(6)


def test_executions_are_divided_and_counted(tmp_path: Path) -> None:
    divided = shares(1_000_000)
    assert set(divided) == {target.name for target in TARGETS}
    assert sum(divided.values()) == 1_000_000
    assert min(divided.values()) > 0
    total, path = Report(), tmp_path / "executions.json"
    merge(total, Report({"a": 2}, slowest_s=0.5))
    merge(total, Report({"a": 1, "b": 4}, slowest_s=0.25))
    assert total.executions == {"a": 3, "b": 4}
    assert total.slowest_s == 0.5
    assert count_executions(total, path) == 7
    assert count_executions(total, path) == 14
