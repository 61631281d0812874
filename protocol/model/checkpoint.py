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
import logging
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self, TypeAlias

import torch
from pydantic import Field, model_validator

from protocol.errors import ModelError, describe, shown
from protocol.messages import ModuleName
from protocol.model.architectures import LLAMA, NormName
from protocol.model.config import ModelConfig, read_config
from protocol.model.files import (
    MAX_TENSORS_BYTES,
    TENSORS_LIMITS,
    is_there,
    limit_structure,
    opened,
    parse_object,
    read_json,
    rows_per_block,
)
from protocol.validation import Strict, validate_file

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest, TensorPin

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM, FINAL_NORM_BIAS = "model.norm.weight", "model.norm.bias"
LM_HEAD = "lm_head.weight"
# What names begin with in files: of language models, of those alone that end before the LM head,
# and of what is a part of a larger model.
_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")
_HEADS = (LM_HEAD, "language_model.lm_head.weight")
# Parameters of an activation, of which files have the last two without an axis.
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
_NO_AXIS = re.compile(r"\.act_fn\.(?:beta|eps)$")
_KINDS = ("weight", "bias")
_log = logging.getLogger(__name__)
# What files have besides and no forward pass reads; the last is for caches that we do not round.
_BUFFER = re.compile(r"rotary_emb\.inv_freq$")
_UNUSED = re.compile(r"\.self_attn\.(?:[qkv]|kv)_(?:proj\.(?:output|[qkv])_)?scale$")
_DTYPES = ("F32", "F16", "BF16")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_MAGICS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))
TORCH_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
# Of tensors that may be there, too, and that nobody reads.
_Integer: TypeAlias = Literal["BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"]
_Dtype: TypeAlias = Literal["F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", _Integer]
_METADATA = "__metadata__"
_Size = Annotated[int, Field(ge=0, lt=2**63)]
# How many rows a digest samples.
_EMBEDDING_ROWS = 64
_LINEAR_ROWS = 4
# Shapes of tensors, by name.
Shapes: TypeAlias = dict[str, tuple[int, ...]]


class Entry(Strict):
    """A tensor in a file. `data_offsets`: where it begins and ends, from the header's end."""

    dtype: _Dtype
    # The first fault ends the reading: pydantic would take some kilobytes for each.
    shape: Annotated[tuple[_Size, ...], Field(strict=False, max_length=8, fail_fast=True)]
    data_offsets: Annotated[tuple[_Size, _Size], Field(strict=False)]

    @model_validator(mode="after")
    def _consistent(self) -> Entry:
        begin, end = self.data_offsets
        bits = 8 if self.dtype == "BOOL" else int(re.sub(r"^\D+|_.*", "", self.dtype))
        size = math.prod(self.shape) * bits // 8
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
        length <= MAX_TENSORS_BYTES or size < 8,
        where if pickled else f"{where}: header length",
        "a pickle, which can run code when it is loaded" if pickled else str(length),
        f"a safetensors file, whose header has at most {MAX_TENSORS_BYTES} bytes",
    )
    got = f"{size} bytes that do not parse (header length {length})"
    ModelError.unless(len(start) >= begin, where, got, "a complete safetensors file")
    limit_structure(start[8:begin], f"{where}: header", TENSORS_LIMITS)
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
            length = int.from_bytes(file.start(8), "little")
            start = file.start(8 + min(length, MAX_TENSORS_BYTES))
            self.header = parse_header(start, file.size, str(path))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, flat; writing to it writes to the tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def lm_head_name(config: ModelConfig) -> str:
    """Return the name of the LM head's weight, which may be the embedding's."""
    return EMBEDDING if config.tie_word_embeddings else LM_HEAD


def module_name(layer: int, module: ModuleName) -> str:
    """Return `model.layers.3.self_attn.q_proj`; its tensors end in `.weight` and `.bias`."""
    return f"model.layers.{layer}.{LLAMA.modules[module].path}"


def norm_name(layer: int, norm: NormName) -> str:
    """Return `model.layers.3.input_layernorm`; its tensors end in `.weight` and `.bias`."""
    return f"model.layers.{layer}.{'self_attn.' * norm.startswith(('q_', 'k_'))}{norm}"


def norm_tensors(config: ModelConfig, layer: int) -> Shapes:
    """Return names and shapes of the tensors of a layer's norms and of its activation."""
    tensors: Shapes = {}
    for norm, weight in config.table.norms.items():
        for kind in _KINDS[: 1 + config.table.norm_bias]:
            tensors[f"{norm_name(layer, norm)}.{kind}"] = (config.width(weight.outputs),)
    if config.activation == "xielu":
        own = f"model.layers.{layer}.mlp.act_fn"
        tensors |= {f"{own}.{name}": (1,) for name in XIELU}
    return tensors


