"""What a model may be imported from: tensors under a plain file's names, some rows at a time.

A source is opened from a path: a directory of safetensors, plain or quantised, one file of GGUF,
or an adapter (LoRA) with the directory of its base.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, get_args

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import ModelError, SettingsError, describe, shown
from protocol.model.at_rest import PinnedFile
from protocol.model.checkpoint import INDEX_FILE, SINGLE_FILE, read_weight_map
from protocol.model.config import ModelConfig, read_config
from protocol.model.files import read_json
from tsqp.extras import needing
from tsqp.importing.quantised import METHODS, Few, Method

# Other forms of a tokenizer, which transformers turns into tokenizer.json.
TOKENIZERS = ("tokenizer.model", "tekken.json", "vocab.json", "merges.txt")
# What a run reads beside config.json and the weights: copied as it is.
BESIDE: tuple[str, ...] = get_args(PinnedFile)[1:]
ADAPTER_FILE = "adapter_config.json"
_PAIR = r"(base_model\.model\.|)(.+)\.lora_([AB])\.weight"
# Of an adapter: what is read, or says nothing of numbers; values of others that change nothing.
_READ = (
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_dropout"),
    *("task_type", "auto_mapping", "revision", "base_model_name_or_path", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "peft_version", "qalora_group_size", "runtime_config"),
)
_NOTHING: tuple[Any, ...] = (None, False, [], {})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}
_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq")


class Source(Protocol):
    """A model to import."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What config.json of the plain one says."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All that is read."""

    @property
    def dtype(self) -> torch.dtype:
        """What tensors are written in unless another is asked for."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, by its name in a plain file; None where there is none."""

    def left(self, wanted: Iterable[str]) -> list[str]:
        """Return the names of its tensors that stand for none of these."""

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """Return some rows of a tensor, float32; all of a vector."""

    def copy_beside(self, directory: Path) -> None:
        """Write tokenizer, template and EOS ids."""


def _open(path: Path) -> Any:
    """Open safetensors. Raises ModelError."""
    ModelError.unless(path.is_file(), str(path), "no such file", "safetensors, no pickles")
    expected = "a complete safetensors file"
    with ModelError.instead_of(SafetensorError, str(path), "a damaged file", expected):
        return safe_open(path, "pt")


_FLOATS = {
    "F64": torch.float32,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def settings_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json says, and apart from it what it says of quantised weights.

    Raises ModelError.
    """
    raw = read_json(path / "config.json")
    found: Any = None
    for settings in (raw.get("text_config"), raw):
        if isinstance(settings, dict):
            found = settings.pop("quantization_config", None) or found
    where = f"{path / 'config.json'}: quantization_config"
    ModelError.unless(isinstance(found or {}, dict), where, describe(found), "an object")
    return raw, found or {}


def checked_config(settings: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a configuration that is no file yet. Raises ModelError that names `where`."""
    with TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", settings)
        try:
            return read_config(Path(folder))
        except ModelError as error:
            place = error.where.replace(folder, where)
            raise ModelError(place, error.got, error.expected) from None


def new_directory(path: Path) -> Path:
    """Return where a directory may be made. Raises SettingsError."""
    free, there = not os.path.lexists(path), path.absolute().parent.is_dir()
    SettingsError.unless(free, "DIRECTORY", str(path), "a name that is free")
    SettingsError.unless(there, f"DIRECTORY: {path}", "no such directory", "one to write into")
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of a directory."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy(source: Path, directory: Path) -> None:
    """Copy what stands beside weights."""
    for path in _beside(source):
        target = directory / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())


def _beside(source: Path, names: Iterable[str] = BESIDE) -> tuple[Path, ...]:
    return tuple(source / name for name in names if (source / name).is_file())


