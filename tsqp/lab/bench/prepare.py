"""Makes what a measurement needs: models in any shape that it takes, pads, and services.

Models and banks of pads are made in processes of their own, so that their memory is not counted
with what is measured.
"""

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from protocol.errors import PolicyError
from protocol.model.checkpoint import (
    INDEX_FILE,
    LM_HEAD,
    SINGLE_FILE,
    Checkpoint,
    Shapes,
    bytes_of,
    file_places,
    light_tensors,
    linear_tensors,
)
from protocol.model.config import ModelConfig, read_config
from protocol.model.files import read_json
from protocol.model.weights import load_tensor
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import MAX_GROUP, BankPlace
from tee_side.protect.pads.source import (
    BATCH_TOKENS,
    Pads,
    fill_pads,
    multiply_here,
    read_weights,
)
from tsqp.importing.header import header
from tsqp.lab.bench.job import Measuring, pad_phases
from tsqp.lab.bench.results import PadMaking
from tsqp.lab.bench.shapes import Shape
from tsqp.lab.measure import cpu_ns, in_fresh_process, rounds
from tsqp.processes import start_service
from tsqp.run.bank import PAD_BATCH, pad_layouts, purpose_of

DTYPE = torch.bfloat16
# A prime, so that no row of a matrix starts where another has started: all rows differ.
_BLOCK = 4_194_301
_LOADING_TIMEOUT_S = 600.0
# Pads made while they are timed, and a few before.
TIMED_PADS = PAD_BATCH + 32
# As many as are dealt at once, where they are, and how often, but for no longer than so.
_DEALT_PADS = 64
_DEALT_ROUNDS, _DEALT_S = 7, 10.0


# ------------------------------------------------------------------------------ random weights


def required_bytes(config: ModelConfig, *, linear: bool = True) -> int:
    """Return the size of the tensors on disk; their names and shapes come to a little more.

    `linear`: with the linear modules; without them, what the TEE needs where they are elsewhere.
    """
    shapes = light_tensors(config) | (linear_tensors(config) if linear else {})
    return sum(math.prod(shape) for shape in shapes.values()) * DTYPE.itemsize


def stored_tensors(config: ModelConfig, linear: bool = True) -> Shapes:
    """Return names and shapes of what a file of a model has, as `required_bytes` counts it."""
    wanted = light_tensors(config) | (linear_tensors(config) if linear else {})
    places = file_places(config)
    return {places[name].name: places[name].shape for name in wanted}


def write_random_model(directory: Path, shape: Shape, linear: bool = True) -> Path:
    """Write config.json and bfloat16 weights, one file, to a directory; return that.

    Weights are normal, of variance 1 / in_features, so that activations stay in range; norms are
    ones. They are cut out of one block of random values, which is as fast as the disk. Raises
    ModelError for settings that are no model's, OSError if the disk is full (`job.check_disk`
    says so before).
    """
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(shape.settings)), encoding="utf-8")
    config = read_config(directory)
    shapes = stored_tensors(config, linear)
    generator = torch.Generator().manual_seed(0)
    block = torch.empty(_BLOCK).normal_(generator=generator)  # float32: scaled, then rounded once
    blocks: dict[float, torch.Tensor] = {}
    (directory / SINGLE_FILE).write_bytes(header(shapes, DTYPE)[0])
    with (directory / SINGLE_FILE).open("ab") as file:
        for name, sizes in shapes.items():
            if len(sizes) < 2 and not name.endswith(".bias"):
                file.write(bytes_of(torch.ones(sizes, dtype=DTYPE).view(-1)))
                continue
            scale = 1 / math.sqrt(sizes[-1])
            if scale not in blocks:
                blocks[scale] = (block * scale).to(DTYPE)
            # The block's values from a random one on, over and over.
            start = int(torch.randint(_BLOCK, (), generator=generator))
            end = start + math.prod(sizes)
            for begin in range(0, end, _BLOCK):
                file.write(bytes_of(blocks[scale][max(0, start - begin) : end - begin]))
    return directory


# -------------------------------------------------------------------------- made from a model


