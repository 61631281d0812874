"""What a service holds: everything about a model directory, and the matrices.

What is said of them (`ServedModel`) is read without them. Weights are read once from safetensors
into fused matrices on the device: each module straight into its rows of the fused matrix, so that
nothing is in memory twice; the int8 weights, too, are made block by block from the file.

A rank holds a part of the output columns of every weight. Each module is parted for itself
(`protocol.messages.part_of`), and so is the vocabulary of the LM head and of the embedding: a tied
weight is one tensor in a part, too.

Whole layers need norms and the order of RoPE's pairs besides, from a model's own directory, or from
one that a segment mask has transformed for a server (`Provision`): there norms of queries and keys
may differ by head, and RoPE's pairs may stand in another order in each key/value head and its query
heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from protocol.model.architectures import NormName
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    Checkpoint,
    light_tensors,
    linear_digest,
    linear_tensors,
    lm_head_name,
    model_digest,
    norm_name,
)
from protocol.model.config import ModelConfig
from protocol.model.files import read_json
from protocol.model.weights import (
    FusedLinear,
    LightWeights,
    NormTensors,
    QuantizedLinear,
    load_final_norm,
    load_light,
    load_linear,
    load_quantized,
    load_tensor,
)
from protocol.validation import Strict, validate_file

BOTH: tuple[Arithmetic, ...] = ("float", "int8")
# A transformed directory has the head under this name, tied or not.
TRANSFORMED_HEAD = "lm_head.weight"
# The tensor that says in which order RoPE's pairs stand, of a layer.
_ORDER = "model.layers.{}.self_attn.rope_order"
# Norms of every architecture, before attention and before the MLP.
_LAYER_NORMS: tuple[NormName, ...] = ("input_layernorm", "post_attention_layernorm")

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
    shapes = (config.module_shape(name) for name in config.table.modules)
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
        whole = whole and self.config.score_cap is None
        return whole and (self.provision is None or self.provision.holds != "linears")

    @property
    def has_segment_head(self) -> bool:
        """Whether a Segment that ends with the last layer can go on with the LM head."""
        held = self.provision is None or self.provision.holds == "model"
        last = self.held_layers[-1] == self.config.num_hidden_layers - 1
        return self.has_segments and held and last


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
    config, checkpoint = Checkpoint.open(directory)
    SettingsError.unless(
        layers is None or 0 <= layers[0] <= layers[1] < config.num_hidden_layers,
        "layers to hold",
        "-".join(map(str, layers or ())),
        f"a range within 0-{config.num_hidden_layers - 1}, the model's",
    )
    check_columns(config, columns, "columns to hold")
    if (provision := read_provision(directory)) is not None:
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
                # Those of queries and keys may have one of two shapes.
                checkpoint.require({f"{norm_name(layer, n)}.weight": (D,) for n in _LAYER_NORMS})
                orders.append(_ORDER.format(layer))
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
        # What a null device says of a directory without linear weights is no digest of anything.
        linear_digest=linear or "0" * 64,
        provision=provision,
        arithmetic=tuple(kind for kind in BOTH if kind in arithmetic),
        norms=_read_norms(config, checkpoint) if provision is None else {},
        layers=layers,
        columns=columns,
    )


def _read_norms(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Read the norms under the names of the wire schema, which knows no q_norm and k_norm."""
    size, names = (config.hidden_size,), {"final_norm": FINAL_NORM}
    for layer in range(config.num_hidden_layers):
        for short in _LAYER_NORMS:
            if short in config.table.norms:
                names[f"layer_{layer}_{short}"] = f"{norm_name(layer, short)}.weight"
    return {
        said: load_tensor(checkpoint, name, size, dtype=torch.float32)
        for said, name in names.items()
    }


Progress = Callable[[int, int], None]

# By layer, then by fused operator.
FloatLinears = dict[int, dict[LinearOperator, FusedLinear]]
IntegerLinears = dict[int, dict[LinearOperator, QuantizedLinear]]


