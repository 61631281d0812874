"""Weights of a model directory: safetensors, one file or several with an index.

The tensors that a model must have follow from its configuration; names, shapes and dtypes are
checked before any weight is read. Reading is memory-mapped through the safetensors library, a
block at a time: pages of a mapping count towards the process's memory as long as it lives.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import ModelError, describe
from protocol.messages import FUSED_MODULES, LinearOperator, ModuleName
from protocol.model.config import ModelConfig, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
_BLOCK_BYTES = 32 * 1024 * 1024
_DTYPES = ("F32", "F16", "BF16")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_PICKLE_MAGICS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


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

    Raises ModelError that names the file: none there, pickled weights, a truncated or damaged
    file, an index that points outside the directory or at a tensor that its file does not hold.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file_of: dict[str, Path] = {}
        self._shape_of: dict[str, tuple[int, ...]] = {}
        self._dtype_of: dict[str, str] = {}
        # Shards that the index names and the directory lacks: a TEE may hold only what it uses.
        self._missing: dict[str, Path] = {}
        index = directory / INDEX_FILE
        if (directory / SINGLE_FILE).exists():
            self._add_file(directory / SINGLE_FILE)
        elif index.exists():
            self._add_index(index)
        else:
            self._refuse_missing()

    def holds(self, tensors: Iterable[str]) -> bool:
        """Say whether all of these tensors are there."""
        return all(name in self._file_of for name in tensors)

    def require(self, tensors: dict[str, tuple[int, ...]]) -> None:
        """Check that these tensors are there with these shapes, as floats. Raises ModelError."""
        for name, shape in tensors.items():
            if name in self._missing:
                raise ModelError(
                    str(self._missing[name]), got="no such file", expected=f"one that holds {name}"
                )
            if name not in self._file_of:
                raise ModelError(
                    f"{self.directory}: {name}", got="no such tensor", expected=f"{list(shape)}"
                )
            where = f"{self._file_of[name]}: {name}"
            if self._shape_of[name] != shape:
                raise ModelError(
                    where, got=f"shape {list(self._shape_of[name])}", expected=f"{list(shape)}"
                )
            if self._dtype_of[name] not in _DTYPES:
                raise ModelError(
                    where,
                    got=f"dtype {self._dtype_of[name]}",
                    expected=f"one of {', '.join(_DTYPES)}",
                )

    def refuse_extra(self, config: ModelConfig) -> None:
        """Refuse tensors that the configuration does not explain, a bias for example.

        They would change the result if they were used. Raises ModelError. The LM head beside a
        tied embedding and the RoPE buffers of old checkpoints mean nothing and are allowed.
        """
        known = light_tensors(config) | linear_tensors(config, FUSED_MODULES)
        for name in sorted(set(self._file_of) - set(known)):
            if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                continue
            raise ModelError(
                f"{self._file_of[name]}: {name}",
                got="a tensor that config.json does not explain",
                expected=f"only those of a {config.architecture} with these settings",
            )

    def copy_into(self, name: str, destination: torch.Tensor) -> None:
        """Copy a tensor into memory that we own, converting to its dtype and device.

        Goes block by block through a mapping that is dropped after each, so that a weight is
        never in memory twice. Raises ModelError if the file has changed under us.
        """
        row_bytes = max(1, destination.nbytes // max(1, destination.shape[0]))
        block = max(1, _BLOCK_BYTES // row_bytes)
        for start in range(0, destination.shape[0], block):
            rows = destination[start : start + block]
            found = self.rows(name, start, start + rows.shape[0])
            if found.shape != rows.shape:  # copy_ would broadcast
                raise ModelError(
                    f"{self._file_of[name]}: {name}",
                    got=f"{list(found.shape)} since the file was checked",
                    expected=f"{list(rows.shape)}",
                )
            rows.copy_(found)

    def rows(self, name: str, start: int, stop: int, step: int = 1) -> torch.Tensor:
        """Return rows of a tensor as a view of the mapped file: short-lived use only."""
        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                found: torch.Tensor = file.get_slice(name)[start:stop][::step]
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path}: {name}", got=_damage(path, error), expected="a readable tensor"
            ) from None
        return found

    def _add_index(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(
                f"{index}: weight_map", got=describe(weight_map), expected="an object of file names"
            )
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise ModelError(
                    f"{index}: {name}",
                    got=describe(file),
                    expected="the name of a file in the same directory",
                )
        for file in sorted(set(weight_map.values())):
            if (self.directory / file).exists():
                self._add_file(self.directory / file)
        for name, file in weight_map.items():
            if not (self.directory / file).exists():
                self._missing[name] = self.directory / file
            elif self._file_of.get(name) != self.directory / file:
                raise ModelError(
                    f"{self.directory / file}: {name}",
                    got="no such tensor",
                    expected=f"one, as {INDEX_FILE} says",
                )

    def _add_file(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is not iterable
                    if name in self._file_of:
                        raise ModelError(
                            f"{path}: {name}",
                            got=f"a tensor that {self._file_of[name].name} holds too",
                            expected="every tensor once",
                        )
                    description = file.get_slice(name)
                    self._file_of[name] = path
                    self._shape_of[name] = tuple(description.get_shape())
                    self._dtype_of[name] = str(description.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ModelError(
                str(path), got=_damage(path, error), expected="a complete safetensors file"
            ) from None

    def _refuse_missing(self) -> None:
        found = sorted(p.name for p in self.directory.iterdir()) if self.directory.is_dir() else []
        pickled = [name for name in found if name.endswith(_PICKLE_SUFFIXES)]
        if pickled:
            raise ModelError(
                str(self.directory / pickled[0]),
                got="pickled weights, which can run code when they are loaded",
                expected=f"{SINGLE_FILE} or {INDEX_FILE}",
            )
        raise ModelError(
            str(self.directory),
            got=f"no weights among {len(found)} files",
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
        )


def _damage(path: Path, error: Exception) -> str:
    """Say what is wrong with a file that safetensors refuses; pickle is recognised by its magic."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as open_error:
        return open_error.strerror or type(open_error).__name__
    if magic.startswith(_PICKLE_MAGICS):
        return "a pickle, which can run code when it is loaded"
    return f"{path.stat().st_size} bytes that do not parse ({error})"[:160]
