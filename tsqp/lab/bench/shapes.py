"""Shapes of published models, so that a benchmark has nothing to download.

Values in shapes.json are those of the model's published config.json, with two exceptions: weights
are written in bfloat16 whatever the original has, and no token id ends a sequence, because random
weights say any.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.model.config import ModelConfig, read_config
from protocol.model.files import read_json


@dataclass(frozen=True)
class Shape:
    """A model without its weights. `settings`: what its config.json says."""

    name: str
    settings: Mapping[str, Any]

    def config(self) -> ModelConfig:
        """Return the configuration as both sides would read it. Raises ModelError."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(
                json.dumps(dict(self.settings)), encoding="utf-8"
            )
            return read_config(Path(folder))

    def with_layers(self, count: int) -> Shape:
        """Return the same shape with another number of layers."""
        return replace(self, settings={**self.settings, "num_hidden_layers": count})


SHAPES: Mapping[str, Shape] = {
    name: Shape(name, shape["settings"])
    for name, shape in json.loads(Path(__file__).with_suffix(".json").read_bytes()).items()
}


def find_shape(name: str) -> Shape:
    """Return a shape by its name. Raises SettingsError that lists the names."""
    SettingsError.unless(name in SHAPES, "--shape", repr(name), f"one of {', '.join(SHAPES)}")
    return SHAPES[name]


def shape_of(model: Path | None, shape: str | None) -> Shape:
    """Return a shape by its name, or that of a model's directory. Raises SettingsError, ModelError.

    Of a directory only config.json is read.
    """
    require_one(model, shape)
    if shape is not None or model is None:
        return find_shape(shape or "")
    read_config(model)  # its errors name the directory
    return Shape(model.name, read_json(model / "config.json") | {"eos_token_id": None})


def require_one(model: object, shape: object) -> None:
    """Refuse a model and a shape together, and neither. Raises SettingsError."""
    SettingsError.unless(
        (model is None) != (shape is None),
        "MODEL and --shape",
        "neither" if model is None else "both",
        "one of them",
    )