@dataclass(frozen=True, slots=True)
class SegmentWeights:
    """By layer, light weights; where they are held, the final norm and the LM head.

    `orders`: int64 [H + K, C / 2], of layers in which RoPE's pairs stand in another order.
    """

    light: dict[int, LightWeights]
    orders: dict[int, torch.Tensor]
    norm: NormTensors | None
    lm_head: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class ServiceWeights(ServedModel):
    """Everything that the service multiplies by, on `device`; floats in `dtype`.

    All have the rows of `part` alone.

    `embedding`, `lm_head`: [vocab_size, hidden_size] (one tensor if tied), None where the
    directory holds weights for a client's feature mask, or their layer is not among `held_layers`.
    `lm_head_int8`: a matrix of its own, also where floats are tied; None where `lm_head` is, or
    `arithmetic` lacks int8. `linears[layer]` and `integers[layer]` by fused operator, None where
    `arithmetic` lacks float or int8. `segment`: what whole layers have beside, None where
    `has_segments` is not.
    """

    device: torch.device
    dtype: torch.dtype
    embedding: torch.Tensor | None
    lm_head: torch.Tensor | None
    lm_head_int8: QuantizedLinear | None
    linears: FloatLinears | None
    integers: IntegerLinears | None
    segment: SegmentWeights | None = None

    @property
    def weight_bytes(self) -> int:
        """Size of all matrices on the device, in bytes."""
        floats = [one for layer in (self.linears or {}).values() for one in layer.values()]
        integers = [one for layer in (self.integers or {}).values() for one in layer.values()]
        if self.lm_head_int8 is not None:
            integers.append(self.lm_head_int8)
        tensors = [self.embedding, self.lm_head]
        if self.segment is not None:
            tensors.append(self.segment.lm_head)
        tensors += [tensor for linear in floats for tensor in (linear.weight, linear.bias)]
        tensors += [tensor for linear in integers for tensor in (linear.weight, linear.scale)]
        # A tied weight is one tensor, under several names.
        held = {id(tensor): tensor.nbytes for tensor in tensors if tensor is not None}
        return sum(held.values())


class PartCheckpoint(Checkpoint):
    """A checkpoint that has of every tensor the rows of a part, and reads no others."""

    def __init__(
        self, directory: Path, columns: Columns, config: ModelConfig | None = None
    ) -> None:
        super().__init__(directory, None, config)
        self._columns = columns

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[slice, torch.Tensor]]:
        """See `Checkpoint.blocks`; `shape` is that of the part, whose first row is 0."""
        whole = (len(self.place(name).rows), *self.entry(name).shape[1:])
        part = part_of(whole[0], *self._columns)
        ModelError.unless(
            (part.stop - part.start, *whole[1:]) == shape,
            self._where(name),
            f"{describe(list(whole))} since the file was checked",
            f"such that part {self._columns} is {list(shape)}",
        )
        yield from self._part(name, range(part.start, part.stop))


