"""A missing extra is one line that names it."""

from __future__ import annotations

import importlib
import sys

import pytest
from click.testing import CliRunner

from protocol.errors import SettingsError
from tsqp.cli.main import command
from tsqp.extras import needing, require


def test_a_missing_module_is_named_with_its_extra() -> None:
    with pytest.raises(SettingsError) as refused, needing("tsqp x", "the extra y"):
        importlib.import_module("no_such_module")
    assert str(refused.value) == "tsqp x: got no module no_such_module, expected the extra y"


def test_a_module_that_does_not_load_says_why() -> None:
    with pytest.raises(SettingsError) as refused, needing("tsqp x", "the extra y"):
        raise ImportError("libpng.so: cannot open shared object file", name="its_part")
    assert refused.value.got == "libpng.so: cannot open shared object file"


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(KeyError), needing("tsqp x", "the extra y"):
        raise KeyError


def test_a_module_that_is_needed_later_is_asked_for_first() -> None:
    require("pathlib", "tsqp x", "the extra y")
    with pytest.raises(SettingsError) as refused:
        require("no_such_module", "tsqp x", "the extra y")
    assert str(refused.value) == "tsqp x: got no module no_such_module, expected the extra y"


@pytest.mark.parametrize(
    ("arguments", "extra"), [(("demo",), "demo"), (("bench", "demo", "--device", "null"), "bench")]
)
def test_commands_that_compare_with_transformers_say_so_before_any_work(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], extra: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, SettingsError)
    assert result.exception.got == "no module transformers"
    assert f"the extra {extra}" in result.exception.expected
    assert result.stdout == ""
