"""What a service says that it holds: everything about a model directory but the matrices.

A rank holds a part of the output columns of every weight. Each module is parted for itself
(`protocol.messages.part_of`), and so is the vocabulary of the LM head and of the embedding: a tied
weight is one tensor in a part, too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field

from protocol.errors import ModelError, SettingsError, describe
from protocol.messages import (
    FUSED_MODULES,
    MAX_RANKS,
    WHOLE,
    Arithmetic,
    Columns,
    Digest,
    LinearOperator,
    ModuleName,
    part_of,
)
from protocol.model.checkpoint import (
    FINAL_NORM,
    Checkpoint,
    TensorFile,
    light_tensors,
    linear_digest,
    linear_tensors,
    model_digest,
    norm_names,
)
from protocol.model.config import ModelConfig, read_config
from protocol.model.files import is_there, read_json
from protocol.model.weights import load_tensor
from protocol.validation import Strict, validate_file

BOTH: tuple[Arithmetic, ...] = ("float", "int8")
# A transformed directory has the head under this name, tied or not.
TRANSFORMED_HEAD = "lm_head.weight"
# Norms of every architecture, before attention and before the MLP.
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")

# Which fused operator a module belongs to.
OPERATOR_OF: dict[ModuleName, LinearOperator] = {
    module: operator for operator, modules in FUSED_MODULES.items() for module in modules
}


PROVISION_FILE = "provision.json"

Holds: TypeAlias = Literal["linears", "layers", "model"]


class Provision(Strict):
    """The marker of a directory whose weights a feature or segment mask has transformed.

    Such a directory is made on the TEE side for a server that may hold nothing else: `config.json`,
    transformed weights and this marker. `mask`: the name of the feature or segment mask. `holds`
    says which weights: "linears" has the linear ones alone (with zero biases where the architecture
    has biases), "layers" also real biases and the layers' norms, "model" also the final norm and
    the LM head. None has an embedding. `provision_id` names the key that undoes the transform; it
    is no secret and says nothing about the key.
    """

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


class PartConfig(ModelConfig):
    """A model's configuration whose output sizes are those of a part; `vocab_size` is one.

    `vocabulary`: how many ids the whole model has.
    """

    columns: Columns
    vocabulary: int

    def module_shape(self, module: ModuleName) -> tuple[int, int]:
        """See `ModelConfig.module_shape`; the out_features are the part's."""
        out_features, in_features = super().module_shape(module)
        part = part_of(out_features, *self.columns)
        return part.stop - part.start, in_features


def check_columns(config: ModelConfig, columns: Columns, option: str) -> None:
    """Check that there is such a part, and that none is empty. Raises SettingsError.

    `option`: where the part, or the number of parts, was asked for.
    """
    part, parts = columns
    shapes = (config.module_shape(name) for names in FUSED_MODULES.values() for name in names)
    most = min(MAX_RANKS, config.vocab_size, *(shape[0] for shape in shapes))
    SettingsError.unless(1 <= parts <= most, option, f"{parts} parts", f"1 to {most}")
    SettingsError.unless(0 <= part < parts, option, f"part {part} of {parts}", f"0 to {parts - 1}")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What Init says, and what decides which requests can be answered.

    `arithmetic`: which linear weights are held. `norms`: float32 on the CPU, under the names of the
    wire schema, empty where the directory holds weights for a client's feature mask (`provision`);
    such a directory has no embedding and no LM head either. `layers`: first and last layer whose
    weights are held, None: all; the embedding goes with layer 0, the LM head with the last.
    `columns`: which part of every weight's output columns is held, of how many. `ranks`: by how
    many processes, each with a part of what is held, requests are computed.
    """

    config: ModelConfig
    model_digest: str
    linear_digest: str
    provision: Provision | None
    arithmetic: tuple[Arithmetic, ...]
    norms: dict[str, torch.Tensor]
    layers: tuple[int, int] | None = None
    columns: Columns = WHOLE
    ranks: int = 1

    @property
    def held_layers(self) -> range:
        """Layers whose linear weights are held."""
        first, last = self.layers or (0, self.config.num_hidden_layers - 1)
        return range(first, last + 1)

    @property
    def part(self) -> PartConfig:
        """The configuration whose output sizes are those of what is held."""
        vocabulary = self.config.vocab_size
        part = part_of(vocabulary, *self.columns)
        fields = dict(self.config) | {"vocab_size": part.stop - part.start}
        return PartConfig(**fields, columns=self.columns, vocabulary=vocabulary)

    @property
    def has_embedding(self) -> bool:
        """Whether Embedding can be answered."""
        return self.provision is None and self.held_layers[0] == 0

    @property
    def has_lm_head(self) -> bool:
        """Whether LMHead and, with int8 weights, RingLMHead can be answered."""
        return self.provision is None and self.held_layers[-1] == self.config.num_hidden_layers - 1

    @property
    def has_segments(self) -> bool:
        """Whether Segment can be answered, for the layers that are held."""
        whole = self.columns == WHOLE and self.ranks == 1 and "float" in self.arithmetic
        return whole and (self.provision is None or self.provision.holds != "linears")

    @property
    def has_segment_head(self) -> bool:
        """Whether a Segment that ends with the last layer can go on with the LM head."""
        held = self.provision is None or self.provision.holds == "model"
        last = self.held_layers[-1] == self.config.num_hidden_layers - 1
        return self.has_segments and held and last


def order_name(layer: int) -> str:
    """Return the name of the tensor that says in which order RoPE's pairs stand."""
    return f"model.layers.{layer}.self_attn.rope_order"


