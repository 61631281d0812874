"""`tee-runner pads`: make pads ahead of use, and say how a bank stands."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from protocol.errors import PolicyError, SettingsError
from tsqp.cli.manifest import MANIFEST, load_manifest
from tsqp.cli.program import DEFAULT_POLICY, model_directory
from tsqp.cli.settings import PATH, THREADS, config_option
from tsqp.cli.status import bytes_for_people

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar

    from protocol.model.config import ModelConfig
    from tee_side.masks.mask import AdditiveMask
    from tee_side.pads.bank import BankFile, PadBankStatus
    from tee_side.pads.layout import PadLayout
    from tee_side.pads.maker import PadMaker
    from tee_side.policy import Policy

C = TypeVar("C", bound=Callable[..., Any])
CONTEXT = {"show_default": True, "help_option_names": ["-h", "--help"]}

# Tokens in one product: each weight is read from the directory once for so many.
BATCH_TOKENS = 512

BANK_FILES = (
    click.option(
        "--bank-key",
        type=PATH,
        metavar="FILE",
        help="Key of the bank, for the TEE alone; default: the bank's name and .key.",
    ),
    click.option(
        "--bank-index",
        type=PATH,
        metavar="FILE",
        help="What of the bank is used up, best where the host cannot restore an old copy;"
        " default: the bank's name and .index.",
    ),
)


def bank_options(command: C) -> C:
    """Add the options that say which bank."""
    bank = click.option("--bank", type=PATH, required=True, metavar="FILE", help="The pad bank.")
    policy = click.option(
        "--policy",
        default=DEFAULT_POLICY,
        metavar="NAME|FILE",
        help="Pads are made for the operators that it puts under pads.",
    )
    for option in reversed((bank, *BANK_FILES, policy)):
        command = option(command)
    return command


@click.group(context_settings=CONTEXT)
@config_option
def pads() -> None:
    """Make one-time pads ahead of use, and say how a bank stands.

    A pad is used for one token and never again. The bank is encrypted under a key that must stay
    in the TEE.
    """


@pads.command(context_settings=CONTEXT)
@click.argument("model", envvar="TEE_RUNNER_PADS_MAKE_MODEL")
@click.option("--tokens", type=click.IntRange(min=1), required=True, help="How many to make.")
@click.option(
    "--capacity",
    type=click.IntRange(min=1),
    help="Tokens that a new bank has space for; default: --tokens. A bank keeps its size.",
)
@bank_options
@MANIFEST[0]
@MANIFEST[1]
@click.option("--threads", type=THREADS, help="CPU threads for torch.")
@config_option
def make(
    *,
    model: str,
    manifest: Path | None,
    manifest_digest: str | None,
    tokens: int,
    capacity: int | None,
    bank: Path,
    bank_key: Path | None,
    bank_index: Path | None,
    policy: str,
    threads: int | None,
) -> None:
    """Make pads for MODEL into a bank, which is created if it is not there.

    Weights are read from MODEL one layer at a time, so that memory does not grow with the model.
    Interrupted work is made again; nothing is used twice.
    """
    import torch

    from protocol.integer import check_kernels
    from protocol.model.checkpoint import Checkpoint, light_tensors
    from protocol.model.config import read_config
    from protocol.model.identity import linear_digest, model_digest
    from tee_side.pads.bank import BankFile
    from tee_side.pads.maker import PadMaker, check_sites, read_weights
    from tee_side.policy import load_policy

    if threads is not None:
        torch.set_num_threads(threads)
    directory = model_directory(model)
    pinned = load_manifest(directory, {"manifest": manifest, "manifest_digest": manifest_digest})
    config, checkpoint = read_config(directory, pinned), Checkpoint(directory, pinned)
    chosen = load_policy(policy)
    chosen.check(config.num_hidden_layers)
    mask, layout = _padded(chosen, config)
    checkpoint.require(light_tensors(config))
    # A bank of wrong products would be sealed like any other.
    check_kernels(torch.device("cpu"))
    check_sites(checkpoint, config, layout)
    described: dict[str, Any] = {
        "layout": layout,
        "mask": mask.described(),
        "model_digest": model_digest(config, checkpoint),
        "linear_digest": linear_digest(config, checkpoint) or "",
        "index_path": bank_index,
    }
    if bank.exists():
        store = BankFile.open(bank, bank_key, **described)
    else:
        store = BankFile.create(bank, bank_key, capacity=capacity or tokens, **described)
    with store:
        if capacity not in (None, store.capacity):
            raise SettingsError(
                "--capacity", got=str(capacity), expected=f"{store.capacity}, as {bank} has"
            )
        _fill(store, PadMaker(mask, read_weights(checkpoint, config, mask.arithmetic)), tokens)
        _show(store.status(), as_json=False)


@pads.command(context_settings=CONTEXT)
@click.option("--bank", type=PATH, required=True, metavar="FILE", help="The pad bank.")
@click.option("--json", is_flag=True, help="One JSON object instead of text.")
@click.option("--bank-key", type=PATH, metavar="FILE", help="Default: the bank's name and .key.")
@click.option(
    "--bank-index", type=PATH, metavar="FILE", help="Default: the bank's name and .index."
)
@config_option
def status(*, bank: Path, bank_key: Path | None, bank_index: Path | None, **settings: bool) -> None:
    """Say how many pads a bank holds, for which model, and what it takes on disk."""
    from tee_side.pads.bank import read_bank_status

    _show(read_bank_status(bank, bank_key, index_path=bank_index), as_json=settings["json"])


def _padded(policy: Policy, config: ModelConfig) -> tuple[AdditiveMask, PadLayout]:
    """Return the mask that a bank is for, and its sites. Raises PolicyError."""
    from tee_side.assembly import sites_under
    from tee_side.masks.mask import AdditiveMask
    from tee_side.pads.layout import PadLayout

    found = [m for m in policy.masks if isinstance(m, AdditiveMask) and m.arithmetic == "int8"]
    if len(found) != 1:
        names = " and ".join(mask.described() for mask in found)
        raise PolicyError(
            f"policy {policy.name}",
            got=f"masks {names}" if found else "no operator under pads",
            expected="one mask that needs pads, as in shielded",
        )
    sites = sites_under(policy, config.num_hidden_layers, found[0])
    return found[0], PadLayout.of(config, sites)


def _fill(store: BankFile, maker: PadMaker, tokens: int) -> None:
    from tee_side.pads.maker import product_operations

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
    if wanted:
        rate = product_operations(store.layout) * wanted / elapsed / 1e9
        click.echo(
            f"{wanted} tokens in {elapsed:.1f} s: {wanted / elapsed:.1f} a second,"
            f" {rate:.0f} GOP/s of int8",
            err=True,
        )


def _advance(bar: ProgressBar[int], tokens: int, _done: int, _sites: int) -> None:
    bar.update(tokens)


def _show(status: PadBankStatus, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(status), default=str))
        return
    click.echo(
        f"{status.path}: {status.available} of {status.capacity} tokens available, next index"
        f" {status.next_index}; mask {status.mask}, model {status.model_digest[:16]}, made"
        f" {status.created}; {bytes_for_people(status.token_bytes)} a token,"
        f" {bytes_for_people(status.allocated_bytes)} on disk"
    )
