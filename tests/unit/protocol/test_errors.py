"""Errors: which of them a retry helps, what a message says, and what it never quotes."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from protocol import errors
from protocol.errors import (
    ErrorCode,
    ModelError,
    ProtocolError,
    ServiceError,
    SettingsError,
    TsqpError,
    describe,
)
from protocol.validation import validate_file
from tests.kit.rows import each_row

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


@each_row(
    ("value", "text"),
    [
        ("Linear", "'Linear'"),
        (list(range(100, 120)), "[100, 101, 102, 103, 104, 105, 106, 107]..."),
        ("x" * 1000, "'" + "x" * 56 + "..."),
        (b"secret", "a value of type bytes"),
        ({"secret": 1}, "a value of type dict"),
        (["secret"], "a value of type list"),
    ],
)
def test_values_of_a_persons_own_file_are_described(value: object, text: str) -> None:
    assert describe(value) == text


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    size: int


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=3)]
    inner: tuple[Inner, ...] = ()


@each_row(
    ("value", "where", "got", "expected"),
    [
        ({}, "file: name", "nothing", "a value"),
        ({"name": 3}, "file: name", "3", "a valid string"),
        ({"name": "x", "inner": ({},)}, "file: inner.0.size", "nothing", "a value"),
        ({"name": "x", "inner": ({"sise": 1},)}, "file: inner.0.sise", "1", "no such key"),
        ({"nome": "x"}, "file: nome", "'x'", "no such key"),
        ({"n" * 500: "x"}, f"file: '{'n' * 60}'...", "'x'", "no such key"),
        ([], "file", "[]", "a valid dictionary or instance of Outer"),
    ],
)
def test_the_first_fault_of_a_file_is_named(
    value: Any, where: str, got: str, expected: str
) -> None:
    for error in (ModelError, SettingsError):
        with pytest.raises(error) as caught:
            validate_file(Outer, value, "file", error)
        assert (caught.value.where, caught.value.got) == (where, got)
        assert caught.value.expected == expected
    assert validate_file(Outer, {"name": "x"}, "file") == Outer(name="x")
