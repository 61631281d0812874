"""A model's chat template: it runs in Jinja's immutable sandbox, for a limited time.

A run that reads no conversation does not import it.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from protocol.errors import ModelError, PromptError

T = TypeVar("T")

# A template that takes a second renders ten thousand messages; the largest context has 4 MB.
_TEMPLATE_SECONDS = 10.0
_MAX_TEXT = 16 * 1024 * 1024
# Of a number that a template computes, in bits; arithmetic on larger ones is one step of Python's
# that may last for hours.
_MAX_BITS = 4096
_ENDS = "a template that ends, with a prompt"


class _EndlessTemplate(BaseException):
    """Derives from BaseException so that nothing on the way takes it for an error it may pass."""


def compiled(text: str, path: Path, where: str) -> Callable[[Mapping[str, Any]], str]:
    """Compile a template, which takes longer than rendering; return what renders it.

    `path`: of the file that has it; `where`: how errors call what it does. Raises ModelError for
    one that is damaged, or does not end in time. What renders it raises ModelError where it does
    not end in time, PromptError if it refuses the messages.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.binop_table |= {"*": _times, "**": _power}
    try:
        template = _in_time(lambda: environment.from_string(text))
    except _EndlessTemplate as error:
        raise ModelError(where, str(error), _ENDS) from None
    except Exception as error:  # noqa: BLE001 - Python's own errors, too: it compiles to Python
        got = f"{type(error).__name__}: {error}"[:160]
        raise ModelError(str(path), got, "a chat template without mistakes") from None

    def render(values: Mapping[str, Any]) -> str:
        try:
            return _in_time(lambda: _joined(template.generate(values)))
        except _EndlessTemplate as error:
            raise ModelError(where, str(error), _ENDS) from None
        except Exception as error:  # noqa: BLE001 - anything; `from error` would quote the prompt
            # Its message may hold the prompt.
            raise PromptError(
                where,
                f"{type(error).__name__} (a template's own words are not shown)",
                "a conversation that the template accepts",
            ) from None

    return render


def _joined(found: Iterable[str]) -> str:
    pieces, size = [], 0
    for piece in found:
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_TEXT:
            raise _EndlessTemplate(f"more than {_MAX_TEXT} characters")
    return "".join(pieces)


def _in_time(work: Callable[[], T]) -> T:
    """Do what a template does; raise _EndlessTemplate when it goes on for too long.

    Whatever loops, calls itself or emits nothing executes lines of Python, and each of them looks
    at the clock. A trace function sees them all, in this thread only; it makes a render of 5 ms
    one of 15 ms. One step inside of Python's own C code is not interrupted.
    """
    end = time.monotonic() + _TEMPLATE_SECONDS

    def watch(_frame: FrameType, _event: str, _argument: object) -> Any:
        if time.monotonic() > end:
            raise _EndlessTemplate(f"no end after {_TEMPLATE_SECONDS:g} s")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        return work()
    finally:
        sys.settrace(before)


def _times(left: Any, right: Any) -> Any:
    """Multiply, within limits."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            if len(one) * other > _MAX_TEXT:
                raise OverflowError("a repetition that is too long")
        elif isinstance(one, int) and one.bit_length() > _MAX_BITS:
            raise OverflowError("a number that is too large")
    return left * right


def _power(left: Any, right: Any) -> Any:
    """Raise to a power, within limits."""
    whole = isinstance(left, int) and isinstance(right, int)
    if whole and left.bit_length() * right > _MAX_BITS:
        raise OverflowError("a number that is too large")
    return left**right
