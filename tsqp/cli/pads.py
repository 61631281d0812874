"""`tee-runner pads`: make pads ahead of use, and say how a bank stands."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import SettingsError
from tsqp.cli.config import CONTEXT, config_option, takes, use
from tsqp.run.load import (
    BANK,
    bank_place,
    load_manifest,
    load_pinned_policy,
    open_seal,
    runner_settings,
)
from tsqp.run.process import bytes_for_people
from tsqp.run.settings import RunSettings, model_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.model.checkpoint import Checkpoint
    from protocol.model.config import ModelConfig
    from tee_side.policy.placement import Policy
    from tee_side.protect.pads.bank import BankFile
    from tee_side.protect.pads.bank_files import BankPlace
    from tee_side.protect.verification import ExactCheck
    from tee_side.words import Site


_SEAL = ("seal_key", "seal_key_fd", "seal_key_command", "seal_digest")
_MODEL = ("model", "policy", "manifest", "manifest_digest", *_SEAL, "kernels", "threads")
_DEALERS = (
    *("dealer", "identity", "service_key", "http_token", "http_ca", "service_appraisal"),
    *("dealer_in_the_clear", "connect_timeout_s", "request_timeout_s"),
)
_THE_BANK = {"required": True, "help": "The pad bank."}


@click.group(context_settings=CONTEXT)
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
    *_DEALERS,
    bank=_THE_BANK,
    policy={"help": "Pads are made for the operators that it puts under pads."},
)
@config_option
def make(*, settings: RunSettings, tokens: int, capacity: int | None) -> None:
    """Make pads for MODEL into a bank, which is created if it is not there.

    Where the policy has pads dealt, each --dealer multiplies; the bank opens for these alone.
    Weights are read from MODEL one layer at a time, so that memory does not grow with the model.
    Interrupted work is made again; nothing is used twice.
    """
    import torch

    from protocol import native
    from protocol.integer import check_kernels
    from protocol.model.checkpoint import Checkpoint, light_tensors
    from tee_side.protect.pads.bank import BankFile
    from tee_side.protect.pads.bank_files import MAX_GROUP
    from tee_side.protect.pads.source import (
        BATCH_TOKENS,
        fill_pads,
        multiply_here,
        read_weights,
    )
    from tee_side.protect.sites import tensors_of
    from tee_side.remote.dealing import UNDER_WAY, Dealing
    from tsqp.run.bank import PAD_BATCH, open_dealers, padded, purpose_of

    place = bank_place(settings)
    if place is None:
        raise SettingsError("--bank", got="none", expected="the pad bank")
    native.set_up(settings.kernels, settings.threads)
    directory = model_directory(settings.model)
    open_seal(directory, settings)
    pinned = load_manifest(directory, settings)
    config, checkpoint = Checkpoint.open(directory, pinned)
    chosen = load_pinned_policy(settings.policy, pinned)
    chosen.check(config.num_hidden_layers)
    mask, layout = padded(chosen, config)
    checkpoint.require(light_tensors(config) | tensors_of([s.site for s in layout.sites], config))
    # A bank of wrong products would be sealed like any other.
    check_kernels(torch.device("cpu"))
    with ExitStack() as opened:
        multiply = multiply_here(mask, read_weights(checkpoint, config, mask.arithmetic))
        dealers: tuple[str, ...] = ()
        if mask.dealt:
            told = runner_settings(settings, chosen, pinned)
            dealers, at = opened.enter_context(open_dealers(told, config, checkpoint))
            checks = cache(partial(_exact_check, chosen, config, checkpoint))
            multiply = Dealing(config, at, checks).multiply
        purpose = purpose_of(checkpoint, config, mask, layout, dealers)
        if place.bank.exists():
            store = BankFile.open(place, purpose)
        else:
            size = capacity or tokens
            store = BankFile.create(place, purpose, capacity=size, group=math.gcd(size, MAX_GROUP))
        opened.enter_context(store)
        SettingsError.unless(
            capacity in (None, store.capacity),
            "--capacity",
            str(capacity),
            f"{store.capacity}, as {place.bank} has",
        )
        batch = min(BATCH_TOKENS, UNDER_WAY * store.group) if dealers else PAD_BATCH
        _fill(store, partial(fill_pads, multiply, store), tokens, batch)
        _show(place, as_json=False)


def _exact_check(
    policy: Policy, config: ModelConfig, checkpoint: Checkpoint, site: Site
) -> ExactCheck | None:
    """Draw what products of a site are checked with; None where the policy believes them."""
    import torch

    from tee_side.protect.randomness import Randomness
    from tee_side.protect.sites import IntegerSites
    from tee_side.protect.verification import ExactCheck

    verified = policy.sites(config.num_hidden_layers, lambda placed: placed.verify != "none")
    if site not in verified:
        return None
    integers = IntegerSites(config, checkpoint, {}, torch.float32)
    return ExactCheck.draw(integers.weights(site).weight, Randomness())


@pads.command(context_settings=CONTEXT)
@takes(RunSettings, *BANK, bank=_THE_BANK)
@use("as_json")
@config_option
def status(*, settings: RunSettings, as_json: bool) -> None:
    """Say how many pads a bank holds, for which model, and what it takes on disk."""
    if (place := bank_place(settings)) is not None:
        _show(place, as_json=as_json)


def _fill(store: BankFile, make: Callable[..., None], tokens: int, batch: int) -> None:
    from tsqp.run.bank import product_operations

    wanted = min(tokens, store.room)
    if wanted < tokens:
        click.echo(
            f"{store.capacity} tokens fit, {store.available} are there: making {wanted} more"
            " (a larger bank is a new file, with --capacity)",
            err=True,
        )
    if wanted == 0:
        return
    started = time.perf_counter()
    with click.progressbar(
        length=wanted * len(store.layout.sites), label="pads", file=sys.stderr
    ) as bar:
        for start in range(0, wanted, batch):
            make(min(batch, wanted - start), on_site=bar.update)
    elapsed = time.perf_counter() - started
    operations = product_operations(store.layout) * wanted
    click.echo(
        f"{wanted} tokens in {elapsed:.1f} s: {wanted / elapsed:.1f} a second,"
        f" {operations / elapsed / 1e9:.0f} GOP/s of int8",
        err=True,
    )


def _show(place: BankPlace, *, as_json: bool) -> None:
    from tee_side.protect.pads.bank import read_bank_status
    from tee_side.protect.pads.bank_files import slot_bytes

    header, state = read_bank_status(place)
    token_bytes = slot_bytes(header.layout, header.group) // header.group
    told: dict[str, Any] = {
        "path": place.bank,
        "available": state.filled - state.reserved,
        "next_index": state.reserved,
        "token_bytes": token_bytes,
        "allocated_bytes": place.bank.stat().st_blocks * 512,
    }
    if as_json:
        click.echo(json.dumps(told | header.model_dump(exclude={"sites"}), default=str))
        return
    click.echo(
        f"{place.bank}: {told['available']} of {header.capacity} tokens available, next index"
        f" {state.reserved}; mask {header.mask}, model {header.model or 'of digest'}"
        f" {header.model_digest[:16]}, made {header.created};"
        f" {bytes_for_people(token_bytes)} a token,"
        f" {bytes_for_people(told['allocated_bytes'])} on disk"
    )
