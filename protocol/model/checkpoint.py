"""Weights of a model directory: safetensors, one file or several with an index.

The tensors that a model must have follow from its configuration; names, shapes and dtypes are
checked before any weight is read. Reading copies a block of rows at a time into memory of our own,
where it is verified, if there is a manifest, and found to be finite, and only then handed out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from protocol.errors import ModelError, describe
from protocol.messages import FUSED_MODULES, LinearOperator, ModuleName
from protocol.model.config import ModelConfig, read_json
from protocol.model.files import is_there, shown
from protocol.model.manifest import Manifest, TensorPin, check_block, rows_per_block
from protocol.model.tensor_file import TORCH_DTYPES, Entry, TensorFile, bytes_of

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
_DTYPES = ("F32", "F16", "BF16")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def lm_head_name(config: ModelConfig) -> str:
    """Return the name of the LM head's weight, which may be the embedding's."""
    return EMBEDDING if config.tie_word_embeddings else "lm_head.weight"


def module_name(layer: int, module: ModuleName) -> str:
    """Return `model.layers.3.self_attn.q_proj`; its tensors end in `.weight` and `.bias`."""
    block = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"model.layers.{layer}.{block}.{module}"


def norm_names(config: ModelConfig, layer: int) -> dict[str, str]:
    """Return the tensor names of a layer's norms under their short names."""
    prefix = f"model.layers.{layer}"
    names = {
        "input_layernorm": f"{prefix}.input_layernorm.weight",
        "post_attention_layernorm": f"{prefix}.post_attention_layernorm.weight",
    }
    if config.qk_norm:
        names["q_norm"] = f"{prefix}.self_attn.q_norm.weight"
        names["k_norm"] = f"{prefix}.self_attn.k_norm.weight"
    return names