def light_tensors(config: ModelConfig) -> Shapes:
    """Return names and shapes of all tensors but the linear modules: what the TEE always has."""
    vocabulary, size = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    tensors: Shapes = {EMBEDDING: vocabulary, lm_head_name(config): vocabulary}
    for layer in range(config.num_hidden_layers):
        tensors |= norm_tensors(config, layer)
    bias = {FINAL_NORM_BIAS: size} if config.table.norm_bias else {}
    return tensors | {FINAL_NORM: size} | bias


def linear_tensors(config: ModelConfig) -> Shapes:
    """Return names and shapes of the weights and biases of the linear modules of all layers."""
    tensors: Shapes = {}
    for layer in range(config.num_hidden_layers):
        for module in config.table.modules:
            name, shape = module_name(layer, module), config.module_shape(module)
            tensors[f"{name}.weight"] = shape
            if module in config.biased_modules:
                tensors[f"{name}.bias"] = shape[:1]
    return tensors


class Place(NamedTuple):
    """Where a file has a tensor: under which name, and which `rows` of what has a `shape` there.

    `added`: to each of its numbers, by whoever reads it.
    """

    name: str
    shape: tuple[int, ...]
    rows: range
    added: float = 0.0


def file_places(
    config: ModelConfig, prefix: str = "model.", head: str = LM_HEAD
) -> dict[str, Place]:
    """Say where files of an architecture have each tensor. `prefix`, `head`: of the names there."""
    table, files, added = config.table, {LM_HEAD: head}, {FINAL_NORM: config.table.norm_offset}
    for layer in range(config.num_hidden_layers):
        own = {norm_name(layer, name): weight for name, weight in table.norms.items()}
        added |= {f"{name}.weight": table.norm_offset for name in own}
        own |= {module_name(layer, name): weight for name, weight in table.modules.items()}
        for name, weight in own.items():
            path = f"{prefix}layers.{layer}.{weight.path}"
            files |= {f"{name}.{kind}": f"{path}.{kind}" for kind in _KINDS}
    ends: Counter[str] = Counter()
    places = {}
    for name, shape in (light_tensors(config) | linear_tensors(config)).items():
        file = files.get(name, prefix + name.removeprefix("model."))
        rows = range(ends[file], ends[file] + shape[0])
        there = () if _NO_AXIS.search(name) else shape
        places[name] = Place(file, there, rows, added.get(name, 0.0))
        ends[file] = rows.stop
    # Modules side by side are one tensor, as high as all of them.
    return {
        name: place._replace(shape=(*[ends[place.name]][: len(place.shape)], *place.shape[1:]))
        for name, place in places.items()
    }


def find_names(has: Callable[[str], bool]) -> tuple[str, str]:
    """Return with what the names of a file's layers begin, and the name of its LM head.

    `has`: says whether it has a tensor.
    """
    prefix = next((p for p in _PREFIXES if has(f"{p}embed_tokens.weight")), _PREFIXES[0])
    return prefix, next(filter(has, _HEADS), LM_HEAD)


def use_of(name: str, prefix: str, config: ModelConfig) -> Literal["unknown", "none", "left out"]:
    """Say what a tensor is for that no forward pass of ours reads.

    None: buffers that are computed, and other parts of a larger model. Left out: layers that
    predict several tokens ahead, and scales of a cache in few bits.
    """
    if _BUFFER.search(name) or (prefix in _PREFIXES[2:] and not name.startswith(prefix)):
        return "none"
    ahead = re.match(rf"{re.escape(prefix)}layers\.(\d+)\.", name)
    if _UNUSED.search(name) or (ahead and int(ahead[1]) >= config.num_hidden_layers):
        return "left out"
    return "unknown"


def explained(names: Iterable[str], prefix: str, config: ModelConfig, directory: Path) -> list[str]:
    """Return which of these tensors nothing explains; log how many are left out knowingly."""
    uses = {name: use_of(name, prefix, config) for name in names}
    if left := sum(use == "left out" for use in uses.values()):
        what = "of tokens ahead, or scales of keys and values"
        _log.warning("%s: %d tensors are left out: layers %s", directory, left, what)
    return [name for name, use in uses.items() if use == "unknown"]


