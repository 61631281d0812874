"""A model directory at rest: pinned by a manifest, and sealed. Made where the disk is trusted.

`protocol.model.at_rest` has the formats.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from protocol.errors import ManifestError, ModelError, SealError
from protocol.model.at_rest import (
    CHUNK_BYTES,
    KEY_BYTES,
    MANIFEST_VERSION,
    SALT_BYTES,
    SEAL_FILE,
    ChunkCipher,
    FilePin,
    FileSeal,
    Manifest,
    PinnedFile,
    SealedModel,
    SealIndex,
    TensorPin,
    read_index,
    unwrap,
    wrap,
)
from protocol.model.checkpoint import (
    EMBEDDING,
    LM_HEAD,
    Checkpoint,
    bytes_of,
    light_tensors,
    linear_tensors,
)
from protocol.model.config import read_config
from protocol.model.files import SEALED_MAGIC, is_there, opened, read_bytes

# Told how much is done by now, and how much there is in all: tensors, or bytes that are sealed.
Progress = Callable[[int, int], None]

MANIFEST_FILE = "manifest.json"
PINNED_FILES: tuple[PinnedFile, ...] = get_args(PinnedFile)

# The largest is a tokenizer.json, of 24 MiB at most.
MAX_FILE_BYTES = 64 * 1024 * 1024


def make_manifest(
    directory: Path,
    progress: Progress = lambda _done, _total: None,
    also: Sequence[Path] = (),
) -> Manifest:
    """Read a model directory and pin everything in it that the TEE may read, and the files `also`.

    Linear weights may be missing, as they may in the TEE's directory under policies in floats that
    verify nothing; they are then not pinned.
    `progress(done, total)` is called after every tensor. Raises ModelError that names file and
    tensor for a directory that a TEE would refuse, and ManifestError for two files of one name.
    """
    beside: dict[str, FilePin] = {}
    for path in also:
        own = FilePin.of(read_bytes(path, MAX_FILE_BYTES, inside=False))
        ManifestError.unless(
            beside.setdefault(path.name, own) == own,
            f"--also: {path}",
            "the name of another file that is pinned",
            "one name for one content",
        )
    config, named = Checkpoint.open(directory)
    held = [name for name in linear_tensors(config) if named.holds([name])]
    light = light_tensors(config)
    # Where there is another head than the embedding, or a copy of that, what decides which it is.
    light |= {LM_HEAD: light[EMBEDDING]} if named.holds([LM_HEAD]) else {}
    named.require(light | dict.fromkeys(held, ()))
    named.refuse_extra(config)
    # Under the names of the files.
    wanted, checkpoint = named.stored([*light, *held]), Checkpoint(directory)
    tensors: dict[str, TensorPin] = {}
    for name in sorted(wanted):
        digests = [
            hashlib.sha256(bytes_of(found)).hexdigest()
            for _, found in checkpoint.blocks(name, wanted[name])
        ]
        pin = {"dtype": checkpoint.entry(name).dtype, "shape": wanted[name], "blocks": digests}
        tensors[name] = TensorPin.model_validate(pin)
        progress(len(tensors), len(wanted))
    files: dict[PinnedFile, str] = {
        name: hashlib.sha256(read_bytes(directory / name, MAX_FILE_BYTES)).hexdigest()
        for name in PINNED_FILES
        if is_there(directory / name)
    }
    manifest = Manifest(version=MANIFEST_VERSION, files=files, tensors=tensors, also=beside)
    read_config(directory, manifest)  # it may have changed between
    return manifest


def seal_model(
    directory: Path,
    key: bytes,
    output: Path,
    progress: Progress = lambda _done, _total: None,
) -> tuple[int, int, list[str], str]:
    """Encrypt the files of a model directory, of folders in it what is read, into a new directory.

    Return how many files and plain bytes were sealed, the names that are no file, and the digest
    for `--seal-digest`. One chunk is in memory at a time. A run that fails leaves nothing behind.
    Raises ModelError for what is no model, or an output that is there; SealError for what is
    sealed; OSError.
    """
    ModelError.unless(
        not os.path.lexists(output), str(output), "something of this name", "a new directory"
    )
    ModelError.unless(
        os.access(output.parent, os.W_OK | os.X_OK),
        str(output.parent),
        "no such directory to write to",
        "one",
    )
    read_config(directory)  # a wrong directory is noticed before any work
    SealError.unless(
        not is_there(directory / SEAL_FILE),
        str(directory / SEAL_FILE),
        "a file of this name",
        "none: the seal's own has it",
    )
    inner = {name for name in PINNED_FILES if "/" in name and (directory / name).is_file()}
    names = sorted(inner.union(path.name for path in directory.iterdir() if not path.is_dir()))
    skipped = sorted(
        path.name
        for path in directory.iterdir()
        if path.is_dir() and not any(name.startswith(f"{path.name}/") for name in inner)
    )
    # What cannot be read is refused before any work.
    total, done = sum(_size(directory / name) for name in names), 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    content_key = secrets.token_bytes(KEY_BYTES)
    # Beside the directory that it becomes: a rename within a file system is one step.
    partial = output.with_name(f".{output.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.mkdir()
        files = {}
        for name in names:
            (partial / name).parent.mkdir(exist_ok=True)
            files[name] = _seal_file(directory / name, content_key, partial / name, count)
        body = SealIndex(files=files).model_dump_json(indent=1).encode() + b"\n"
        _write(partial / SEAL_FILE, [wrap(content_key, key, body)])
        digest = SealedModel(partial, key).digest
        partial.rename(output)
    finally:
        # Not there any more where all went well.
        shutil.rmtree(partial, ignore_errors=True)
    return len(files), total, skipped, digest


def rewrap(directory: Path, old: bytes, new: bytes) -> str:
    """Have a seal opened by another key and not by the old one. Return its digest, which stays.

    A party with a copy of the old index and the old key can still open the files. Raises SealError,
    OSError.
    """
    path = directory / SEAL_FILE
    content_key, body = unwrap(read_index(path), old, str(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        _write(partial, [wrap(content_key, new, body)])
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return hashlib.sha256(body).hexdigest()


def _size(path: Path) -> int:
    with opened(path) as file:
        return file.size


def _seal_file(
    path: Path, content_key: bytes, output: Path, tell: Callable[[int], None]
) -> FileSeal:
    header = SEALED_MAGIC + secrets.token_bytes(SALT_BYTES)
    with opened(path) as file:
        cipher = ChunkCipher(content_key, header, file.size)

        def stored() -> Iterator[bytes]:
            yield header
            plain = memoryview(bytearray(min(CHUNK_BYTES, cipher.size)))
            for chunk in range(cipher.chunks):
                start = chunk * CHUNK_BYTES
                part = plain[: cipher.size - start]
                file.fill(part, start)
                yield cipher.seal(chunk, part)
                tell(len(part))

        _write(output, stored())
    return FileSeal(size=cipher.size, header=hashlib.sha256(header).hexdigest())


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a new file, and bring it to the disk."""
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
