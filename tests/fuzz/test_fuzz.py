"""The kept cases once through their readers, and that the fuzzer finds what it looks for."""

from __future__ import annotations

import time
from pathlib import Path

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import REQUEST_TYPES
from tests.fuzz.engine import BATCH, CORPUS, Fuzzer, Target
from tests.fuzz.mutate import Case, Mutator
from tests.fuzz.targets import TARGETS
from tests.kit.rows import each_row


@each_row("target", TARGETS, ids=lambda target: target.name)
def test_every_case_ends_in_a_result_or_an_error_of_its_own_kind(target: Target) -> None:
    fuzzer = Fuzzer(target, 1, timed=False)
    # A target whose seeds are refused would look at nothing but its first check.
    assert fuzzer.good, f"none of the seeds of {target.name} is read"
    fuzzer.run(10)
    assert fuzzer.report.findings == []


def test_the_corpus_has_every_message_and_no_strangers() -> None:
    assert {path.stem for path in CORPUS.iterdir()} <= {target.name for target in TARGETS}
    targets = {target.name: target for target in TARGETS}
    kinds = {cls.__name__ for cls in REQUEST_TYPES.values()}
    for name in ("request-framed", "request-inline"):
        assert {targets[name].read(case).split()[1] for case in targets[name].seeds()} == kinds
    # What is remembered of a header is used, and so are replies that are expected.
    for name, said in (("request-framed", " known"), ("reply", " expected")):
        read = [targets[name].read(case) for case in targets[name].seeds()]
        assert any(outcome.endswith(said) for outcome in read)


class _TwoLinesError(ProtocolError):
    """Says what no person should see."""

    def __str__(self) -> str:
        return "two\nlines"


def _reader(case: Case) -> str:
    """Read numbers, with a mistake of each kind that is looked for."""
    text = case[0]
    if text.startswith(b"key"):
        raise KeyError(text)
    if text.startswith(b"large"):
        return f"{len(bytearray(65 * 1024 * 1024))}"
    if text.startswith(b"slow"):
        until = time.thread_time() + 0.06
        while time.thread_time() < until:
            pass
    if not text.isdigit():
        refusal = _TwoLinesError if text.startswith(b"line") else ProtocolError
        raise refusal("here", got="letters", expected="", code=ErrorCode.INVALID_FIELD)
    return "digits"


def _changed(mutator: Mutator, case: Case, other: Case) -> Case:
    return (mutator.pick((b"1", b"12", b"x", b"y")),)


READER = Target("control", _reader, _changed, (ProtocolError,), made=lambda: [(b"12345678",)])


@each_row(
    ("case", "why"),
    [(b"key", "KeyError"), (b"line", "a text of"), (b"large", " bytes"), (b"slow", " ms")],
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
