"""Weights of a model directory: safetensors, one file or several with an index.

The tensors that a model must have follow from its configuration; names, shapes and dtypes are
checked before any weight is read. Reading copies a block of rows at a time into memory of our own,
where it is verified, if there is a manifest, and found to be finite, and only then handed out.

The header of a file is read here although the safetensors library reads the format, because it
reads through a mapping (see `protocol.model.files`), takes headers of 100 MB, and would have to
parse the header again for every block. Format: https://huggingface.co/docs/safetensors, "Format";
of the files that the library accepts, those that hold floats of 16 bits or more and nothing else.

Two digests show that both sides were started with different models. They catch a mistake, not a
lie: they sample, and a service could answer with the right digests and compute with other weights.
Verification of results is a property of a placement.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import torch
from pydantic import Field, model_validator

from protocol.errors import ModelError, describe, shown
from protocol.messages import ModuleName
from protocol.model.config import ModelConfig
from protocol.model.files import is_there, opened, parse_object, read_json, rows_per_block
from protocol.validation import Strict, validate_file

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest, TensorPin

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
_DTYPES = ("F32", "F16", "BF16")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_MAGICS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))
# The largest models that we run have some thousand tensors, at 150 bytes each.
MAX_HEADER_BYTES = 2 * 1024 * 1024
TORCH_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_METADATA = "__metadata__"
_Size = Annotated[int, Field(ge=0, lt=2**63)]
# How many rows a digest samples.
_EMBEDDING_ROWS = 64
_LINEAR_ROWS = 4
# Shapes of tensors, by name.
Shapes: TypeAlias = dict[str, tuple[int, ...]]


class Entry(Strict):
    """A tensor in a file. `data_offsets`: where it begins and ends, from the header's end."""

    dtype: Literal["F16", "BF16", "F32", "F64"]
    # The first fault ends the reading: pydantic would take some kilobytes for each.
    shape: Annotated[tuple[_Size, ...], Field(strict=False, max_length=8, fail_fast=True)]
    data_offsets: Annotated[tuple[_Size, _Size], Field(strict=False)]

    @model_validator(mode="after")
    def _consistent(self) -> Entry:
        begin, end = self.data_offsets
        size = math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize
        if end - begin != size:
            raise ValueError(f"data_offsets {size} bytes apart, not {end - begin}")
        return self

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next; a row of a vector is an element."""
        begin, end = self.data_offsets
        return (end - begin) // max(1, self.shape[0] if self.shape else 1)


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says of itself. `data_begin`: bytes before the first tensor's."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_begin: int


def parse_header(start: bytes, size: int, where: str) -> Header:
    """Check a header. `start`: the file up to the end of its header, or more; `size`: of the file.

    Offsets must cover the file without gaps and overlaps, and fit dtypes and shapes. Raises
    ModelError that names file and tensor.
    """
    length = int.from_bytes(start[:8], "little")
    begin = 8 + length
    pickled = start.startswith(_PICKLE_MAGICS)
    ModelError.unless(
        length <= MAX_HEADER_BYTES or size < 8,
        where if pickled else f"{where}: header length",
        "a pickle, which can run code when it is loaded" if pickled else str(length),
        f"a safetensors file, whose header has at most {MAX_HEADER_BYTES} bytes",
    )
    got = f"{size} bytes that do not parse (header length {length})"
    ModelError.unless(len(start) >= begin, where, got, "a complete safetensors file")
    raw = parse_object(start[8:begin], f"{where}: header")
    metadata = raw.pop(_METADATA, {})
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ModelError.unless(texts, f"{where}: {_METADATA}", describe(metadata), "texts by name")
    # One by one, so that the first fault ends the reading.
    entries = {name: validate_file(Entry, raw[name], f"{where}: {shown(name)}") for name in raw}
    covered = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        ModelError.unless(
            entry.data_offsets[0] == covered,
            f"{where}: {shown(name)}: data_offsets",
            str(list(entry.data_offsets)),
            f"to begin at {covered}, where the tensor before it ends",
        )
        covered = entry.data_offsets[1]
    expected = f"{begin + covered}, to which the last tensor's data_offsets lead"
    ModelError.unless(begin + covered == size, where, f"{size} bytes", expected)
    return Header(entries, metadata, begin)


class TensorFile:
    """One safetensors file whose header has been checked. Raises ModelError that names it.

    `stamp`: the file's, as it was then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as file:
            self.stamp = file.stamp
            self.header = parse_header(file.start(8 + MAX_HEADER_BYTES), file.size, str(path))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, flat; writing to it writes to the tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def lm_head_name(config: ModelConfig) -> str:
    """Return the name of the LM head's weight, which may be the embedding's."""
    return EMBEDDING if config.tie_word_embeddings else "lm_head.weight"


