"""Where a prompt comes from, and that its text is UTF-8: files and lines are read as bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click.core import ParameterSource

from protocol.errors import PromptError, SettingsError

_SOURCES = ("prompt", "prompt_file", "prompt_token_ids")


def chosen_prompt(
    context: click.Context,
    *,
    prompt: str | None,
    prompt_file: str | None,
    prompt_token_ids: str | None,
) -> str | list[int]:
    """Return the one prompt that was given: a text, or token ids.

    One on the command line comes before others in the environment or the settings file. Raises
    SettingsError if there is none or more than one, PromptError if it cannot be read.
    """
    values = dict(zip(_SOURCES, (prompt, prompt_file, prompt_token_ids), strict=True))
    given = {name: value for name, value in values.items() if value is not None}
    typed = {
        name: value
        for name, value in given.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    given = typed or given
    SettingsError.unless(
        len(given) == 1,
        "prompt",
        " and ".join(f"--{name.replace('_', '-')}" for name in given) or "none",
        "exactly one of --prompt, --prompt-file and --prompt-token-ids",
    )
    [(name, value)] = given.items()
    if name == "prompt_token_ids":
        return _parse_ids(value)
    return _read_file(value) if name == "prompt_file" else require_utf8(value, "--prompt")


def require_utf8(text: str, where: str) -> str:
    """Return a text from the command line. Raises PromptError if its bytes were not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # Python stands surrogates for such bytes, which no tokenizer takes.
        raise PromptError(where, got="bytes that are not UTF-8", expected="UTF-8") from None
    return text


def read_line() -> str | None:
    """Return the next line of standard input, or None at its end. Raises PromptError."""
    line = sys.stdin.buffer.readline()
    return decode(line, "standard input").rstrip("\r\n") if line else None


def _read_file(name: str) -> str:
    """Return the text of a file, or of standard input, without its last newline."""
    where = "standard input" if name == "-" else name
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PromptError(
            f"--prompt-file {name}", got=reason or "an unreadable file", expected="a text file"
        ) from None
    text = decode(content, where)
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def decode(content: bytes, where: str) -> str:
    """Return the text of UTF-8, less a byte-order mark before it. Raises PromptError."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise PromptError(
            where, got=f"a byte that is not UTF-8 at offset {error.start}", expected="UTF-8"
        ) from None


def _parse_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    PromptError.unless(
        all(part.isascii() and part.isdecimal() for part in parts),
        "--prompt-token-ids",
        "something that is no integer",
        "integers like 1,2,3",
    )
    return [int(part) for part in parts]