def load_weights(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    arithmetic: Sequence[Arithmetic] = BOTH,
    layers: tuple[int, int] | None = None,
    columns: Columns = WHOLE,
    progress: Progress | None = None,
) -> ServiceWeights:
    """Read a model directory. `progress(done, total)` is called after every layer.

    `arithmetic`: which linear weights to hold; a directory for a feature mask has float ones only.
    `layers`, `columns`: see `read_served_model`. Raises ModelError that names file and tensor, and
    SettingsError.
    """
    # Before the weights: the pages that its digests map would come on top of them.
    held = read_served_model(directory, arithmetic, layers=layers, columns=columns)
    config, arithmetic = held.part, held.arithmetic
    # What was transformed has Llama's names.
    named = held.config if held.provision is None else None
    checkpoint = PartCheckpoint(directory, columns, named)

    read = partial(load_tensor, checkpoint, dtype=dtype, device=device)
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = read(EMBEDDING, vocabulary) if held.has_embedding else None
    lm_head: torch.Tensor | None = None
    lm_head_int8: QuantizedLinear | None = None
    if held.has_lm_head:
        tied = embedding if config.tie_word_embeddings else None
        lm_head = read(lm_head_name(config), vocabulary) if tied is None else tied
        if "int8" in arithmetic:
            lm_head_int8 = load_quantized(
                checkpoint, config, config.num_hidden_layers - 1, "lm_head", device
            )
    linears: FloatLinears = {}
    integers: IntegerLinears = {}
    for done, layer in enumerate(held.held_layers, 1):
        if "float" in arithmetic:
            linears[layer] = {
                operator: load_linear(
                    checkpoint, config, layer, operator, dtype=dtype, device=device
                )
                for operator in FUSED_MODULES
            }
        if "int8" in arithmetic:
            # From the file and not from the floats above: those are rounded to `dtype`.
            integers[layer] = {
                operator: load_quantized(checkpoint, config, layer, operator, device)
                for operator in FUSED_MODULES
            }
        if progress is not None:
            progress(done, len(held.held_layers))
    return ServiceWeights(
        **vars(held),
        device=device,
        dtype=dtype,
        embedding=embedding,
        lm_head=lm_head,
        lm_head_int8=lm_head_int8,
        linears=linears or None,
        integers=integers or None,
        segment=(
            _read_segment(held, checkpoint, read, lm_head, device) if held.has_segments else None
        ),
    )


def _read_segment(
    held: ServedModel,
    checkpoint: Checkpoint,
    read: Callable[[str, tuple[int, ...]], torch.Tensor],
    lm_head: torch.Tensor | None,
    device: torch.device,
) -> SegmentWeights:
    """Read what whole layers need besides.

    `read`: reads a tensor of a checked shape, by its name, to the device. `lm_head`: of the service
    itself. Raises ModelError.
    """
    config, transformed = held.config, held.provision is not None
    (H, K, C), D = config.heads, config.hidden_size
    heads = {"q_norm": H, "k_norm": K} if transformed else {}

    def of_layer(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        by_head = next(((count, *shape) for n, count in heads.items() if f".{n}." in name), shape)
        return read(name, tuple(_read_either(checkpoint, name, (shape, by_head)).shape))

    light, orders = {}, {}
    for layer in held.held_layers:
        light[layer] = load_light(config, layer, of_layer if transformed else read)
        order = _ORDER.format(layer)
        if transformed and checkpoint.holds([order]):
            order_Kc = _read_either(checkpoint, order, ((K, C // 2),))
            usual_Kc = torch.arange(C // 2).to(order_Kc.dtype).expand(K, -1)
            ModelError.unless(
                torch.equal(order_Kc.sort().values, usual_Kc),
                f"{checkpoint.directory}: {order}",
                "other numbers",
                f"each of 0-{C // 2 - 1} in each head",
            )
            order_Xc = torch.cat((order_Kc.repeat_interleave(H // K, 0), order_Kc))
            orders[layer] = order_Xc.to(device, torch.int64)
    if not held.has_segment_head:
        return SegmentWeights(light, orders, None, None)
    if transformed:
        lm_head = read(TRANSFORMED_HEAD, (config.vocab_size, D))
    return SegmentWeights(light, orders, load_final_norm(config, read), lm_head)


def _read_either(
    checkpoint: Checkpoint, name: str, shapes: tuple[tuple[int, ...], ...]
) -> torch.Tensor:
    """Read a small tensor that has one of these shapes. Raises ModelError."""
    expected = " or ".join(str(list(shape)) for shape in shapes)
    where = f"{checkpoint.directory}: {name}"
    ModelError.unless(checkpoint.holds([name]), where, "no such tensor", expected)
    found = checkpoint.rows(name, 0, max(shape[0] for shape in shapes) + 1)
    ModelError.unless(tuple(found.shape) in shapes, where, f"shape {list(found.shape)}", expected)
    return found
