"""`tee-runner generate` and `chat`: text from one prompt, and a conversation.

That is held in a terminal, or by lines of standard input.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from protocol.errors import LimitError, PromptError, TsqpError
from tsqp.cli.config import CONTEXT, config_option
from tsqp.cli.options import takes
from tsqp.cli.terminal import chosen_prompt, describe_error, read_line, require_utf8, stream
from tsqp.processes import complain, tell
from tsqp.run.load import load, open_runner, policy_digest, sampling_of
from tsqp.run.settings import TextSettings

if TYPE_CHECKING:
    import torch

    from tee_side.engine.generation import Generation, GenerationResult
    from tee_side.engine.tokenizer import Tokenizer
    from tee_side.runner import Runner
    from tsqp.operator_table import OperatorTotals


class PrivateFile(click.File):
    """A file to write that its owner alone can read: mode 0600, also where it was there before."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> BinaryIO:
        """Open it for appending, so that a run that is refused leaves an old file as it was."""
        try:
            file = open(value, "ab", opener=partial(os.open, mode=0o600))  # noqa: SIM115
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                os.fchmod(file.fileno(), 0o600)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self.fail(f"{value}: got {reason}, expected a file to write", param, ctx)
        if ctx is not None:
            ctx.call_on_close(partial(_close, file))
        return file


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # what could not be written was said by `_write`
        file.close()


@click.command(context_settings=CONTEXT)
@click.option("--prompt", metavar="TEXT")
@click.option(
    "--prompt-file",
    metavar="FILE",
    help="UTF-8; - reads standard input. A final newline and a byte-order mark are dropped.",
)
@click.option("--prompt-token-ids", metavar="1,2,3")
@click.option(
    "--report",
    type=PrivateFile(),
    metavar="FILE",
    help="Write the JSON object, with totals per operator, to this file.",
)
@click.option(
    "--save-logits",
    type=PrivateFile(),
    metavar="FILE",
    help="Write the logits of every new token to this safetensors file, to compare them.",
)
@takes(TextSettings)
@config_option
@click.pass_context
def generate(
    context: click.Context,
    /,
    *,
    settings: TextSettings,
    prompt: str | None,
    prompt_file: str | None,
    prompt_token_ids: str | None,
    report: BinaryIO | None,
    save_logits: BinaryIO | None,
) -> None:
    """Generate text from a prompt.

    MODEL is a Hugging Face directory, or "demo". Prompt and answer are on this machine only: what
    the GPU side can see of them is the policy's, and the first line on stderr says it.
    """
    from tsqp.operator_table import OperatorTable

    given = chosen_prompt(
        context, prompt=prompt, prompt_file=prompt_file, prompt_token_ids=prompt_token_ids
    )
    table = OperatorTable() if report else None
    logits: list[torch.Tensor] = []
    generation: Generation | None = None
    try:
        sampling = sampling_of(settings)
        # Token ids are enough for a model without a tokenizer; what comes out are token ids, too.
        loaded = load(settings, text_needed=isinstance(given, str))
        if isinstance(given, str):
            given = [] if loaded.tokenizer is None else loaded.tokenizer.encode(given)
        with open_runner(settings, loaded, table) as runner:
            generation = runner.generate(
                given,
                max_new_tokens=settings.max_new_tokens,
                sampling=sampling,
                stop=settings.stop,
                with_text=loaded.tokenizer is not None,
            )
            result = stream(runner, generation, settings, logits if save_logits else None)
            # The digest of the model reads the configuration and every light weight.
            wanted = settings.as_json or report
            described = _described(runner, result, settings.model, sampling.seed) if wanted else {}
    except TsqpError as error:
        if settings.as_json:  # an object too, with the tokens so far
            token_ids, text = (generation.token_ids, generation.text) if generation else ([], "")
            click.echo(
                json.dumps(
                    {"error": describe_error(error), "token_ids": token_ids, "text": text or ""}
                )
            )
        raise
    if settings.as_json:
        click.echo(json.dumps(described))
    if report and table:
        operators = {name: _costs(totals) for name, totals in table.totals.items()}
        _write(report, json.dumps(described | {"operators": operators}, indent=1).encode())
    if save_logits:
        import torch
        from safetensors.torch import save

        _write(save_logits, save({"logits": torch.stack(logits).to(torch.float32)}))


def _described(
    runner: Runner, result: GenerationResult, model: str, seed: int | None
) -> dict[str, object]:
    """Return a result with what it was made with, so that it can be made again."""
    from protocol import native

    return result.model_dump() | {
        "model": model,
        "model_digest": runner.model_digest,
        "policy_digest": policy_digest(runner.policy).hex(),
        "kernels": native.choice().variant,
        "cores": runner.cores._asdict(),
        "seed": seed,
    }


def _costs(totals: OperatorTotals) -> dict[str, object]:
    counts = ("place", "calls", "round_trips", "bytes_sent", "bytes_received")
    times = {
        f"{part}_s": getattr(totals, f"{part}_ns") / 1e9 for part in ("tee", "wire", "queue", "gpu")
    }
    return {name: getattr(totals, name) for name in counts} | times


def _write(file: BinaryIO, content: bytes) -> None:
    """Write and flush, because click drops errors of closing. Raises OSError with the name."""
    try:
        with suppress(OSError):  # a device has no length
            file.truncate(0)
        file.write(content)
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from None


Message = dict[str, str]

COMMANDS = {
    "/help": "list these commands",
    "/clear": "forget what was said, but for the system message",
    "/system [TEXT]": "show the system message, or set it and forget what was said",
    "/stats": "turn statistics after each answer on or off",
    "/quit": "end the chat, as Ctrl-D does; Ctrl-C stops an answer",
}


