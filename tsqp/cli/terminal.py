"""Prompts, which are read as bytes and must be UTF-8, and a generation as a terminal shows it.

Tokens are shown in a thread that the generation does not wait for: an observer of the requests sees
when each token's begin. Were a token decoded and written between two requests, one that shows
nothing (half of a character, a special token) would come sooner.

The status line is the terminal's last row, while text scrolls above it. Plain VT100: the scroll
region excludes the last row, and every update saves and restores the cursor. Progress-bar libraries
ask the terminal for the cursor's position at every update, which waits for an answer and reads from
standard input; generated text must not wait for that.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click
from click.core import ParameterSource

from protocol.errors import PromptError, SettingsError, TsqpError
from tsqp.run.process import bytes_for_people

if TYPE_CHECKING:
    import torch

    from tee_side.engine.generation import Generation, GenerationResult, PadTotals, RpcTotals
    from tee_side.engine.tokenizer import TextStream
    from tee_side.runner import Runner
    from tsqp.run.settings import TextSettings

_SOURCES = ("prompt", "prompt_file", "prompt_token_ids")
_SAVE, _RESTORE = "\x1b7", "\x1b8"
# What has come is shown so often, by the clock and not by tokens.
TICK_S = 0.05
# More than are generated in any tick: with so many unwritten, standard output has stalled.
QUEUED_TOKENS = 1024
# How long the end of a run that has failed waits for such an output.
_STALLED_S = 2.0

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def for_terminal(text: str) -> str:
    """Escape control characters but newline and tab, so that no terminal obeys them."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class StatusLine:
    """Shows tokens, rate and traffic on stderr; silent where stderr is no terminal."""

    def __init__(
        self, policy: str, generation: Generation | None = None, *, enabled: bool = True
    ) -> None:
        self._policy = policy
        self._generation = generation
        # A machine's console says that it is one which scrolls alone.
        plain = os.environ.get("TERM") == "dumb"
        self._enabled = enabled and sys.stderr.isatty() and not plain
        self._size = shutil.get_terminal_size()
        self._started = time.perf_counter()
        # Tokens there were when the run began to wait for pads, and what it waits for.
        self._waiting: tuple[int, str] = (-1, "")

    def __enter__(self) -> StatusLine:
        if self._enabled:
            # A new line first, so that the row that is taken away was empty.
            try:
                _write(sys.stderr, f"\n\x1b[1A{_SAVE}\x1b[1;{self._size.lines - 1}r{_RESTORE}")
                self.draw()
            except BaseException:
                # A signal at this moment: `__exit__` would not be called.
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            _write(sys.stderr, f"{_SAVE}\x1b[r\x1b[{self._size.lines};1H\x1b[2K{_RESTORE}")

    def waiting(self, missing: int) -> None:
        """Note that the run waits for pads to be made, until the next token."""
        self._waiting = self._tokens(), f"out of pads, making more ({missing} missing)"

    def draw(self) -> None:
        """Draw what there is to say."""
        if not self._enabled:
            return
        generation, tokens = self._generation, self._tokens()
        text = "prefill"
        if self._waiting[0] == tokens:
            text = self._waiting[1]
        elif generation is not None and tokens:
            rate = tokens / (time.perf_counter() - self._started)
            text = f"tokens {tokens}, {rate:.1f} a second{traffic(generation.rpc)}"
            text += pads_left(generation.pads)
        size = shutil.get_terminal_size()
        region = "" if size == self._size else f"\x1b[1;{size.lines - 1}r"
        self._size = size
        shown = f"{self._policy}: {text}"[: size.columns - 1]
        _write(
            sys.stderr, f"{_SAVE}{region}\x1b[{size.lines};1H\x1b[2K\x1b[7m{shown}\x1b[0m{_RESTORE}"
        )

    def _tokens(self) -> int:
        return 0 if self._generation is None else self._generation.token_count


def traffic(rpc: RpcTotals) -> str:
    """Render what left the TEE and came back; nothing where nothing did."""
    if rpc.count == 0:
        return ""
    sent, received = bytes_for_people(rpc.bytes_sent), bytes_for_people(rpc.bytes_received)
    return f", {rpc.count} RPCs, {sent} up, {received} down"


def pads_left(pads: PadTotals | None) -> str:
    """Render how the pads stand; nothing for policies that need none."""
    if pads is None:
        return ""
    times = "once" if pads.waited == 1 else f"{pads.waited} times"
    out = [f"waited {times} for more"] if pads.waited else []
    out += [f"{pads.in_tee} steps in the TEE for lack of them"] if pads.in_tee else []
    return f", {pads.available} pads left{' (' + ', '.join(out) + ')' if out else ''}"


