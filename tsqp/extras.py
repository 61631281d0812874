"""What only an extra installs: a missing one is said in one line, before any work."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from protocol.errors import SettingsError

_OURS = frozenset({"protocol", "tee_side", "gpu_side", "tsqp"})


@contextmanager
def needing(where: str, expected: str) -> Iterator[None]:
    """Raise SettingsError in place of an ImportError of the block: `expected` names the extra."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise  # a mistake of ours, which no extra mends
        # One that is there and does not load says why; its name alone would mislead.
        missing = isinstance(error, ModuleNotFoundError)
        raise SettingsError(
            where, got=f"no module {error.name}" if missing else str(error), expected=expected
        ) from None


def require(module: str, where: str, expected: str) -> None:
    """Raise SettingsError where a module is not installed: `expected` names the extra."""
    SettingsError.unless(find_spec(module) is not None, where, f"no module {module}", expected)