def light_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors but the linear modules: what the TEE always has."""
    vocabulary = (config.vocab_size, config.hidden_size)
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: vocabulary, lm_head_name(config): vocabulary}
    for layer in range(config.num_hidden_layers):
        for short, name in norm_names(config, layer).items():
            size = config.head_dim if short in ("q_norm", "k_norm") else config.hidden_size
            tensors[name] = (size,)
    tensors[FINAL_NORM] = (config.hidden_size,)
    return tensors


def linear_tensors(
    config: ModelConfig, operators: Iterable[LinearOperator]
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights and biases of some fused operators, all layers."""
    tensors: dict[str, tuple[int, ...]] = {}
    modules = [module for operator in operators for module in FUSED_MODULES[operator]]
    for layer in range(config.num_hidden_layers):
        for module in modules:
            name, shape = module_name(layer, module), config.module_shape(module)
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
        self._found: dict[str, tuple[TensorFile, Entry]] = {}
        # Shards that the index names and the directory lacks: a TEE may hold only what it uses.
        self._missing: dict[str, Path] = {}
        self._remembered: dict[object, str] = {}
        # The file that says which tensors there are.
        self._contents = directory / SINGLE_FILE
        if is_there(self._contents):
            self._add_file(self._contents)
        elif is_there(directory / INDEX_FILE):
            self._contents = directory / INDEX_FILE
            self._add_index(self._contents)
        else:
            self._refuse_missing()

    def holds(self, tensors: Iterable[str]) -> bool:
        """Say whether all of these tensors are there."""
        return all(name in self._found for name in tensors)

    def require(self, tensors: dict[str, tuple[int, ...]]) -> None:
        """Check that these tensors are there with these shapes, as floats, as in the manifest.

        Raises ModelError, ManifestError.
        """
        for name, shape in tensors.items():
            if name in self._missing:
                raise ModelError(
                    f"{self._missing[name]}: {name}",
                    got="no such file",
                    expected=f"one, as {INDEX_FILE} says",
                )
            if name not in self._found:
                raise ModelError(
                    f"{self._contents}: {name}", got="no such tensor", expected=f"{list(shape)}"
                )
            _, entry = self._found[name]
            where = self._where(name)
            if entry.shape != shape:
                raise ModelError(
                    where, got=f"shape {describe(list(entry.shape))}", expected=f"{list(shape)}"
                )
            if entry.dtype not in _DTYPES:
                raise ModelError(
                    where,
                    got=f"dtype {entry.dtype}",
                    expected=f"one of {', '.join(_DTYPES)}",
                )
            self._pin(entry)

    def refuse_extra(self, config: ModelConfig) -> None:
        """Refuse tensors that the configuration does not explain, a bias for example.

        They would change the result if they were used. Raises ModelError. The LM head beside a
        tied embedding and the RoPE buffers of old checkpoints mean nothing and are allowed.
        """
        known = light_tensors(config) | linear_tensors(config, FUSED_MODULES)
        for name in sorted(set(self._found) - set(known)):
            if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                continue
            raise ModelError(
                self._where(name),
                got="a tensor that config.json does not explain",
                expected=f"only those of a {config.architecture} with these settings",
            )

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
        _, entry = self._found[name]
        if entry.shape != shape:  # copy_ would broadcast
            raise ModelError(
                self._where(name),
                got=f"{describe(list(entry.shape))} since the file was checked",
                expected=f"{list(shape)}",
            )
        step = rows_per_block(shape, entry.row_bytes)
        yield from self._verified(entry, range(-(-shape[0] // step)))

    def rows(self, name: str, start: int, stop: int, step: int = 1) -> torch.Tensor:
        """Return a copy of some rows of a checked tensor, as stored.

        With a manifest, all blocks that they lie in are read and verified. Raises ModelError,
        ManifestError.
        """
        _, entry = self._found[name]
        wanted = range(start, min(stop, entry.shape[0]), step)
        found = torch.empty((len(wanted), *entry.shape[1:]), dtype=TORCH_DTYPES[entry.dtype])
        if self.manifest is None:
            self._copy_rows(entry, wanted, found)
            return found
        size = rows_per_block(entry.shape, entry.row_bytes)
        blocks = sorted({row // size for row in wanted})
        for rows, block in self._verified(entry, blocks):
            first = -(-max(0, rows.start - start) // step)
            inside = wanted[first : -(-max(0, rows.stop - start) // step)]
            begin, end = inside.start - rows.start, inside.stop - rows.start
            found[first : first + len(inside)] = block[begin:end:step]
        return found

    def pin(self, name: str) -> TensorPin:
        """Return what a manifest says of a checked tensor; from what is here, believed or verified.

        Raises ModelError, ManifestError.
        """
        _, entry = self._found[name]
        digests = [
            hashlib.sha256(bytes_of(found)).hexdigest()
            for _, found in self.blocks(name, entry.shape)
        ]
        return TensorPin.model_validate(
            {"dtype": entry.dtype, "shape": entry.shape, "blocks": digests}
        )

    def remember(self, what: object, compute: Callable[[], str]) -> str:
        """Return a digest of what is here; computed once where a manifest pins the content."""
        if self.manifest is None:
            return compute()
        if what not in self._remembered:
            self._remembered[what] = compute()
        return self._remembered[what]

    def _verified(
        self, entry: Entry, blocks: Iterable[int]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield whole blocks of a tensor: copied first, checked then. One buffer for all."""
        file, _ = self._found[entry.name]
        where, pin = self._where(entry.name), self._pin(entry)
        size = rows_per_block(entry.shape, entry.row_bytes)
        buffer = torch.empty(size * entry.row_bytes, dtype=torch.uint8)
        with file.reading(entry) as descriptor:
            for block in blocks:
                rows = slice(block * size, min((block + 1) * size, entry.shape[0]))
                part = buffer[: (rows.stop - rows.start) * entry.row_bytes]
                file.read_rows(descriptor, entry, rows.start, part)
                if pin is not None:
                    check_block(pin, where, block, bytes_of(part))
                found = _typed(part, entry)
                _require_finite(found, where)
                yield rows, found

    def _copy_rows(self, entry: Entry, wanted: range, into: torch.Tensor) -> None:
        """Copy rows of a tensor that nobody pinned; those between them are not read."""
        file, _ = self._found[entry.name]
        if not into.numel():
            return
        raw = into.view(-1).view(torch.uint8)
        with file.reading(entry) as descriptor:
            if wanted.step == 1:
                file.read_rows(descriptor, entry, wanted.start, raw)
            else:
                for row, part in zip(wanted, raw.split(entry.row_bytes), strict=True):
                    file.read_rows(descriptor, entry, row, part)
        _require_finite(into, self._where(entry.name))

    def _pin(self, entry: Entry) -> TensorPin | None:
        """Return what the manifest says of a tensor; None only where there is no manifest."""
        if self.manifest is None:
            return None
        where = self._where(entry.name)
        return self.manifest.check_tensor(where, entry.name, entry.dtype, entry.shape)

    def _where(self, name: str) -> str:
        return f"{self._found[name][0].path}: {shown(name)}"

    def _add_index(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(
                f"{index}: weight_map", got=describe(weight_map), expected="an object of file names"
            )
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _plain(file):
                raise ModelError(
                    f"{index}: {shown(name)}",
                    got=describe(file),
                    expected="the name of a file in the same directory",
                )
        for file in sorted(set(weight_map.values())):
            if is_there(self.directory / file):
                self._add_file(self.directory / file)
        for name, file in weight_map.items():
            path = self.directory / file
            if not is_there(path):
                self._missing[name] = path
            elif name not in self._found or self._found[name][0].path != path:
                raise ModelError(
                    f"{path}: {shown(name)}",
                    got="no such tensor",
                    expected=f"one, as {INDEX_FILE} says",
                )

    def _add_file(self, path: Path) -> None:
        file = TensorFile(path)
        for name, entry in file.entries.items():
            if name in self._found:
                raise ModelError(
                    f"{path}: {shown(name)}",
                    got=f"a tensor that {self._found[name][0].path.name} holds too",
                    expected="every tensor once",
                )
            self._found[name] = (file, entry)

    def _refuse_missing(self) -> None:
        found = sorted(p.name for p in self.directory.iterdir()) if self.directory.is_dir() else []
        pickled = [name for name in found if name.endswith(_PICKLE_SUFFIXES)]
        if pickled:
            raise ModelError(
                str(self.directory / shown(pickled[0])),
                got="pickled weights, which can run code when they are loaded",
                expected=f"{SINGLE_FILE} or {INDEX_FILE}",
            )
        raise ModelError(
            str(self.directory),
            got=f"no weights among {len(found)} files",
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
        )


def _plain(name: str) -> bool:
    """Say whether this names a file of a directory, and nothing beyond it."""
    fits = 0 < len(name) < 256 and name.isprintable()
    return fits and Path(name).name == name and name not in (".", "..")


def _typed(raw: torch.Tensor, entry: Entry) -> torch.Tensor:
    """View bytes as rows of a tensor."""
    return raw.view(TORCH_DTYPES[entry.dtype]).view(-1, *entry.shape[1:])


def _require_finite(values: torch.Tensor, where: str) -> None:
    """Refuse NaN and infinity: one of them makes every token wrong. Raises ModelError."""
    if not values.numel():
        return
    smallest, largest = values.aminmax()  # passes NaN on; many times as fast as isfinite
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        raise ModelError(where, got="NaN or infinity", expected="finite weights")