def module_name(config: ModelConfig, layer: int, module: ModuleName) -> str:
    """Return `model.layers.3.self_attn.q_proj`; its tensors end in `.weight` and `.bias`."""
    return f"model.layers.{layer}.{config.table.modules[module].path}"


def norm_names(config: ModelConfig, layer: int) -> dict[str, str]:
    """Return the tensor names of a layer's norms under their short names."""
    norms = config.table.norms.items()
    return {short: f"model.layers.{layer}.{norm.path}.weight" for short, norm in norms}


def light_tensors(config: ModelConfig) -> Shapes:
    """Return names and shapes of all tensors but the linear modules: what the TEE always has."""
    vocabulary = (config.vocab_size, config.hidden_size)
    tensors: Shapes = {EMBEDDING: vocabulary, lm_head_name(config): vocabulary}
    widths = [(config.width(norm.outputs),) for norm in config.table.norms.values()]
    for layer in range(config.num_hidden_layers):
        tensors |= zip(norm_names(config, layer).values(), widths, strict=True)
    return tensors | {FINAL_NORM: (config.hidden_size,)}


def linear_tensors(config: ModelConfig) -> Shapes:
    """Return names and shapes of the weights and biases of the linear modules of all layers."""
    tensors: Shapes = {}
    for layer in range(config.num_hidden_layers):
        for module in config.table.modules:
            name, shape = module_name(config, layer, module), config.module_shape(module)
            tensors[f"{name}.weight"] = shape
            if module in config.biased_modules:
                tensors[f"{name}.bias"] = shape[:1]
    return tensors


