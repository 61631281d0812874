"""Makes the manifest of a model directory, on a machine whose disk is trusted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.errors import ManifestError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint, light_tensors, linear_tensors
from protocol.model.config import read_config
from protocol.model.files import is_there, read_bytes
from protocol.model.manifest import (
    MANIFEST_VERSION,
    PINNED_FILES,
    FilePin,
    Manifest,
    PinnedFile,
    TensorPin,
)
from protocol.model.tensor_file import bytes_of

# A calibration has four bytes for each output of every linear operator.
MAX_FILE_BYTES = 512 * 1024 * 1024

Progress = Callable[[int, int], None]


def make_manifest(
    directory: Path,
    progress: Progress = lambda _done, _total: None,
    also: Sequence[Path] = (),
) -> Manifest:
    """Read a model directory and pin everything in it that the TEE may read, and the files `also`.

    Linear weights may be missing, as they may in the TEE's directory; they are then not pinned.
    `progress(done, total)` is called after every tensor. Raises ModelError that names file and
    tensor for a directory that a TEE would refuse, and ManifestError for two files of one name.
    """
    beside = _pinned_by_name(also)
    config, checkpoint = read_config(directory), Checkpoint(directory)
    wanted = light_tensors(config)
    linears = linear_tensors(config, FUSED_MODULES)
    wanted |= {name: shape for name, shape in linears.items() if checkpoint.holds([name])}
    checkpoint.require(wanted)
    checkpoint.refuse_extra(config)
    tensors: dict[str, TensorPin] = {}
    for name in sorted(wanted):
        tensors[name] = _pinned_tensor(checkpoint, name, wanted[name])
        progress(len(tensors), len(wanted))
    files: dict[PinnedFile, str] = {
        name: hashlib.sha256(read_bytes(directory / name, MAX_FILE_BYTES)).hexdigest()
        for name in PINNED_FILES
        if is_there(directory / name)
    }
    manifest = Manifest(version=MANIFEST_VERSION, files=files, tensors=tensors, also=beside)
    read_config(directory, manifest)  # it may have changed between
    return manifest


def _pinned_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> TensorPin:
    """Pin a checked tensor, from what is there."""
    digests, dtype = [], checkpoint.dtype(name)
    for _, found in checkpoint.blocks(name, shape):
        digests.append(hashlib.sha256(bytes_of(found)).hexdigest())
    return TensorPin.model_validate({"dtype": dtype, "shape": shape, "blocks": digests})


def _pinned_by_name(paths: Sequence[Path]) -> dict[str, FilePin]:
    found: dict[str, FilePin] = {}
    for path in paths:
        pin = FilePin.of(read_bytes(path, MAX_FILE_BYTES, inside=False))
        ManifestError.unless(
            found.setdefault(path.name, pin) == pin,
            f"--also: {path}",
            "the name of another file that is pinned",
            "one name for one content",
        )
    return found