class Printer:
    """Writes tokens to standard output as text, twenty times a second, in a thread of its own.

    `text`: what decodes them; None writes nothing. `status`: redrawn as often. To a terminal
    control characters are written as `for_terminal` shows them; elsewhere the text is unchanged.
    """

    def __init__(self, text: TextStream | None, status: StatusLine) -> None:
        self._text, self._status = text, status
        self._queue: queue.Queue[int] = queue.Queue(QUEUED_TOKENS)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._open_line = False
        self._thread = threading.Thread(target=self._run, name="printer", daemon=True)

    def __enter__(self) -> Printer:
        self._status.__enter__()
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._closing.set()
        try:
            self._thread.join(None if kind is None else _STALLED_S)
        finally:
            self._status.__exit__()
        if kind is None and self._failure is not None:
            raise self._failure
        if kind is not None and self._open_line:  # what is said next begins a line
            with suppress(OSError):
                _write(sys.stdout, "\n")

    def put(self, token_id: int) -> None:
        """Hand over a token, with the same work for each. Raises what writing has raised."""
        if self._failure is not None:
            raise self._failure
        self._queue.put(token_id)

    def _run(self) -> None:
        while not self._closing.wait(TICK_S):
            self._show()
        self._show(last=True)

    def _show(self, *, last: bool = False) -> None:
        """Write what has come; after a failure take it only, so that `put` never blocks."""
        try:
            ids = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
            if self._text is not None and self._failure is None:
                text = "".join(map(self._text.feed, ids)) + (self._text.flush() if last else "")
                if text:
                    _write(sys.stdout, for_terminal(text) if sys.stdout.isatty() else text)
                    self._open_line = True
            self._status.draw()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that generates
            self._failure = error


def _write(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()


def stream(
    runner: Runner,
    generation: Generation,
    settings: TextSettings,
    keep_logits: list[torch.Tensor] | None = None,
) -> GenerationResult:
    """Run a generation to its end, and show text and statistics unless JSON is asked for.

    What is shown is decoded and written by a thread of its own: between two tokens there is
    the same work for each.
    """
    show = not settings.as_json
    stats = settings.stats and show
    status = StatusLine(runner.policy.name, generation, enabled=stats)
    with Printer(generation.text_stream() if show else None, status) as printer:
        runner.on_wait = status.waiting
        for sampled in generation.steps():
            printer.put(sampled.token_id)
            if keep_logits is not None:
                keep_logits.append(sampled.logits_V)
    result = generation.result()
    if show:
        click.echo(",".join(map(str, result.token_ids)) if result.text is None else "")
    if stats:
        timing, usage = result.timing, result.usage
        tpot_s = timing.tpot_s
        per_token = "" if tpot_s is None else f", {tpot_s * 1e3:.1f} ms a token after it"
        click.echo(
            f"{result.policy}: {usage.prompt_tokens} + {usage.completion_tokens} tokens"
            f" ({result.finish_reason}), first after {timing.ttft_s * 1e3:.0f} ms{per_token}"
            f"{traffic(result.rpc)}{pads_left(result.pads)}",
            err=True,
        )
    return result


def describe_error(error: TsqpError) -> dict[str, object]:
    """Return an error as JSON has it."""
    parts = {name: getattr(error, name) for name in ("where", "got", "expected", "retryable")}
    return {"type": type(error).__name__, **parts}


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
        parts = [part.strip() for part in value.split(",")]
        PromptError.unless(
            all(part.isascii() and part.isdecimal() for part in parts),
            "--prompt-token-ids",
            "something that is no integer",
            "integers like 1,2,3",
        )
        return [int(part) for part in parts]
    if name == "prompt":
        return require_utf8(value, "--prompt")
    text = read_text(value, "--prompt-file")
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def require_utf8(text: str, where: str) -> str:
    """Return a text from the command line. Raises PromptError if its bytes were not UTF-8."""
    # Python stands surrogates for such bytes, which no tokenizer takes.
    with PromptError.instead_of(UnicodeEncodeError, where, "bytes that are not UTF-8", "UTF-8"):
        text.encode("utf-8")
    return text


def read_line() -> str | None:
    """Return the next line of standard input, or None at its end. Raises PromptError."""
    line = sys.stdin.buffer.readline()
    return decode(line, "standard input").rstrip("\r\n") if line else None


def read_text(file: str | Path, option: str) -> str:
    """Return the text of a file, of standard input where a name is "-". Raises PromptError."""
    where = "standard input" if file == "-" else f"{option} {file}"
    with PromptError.for_os(where, "a text file", ValueError):
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    return decode(content, where)


def decode(content: bytes, where: str) -> str:
    """Return the text of UTF-8, less a byte-order mark before it. Raises PromptError."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise PromptError(
            where, got=f"a byte that is not UTF-8 at offset {error.start}", expected="UTF-8"
        ) from None