class Checkpoint:
    """The safetensors files of one directory, their headers checked for damage.

    `manifest`: what the directory must hold; then every byte that is handed out was compared with
    it, in the memory in which it is handed out. Raises ModelError that names the file: none there,
    pickled weights, a truncated or damaged file, an index that points outside the directory or at a
    tensor that its file does not hold; ManifestError that names file and tensor, where it differs.
    """

    def __init__(self, directory: Path, manifest: Manifest | None = None) -> None:
        self.directory = directory
        self.manifest = manifest
        self._found: dict[str, TensorFile] = {}
        # Shards that the index names and the directory lacks: a TEE may hold only what it uses.
        self._missing: dict[str, Path] = {}
        self._remembered: dict[tuple[bytes, tuple[str, ...]], str] = {}
        # The file that says which tensors there are.
        self._contents = directory / SINGLE_FILE
        if is_there(self._contents):
            self._add_file(self._contents)
        elif is_there(directory / INDEX_FILE):
            self._contents = directory / INDEX_FILE
            self._add_index()
        else:
            found = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
            where = directory
            got = f"no weights among {len(found)} files"
            if pickled := [name for name in found if name.endswith(_PICKLE_SUFFIXES)]:
                where = directory / shown(pickled[0])
                got = "pickled weights, which can run code when they are loaded"
            raise ModelError(str(where), got=got, expected=f"{SINGLE_FILE} or {INDEX_FILE}")

    def holds(self, tensors: Iterable[str]) -> bool:
        """Say whether all of these tensors are there."""
        return all(name in self._found for name in tensors)

    def require(self, tensors: Shapes) -> None:
        """Check that these tensors are there with these shapes, as floats, as in the manifest.

        Raises ModelError, ManifestError.
        """
        for name, shape in tensors.items():
            path = self._missing.get(name)
            ModelError.unless(
                path is None, f"{path}: {name}", "no such file", f"one, as {INDEX_FILE} says"
            )
            ModelError.unless(
                name in self._found, f"{self._contents}: {name}", "no such tensor", f"{list(shape)}"
            )
            entry = self.entry(name)
            where = self._where(name)
            got = f"shape {describe(list(entry.shape))}"
            ModelError.unless(entry.shape == shape, where, got, f"{list(shape)}")
            known = entry.dtype in _DTYPES
            ModelError.unless(known, where, f"dtype {entry.dtype}", f"one of {', '.join(_DTYPES)}")
            self._pin(name)

    def refuse_extra(self, config: ModelConfig, also: Iterable[str] = ()) -> None:
        """Refuse tensors that the configuration does not explain, a bias for example.

        They would change the result if they were used. Raises ModelError. The LM head beside a
        tied embedding and the RoPE buffers of old checkpoints mean nothing and are allowed; `also`:
        tensors that the caller explains.
        """
        known = light_tensors(config) | linear_tensors(config)
        got = "a tensor that config.json does not explain"
        expected = f"only those of a {config.architecture} with these settings"
        for name in sorted(set(self._found) - set(known) - {"lm_head.weight", *also}):
            buffer = name.endswith("rotary_emb.inv_freq")
            ModelError.unless(buffer, self._where(name), got, expected)

    def copy_into(self, name: str, destination: torch.Tensor) -> None:
        """Copy a tensor into memory that we own, converting to its dtype and device.

        Goes block by block, so that a weight is never in memory twice. Raises ModelError if the
        file has changed under us, ManifestError.
        """
        for rows, found in self.blocks(name, tuple(destination.shape)):
            destination[rows].copy_(found)

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield a tensor of a checked shape, some 4 MiB of rows after the other, as stored.

        Each is valid until the next is asked for. Raises ModelError, ManifestError.
        """
        entry = self.entry(name)
        same = entry.shape == shape  # copy_ would broadcast
        got = f"{describe(list(entry.shape))} since the file was checked"
        ModelError.unless(same, self._where(name), got, f"{list(shape)}")
        yield from self._read(name, range(shape[0]))

    def rows(self, name: str, start: int, stop: int, step: int = 1) -> torch.Tensor:
        """Return a copy of some rows of a checked tensor, as stored.

        All blocks that they lie in are read; without a manifest, and for a step, only the rows
        that are wanted. Raises ModelError, ManifestError.
        """
        entry = self.entry(name)
        wanted = range(start, min(stop, entry.shape[0]), step)
        found = torch.empty((len(wanted), *entry.shape[1:]), dtype=TORCH_DTYPES[entry.dtype])
        for rows, block in self._read(name, wanted):
            first, last = bisect_left(wanted, rows.start), bisect_left(wanted, rows.stop)
            found[first:last] = block[wanted[first] - rows.start :: step][: last - first]
        return found

    def digest(self, start: bytes, tensors: Shapes, rows: int) -> str:
        """Hash evenly spaced rows of matrices, and vectors as a whole, in the order of their names.

        Behind `start`; computed once where a manifest pins the content. Raises as `require`.
        """
        self.require(tensors)
        what = (start, tuple(tensors))
        if self.manifest is None or what not in self._remembered:
            digest = hashlib.sha256(start)
            for name in sorted(tensors):
                shape = tensors[name]
                step = max(1, shape[0] // rows) if len(shape) > 1 else 1
                sample = self.rows(name, 0, shape[0], step)
                digest.update(f"{name} {sample.dtype} {list(shape)}".encode())
                digest.update(bytes_of(sample))
            self._remembered[what] = digest.hexdigest()
        return self._remembered[what]

    def _read(self, name: str, wanted: range) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the blocks of rows that hold the wanted ones: copied first, checked then."""
        file, entry = self._found[name], self.entry(name)
        where = self._where(name)
        pin = self._pin(name)
        size = rows_per_block(entry.shape, entry.row_bytes)
        if pin is None and wanted.step > 1:
            size = 1  # a block is read whole only where it is verified
        buffer = torch.empty(size * entry.row_bytes, dtype=torch.uint8)
        begin = file.header.data_begin + entry.data_offsets[0]
        with opened(file.path) as reading:
            got = "another content since the file was checked"
            ModelError.unless(reading.stamp == file.stamp, where, got, "the same")
            for block in sorted({row // size for row in wanted}):
                rows = slice(block * size, min(entry.shape[0], (block + 1) * size))
                part = buffer[: (rows.stop - rows.start) * entry.row_bytes]
                reading.fill(bytes_of(part), begin + rows.start * entry.row_bytes)
                if self.manifest is not None and pin is not None:
                    self.manifest.check_block(pin, where, block, bytes_of(part))
                found = part.view(TORCH_DTYPES[entry.dtype]).view(-1, *entry.shape[1:])
                # Passes NaN on, and is many times as fast as isfinite.
                finite = all(math.isfinite(extreme) for extreme in found.aminmax())
                ModelError.unless(finite, where, "NaN or infinity", "finite weights")
                yield rows, found

    def _pin(self, name: str) -> TensorPin | None:
        """Return what the manifest says of a tensor; None only where there is no manifest."""
        if self.manifest is None:
            return None
        entry = self.entry(name)
        return self.manifest.check_tensor(self._where(name), name, entry.dtype, entry.shape)

    def entry(self, name: str) -> Entry:
        """Return what its file says of a tensor that is there."""
        return self._found[name].header.entries[name]

    def _where(self, name: str) -> str:
        return f"{self._found[name].path}: {shown(name)}"

    def _add_index(self) -> None:
        index = self._contents
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(
                f"{index}: weight_map", describe(weight_map), "an object of file names"
            )
        expected = "the name of a file in the same directory"
        for name, file in weight_map.items():
            ModelError.unless(_is_plain(file), f"{index}: {shown(name)}", describe(file), expected)
        for file in sorted(set(weight_map.values())):
            if is_there(self.directory / file):
                self._add_file(self.directory / file)
        for name, file in weight_map.items():
            path = self.directory / file
            if not is_there(path):
                self._missing[name] = path
            elif name not in self._found or self._found[name].path != path:
                raise ModelError(
                    f"{path}: {shown(name)}", "no such tensor", f"one, as {INDEX_FILE} says"
                )

    def _add_file(self, path: Path) -> None:
        file = TensorFile(path)
        for name in file.header.entries:
            if (other := self._found.setdefault(name, file)) is not file:
                raise ModelError(
                    f"{path}: {shown(name)}",
                    f"a tensor that {other.path.name} holds too",
                    "every tensor once",
                )


def _is_plain(name: object) -> bool:
    """Say whether this names a file of a directory, and nothing beyond it."""
    if not isinstance(name, str) or not 0 < len(name) < 256 or not name.isprintable():
        return False
    return Path(name).name == name and name not in (".", "..")


def model_digest(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """Return SHA-256, in hex, over the configuration, all norms and some rows of the embedding.

    It covers what every TEE-side directory has. EOS ids and `dtype` are left out: they do not
    change what the service computes. Raises ModelError, ManifestError.
    """
    described = config.model_dump(mode="json", exclude={"eos_token_ids", "dtype", "biased_modules"})
    described["biased_modules"] = sorted(config.biased_modules)
    described["qk_norm"] = config.qk_norm
    start = json.dumps(described, sort_keys=True).encode()
    return checkpoint.digest(start, light_tensors(config), _EMBEDDING_ROWS)


def linear_digest(config: ModelConfig, checkpoint: Checkpoint) -> str | None:
    """Return SHA-256, in hex, over a few rows of every linear weight and bias.

    None where the directory lacks them: a TEE that only offloads needs no linear weights. Raises
    ModelError, ManifestError.
    """
    tensors = linear_tensors(config)
    return checkpoint.digest(b"", tensors, _LINEAR_ROWS) if checkpoint.holds(tensors) else None