class Directory:
    """Safetensors with config.json; quantised weights are read as the floats they stand for.

    Raises ModelError that names what is missing, or a method that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings, self._quantised = settings_of(path)
        index = path / INDEX_FILE
        shards = {path / SINGLE_FILE}  # which counts where both are there
        if not (path / SINGLE_FILE).exists() and index.exists():
            shards = {path / file for file in read_weight_map(index).values()}
        self._file: dict[str, Path] = {}
        self._dtypes: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for shard in sorted(shards):
            file = _open(shard)
            for name in file.keys():  # noqa: SIM118 - no mapping
                part = file.get_slice(name)
                self._file[name], self._dtypes[name] = shard, part.get_dtype()
                self._shapes[name] = tuple(part.get_shape())
        self.files = (*_beside(path, ("config.json", *BESIDE, *TOKENIZERS)), *sorted(shards))

    @cached_property
    def dtype(self) -> torch.dtype:
        """Bfloat16 where weights are quantised, else that of the first of them."""
        stored = next(filter(_FLOATS.__contains__, self._dtypes.values()), "BF16")
        return torch.bfloat16 if self._few else _FLOATS[stored]

    @cached_property
    def _few(self) -> dict[str, tuple[Few, Method]]:
        """Quantised weights, by the name that they have in a plain file."""
        settings, where = self._quantised, f"{self.path / 'config.json'}: quantization_config"
        groups = [
            one.get("weights") or {} for one in (settings.get("config_groups") or {}).values()
        ]
        method = settings.get("quant_method")
        expected = f"one of {', '.join(_METHODS)}, of all weights alike"
        ModelError.unless(not settings or method in _METHODS, where, describe(method), expected)
        other = [key for key in ("transform_config", "sparsity_config") if settings.get(key)]
        ModelError.unless(not other, where, "".join(other[:1]), "scales of weights alone")
        layouts = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric")
        kinds = {tuple(str(one.get(key)) for key in layouts) for one in groups}
        ModelError.unless(len(kinds) < 2, where, "groups of several kinds", "one kind of weights")
        ours = {**settings, **(groups[0] if groups else {})}
        block = ours.get("weight_block_size") or ours.get("block_structure")
        group = ours.get("group_size") or ours.get("q_group_size") or -1
        if not block and group > 0:
            block = (1, group)
        bits = ours.get("num_bits") or ours.get("bits") or ours.get("w_bit") or 4
        ModelError.unless(bits in range(1, 9), where, f"{describe(bits)} bits", "1 to 8")
        two = settings.get("checkpoint_format") == "gptq_v2"
        found: dict[str, tuple[Few, Method]] = {}
        # Packed weights have scales, too: the first mark counts.
        for mark, name in ((mark, name) for mark in METHODS for name in self._shapes):
            stem = name.removesuffix(f".{mark}")
            if stem != name and f"{stem}.weight" not in found:
                kept = tuple(block) if block else None
                few = Few(stem, self._read, self._shapes, bits, kept, less_one=not two)
                found[f"{stem}.weight"] = few, METHODS[mark]
        ModelError.unless(not settings or found, where, describe(method), "its tensors, too")
        return found

    def left(self, wanted: Iterable[str]) -> list[str]:
        """See `Source.left`."""
        read = set(wanted)
        for name in read & self._few.keys():
            few, method = self._few[name]
            read |= {f"{few.name}.{part}" for part in (method.mark, *method.parts)}
        return sorted(self._shapes.keys() - read)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `Source.shape`."""
        if name in self._few:
            few, method = self._few[name]
            return method.shape(few)
        kind = self._dtypes.get(name, "F32")
        ModelError.unless(kind in _FLOATS, shown(name), f"{kind} without a scale", "floats")
        return self._shapes.get(name)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """See `Source.rows`."""
        if name in self._few:
            few, method = self._few[name]
            return method.rows(few, rows)
        return self._read(name, rows, slice(None)).float()

    def _read(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        # Opened anew: a mapping keeps what was read in memory for as long as there is some.
        part = _open(self._file[name]).get_slice(name)
        axes = len(self._shapes[name])
        found: torch.Tensor = part[rows, columns] if axes > 1 else part[rows] if axes else part[...]
        return found

    def copy_beside(self, directory: Path) -> None:
        """See `Source.copy_beside`; a tokenizer of another form is turned into tokenizer.json."""
        _copy(self.path, directory)
        others = _beside(self.path, TOKENIZERS)
        if others and not (directory / "tokenizer.json").exists():
            with needing(str(others[0]), "pip install 'tsqp[import]'"):
                import sentencepiece  # noqa: F401 - without it transformers takes another library
                from transformers import AutoTokenizer
            read = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
            read.save_pretrained(directory)


class Adapter:
    """A base with an adapter merged into it: W + s B A, with s = alpha / r or alpha / sqrt(r).

    Raises ModelError for one that is no LoRA of linear modules, or of another base.
    """

    def __init__(self, path: Path, base: Source) -> None:
        self.base, self.settings, self.dtype = base, base.settings, base.dtype
        where, given = path / ADAPTER_FILE, read_json(path / ADAPTER_FILE)
        # What else there is may change the base, or what is added to it.
        for key in given.keys() - set(_READ):
            got, fine = given[key], _NEUTRAL.get(key, _NOTHING)
            ModelError.unless(got in fine, f"{where}: {key}", describe(got), f"one of {fine}")
        self._given = given
        weights = path / "adapter_model.safetensors"
        self._file = _open(weights)
        self.path, self.files = path, (*base.files, where, weights, *_beside(path))
        # Where the file has each pair, by the weight that it changes.
        names = {name: re.fullmatch(_PAIR, name) for name in self._file.keys()}  # noqa: SIM118
        whole = [name for name, found in names.items() if found is None]
        got = shown(", ".join(whole)) if whole else "none"
        ModelError.unless(names and not whole, str(weights), got, "pairs of linear modules")
        halves = {k: {f[2]: f[1] + f[2] for f in names.values() if f and f[3] == k} for k in "AB"}
        odd = sorted(halves["A"].items() ^ halves["B"].items())
        ModelError.unless(not odd, str(weights), f"half a pair: {odd[:1]}", "both, A and B")
        self._pairs = {f"{module}.weight": stem for module, stem in halves["A"].items()}
        for target, stem in self._pairs.items():
            high, wide = base.shape(target) or (0, 0)
            up, down = self._tensors(target)
            ModelError.unless(
                (*up.shape, *down.shape) == (high, self._of(target)[0], self._of(target)[0], wide),
                f"{weights}: {shown(stem)}",
                f"{list(up.shape)} by {list(down.shape)}",
                f"[{high}, r] by [r, {wide}]: is it of another base, or rank?",
            )

    def _tensors(self, target: str) -> tuple[torch.Tensor, torch.Tensor]:
        stem = self._pairs[target]
        up, down = (self._file.get_tensor(f"{stem}.lora_{kind}.weight").float() for kind in "BA")
        return up, down

    def _of(self, target: str) -> tuple[float, float]:
        """Return rank and alpha, of which a pattern may name others for a module."""
        module, given = target.removesuffix(".weight"), self._given
        found = [float(given["r"]), float(given["lora_alpha"])]
        for at, patterns in enumerate(("rank_pattern", "alpha_pattern")):
            own = [
                float(value)
                for pattern, value in (given.get(patterns) or {}).items()
                if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module)
            ]
            found[at] = (*own, found[at])[0]
        return found[0], found[1]

    def left(self, wanted: Iterable[str]) -> list[str]:
        """See `Source.left`."""
        return self.base.left(wanted)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `Source.shape`."""
        return self.base.shape(name)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """See `Source.rows`."""
        found = self.base.rows(name, rows)
        if name in self._pairs:
            (up, down), (rank, alpha) = self._tensors(name), self._of(name)
            scale = alpha / (math.sqrt(rank) if self._given.get("use_rslora") else rank)
            found = found + scale * (up[rows] @ down)
        return found

    def copy_beside(self, directory: Path) -> None:
        """See `Source.copy_beside`; what stands beside the adapter is in place of the base's."""
        self.base.copy_beside(directory)
        _copy(self.path, directory)
