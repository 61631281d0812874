"""`tee-runner`: run the forward pass in the TEE; its commands `serve` and `pads` are here.

`serve` has many clients, over HTTP; `pads` makes pads ahead of use, and says how a bank stands.
"""

from __future__ import annotations

import ipaddress
import json
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import click

from protocol.errors import SettingsError
from tsqp.cli.config import CONTEXT, Commands, config_option, version_option
from tsqp.cli.options import takes, use
from tsqp.cli.program import run
from tsqp.processes import bytes_for_people, tell
from tsqp.run.load import engine_settings, hides, load, open_runner
from tsqp.run.settings import RunSettings, ServeSettings, model_directory
from tsqp.run.trust import (
    BANK,
    BATCH_TOKENS,
    bank_place,
    load_manifest,
    load_pinned_policy,
    open_seal,
    padded,
    product_operations,
)

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

    from tee_side.protect.pads.bank import BankFile, PadBankStatus
    from tee_side.protect.pads.maker import PadMaker


@click.group(
    "tee-runner",
    cls=Commands,
    modules={"generate": "generate", "chat": "generate"},
    context_settings=CONTEXT,
)
@config_option
@version_option
def command() -> None:
    """Run a model's forward pass in the TEE, and its heavy operators on a gpu-service.

    Shell completion: tsqp completion bash|zsh|fish.
    """


_SAY_EVERY_S = 2.0


@command.command(context_settings=CONTEXT)
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


_SEAL = ("seal_key", "seal_key_fd", "seal_key_command", "seal_digest")
_MODEL = ("model", "policy", "manifest", "manifest_digest", *_SEAL, "kernels", "threads")
_THE_BANK = {"required": True, "help": "The pad bank."}


@command.group(context_settings=CONTEXT)
@config_option
def pads() -> None:
    """Make one-time pads ahead of use, and say how a bank stands.

    A pad is used for one token and never again. The bank is encrypted under a key that must stay
    in the TEE.
    """


@pads.command(context_settings=CONTEXT)
@click.option("--tokens", type=click.IntRange(min=1), required=True, help="How many to make.")
@click.option(
    "--capacity",
    type=click.IntRange(min=1),
    help="Tokens that a new bank has space for; default: --tokens. A bank keeps its size.",
)
@takes(
    RunSettings,
    *BANK,
    *_MODEL,
    bank=_THE_BANK,
    policy={"help": "Pads are made for the operators that it puts under pads."},
)
@config_option
def make(*, settings: RunSettings, tokens: int, capacity: int | None) -> None:
    """Make pads for MODEL into a bank, which is created if it is not there.

    Weights are read from MODEL one layer at a time, so that memory does not grow with the model.
    Interrupted work is made again; nothing is used twice.
    """
    import torch

    from protocol import native
    from protocol.integer import check_kernels
    from protocol.model.checkpoint import Checkpoint, light_tensors
    from protocol.model.config import read_config
    from protocol.model.identity import linear_digest, model_digest
    from tee_side.protect.pads.bank import BankFile, read_bank_status
    from tee_side.protect.pads.bank_format import MAX_GROUP, Purpose
    from tee_side.protect.pads.maker import PadMaker, read_weights
    from tee_side.protect.sites import tensors_of

    place = bank_place(settings)
    if place is None:
        raise SettingsError("--bank", got="none", expected="the pad bank")
    native.set_up(settings.kernels, settings.threads)
    directory = model_directory(settings.model)
    open_seal(directory, settings)
    pinned = load_manifest(directory, settings)
    config, checkpoint = read_config(directory, pinned), Checkpoint(directory, pinned)
    chosen = load_pinned_policy(settings.policy, pinned)
    chosen.check(config.num_hidden_layers)
    mask, layout = padded(chosen, config)
    sites = [site.site for site in layout.sites]
    checkpoint.require(light_tensors(config) | tensors_of(sites, config))
    # A bank of wrong products would be sealed like any other.
    check_kernels(torch.device("cpu"))
    purpose = Purpose.of(
        layout,
        mask=mask.described(),
        model=directory.resolve().name,
        model_digest=model_digest(config, checkpoint),
        linear_digest=linear_digest(config, checkpoint) or "",
    )
    if place.bank.exists():
        store = BankFile.open(place, purpose)
    else:
        size = capacity or tokens
        store = BankFile.create(place, purpose, capacity=size, group=math.gcd(size, MAX_GROUP))
    with store:
        SettingsError.unless(
            capacity in (None, store.capacity),
            "--capacity",
            str(capacity),
            f"{store.capacity}, as {place.bank} has",
        )
        _fill(store, PadMaker(mask, read_weights(checkpoint, config, mask.arithmetic)), tokens)
        _show(read_bank_status(place), as_json=False)


@pads.command(context_settings=CONTEXT)
@takes(RunSettings, *BANK, bank=_THE_BANK)
@use("as_json")
@config_option
def status(*, settings: RunSettings, as_json: bool) -> None:
    """Say how many pads a bank holds, for which model, and what it takes on disk."""
    from tee_side.protect.pads.bank import read_bank_status

    if (place := bank_place(settings)) is not None:
        _show(read_bank_status(place), as_json=as_json)


def _fill(store: BankFile, maker: PadMaker, tokens: int) -> None:
    wanted = min(tokens, store.room)
    if wanted < tokens:
        click.echo(
            f"{store.capacity} tokens fit, {store.available} are there: making {wanted} more"
            " (a larger bank is a new file, with --capacity)",
            err=True,
        )
    if wanted == 0:
        return
    sites = len(store.layout.sites)
    batches = [min(BATCH_TOKENS, wanted - start) for start in range(0, wanted, BATCH_TOKENS)]
    started = time.perf_counter()
    with click.progressbar(length=wanted * sites, label="pads", file=sys.stderr) as bar:
        for count in batches:
            maker.fill(store, count, on_site=partial(_advance, bar, count))
    elapsed = time.perf_counter() - started
    rate = product_operations(store.layout) * wanted / elapsed / 1e9
    click.echo(
        f"{wanted} tokens in {elapsed:.1f} s: {wanted / elapsed:.1f} a second,"
        f" {rate:.0f} GOP/s of int8",
        err=True,
    )


def _advance(bar: ProgressBar[int], tokens: int, _done: int, _sites: int) -> None:
    bar.update(tokens)


def _show(status: PadBankStatus, *, as_json: bool) -> None:
    header = status.header
    if as_json:
        told = vars(status) | header.model_dump(exclude={"sites"})
        del told["header"]
        click.echo(json.dumps(told, default=str))
        return
    click.echo(
        f"{status.path}: {status.available} of {header.capacity} tokens available, next index"
        f" {status.next_index}; mask {header.mask}, model {header.model or 'of digest'}"
        f" {header.model_digest[:16]}, made {header.created};"
        f" {bytes_for_people(status.token_bytes)} a token,"
        f" {bytes_for_people(status.allocated_bytes)} on disk"
    )


def main() -> NoReturn:
    """Entry point."""
    run(command, "tee-runner", has_secrets=True)
