"""What a model's own files say of its embeddings; those of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict

from protocol.errors import ModelError, describe
from protocol.model.files import MAX_JSON_BYTES, find_file, parse_object, read_file, read_json
from protocol.validation import validate_known
from tee_side.engine.request import Pooling

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest

_MODULES_FILE, _POOLING_FILE = "modules.json", "1_Pooling/config.json"
_PROMPTS_FILE = "config_sentence_transformers.json"
_POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a text becomes a vector.

    `prompts`: by their names, what stands in front of a text; `prompt`: what does where none is
    named. `shorter`: whether the first elements of a vector are a vector, too: files of such models
    do not say up to where.
    """

    pooling: Pooling = "last"
    normalised: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt: str = ""
    shorter: bool = False

    def front(self, prompt_name: str | None) -> str:
        """Return what stands in front of a text."""
        return self.prompt if prompt_name is None else self.prompts[prompt_name]

    def refused(
        self, prompt_name: str | None, dimensions: object, size: int
    ) -> tuple[str, str] | None:
        """Return which of two parameters does not fit, and what would; None where both do.

        `size`: of a vector.
        """
        fits = dimensions is None or (type(dimensions) is int and dimensions == size)
        if not fits and not (self.shorter and type(dimensions) is int and 0 < dimensions < size):
            return "dimensions", f"{'1 to ' * self.shorter}{size}, or nothing"
        if prompt_name is not None and prompt_name not in self.prompts:
            names = ", ".join(self.prompts)
            return "prompt_name", f"one of {names}, or nothing" if names else "nothing"
        return None

    def vector(self, pooled_D: torch.Tensor, dimensions: int | None = None) -> torch.Tensor:
        """Return the vector of a pooled hidden state, float32; its first `dimensions` elements."""
        found = pooled_D.to(torch.float32)[:dimensions]
        return torch.nn.functional.normalize(found, dim=-1) if self.normalised else found


class _Prompts(BaseModel):
    """What config_sentence_transformers.json says of prompts."""

    model_config = ConfigDict(frozen=True, strict=True)

    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None


def read_embedding(
    directory: Path, pooling: Pooling | None = None, manifest: Manifest | None = None
) -> Embedding:
    """Read what the files say; without any, vectors are of length 1 and of the last token.

    `pooling`: instead of what they say. Raises ModelError for what we do not compute, and
    ManifestError.
    """
    path = find_file(directory, _MODULES_FILE, manifest)
    if path is None:
        return Embedding(pooling or "last")
    content = b'{"modules":' + read_file(path, MAX_JSON_BYTES, manifest) + b"}"
    modules = parse_object(content, str(path))["modules"]
    listed = modules if isinstance(modules, list) else []
    kinds = [str(one.get("type")).rpartition(".")[2] for one in listed if isinstance(one, dict)]
    known = kinds in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
    expected = "Transformer, Pooling and perhaps Normalize"
    ModelError.unless(known, f"{path}: type", ", ".join(kinds) or describe(modules), expected)
    if pooling is None:
        pooling = _pooling(directory, manifest)
    said = _Prompts()
    if found := find_file(directory, _PROMPTS_FILE, manifest):
        said = validate_known(_Prompts, read_json(found, manifest), str(found))
    prompts, prompt = said.prompts or {}, said.default_prompt_name
    ModelError.unless(
        prompt is None or prompt in prompts,
        f"{found}: default_prompt_name",
        describe(prompt),
        f"one of {', '.join(prompts)}",
    )
    return Embedding(pooling, len(kinds) == 3, prompts, prompts[prompt] if prompt else "", True)


def _pooling(directory: Path, manifest: Manifest | None) -> Pooling:
    """Return how 1_Pooling/config.json says that rows become one."""
    path = find_file(directory, _POOLING_FILE, manifest)
    ModelError.unless(
        path is not None,
        str(directory / _POOLING_FILE),
        "no such file",
        f"one, for {_MODULES_FILE}",
    )
    raw = read_json(directory / _POOLING_FILE, manifest)
    modes = [name.removeprefix("pooling_mode_") for name, on in raw.items() if on is True]
    modes = [str(raw["pooling_mode"])] if "pooling_mode" in raw else modes
    modes = [mode for mode in modes if mode != "include_prompt"]
    known = len(modes) == 1 and modes[0] in _POOLINGS
    expected = f"one of {', '.join(_POOLINGS)}"
    ModelError.unless(known, f"{directory / _POOLING_FILE}", ", ".join(modes) or "none", expected)
    ModelError.unless(
        raw.get("include_prompt", True) is True,
        f"{directory / _POOLING_FILE}: include_prompt",
        describe(raw.get("include_prompt")),
        "true",
    )
    return _POOLINGS[modes[0]]
