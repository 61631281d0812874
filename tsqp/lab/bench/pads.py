"""The pads that a measurement uses up: how many there are, a bank of them, and what they cost.

A bank is made in a process of its own, so that its memory is not counted with what is measured.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch

from protocol.errors import PolicyError
from protocol.model.checkpoint import Checkpoint, linear_digest, model_digest
from protocol.model.config import ModelConfig, read_config
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import MAX_GROUP, BankPlace, Purpose
from tee_side.protect.pads.source import BATCH_TOKENS, PadMaker, read_weights
from tee_side.protect.pads.source import BATCH_TOKENS as PAD_BATCH
from tee_side.protect.sites import PadLayout
from tee_side.words import PHASES, Phase
from tsqp.lab.bench.machine import cpu_ns
from tsqp.lab.bench.model import PadMaking
from tsqp.lab.measure import in_fresh_process

# Pads made while they are timed, and a few before.
TIMED_PADS = PAD_BATCH + 32


def pad_layouts(policy: Policy, config: ModelConfig) -> dict[AdditiveMask, PadLayout]:
    """Return the sites under each mask that needs pads."""
    layers = config.num_hidden_layers
    return {
        mask: PadLayout.of(config, policy.sites_under(layers, mask))
        for mask in policy.masks
        if isinstance(mask, AdditiveMask)
    }


def pad_phases(policy: Policy, mask: AdditiveMask | None = None) -> tuple[Phase, ...]:
    """Return the phases of which each token uses up a pad, of a mask or of any."""
    placed = [one for _, one in policy.leaving() if isinstance(one.mask, AdditiveMask)]
    masked = {one.phase for one in placed if mask in (None, one.mask)}
    return tuple(phase for phase in PHASES if masked & {None, phase})


def bank_bytes(config: ModelConfig, policy: Policy, tokens: int) -> int:
    """Return about how much room a bank takes on disk."""
    return sum(one.token_bytes for one in pad_layouts(policy, config).values()) * tokens


def bank(model: Path, policy: Policy, tokens: int, path: Path, *, zeros: bool) -> Path | None:
    """Make pads ahead; None for a policy without any, or whose mask no bank can hold.

    `zeros`: factors u = 0, for services that answer with zeros: unmasked, activations stay finite.
    The work online is the same.
    """
    masks = [mask for mask in policy.masks if isinstance(mask, AdditiveMask)]
    if not masks or masks[0].arithmetic != "int8":
        return None
    PolicyError.unless(
        len(masks) == 1,
        f"policy {policy.name}",
        f"{len(masks)} masks with pads",
        "one: a bank is made for one",
    )
    in_fresh_process(_write_bank, model, policy, tokens, path, zeros)
    return path


def _write_bank(model: Path, policy: Policy, tokens: int, path: Path, zeros: bool) -> None:
    store, maker = _new_bank(model, policy, tokens, path)
    with store:
        if not zeros:
            maker.fill(store, tokens)
            return
        for first in range(0, store.capacity, BATCH_TOKENS):
            count = min(BATCH_TOKENS, store.capacity - first)
            with store.begin(count) as batch:
                for site in store.layout.sites:
                    batch.put(site.number, torch.zeros(count, site.out_features, dtype=torch.int32))
                batch.commit()


def _new_bank(model: Path, policy: Policy, tokens: int, path: Path) -> tuple[BankFile, PadMaker]:
    """Return an empty bank for a policy's one mask, and what fills it."""
    config, checkpoint = read_config(model), Checkpoint(model)
    ((mask, layout),) = pad_layouts(policy, config).items()
    purpose = Purpose.of(
        layout,
        mask=mask.described(),
        model=model.resolve().name,
        model_digest=model_digest(config, checkpoint),
        linear_digest=linear_digest(config, checkpoint) or "",
    )
    place, groups = BankPlace.at(path, beside_bank=True), -(-tokens // MAX_GROUP)
    store = BankFile.create(place, purpose, capacity=groups * MAX_GROUP, group=MAX_GROUP)
    return store, PadMaker(mask, read_weights(checkpoint, config, mask.arithmetic))


def pad_making(model: Path, policy: Policy, path: Path) -> PadMaking:
    """Make pads as `tee-runner pads make` does, into a bank of their own, and time it.

    By this process's threads. `path`: of the bank, which is removed again. The weights' values make
    no difference to time. Raises TsqpError.
    """
    store, maker = _new_bank(model, policy, TIMED_PADS, path)
    try:
        with store:
            maker.fill(store, TIMED_PADS - PAD_BATCH)  # reads the weights a first time
            started, cpu_before = time.perf_counter_ns(), cpu_ns()
            maker.fill(store, PAD_BATCH)
            cpu, elapsed = cpu_ns() - cpu_before, time.perf_counter_ns() - started
    finally:
        remove(path)
    return PadMaking(
        phases=pad_phases(policy),
        token_ms=elapsed / 1e6 / PAD_BATCH,
        cpu_ms=cpu / 1e6 / PAD_BATCH,
        batch_tokens=PAD_BATCH,
    )


def remove(path: Path) -> None:
    """Delete a bank with the files beside it."""
    for file in path.parent.glob(f"{path.name}*"):
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()
