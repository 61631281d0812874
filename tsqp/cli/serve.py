"""`tee-runner serve`: many clients, over HTTP."""

from __future__ import annotations

import ipaddress
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from protocol.errors import SettingsError
from tsqp.cli.attesting import attest_options
from tsqp.cli.options import use
from tsqp.cli.running import SERVING_OPTIONS, engine_settings, hides, load, open_runner
from tsqp.cli.settings import CONTEXT, PATH, FiniteFloatRange, config_option, model_argument

_SAY_EVERY_S = 2.0
_COUNT = click.IntRange(min=1)


@click.command(context_settings=CONTEXT)
@model_argument()
@click.option("--host", default="127.0.0.1", help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0: one that is free.")
@click.option("--tls-certificate", type=PATH, metavar="FILE", help="PEM, with its chain.")
@click.option("--tls-key", type=PATH, metavar="FILE", help="PEM, of the certificate.")
@attest_options("clients")
@click.option(
    "--seal-key-server",
    metavar="URL",
    help="MODEL is sealed: a tsqp keyserver that gives its key to what --attest proves.",
)
@click.option(
    "--api-keys",
    type=PATH,
    metavar="FILE",
    help="Who may ask, and how much (tsqp api-key); read again on SIGHUP. Without it: everyone.",
)
@click.option(
    "--allow-origin",
    multiple=True,
    metavar="ORIGIN",
    help="Of web pages that may ask, * for all; repeatable.",
)
@click.option("--served-model-name", metavar="NAME", help="Default: the name of MODEL.")
@click.option(
    "--max-model-len", type=_COUNT, help="Prompt and answer; default: the model's context."
)
@click.option(
    "--default-max-tokens", type=_COUNT, default=1024, help="Of an answer without max_tokens."
)
@click.option("--max-sequences", type=_COUNT, default=64, help="That run at a time; others wait.")
@click.option("--max-waiting", type=_COUNT, default=256, help="Requests that wait; others get 503.")
@click.option(
    "--speculative",
    type=click.Choice(["none", "ngram"]),
    default="none",
    help="Guess tokens from what the text repeats. Same text, fewer round trips; more pads.",
)
@click.option(
    "--speculative-tokens", type=click.IntRange(1, 16), default=4, help="Guessed at a time."
)
@click.option(
    "--prefix-reuse/--no-prefix-reuse",
    default=None,
    show_default="on, but off where pads or shares hide what leaves",
    help="Keep keys and values of earlier turns, for later ones of the same API key.",
)
@click.option(
    "--fixed-tempo-ms",
    type=FiniteFloatRange(0, 60_000),
    default=0.0,
    help="Send a token at most so often, on a clock of its own; 0: as they come.",
)
@click.option(
    "--round-usage", type=_COUNT, default=1, help="Tell token counts as multiples of this number."
)
@click.option(
    "--pooling", type=click.Choice(["last", "mean"]), default="last", help="Of /v1/embeddings."
)
@click.option(
    "--audit-log", type=PATH, metavar="FILE", help="Sealed log: who, when, how much; no text."
)
@click.option("--audit-key", type=PATH, metavar="FILE", help="Its key (tsqp audit new-key).")
@click.option("--audit-key-fd", type=click.IntRange(0), help="An open file that has its key.")
@click.option("--page", is_flag=True, help="For development: a page to chat at /, with what left.")
@use(*SERVING_OPTIONS)
@config_option
def serve(**settings: Any) -> None:
    """Serve a model to clients of OpenAI's API.

    MODEL is a Hugging Face directory, or "demo". What the GPU side can see of prompts and answers
    is the policy's, and the first line on stderr says it.
    """
    from tsqp.extras import require

    for module in ("fastapi", "uvicorn", "prometheus_client"):
        require(module, "tee-runner serve", "the extra serve: pip install '.[serve]'")
    from tsqp.server import opened_parts, serve_forever

    # It is for the keys, which are read while the model is loaded.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    began = time.monotonic()
    _require_both(settings, "tls_certificate", "tls_key")
    if settings["attest"] and settings["tls_key"]:
        expected = "no --tls-key: keys of an attested server are made inside"
        raise SettingsError("--attest", got="--tls-key as well", expected=expected)
    if settings["page"] and not _is_loopback(settings["host"]):
        expected = "an address of this machine alone: it shows what crosses, to anyone who asks"
        raise SettingsError("--page", got=f"--host {settings['host']}", expected=expected)
    loaded = load(settings, text_needed=True)
    policy = loaded.policy
    # Settings stay as they were given: a digest of them may have been told to a key server.
    reuses = settings["prefix_reuse"]
    guesses = settings["speculative"] == "ngram"
    engine = engine_settings(
        settings,
        max_model_len=settings["max_model_len"],
        max_sequences=settings["max_sequences"],
        max_waiting=settings["max_waiting"],
        speculative_tokens=settings["speculative_tokens"] if guesses else 0,
        prefix_reuse=not hides(policy) if reuses is None else reuses,
    )
    _say(began, f"loading {settings['model']} under policy {policy.name}")
    identity = None
    if settings["attest"]:
        from tsqp.attestation import identify

        identity = identify(settings, loaded)
        _say(began, identity.said)
    feed = None
    if settings["page"]:
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
    click.echo(f"{time.monotonic() - began:6.1f} s  {text}", err=True)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require_both(settings: dict[str, Any], *names: str) -> None:
    given = [name for name in names if settings[name] is not None]
    if given and len(given) < len(names):
        options = [f"--{name.replace('_', '-')}" for name in names]
        raise SettingsError(" and ".join(options), got="one of them", expected="both or none")


def model_name(settings: dict[str, Any]) -> str:
    """Return under which name the model is served."""
    return settings["served_model_name"] or Path(settings["model"]).resolve().name
