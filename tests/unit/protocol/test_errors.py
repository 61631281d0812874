"""Errors: which of them a retry helps, and that a message is one short line."""

from __future__ import annotations

from protocol import errors
from protocol.errors import ErrorCode, ProtocolError, ServiceError, TsqpError

RETRYABLE = {
    *(errors.EndpointError, errors.AbsentError, errors.DeadlineExceededError, errors.LimitError),
    *(errors.PadsExhaustedError, errors.SessionLostError),
}
RETRYABLE_CODES = {ErrorCode.DEADLINE_EXCEEDED, ErrorCode.SHUTTING_DOWN, ErrorCode.QUEUE_FULL}


def _tree(error: type[TsqpError]) -> list[type[TsqpError]]:
    return [error, *(one for below in error.__subclasses__() for one in _tree(below))]


def test_the_tree_is_the_one_that_is_drawn_and_says_whether_a_retry_helps() -> None:
    ours = [error for error in _tree(TsqpError) if error.__module__ == "protocol.errors"]
    assert len(ours) >= 28
    for error in ours:
        assert error.__name__ in (errors.__doc__ or "")
        assert error.retryable is (error in RETRYABLE), error
    for code in ErrorCode:
        served = ServiceError("Linear at tcp://h:1", code=code)
        assert served.retryable is (code in RETRYABLE_CODES), code
        assert code.value in str(served)


def test_a_message_is_one_short_printable_line() -> None:
    error = ProtocolError("reply", got="[3]", expected="[4]", code=ErrorCode.INVALID_FIELD)
    assert str(error) == "reply: got [3], expected [4]"
    said = str(TsqpError("a\nb\x1b[2J", got="x" * 10_000, expected="\u202e"))
    assert said.isprintable()
    assert len(said) < 1100
