"""The key of a feature or segment mask, as far as a run needs it.

The code that makes and reads such keys is an installed package's: it registers its key class as the
entry point `feature` of the group `tsqp.keys`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from protocol.errors import FeatureKeyError
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from tee_side.plugins import load_entry_point, one_entry_point
from tee_side.protect.masks.mask import (
    FeatureMask,
    KeyedSegment,
    KeyedTransform,
    ProvisionedMask,
    SegmentMask,
)
from tee_side.words import Site

_GROUP, _NAME = "tsqp.keys", "feature"


class TransformKey(Protocol):
    """Undoes the weights of a provisioned server; secret but for the two properties."""

    @property
    def provision_id(self) -> str:
        """The name that the server repeats, SHA-256 in hex."""

    @property
    def server_linear_digest(self) -> str:
        """The digest of the weights that the server got, SHA-256 in hex."""

    @classmethod
    def load(cls, path: Path) -> TransformKey:
        """Read a key. Raises FeatureKeyError."""

    def check(self, config: ModelConfig, checkpoint: Checkpoint, mask: ProvisionedMask) -> None:
        """Check that the key is one of this model and mask. Raises FeatureKeyError."""

    def transforms(
        self,
        mask: FeatureMask,
        config: ModelConfig,
        gains: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> dict[Site, KeyedTransform]:
        """Make every site's transform.

        `gains`: of each layer, the weights [D] of `input_layernorm` and `post_attention_layernorm`.
        Raises FeatureKeyError for another mask, MaskError for a gain that the mask cannot fold.
        """

    def segment(self, mask: SegmentMask, config: ModelConfig) -> KeyedSegment:
        """Make the residual stream's map. Raises FeatureKeyError for another mask."""


def load_key(path: Path) -> TransformKey:
    """Read the key of a feature or segment mask through the package that makes such keys.

    Raises FeatureKeyError, and PluginError for a package that does not load.
    """
    if (entry := one_entry_point(_GROUP, _NAME)) is not None:
        key_class: type[TransformKey] = load_entry_point(entry)
        return key_class.load(path)
    raise FeatureKeyError(
        str(path),
        "no package that reads keys of such masks",
        f"one that registers {_NAME!r} in the entry points {_GROUP}, as tsqp does",
    )
