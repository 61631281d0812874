"""A model's chat template: it runs in Jinja's immutable sandbox, for a limited time.

It is that of `chat_template.jinja`, or of `tokenizer_config.json`. A run that reads no conversation
does not import this.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from protocol.errors import ModelError, PromptError
from protocol.model.files import MAX_JSON_BYTES, find_file, read_file, read_json

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest

T = TypeVar("T")

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

# A template that takes a second renders ten thousand messages; the largest context has 4 MB.
_TEMPLATE_SECONDS = 10.0
_MAX_TEXT = 16 * 1024 * 1024
# Of a number that a template computes, in bits; arithmetic on larger ones is one step of Python's
# that may last for hours.
_MAX_BITS = 4096
_ENDS = "a template that ends, with a prompt"


class _EndlessTemplate(BaseException):
    """Derives from BaseException so that nothing on the way takes it for an error it may pass."""


class ChatTemplate:
    """The chat template of a model directory, if it has one, and what is named beside it.

    Raises ModelError where a file is damaged, and ManifestError for one that is not the manifest's.
    """

    def __init__(self, directory: Path, manifest: Manifest | None = None) -> None:
        self._directory = directory
        # Of the file that has the template.
        self._path = path = find_file(directory, CONFIG_FILE, manifest)
        config: dict[str, Any] = {} if path is None else read_json(path, manifest)
        self._class = config.get("tokenizer_class")
        template = config.get("chat_template")
        if isinstance(template, list):
            # Several named templates, of which "default" is the one for chat.
            named = [entry for entry in reversed(template) if isinstance(entry, dict)]
            template = next((e.get("template") for e in named if e.get("name") == "default"), None)
        if own := find_file(directory, TEMPLATE_FILE, manifest):
            self._path, content = own, read_file(own, MAX_JSON_BYTES, manifest)
            with ModelError.instead_of(
                UnicodeDecodeError, str(own), "bytes that are not UTF-8", "a template"
            ):
                template = content.decode("utf-8")
        self._template = template
        special = {name: config.get(name) for name in _SPECIAL_TOKENS}
        texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in special.items()}
        self._special = {name: text for name, text in texts.items() if text is not None}

    def info(self) -> dict[str, str | None]:
        """Return what the model's files name, as in `tokenizer_config.json`.

        `tokenizer_class`, `chat_template` (None for none) and the special tokens.
        """
        found = {"tokenizer_class": self._class, "chat_template": self._template, **self._special}
        return {name: text if isinstance(text, str) else None for name, text in found.items()}

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the model reads it, by default up to the assistant's next turn.

        Raises ModelError if the model has no chat template, a damaged one, or one that does not end
        in time, PromptError if it refuses the messages.
        """
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return self._compiled(given | self._special)

    @cached_property
    def _compiled(self) -> Callable[[Mapping[str, Any]], str]:
        """What renders: compiling takes longer than rendering."""
        template, where = self._template, f"{self._directory}: chat template"
        if not isinstance(template, str):
            raise ModelError(
                str(self._directory),
                "no chat template",
                f"one in {TEMPLATE_FILE} or {CONFIG_FILE} (or use generate)",
            )
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
            compiled = _in_time(lambda: environment.from_string(template))
        except _EndlessTemplate as error:
            raise ModelError(where, str(error), _ENDS) from None
        except Exception as error:  # noqa: BLE001 - Python's own errors, too: it compiles to Python
            got = f"{type(error).__name__}: {error}"[:160]
            raise ModelError(str(self._path), got, "a chat template without mistakes") from None

        def render(values: Mapping[str, Any]) -> str:
            try:
                return _in_time(lambda: _joined(compiled.generate(values)))
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