def endless(model: Path, beside: Path) -> Path:
    """Return a directory of the model without EOS: what it says must not end a measurement early.

    `beside`: a folder to make it in. Digests do not cover EOS ids: services may have the original.
    """
    if not read_config(model).eos_token_ids:
        return model
    made = beside / "endless"
    made.mkdir()
    for file in model.iterdir():
        # generation_config.json names further EOS ids.
        if file.is_file() and file.name not in ("config.json", "generation_config.json"):
            # Under another name, and copied where the file system or its owner forbids that. A
            # symbolic link that leads out of a model's directory would be refused.
            try:
                (made / file.name).hardlink_to(file.resolve())
            except OSError:
                shutil.copyfile(file, made / file.name)
    content = read_json(model / "config.json") | {"eos_token_id": None}
    (made / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return made


def write_hollow(source: Path, target: Path) -> Path:
    """Write a directory of a model whose linear weights and LM head are zeros; return it.

    The embedding is the model's, also where the model's LM head is the same matrix. For services
    that answer with zeros, which is right then: results of a verified policy pass their checks, at
    the same cost as those of any weights.
    """
    target.mkdir()
    config, _ = Checkpoint.open(source)
    settings = read_json(source / "config.json") | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    checkpoint = Checkpoint(source)
    shapes = stored_tensors(read_config(target), linear=False)
    zeros = {LM_HEAD: shapes.pop(LM_HEAD)}
    checkpoint.require(shapes)
    light = {
        name: load_tensor(checkpoint, name, shape, dtype=checkpoint.rows(name, 0, 1).dtype)
        for name, shape in shapes.items()
    }
    linears = stored_tensors(config).items() - stored_tensors(config, linear=False).items()
    files = {"light.safetensors": shapes, "zeros.safetensors": zeros | dict(linears)}
    save_file(light, target / "light.safetensors", metadata={"format": "pt"})
    path = target / "zeros.safetensors"
    # What is past the end of what was written reads as zeros, and takes no room on a disk.
    start, size = header(files[path.name], DTYPE)
    path.write_bytes(start)
    os.truncate(path, path.stat().st_size + size)
    weight_map = {name: file for file, names in files.items() for name in names}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (target / INDEX_FILE).write_text(index, encoding="utf-8")
    return target


# --------------------------------------------------------------------------------------- pads


def bank_bytes(config: ModelConfig, policy: Policy, tokens: int) -> int:
    """Return about how much room a bank takes on disk."""
    return sum(one.token_bytes for one in pad_layouts(policy, config).values()) * tokens


def pad_bank(model: Path, policy: Policy, tokens: int, path: Path, *, zeros: bool) -> Path | None:
    """Make pads ahead; None for a policy without any or with dealers, or that no bank can hold.

    `zeros`: factors u = 0, for services that answer with zeros: unmasked, activations stay finite.
    The work online is the same.
    """
    masks = [mask for mask in policy.masks if isinstance(mask, AdditiveMask)]
    if not masks or masks[0].arithmetic != "int8" or policy.dealt:
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
    store, make = _new_bank(model, policy, tokens, path)
    with store:
        if not zeros:
            make(tokens)
            return
        for first in range(0, store.capacity, BATCH_TOKENS):
            count = min(BATCH_TOKENS, store.capacity - first)
            with store.begin(count) as batch:
                for site in store.layout.sites:
                    batch.put(site.number, torch.zeros(count, site.out_features, dtype=torch.int32))
                batch.commit()


def _new_bank(
    model: Path, policy: Policy, tokens: int, path: Path
) -> tuple[BankFile, Callable[[int], None]]:
    """Return an empty bank for a policy's one mask, and what fills it."""
    config, checkpoint = Checkpoint.open(model)
    ((mask, layout),) = pad_layouts(policy, config).items()
    purpose = purpose_of(checkpoint, config, mask, layout)
    place, groups = BankPlace.at(path, beside_bank=True), -(-tokens // MAX_GROUP)
    store = BankFile.create(place, purpose, capacity=groups * MAX_GROUP, group=MAX_GROUP)
    weights = read_weights(checkpoint, config, mask.arithmetic)
    return store, partial(fill_pads, multiply_here(mask, weights), store)


def pad_dealing(policy: Policy, pads: Pads) -> PadMaking:
    """Have dealers multiply pads of a run, for its stock, and time it. Raises TsqpError."""

    def deal(tokens: int) -> None:
        pads.drop()
        pads.fill(tokens)

    deal(_DEALT_PADS)
    return _timed(policy, deal, _DEALT_PADS, _DEALT_ROUNDS)


def pad_making(model: Path, policy: Policy, folder: Path) -> PadMaking:
    """Make pads as `tee-runner pads make` does, into a bank of their own, and time it.

    By this process's threads. `folder`: where the bank is made, and removed again. The weights'
    values make no difference to time. Raises TsqpError.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store, make = _new_bank(model, policy, TIMED_PADS, Path(place) / "pads")
        with store:
            make(TIMED_PADS - PAD_BATCH)  # reads the weights a first time
            return _timed(policy, make, PAD_BATCH)


def _timed(policy: Policy, make: Callable[[int], object], tokens: int, times: int = 1) -> PadMaking:
    """Make pads so many times over; return the medians."""
    found = []
    for _ in rounds(times, _DEALT_S):
        started, cpu_before = time.perf_counter_ns(), cpu_ns()
        make(tokens)
        found.append((time.perf_counter_ns() - started, cpu_ns() - cpu_before))
    elapsed, cpu = (median(column) for column in zip(*found, strict=True))
    return PadMaking(
        phases=pad_phases(policy),
        token_ms=elapsed / 1e6 / tokens,
        cpu_ms=cpu / 1e6 / tokens,
        batch_tokens=tokens,
    )


# ------------------------------------------------------------------------------------ services


def start_services(
    running: ExitStack, policy: Policy, model: Path, folder: Path, settings: Measuring
) -> list[tuple[int, str]]:
    """Start the services of a policy, which end with `running`; their sockets are in `folder`.

    Returns process ids and endpoints. Raises ProcessError.
    """
    found = []
    for number in range(policy.services):
        bind = f"{settings.transport}://{folder}/gpu-{number}.sock"
        arguments = [
            *(str(model), "--device", settings.device, "--arithmetic", policy.arithmetic),
            *("--bind", "tcp://127.0.0.1:*" if settings.transport == "tcp" else bind),
            *("--kernels", settings.kernels, "--threads", str(settings.gpu_threads)),
            *("--spin-us", str(settings.spin_us)),
            *(("--dtype", settings.dtype) if settings.dtype else ()),
        ]
        found.append(start_service(running, arguments, timeout_s=_LOADING_TIMEOUT_S))
    return found
