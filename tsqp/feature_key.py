"""The key of a feature or segment mask: what the TEE keeps, and what static maps are drawn from.

A JSON file for its owner alone (mode 0600). A reader of it can undo the mask. It is bound to a
model, to a mask with its options, and to the weights that were made with it: their
`provision_id`, which the server repeats, is derived from all of these and from the secret seed, so
that a key that was changed anywhere no longer fits itself.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.curve import read_text
from protocol.errors import (
    FeatureKeyError,
    KeyFileError,
    describe_untrusted,
)
from protocol.messages import Digest
from protocol.model.checkpoint import Checkpoint, linear_digest, model_digest
from protocol.model.config import ModelConfig
from protocol.validation import expectation
from tee_side.protect.masks.mask import Mask, describe_mask
from tee_side.protect.randomness import derive_key
from tsqp.key_files import write_new

_MODE = 0o600
_MAX_BYTES = 65536


class FeatureKey(BaseModel):
    """What undoes a provisioned server's weights.

    `mask`, `options`: the mask's name and all its fields. `seed`: 32 bytes, secret. `model_digest`,
    `linear_digest`: of the model that was provisioned; `server_linear_digest`: of the weights that
    the server got.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1]
    mask: Annotated[str, Field(min_length=1, max_length=64)]
    options: dict[str, Any]
    seed: Annotated[Digest, Field(repr=False)]
    model_digest: Digest
    linear_digest: Digest
    server_linear_digest: Digest
    provision_id: Digest

    @classmethod
    def bind(cls, **fields: Any) -> FeatureKey:
        """Make a key from all fields but `version` and `provision_id`."""
        draft = cls(version=1, provision_id="0" * 64, **fields)
        return draft.model_copy(update={"provision_id": draft.derived_id()})

    def derived_id(self) -> str:
        """Return what `provision_id` must be: a public name that does not give the seed away."""
        fields = self.model_dump(mode="json", exclude={"seed", "provision_id"})
        text = json.dumps(fields, sort_keys=True)
        return derive_key(bytes.fromhex(self.seed), b"tsqp provision " + text.encode()).hex()

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner may read.

        Nothing is overwritten, and nothing is left after a failure. Raises FeatureKeyError.
        """
        try:
            write_new(path, self.model_dump_json(indent=2) + "\n", _MODE)
        except KeyFileError as error:
            raise FeatureKeyError(error.where, got=error.got, expected=error.expected) from None

    @classmethod
    def load(cls, path: Path) -> FeatureKey:
        """Read a key. Raises FeatureKeyError that names the file and field.

        Refused: a file that group or others may use, another version, a damaged or changed key.
        """
        where = str(path)
        try:
            text, status = read_text(path, _MAX_BYTES)
        except KeyFileError as error:
            raise FeatureKeyError(error.where, got=error.got, expected=error.expected) from None
        FeatureKeyError.unless(
            not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO),
            where,
            f"mode {stat.S_IMODE(status.st_mode):04o}",
            f"{_MODE:04o}: for its owner alone (chmod 600)",
        )
        try:
            key = cls.model_validate_json(text)
        except ValidationError as error:
            # The version first: with another one the other fields may be other ones, too.
            faults = error.errors(include_url=False)
            if faults[0]["type"] == "json_invalid":
                raise FeatureKeyError(
                    where, got="no JSON", expected="a key that tsqp provision wrote"
                ) from None
            first = next((fault for fault in faults if fault["loc"] == ("version",)), faults[0])
            field = ".".join(str(part) for part in first["loc"])
            # Never quoted: what stands in a wrong place may be the seed.
            raise FeatureKeyError(
                f"{where}: {field}" if field else where,
                got="nothing" if first["type"] == "missing" else describe_untrusted(first["input"]),
                expected=expectation(first["type"], first["msg"]),
            ) from None
        FeatureKeyError.unless(
            key.provision_id == key.derived_id(),
            f"{where}: provision_id (the key was changed)",
            key.provision_id,
            key.derived_id(),
        )
        return key

    def check(self, config: ModelConfig, checkpoint: Checkpoint, mask: Mask) -> None:
        """Check that the key is one of this model and mask. Raises FeatureKeyError with both.

        Linear weights are compared where the directory has them.
        """
        digests = {
            "model_digest": model_digest(config, checkpoint),
            "linear_digest": linear_digest(config, checkpoint),
        }
        for name, theirs in digests.items():
            ours = getattr(self, name)
            FeatureKeyError.unless(
                theirs is None or ours == theirs,
                f"key: {name}",
                ours,
                f"{theirs}, of {checkpoint.directory}",
            )
        self._check_mask(mask)

    def _check_mask(self, mask: Mask) -> None:
        FeatureKeyError.unless(
            (self.mask, self.options) == (mask.name, mask.model_dump(mode="json")),
            "key: mask",
            describe_mask(self.mask, self.options),
            f"{mask.described()}, as in the policy",
        )
