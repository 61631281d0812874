"""What is installed only with an extra: said in one line where it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import SettingsError


@contextmanager
def needing(where: str, expected: str) -> Iterator[None]:
    """Raise SettingsError in place of an ImportError of the block: `expected` names the extra."""
    try:
        yield
    except ImportError as error:
        # One that is there and does not load says why; its name alone would mislead.
        missing = isinstance(error, ModuleNotFoundError)
        got = f"no module {error.name}" if missing else str(error)
        raise SettingsError(where, got=got, expected=expected) from None
