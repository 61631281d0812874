"""What is said of the first wrong field of a file."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import ModelError, SettingsError
from protocol.validation import first_fault, validate_file


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    size: int


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=3)]
    inner: tuple[Inner, ...] = ()


def test_a_right_file_is_a_model() -> None:
    assert validate_file(Outer, {"name": "x"}, "file") == Outer(name="x")


@pytest.mark.parametrize(
    ("value", "where", "got", "expected"),
    [
        ({}, "file: name", "nothing", "a value"),
        ({"name": 3}, "file: name", "3", "a valid string"),
        ({"name": "x", "inner": ({},)}, "file: inner.0.size", "nothing", "a value"),
        (
            {"name": "x", "inner": ({"size": 1, "sise": 2},)},
            "file: inner.0.sise",
            "2",
            "no such key",
        ),
        ({"nome": "x"}, "file: nome", "'x'", "no such key"),
        ({"n" * 500: "x"}, f"file: '{'n' * 60}'...", "'x'", "no such key"),
        ([], "file", "[]", "a valid dictionary or instance of Outer"),
    ],
)
def test_the_first_fault_is_named(value: Any, where: str, got: str, expected: str) -> None:
    for error in (ModelError, SettingsError):
        with pytest.raises(error) as caught:
            validate_file(Outer, value, "file", error)
        assert (caught.value.where, caught.value.got, caught.value.expected) == (
            where,
            got,
            expected,
        )


def test_a_misspelt_key_says_more_than_the_missing_one() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"nome": "x"})
    fault = first_fault(caught.value)
    assert (fault.kind, fault.path, fault.field) == ("extra_forbidden", ("nome",), "nome")


def test_of_many_unknown_keys_pydantic_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take kilobytes for each."""
    monkeypatch.setattr(Outer, "model_validate", None)
    with pytest.raises(ModelError, match="file: 0: got 0, expected no such key"):
        validate_file(Outer, {str(key): key for key in range(1000)}, "file")