class Checkpoint:
    """The safetensors files of one directory, their headers checked for damage.

    `config`: whose model they hold; then tensors have Llama's names here, wherever a file has them.
    None: the names of the files. `manifest`: what the directory must hold; then every byte that is
    handed out was compared with it, in the memory in which it is handed out. Raises ModelError that
    names the file: none there, pickled weights, a truncated or damaged file, an index that points
    outside the directory or at a tensor that its file does not hold; ManifestError that names file
    and tensor, where it differs.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest | None = None,
        config: ModelConfig | None = None,
    ) -> None:
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
            if pickled := [name for name in found if name.endswith(PICKLE_SUFFIXES)]:
                where = directory / shown(pickled[0])
                got = "pickled weights, which can run code when they are loaded"
            raise ModelError(str(where), got=got, expected=f"{SINGLE_FILE} or {INDEX_FILE}")
        self._prefix = "model."
        self._places: dict[str, Place] = {}
        if config is not None:
            self._prefix, head = find_names(
                (self._found.keys() | self._missing.keys()).__contains__
            )
            # The head may be there beside an embedding that config.json says is the head.
            apart = config.model_copy(update={"tie_word_embeddings": False})
            self._places = file_places(apart, self._prefix, head)

    @classmethod
    def open(cls, directory: Path, manifest: Manifest | None = None) -> tuple[ModelConfig, Self]:
        """Read the configuration of a model and the headers of its files.

        The LM head is the embedding only where the files agree: as in transformers, another matrix
        beside it is the LM head, whatever config.json says. Raises ModelError, ManifestError.
        """
        config = read_config(directory, manifest)
        checkpoint = cls(directory, manifest, config)
        if config.tie_word_embeddings and checkpoint.has_own_head():
            config = config.model_copy(update={"tie_word_embeddings": False})
        elif not config.tie_word_embeddings and not checkpoint.has_head():
            # An embedding model, as sentence-transformers saves it.
            config = config.model_copy(update={"tie_word_embeddings": True, "generates": False})
        return config, checkpoint

    def place(self, name: str) -> Place:
        """Return where the file has a tensor. LookupError where neither it nor a table knows."""
        if (known := self._places.get(name)) is not None:
            return known
        shape = self._found[name].header.entries[name].shape
        return Place(name, shape, range(math.prod(shape[:1])))

    def stored(self, tensors: Iterable[str]) -> Shapes:
        """Return names and shapes of the tensors in the files that hold these."""
        return {place.name: place.shape for place in map(self.place, tensors)}

    def holds(self, tensors: Iterable[str]) -> bool:
        """Say whether all of these tensors are there."""
        return all(self._named(name) in self._found for name in tensors)

    def _named(self, name: str) -> str:
        return self._places[name].name if name in self._places else name

    def has_own_head(self) -> bool:
        """Say whether there is an LM head that is another matrix than the embedding.

        Also where that cannot be seen, because it is in a file that is not here. Raises ModelError,
        ManifestError.
        """
        if self._named(LM_HEAD) in self._missing or not self.holds((LM_HEAD, EMBEDDING)):
            return self._named(LM_HEAD) in self._missing
        one, other = self.entry(LM_HEAD), self.entry(EMBEDDING)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return True
        rows = range(other.shape[0])
        both = zip(self._read(LM_HEAD, rows), self._read(EMBEDDING, rows), strict=False)
        return any(not bool((a == b).all()) for (_, a), (_, b) in both)

    def has_head(self) -> bool:
        """Say whether files of a whole model, with a prefix, are these, or an LM head is there."""
        return bool(self._prefix) or self._named(LM_HEAD) in self._found.keys() | self._missing

    def require(self, tensors: Shapes) -> None:
        """Check that these tensors are there with these shapes, as floats, as in the manifest.

        Raises ModelError, ManifestError.
        """
        for name, own in tensors.items():
            stored, known = self._named(name), self._places.get(name)
            shape = own if known is None else known.shape
            path = self._missing.get(stored)
            ModelError.unless(
                path is None, f"{path}: {stored}", "no such file", f"one, as {INDEX_FILE} says"
            )
            where, expected = f"{self._contents}: {stored}", f"{list(shape)}"
            ModelError.unless(stored in self._found, where, "no such tensor", expected)
            entry = self.entry(name)
            where = self._where(name)
            got = f"shape {describe(list(entry.shape))}"
            ModelError.unless(entry.shape == shape, where, got, expected)
            read = entry.dtype in _DTYPES
            ModelError.unless(read, where, f"dtype {entry.dtype}", f"one of {', '.join(_DTYPES)}")
            self._pin(name)

    def refuse_extra(self, config: ModelConfig, also: Iterable[str] = ()) -> None:
        """Refuse tensors that the configuration does not explain, a bias for example.

        They would change the result if they were used. Raises ModelError. The LM head beside a
        tied embedding, the RoPE buffers of old checkpoints and the other parts of a larger model
        mean nothing and are allowed; layers that predict several tokens ahead and scales of caches
        are left out, and that is logged. `also`: tensors that the caller explains.
        """
        known = {self._named(name) for name in light_tensors(config) | linear_tensors(config)}
        known |= {self._named(LM_HEAD), *also}
        got = "a tensor that config.json does not explain"
        expected = f"only those of a {config.architecture} with these settings"
        left = sorted(set(self._found) - known)
        if unknown := explained(left, self._prefix, config, self.directory):
            where = f"{self._found[unknown[0]].path}: {shown(unknown[0])}"
            raise ModelError(where, got, expected)

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
        entry, place = self.entry(name), self.place(name)
        # copy_ would broadcast
        whole = (len(place.rows), *place.shape[1:])
        same = entry.shape == place.shape and (shape == whole or shape == place.shape == ())
        got = f"{describe(list(entry.shape))} since the file was checked"
        ModelError.unless(same, self._where(name), got, f"{list(shape)}")
        yield from self._part(name, range(len(place.rows)))

    def _part(self, name: str, wanted: range) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield consecutive rows of a tensor, which are counted from the first of them."""
        added = self.place(name).added
        for rows, found in self._read(name, wanted):
            first, last = max(rows.start, wanted.start), min(rows.stop, wanted.stop)
            inside = found[first - rows.start : last - rows.start]
            its_rows = slice(first - wanted.start, last - wanted.start)
            yield its_rows, inside.to(torch.float32) + added if added else inside

    def rows(self, name: str, start: int, stop: int, step: int = 1) -> torch.Tensor:
        """Return a copy of some rows of a checked tensor, as stored.

        All blocks that they lie in are read; without a manifest, and for a step, only the rows
        that are wanted. Raises ModelError, ManifestError.
        """
        entry = self.entry(name)
        wanted = range(start, min(stop, len(self.place(name).rows)), step)
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
        """Yield the blocks of rows that hold the wanted ones: copied first, checked then.

        Of a tensor that is a part of the file's, only its own rows.
        """
        file, entry = self._found[self._named(name)], self.entry(name)
        where, own = self._where(name), self.place(name).rows
        pin, height = self._pin(name), math.prod(entry.shape[:1])
        size = rows_per_block(entry.shape, entry.row_bytes)
        if pin is None and wanted.step > 1:
            size = 1  # a block is read whole only where it is verified
        buffer = torch.empty(size * entry.row_bytes, dtype=torch.uint8)
        begin = file.header.data_begin + entry.data_offsets[0]
        with opened(file.path) as reading:
            got = "another content since the file was checked"
            ModelError.unless(reading.stamp == file.stamp, where, got, "the same")
            for block in sorted({own[row] // size for row in wanted}):
                rows = slice(block * size, min(height, (block + 1) * size))
                part = buffer[: (rows.stop - rows.start) * entry.row_bytes]
                reading.fill(bytes_of(part), begin + rows.start * entry.row_bytes)
                if self.manifest is not None and pin is not None:
                    self.manifest.check_block(pin, where, block, bytes_of(part))
                found = part.view(TORCH_DTYPES[entry.dtype]).view(-1, *entry.shape[1:])
                # Passes NaN on, and is many times as fast as isfinite.
                finite = all(math.isfinite(extreme) for extreme in found.aminmax())
                ModelError.unless(finite, where, "NaN or infinity", "finite weights")
                first, last = max(own.start, rows.start), min(own.stop, rows.stop)
                yield (
                    slice(first - own.start, last - own.start),
                    found[first - rows.start : last - rows.start],
                )

    def _pin(self, name: str) -> TensorPin | None:
        """Return what the manifest says of a tensor; None only where there is no manifest."""
        if self.manifest is None:
            return None
        entry = self.entry(name)
        stored = self._named(name)
        return self.manifest.check_tensor(self._where(name), stored, entry.dtype, entry.shape)

    def entry(self, name: str) -> Entry:
        """Return what its file says of a tensor that is there."""
        stored = self._named(name)
        return self._found[stored].header.entries[stored]

    def _where(self, name: str) -> str:
        stored = self._named(name)
        return f"{self._found[stored].path}: {shown(stored)}"

    def _add_index(self) -> None:
        weight_map = read_weight_map(self._contents)
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


def read_weight_map(index: Path) -> dict[str, str]:
    """Return which file of its directory has each tensor. Raises ModelError."""
    weight_map = read_json(index, None, MAX_TENSORS_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map", describe(weight_map), "an object of file names")
    expected = "the name of a file in the same directory"
    for name, file in weight_map.items():
        ModelError.unless(_is_plain(file), f"{index}: {shown(name)}", describe(file), expected)
    return weight_map


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
