"""A missing extra is one line that names it."""

from __future__ import annotations

import importlib

import pytest

from protocol.errors import SettingsError
from tsqp.extras import needing


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