def read_served_model(
    directory: Path,
    arithmetic: Sequence[Arithmetic] = BOTH,
    *,
    weights: bool = True,
    layers: tuple[int, int] | None = None,
    columns: Columns = WHOLE,
) -> ServedModel:
    """Check a model directory and read what Init says of it, but no matrix.

    `arithmetic`: which linear weights are wanted; a directory for a feature mask has float ones
    only. `weights`: whether a model's own directory must have them at all: for a null device the
    norms, embedding and LM head are enough. `layers`: first and last to hold, None: all; the
    directory has all of them. `columns`: see `ServedModel`. Raises ModelError that names file and
    tensor, and SettingsError for layers or columns that the model has not.
    """
    config = read_config(directory)
    SettingsError.unless(
        layers is None or 0 <= layers[0] <= layers[1] < config.num_hidden_layers,
        "layers to hold",
        "-".join(map(str, layers or ())),
        f"a range within 0-{config.num_hidden_layers - 1}, the model's",
    )
    check_columns(config, columns, "columns to hold")
    provision = read_provision(directory)
    checkpoint = Checkpoint(directory)
    linears = linear_tensors(config)
    orders: list[str] = []
    if provision is None:
        checkpoint.require(light_tensors(config) | (linears if weights else {}))
    else:
        ModelError.unless(
            "float" in arithmetic,
            f"{directory / PROVISION_FILE}: mask {provision.mask}",
            f"arithmetic {', '.join(arithmetic)}",
            "float: transformed weights have no integers",
        )
        arithmetic = ("float",)
        checkpoint.require(linears)
        if provision.holds != "linears":
            D = config.hidden_size
            for layer in range(config.num_hidden_layers):
                names = norm_names(config, layer)
                # Those of queries and keys may have one of two shapes.
                checkpoint.require({names[name]: (D,) for name in _LAYER_NORMS})
                orders.append(order_name(layer))
            head = {FINAL_NORM: (D,), TRANSFORMED_HEAD: (config.vocab_size, D)}
            checkpoint.require(head if provision.holds == "model" else {})
    checkpoint.refuse_extra(config, orders)
    linear = linear_digest(config, checkpoint)
    if linear is not None:
        checkpoint.require(linears)
    return ServedModel(
        config=config,
        model_digest=(
            model_digest(config, checkpoint) if provision is None else provision.provision_id
        ),
        # What a null device says of a directory without linear weights, unless a calibration in it
        # says which weights it was made of, is no digest of anything.
        linear_digest=linear or _calibrated_digest(directory) or "0" * 64,
        provision=provision,
        arithmetic=tuple(kind for kind in BOTH if kind in arithmetic),
        norms=_read_norms(config, checkpoint) if provision is None else {},
        layers=layers,
        columns=columns,
    )


def _calibrated_digest(directory: Path) -> str | None:
    """Return the digest of the linear weights that the directory's calibration was made of.

    A runner without linear weights of its own expects the service to have those.
    """
    path = directory / "calibration.safetensors"
    if not is_there(path):
        return None
    digest = TensorFile(path).header.metadata.get("linear_digest", "")
    ModelError.unless(
        re.fullmatch("[0-9a-f]{64}", digest),
        f"{path}: linear_digest",
        describe(digest) if digest else "nothing",
        "64 hexadecimal digits",
    )
    return digest


def _read_norms(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Read the norms under the names of the wire schema, which knows no q_norm and k_norm."""
    size, names = (config.hidden_size,), {"final_norm": FINAL_NORM}
    for layer in range(config.num_hidden_layers):
        found = norm_names(config, layer)
        for short in _LAYER_NORMS:
            names[f"layer_{layer}_{short}"] = found[short]
    return {
        said: load_tensor(checkpoint, name, size, dtype=torch.float32)
        for said, name in names.items()
    }
