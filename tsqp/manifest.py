"""Makes the manifest of a model directory, on a machine whose disk is trusted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint, light_tensors, linear_tensors
from protocol.model.config import read_config
from protocol.model.files import is_there, read_bytes
from protocol.model.manifest import (
    MANIFEST_VERSION,
    PINNED_FILES,
    Manifest,
    PinnedFile,
    TensorPin,
)

# A calibration has four bytes for each output of every linear operator.
_MAX_FILE_BYTES = 512 * 1024 * 1024

Progress = Callable[[int, int], None]


def make_manifest(directory: Path, progress: Progress = lambda _done, _total: None) -> Manifest:
    """Read a model directory and pin everything in it that the TEE may read.

    Linear weights may be missing, as they may in the TEE's directory; they are then not pinned.
    `progress(done, total)` is called after every tensor. Raises ModelError that names file and
    tensor for a directory that a TEE would refuse.
    """
    config, checkpoint = read_config(directory), Checkpoint(directory)
    wanted = light_tensors(config)
    linears = linear_tensors(config, FUSED_MODULES)
    wanted |= {name: shape for name, shape in linears.items() if checkpoint.holds([name])}
    checkpoint.require(wanted)
    checkpoint.refuse_extra(config)
    tensors: dict[str, TensorPin] = {}
    for name in sorted(wanted):
        tensors[name] = checkpoint.pin(name)
        progress(len(tensors), len(wanted))
    files: dict[PinnedFile, str] = {
        name: hashlib.sha256(read_bytes(directory / name, _MAX_FILE_BYTES)).hexdigest()
        for name in PINNED_FILES
        if is_there(directory / name)
    }
    manifest = Manifest(version=MANIFEST_VERSION, files=files, tensors=tensors)
    read_config(directory, manifest)  # it may have changed between
    return manifest
