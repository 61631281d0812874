"""The kept cases again, a few new ones, and that the fuzzer finds what it looks for.

For long runs: `python -m tests.fuzz SECONDS`.
"""

from __future__ import annotations

import time
from pathlib import Path

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import REQUEST_TYPES
from tests.fuzz.engine import BATCH, CORPUS, Fuzzer, Report, Target
from tests.fuzz.mutate import Case, Mutator
from tests.fuzz.targets import TARGETS, count_executions, merge, shares
from tests.kit.rows import each_row

_NEW = 25


@each_row("target", TARGETS, ids=lambda target: target.name)
def test_every_case_ends_in_a_result_or_an_error_of_its_own_kind(target: Target) -> None:
    fuzzer = Fuzzer(target, 1, timed=False)
    # A target whose seeds are refused would look at nothing but its first check.
    assert fuzzer.good, f"none of the seeds of {target.name} is read"
    fuzzer.run(_NEW)
    assert fuzzer.report.findings == []


def test_the_corpus_has_every_message_and_no_strangers() -> None:
    assert {path.stem for path in CORPUS.iterdir()} <= {target.name for target in TARGETS}
    kinds = {cls.__name__ for cls in REQUEST_TYPES.values()}
    wire = {target.name: target for target in TARGETS}
    for name in ("request-framed", "request-inline"):
        read = {wire[name].read(case).split()[1] for case in wire[name].seeds()}
        assert read == kinds, name
    # What is remembered of a header is used, and so are replies that are expected.
    for name, said in (("request-framed", " known"), ("reply", " expected")):
        fuzzer = Fuzzer(wire[name], 1, timed=False)
        assert any(outcome.endswith(said) for outcome in fuzzer.kept)


# -------------------------------------------------------------------------------- controls


def _reader(case: Case) -> str:
    """Read numbers, with a mistake of each kind that is looked for."""
    text = case[0]
    if text.startswith(b"key"):
        raise KeyError(text)
    if text.startswith(b"long"):
        raise _refusal("x" * 1000, "y" * 1000, "z" * 5000)
    if text.startswith(b"line"):
        raise _refusal("two\nlines")
    if text.startswith(b"large"):
        return f"{len(bytearray(65 * 1024 * 1024))}"
    if text.startswith(b"slow"):
        until = time.thread_time() + 0.06
        while time.thread_time() < until:
            pass
    if not text.isdigit():
        raise _refusal("letters")
    return "digits"


class _TalkativeError(ProtocolError):
    """Says all that it was given."""

    def __str__(self) -> str:
        return "".join(map(str, self.said))

    said: tuple[str, ...] = ()


def _refusal(*said: str) -> ProtocolError:
    error = _TalkativeError("here", got="it", expected="", code=ErrorCode.INVALID_FIELD)
    error.said = said
    return error


def _changed(mutator: Mutator, case: Case, other: Case) -> Case:
    return (mutator.pick((b"1", b"12", b"x", b"y")),)


READER = Target("control", _reader, _changed, (ProtocolError,), made=lambda: [(b"12345678",)])


@each_row(
    ("case", "why"),
    [
        (b"key", "KeyError"),
        (b"long", "a text of"),
        (b"line", "a text of"),
        (b"large", " bytes"),
        (b"slow", " ms"),
    ],
)
def test_mistakes_are_found(case: bytes, why: str, tmp_path: Path) -> None:
    fuzzer = Fuzzer(READER, 1, folder=tmp_path)
    fuzzer.run(BATCH)
    assert not fuzzer.report.findings
    fuzzer.execute((case,))
    assert any(why in finding for finding in fuzzer.report.findings)


def test_the_smaller_case_of_an_outcome_is_kept_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "control.txt").write_text("# seeds\nMTIzNDU2\n# found\n")
    fuzzer = Fuzzer(READER, 1, folder=tmp_path)
    for text in (b"99999999", b"abcdefgh", b"z", b"7"):
        fuzzer.execute((text,))
    assert sorted(fuzzer.kept.values()) == [(b"7",), (b"z",)]
    READER.keep(list(fuzzer.kept.values()), tmp_path)
    assert READER.seeds(tmp_path) == [(b"12345678",), (b"123456",)]
    assert READER.found(tmp_path) == [(b"7",), (b"z",)]


def test_executions_are_divided_and_counted(tmp_path: Path) -> None:
    divided = shares(1_000_000)
    assert set(divided) == {target.name for target in TARGETS}
    assert sum(divided.values()) == 1_000_000
    total, path = Report(), tmp_path / "executions.json"
    merge(total, Report({"a": 2}, ["a: wrong"], slowest_s=0.5))
    merge(total, Report({"a": 1, "b": 4}, ["a: wrong", "b: wrong"], slowest_s=0.25))
    assert (total.executions, total.slowest_s) == ({"a": 3, "b": 4}, 0.5)
    assert total.findings == ["a: wrong", "b: wrong"]
    assert [count_executions(total, path) for _ in range(2)] == [7, 14]
