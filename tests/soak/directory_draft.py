"""A small model directory that is about to be spoilt, and what its refusal must name."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import INDEX_FILE, SINGLE_FILE, light_tensors, linear_tensors
from protocol.model.config import read_config

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Named:
    """What a refusal must name; `by`: the readers that must refuse."""

    parts: tuple[str, ...]
    by: tuple[str, ...] = ("tee", "service")


def named(*parts: str) -> Named:
    """Return what both readers must name."""
    return Named(parts)


class Draft:
    """A good model directory that is about to be spoilt."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory = directory
        self.rng = rng

    def __truediv__(self, name: str) -> Path:
        return self.directory / name

    @property
    def weights(self) -> Path:
        """The one file of weights."""
        return self / SINGLE_FILE

    def set(self, **changes: Any) -> None:
        """Change config.json."""
        fields = {**BASE, **changes}
        (self / CONFIG).write_text(json.dumps(fields), encoding="utf-8")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors."""
        found: dict[str, torch.Tensor] = load_file(self.weights)
        return found

    def any_tensor(self) -> str:
        """Return the name of one."""
        return self.rng.choice(sorted(self.tensors()))

    def change(self, changed: dict[str, torch.Tensor | None]) -> None:
        """Replace tensors, or leave them out, in a file that is otherwise good."""
        kept = {name: t for name, t in {**self.tensors(), **changed}.items() if t is not None}
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, self.weights)

    def header(self) -> tuple[dict[str, Any], bytes]:
        """Return the header, parsed, and the data behind it."""
        content = self.weights.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        return json.loads(content[8:end]), content[end:]

    def write(self, header: object, data: bytes, length: int | None = None) -> None:
        """Write a file with any header: an object, or bytes as they are."""
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        size = len(raw) if length is None else length
        self.weights.write_bytes(size.to_bytes(8, "little") + raw + data)

    def shard(self) -> dict[str, str]:
        """Divide the weights in two files and an index; return its map."""
        tensors = self.tensors()
        self.weights.unlink()
        files = ("a.safetensors", "b.safetensors")
        found: dict[str, str] = {}
        for number, file in enumerate(files):
            part = {name: tensors[name] for name in sorted(tensors)[number::2]}
            save_file(part, self / file)
            found |= dict.fromkeys(part, file)
        self.index(found)
        return found

    def index(self, weight_map: object) -> None:
        """Write the index."""
        (self / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def make_base(directory: Path, tokenizer: Path) -> None:
    """Make the good directory."""
    directory.mkdir()
    Draft(directory, random.Random(0)).set()
    config = read_config(directory)
    generator = torch.Generator().manual_seed(0)
    shapes = light_tensors(config) | linear_tensors(config, FUSED_MODULES)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, directory / SINGLE_FILE)
    (directory / GENERATION).write_text('{"eos_token_id": 1}', encoding="utf-8")
    shutil.copyfile(tokenizer, directory / TOKENIZER)
