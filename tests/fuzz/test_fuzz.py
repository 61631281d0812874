"""That the fuzzer finds what it looks for; the kept cases are read by the row `fuzz` of faults."""

import time
from pathlib import Path

from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import REQUEST_TYPES
from tests.fuzz.engine import CORPUS, Fuzzer, Target
from tests.fuzz.targets import TARGETS
from tests.kit.mutate import Case, one
from tests.kit.rows import each_row


def test_the_corpus_has_every_message_and_no_strangers() -> None:
    assert {path.stem for path in CORPUS.iterdir()} <= {target.name for target in TARGETS}
    targets = {target.name: target for target in TARGETS}
    # A target whose seeds are refused would look at nothing but its first check.
    for target in TARGETS:
        assert any(_is_read(target, case) for case in target.seeds()), target.name
    kinds = {cls.__name__ for cls in REQUEST_TYPES.values()}
    for name in ("request-framed", "request-inline"):
        assert {targets[name].read(case).split()[1] for case in targets[name].seeds()} == kinds
    # What is remembered of a header is used, and so are replies that are expected.
    for name, said in (("request-framed", " known"), ("reply", " expected")):
        read = [targets[name].read(case) for case in targets[name].seeds()]
        assert any(outcome.endswith(said) for outcome in read)


def _is_read(target: Target, case: Case) -> bool:
    try:
        target.read(case)
    except target.errors:
        return False
    return True


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


READER = Target("control", _reader, one, (ProtocolError,), made=lambda: [(b"12345678",), (b"x",)])


@each_row(
    ("case", "why"),
    [(b"key", "KeyError"), (b"line", "a text of"), (b"large", " bytes"), (b"slow", " ms")],
)
def test_mistakes_are_found(case: bytes, why: str, tmp_path: Path) -> None:
    fuzzer = Fuzzer(READER, 1, folder=tmp_path)
    assert not fuzzer.report.findings
    fuzzer.execute((case,))
    assert any(why in finding for finding in fuzzer.report.findings)
