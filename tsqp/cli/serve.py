"""`tee-runner serve` and `chat`: one run that answers again and again.

Many clients, over HTTP; or one person, in a terminal or by lines of standard input.
"""

from __future__ import annotations

import ipaddress
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from protocol.errors import LimitError, PromptError, SettingsError, TsqpError
from tsqp.cli.config import CONTEXT, config_option, takes
from tsqp.cli.terminal import describe_error, read_line, require_utf8, stream
from tsqp.run.load import engine_settings, hides, load, open_runner, sampling_of
from tsqp.run.process import complain, tell
from tsqp.run.server_settings import ServeSettings
from tsqp.run.settings import TextSettings, model_directory

if TYPE_CHECKING:
    from tee_side.engine.generation import Generation, GenerationResult
    from tee_side.runner import Runner


_SAY_EVERY_S = 2.0


@click.command(context_settings=CONTEXT)
@takes(ServeSettings)
@config_option
def serve(settings: ServeSettings) -> None:
    """Serve a model to clients of OpenAI's API.

    MODEL is a Hugging Face directory, or "demo". What the GPU side can see of prompts and answers
    is the policy's, and the first line on stderr says it.
    """
    from tsqp.extras import require

    for module in ("fastapi", "uvicorn", "prometheus_client"):
        require(module, "tee-runner serve", "the extra serve: pip install '.[serve]'")
    from tsqp.run.server import opened_parts, serve_forever

    # It is for the keys, which are read while the model is loaded.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    began = time.monotonic()
    # Before a key server is asked, as all that the settings alone show to be wrong.
    certificate, key = settings.tls_certificate is not None, settings.tls_key is not None
    SettingsError.unless(
        certificate == key, "--tls-certificate and --tls-key", "one of them", "both or none"
    )
    expected = "no --tls-key: keys of an attested server are made inside"
    SettingsError.unless(not (settings.attest and key), "--attest", "--tls-key as well", expected)
    expected = "an address of this machine alone: it shows what crosses to every client that asks"
    SettingsError.unless(
        not settings.page or _is_loopback(settings.host),
        "--page",
        f"--host {settings.host}",
        expected,
    )
    release = None
    if settings.seal_key_server is not None:
        from tsqp.run.attestation import refuse_inside, release_key

        refuse_inside(model_directory(settings.model), settings)
        release = partial(release_key, settings)
    loaded = load(settings, text_needed=True, release=release)
    policy = loaded.policy
    reuses, guesses = settings.prefix_reuse, settings.speculative == "ngram"
    engine = replace(
        engine_settings(settings),
        max_model_len=settings.max_model_len,
        max_sequences=settings.max_sequences,
        max_waiting=settings.max_waiting,
        speculative_tokens=settings.speculative_tokens if guesses else 0,
        prefix_reuse=not hides(policy) if reuses is None else reuses,
    )
    _say(began, f"loading {settings.model} under policy {policy.name}")
    identity = None
    if settings.attest:
        from tsqp.run.attestation import identify

        identity = identify(settings, loaded.manifest, policy)
        _say(began, identity.said)
    feed = None
    if settings.page:
        from tsqp.page.feed import Feed

        feed = Feed()
    with (
        opened_parts(settings, identity) as parts,
        open_runner(
            settings,
            loaded,
            None,
            idles=True,
            engine=engine,
            feed=feed,
            on_load=_Progress(partial(_say, began)),
        ) as runner,
    ):
        _say(began, f"{runner.config.num_hidden_layers} layers are ready; making a first token")
        serve_forever(runner, settings, parts, lambda text: _say(began, text), feed)


class _Progress:
    """Says every few seconds how far weights are loaded."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._next_s = say, time.monotonic() + _SAY_EVERY_S

    def __call__(self, what: str, done: int, total: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _SAY_EVERY_S
            self._say(f"{what}: {done} of {total}")


def _say(began: float, text: str) -> None:
    tell(f"{time.monotonic() - began:6.1f} s  {text}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
        session = Session(runner, settings, system, in_terminal=in_terminal)
        try:
            session.run(_terminal_reader() if in_terminal else read_line)
        except TsqpError as found:
            error = found
            raise
        finally:
            # Whatever ends the conversation (a lost service, Ctrl-C): what was said is still shown.
            if settings.as_json and (session.turns or error):
                said: dict[str, object] = {
                    "messages": session.messages,
                    "turns": [turn.model_dump() for turn in session.turns],
                }
                said |= {"error": describe_error(error)} if error else {}
                click.echo(json.dumps(said))


class Session:
    """What was said, and how much of it the model is still told.

    `in_terminal`: lines that begin with / are commands, Ctrl-C stops an answer, and what can be put
    right by another message does not end the chat.
    """

    def __init__(
        self, runner: Runner, settings: TextSettings, system: str | None, *, in_terminal: bool
    ) -> None:
        from tsqp.run.conversations import chat_template

        self._runner = runner
        self._template = chat_template(settings, runner.tokenizer)
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
                try:
                    self.answer(line)
                except TsqpError as error:
                    refused = isinstance(error, PromptError | LimitError)
                    if not self._in_terminal or not (refused or error.retryable):
                        raise
                    complain(f"error: {error}")

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

    def answer(self, line: str) -> None:
        """Generate an answer to a message, and keep both."""
        user = {"role": "user", "content": line}
        ids, forgotten = self._fitting(user)
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

    def _fitting(self, user: Message) -> tuple[list[int], int]:
        """Return the prompt, and how many messages had to be left out for it.

        The oldest turns are, until a quarter of the context is free, or `--max-new-tokens`.
        """
        from tee_side.chat.template import Conversation

        context = self._runner.config.context_length
        room = context - min(self._settings.max_new_tokens, context // 4)
        forgotten = self._forgotten
        while True:
            told = [*self._system, *self._said[forgotten:], user]
            ids = self._template.encode(Conversation(messages=told))
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
