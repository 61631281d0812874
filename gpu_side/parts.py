"""A rank's part of the output columns of every weight: its sizes, and how it is read.

Each module is parted for itself (`protocol.messages.part_of`), and so is the vocabulary of the LM
head and of the embedding: a tied weight is one tensor in a part, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from protocol.errors import ModelError, SettingsError, describe
from protocol.messages import FUSED_MODULES, MAX_RANKS, Columns, ModuleName, part_of
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig


class PartConfig(ModelConfig):
    """A model's configuration whose output sizes are those of a part; `vocab_size` is one.

    `vocabulary`: how many ids the whole model has.
    """

    columns: Columns
    vocabulary: int

    @classmethod
    def of(cls, config: ModelConfig, columns: Columns) -> PartConfig:
        """Return the configuration of a part."""
        part = part_of(config.vocab_size, *columns)
        fields = dict(config) | {"vocab_size": part.stop - part.start}
        return cls(**fields, columns=columns, vocabulary=config.vocab_size)

    def module_shape(self, module: ModuleName) -> tuple[int, int]:
        """See `ModelConfig.module_shape`; the out_features are the part's."""
        out_features, in_features = super().module_shape(module)
        part = part_of(out_features, *self.columns)
        return part.stop - part.start, in_features

    @property
    def first_id(self) -> int:
        """The first token id of the part's vocabulary."""
        first: int = part_of(self.vocabulary, *self.columns).start
        return first


class PartCheckpoint(Checkpoint):
    """A checkpoint that has of every tensor the rows of a part, and reads no others."""

    def __init__(self, directory: Path, columns: Columns) -> None:
        super().__init__(directory)
        self._columns = columns

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[slice, torch.Tensor]]:
        """See `Checkpoint.blocks`; `shape` is that of the part, whose first row is 0."""
        whole = self._entry(name).shape
        part = part_of(whole[0], *self._columns)
        if (part.stop - part.start, *whole[1:]) != shape:
            got = f"{describe(list(whole))} since the file was checked"
            expected = f"such that part {self._columns} is {list(shape)}"
            raise ModelError(self._where(name), got=got, expected=expected)
        for rows, found in self._read(name, range(part.start, part.stop)):
            first, last = max(rows.start, part.start), min(rows.stop, part.stop)
            inside = found[first - rows.start : last - rows.start]
            yield slice(first - part.start, last - part.start), inside


def check_columns(config: ModelConfig, columns: Columns, option: str) -> None:
    """Check that there is such a part, and that none is empty. Raises SettingsError.

    `option`: where the part, or the number of parts, was asked for.
    """
    part, parts = columns
    shapes = (config.module_shape(name) for names in FUSED_MODULES.values() for name in names)
    most = min(MAX_RANKS, config.vocab_size, *(shape[0] for shape in shapes))
    if not 1 <= parts <= most:
        raise SettingsError(option, got=f"{parts} parts", expected=f"1 to {most}")
    if not 0 <= part < parts:
        raise SettingsError(option, got=f"part {part} of {parts}", expected=f"0 to {parts - 1}")
