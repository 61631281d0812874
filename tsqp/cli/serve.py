"""`tee-runner serve`: many clients, over HTTP."""

from __future__ import annotations

import ipaddress
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import click

from protocol.errors import SettingsError
from tsqp.cli.config import CONTEXT, config_option
from tsqp.cli.options import takes
from tsqp.run.load import engine_settings, hides, load, open_runner
from tsqp.run.process import tell
from tsqp.run.settings import ServeSettings, model_directory

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
    where = "--tls-certificate and --tls-key"
    SettingsError.unless(certificate == key, where, "one of them", "both or none")
    expected = "no --tls-key: keys of an attested server are made inside"
    SettingsError.unless(not (settings.attest and key), "--attest", "--tls-key as well", expected)
    expected = "an address of this machine alone: it shows what crosses to every client that asks"
    shown = not settings.page or _is_loopback(settings.host)
    SettingsError.unless(shown, "--page", f"--host {settings.host}", expected)
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