@click.command(context_settings=CONTEXT)
@click.option("--system", metavar="TEXT", help="System message, if the model's template has one.")
@takes(TextSettings)
@config_option
def chat(*, settings: TextSettings, system: str | None) -> None:
    """Talk with a model, through its chat template; one line a turn, end of input ends it.

    MODEL is a Hugging Face directory, or "demo". In a terminal lines can be edited and called back,
    /help lists commands, and Ctrl-C stops an answer; what is typed is kept in memory only.
    """
    system = require_utf8(system, "--system") if system else None
    loaded = load(settings, text_needed=True)
    error: TsqpError | None = None
    in_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    with open_runner(settings, loaded, None, idles=True) as runner:
        conversation = Conversation(runner, settings, system, in_terminal=in_terminal)
        try:
            conversation.run(_terminal_reader() if in_terminal else read_line)
        except TsqpError as found:
            error = found
            raise
        finally:
            # Whatever ends the conversation (a lost service, Ctrl-C): what was said is still shown.
            if settings.as_json and (conversation.turns or error):
                said: dict[str, object] = {
                    "messages": conversation.messages,
                    "turns": [turn.model_dump() for turn in conversation.turns],
                }
                said |= {"error": describe_error(error)} if error else {}
                click.echo(json.dumps(said))


class Conversation:
    """What was said, and how much of it the model is still told.

    `in_terminal`: lines that begin with / are commands, Ctrl-C stops an answer, and what can be put
    right by another message does not end the chat.
    """

    def __init__(
        self, runner: Runner, settings: TextSettings, system: str | None, *, in_terminal: bool
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._in_terminal = in_terminal
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        # Of user and assistant in turns; those before `_forgotten` do not fit any more.
        self._said: list[Message] = []
        self._forgotten = 0
        self.turns: list[GenerationResult] = []

    @property
    def messages(self) -> list[Message]:
        """The system message, and everything that was said since it was set."""
        return self._system + self._said

    def run(self, read: Callable[[], str | None]) -> None:
        """Answer line after line until there is none."""
        while True:
            # While the person thinks, pads are made.
            with self._runner.filling():
                line = read()
            if line is None or (self._in_terminal and line.strip() == "/quit"):
                return
            if self._in_terminal and line.startswith("/"):
                self._obey(line)
            elif line.strip():
                self._answer_or_complain(line)

    def _obey(self, line: str) -> None:
        """Carry out a command."""
        name, _, rest = line.strip().partition(" ")
        if name == "/clear" or (name == "/system" and rest):
            if rest:
                self._system = [{"role": "system", "content": rest}]
            self._said, self._forgotten = [], 0
            tell("what was said is forgotten")
        elif name == "/system":
            tell(self._system[0]["content"] if self._system else "there is no system message")
        elif name == "/stats":
            self._settings = replace(self._settings, stats=not self._settings.stats)
            tell(f"statistics are {'on' if self._settings.stats else 'off'}")
        else:
            if name != "/help":
                tell(f"{name} is no command; these are:")
            for command, meaning in COMMANDS.items():
                tell(f"{command:16}{meaning}")

    def _answer_or_complain(self, line: str) -> None:
        try:
            self.answer(line)
        except TsqpError as error:
            refused = isinstance(error, PromptError | LimitError)
            if not self._in_terminal or not (refused or error.retryable):
                raise
            complain(f"error: {error}")

    def answer(self, line: str) -> None:
        """Generate an answer to a message, and keep both."""
        user = {"role": "user", "content": line}
        ids, forgotten = self._fitting(user, self._runner.tokenizer)
        if forgotten > self._forgotten:
            turns = (forgotten - self._forgotten) // 2
            tell(f"the context is full: the oldest {turns} turn(s) are not told to the model")
        generation = self._runner.generate(
            ids,
            max_new_tokens=self._settings.max_new_tokens,
            sampling=sampling_of(self._settings),
            stop=self._settings.stop,
        )
        with _stopped_by_ctrl_c(generation, enabled=self._in_terminal):
            result = stream(self._runner, generation, self._settings)
        self._forgotten = forgotten
        self.turns.append(result)
        self._said += [user, {"role": "assistant", "content": result.text or ""}]

    def _fitting(self, user: Message, tokenizer: Tokenizer) -> tuple[list[int], int]:
        """Return the prompt, and how many messages had to be left out for it.

        The oldest turns are, until a quarter of the context is free, or `--max-new-tokens`.
        """
        context = self._runner.config.context_length
        room = context - min(self._settings.max_new_tokens, context // 4)
        forgotten = self._forgotten
        while True:
            told = [*self._system, *self._said[forgotten:], user]
            ids = tokenizer.apply_chat_template(told)
            if len(ids) <= room or forgotten >= len(self._said):
                return ids, forgotten
            forgotten += 2


@contextmanager
def _stopped_by_ctrl_c(generation: Generation, *, enabled: bool) -> Iterator[None]:
    """Let Ctrl-C end the answer after the next token; a second one ends the program, as ever."""
    if not enabled:
        yield
        return

    def stop(*_: object) -> None:
        generation.stop()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _terminal_reader() -> Callable[[], str | None]:
    """Return what reads a line that can be edited; Ctrl-C at the prompt discards the line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(
        "> ",
        completer=WordCompleter([command.split()[0] for command in COMMANDS], sentence=True),
        complete_while_typing=False,
        # Standard output is for answers alone.
        output=create_output(sys.stderr),
    )

    def read() -> str | None:
        while True:
            try:
                return require_utf8(session.prompt(), "standard input")
            except KeyboardInterrupt:
                tell("(Ctrl-D or /quit ends the chat)")
            except EOFError:
                return None

    return read
