"""The marker of a directory whose weights a feature or segment mask has transformed.

Such a directory is made on the TEE side for a server that may hold nothing else: `config.json`,
transformed weights and this marker. `holds` says which weights: "linears" has the linear ones alone
(with zero biases where the architecture has biases), "layers" also real biases and the layers'
norms, "model" also the final norm and the LM head. None has an embedding. `provision_id` names the
key that undoes the transform; it is no secret and says nothing about the key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from protocol.errors import ModelError
from protocol.messages import Digest
from protocol.model.config import read_json
from protocol.validation import validate_file

PROVISION_FILE = "provision.json"

Holds: TypeAlias = Literal["linears", "layers", "model"]


class Provision(BaseModel):
    """What `provision.json` says. `mask`: the name of the feature or segment mask."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Annotated[int, Field(ge=1, le=1)] = 1
    mask: Annotated[str, Field(pattern="^[a-z0-9-]{1,64}$")]
    provision_id: Digest
    holds: Holds = "linears"


def read_provision(directory: Path) -> Provision | None:
    """Read the marker; None where there is none, and the directory is a model's own.

    Raises ModelError that names file and field: damaged, of another version, a field too many.
    """
    path = directory / PROVISION_FILE
    if not path.exists() and not path.is_symlink():
        return None
    raw = read_json(path)
    # a default is for writers, not for readers
    ModelError.unless("version" in raw, f"{path}: version", "nothing", "1")
    return validate_file(Provision, raw, str(path))


def write_provision(directory: Path, provision: Provision) -> None:
    """Write the marker; the last file of a directory, so that a partial one is none.

    Raises FileExistsError where there is one already.
    """
    with (directory / PROVISION_FILE).open("x", encoding="utf-8") as file:
        json.dump(provision.model_dump(), file, indent=2)
        file.write("\n")
