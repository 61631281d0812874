"""The service's weights: read once from safetensors into fused matrices on the device.

Each module is read straight into its rows of the fused matrix, so that nothing is in memory twice:
the int8 weights, too, are made block by block from the file.

Whole layers need norms and the order of RoPE's pairs besides, from a model's own directory, or from
one that a segment mask has transformed for a server (`gpu_side.served_model.Provision`): there
norms of queries and keys may differ by head, and RoPE's pairs may stand in another order in each
key/value head and its query heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gpu_side.served_model import (
    BOTH,
    TRANSFORMED_HEAD,
    ServedModel,
    order_name,
    read_served_model,
)
from protocol.errors import ModelError, describe
from protocol.messages import FUSED_MODULES, WHOLE, Arithmetic, Columns, LinearOperator, part_of
from protocol.model.checkpoint import EMBEDDING, FINAL_NORM, Checkpoint, lm_head_name, norm_names
from protocol.model.weights import (
    FusedLinear,
    LayerNorms,
    QuantizedLinear,
    load_linear,
    load_quantized,
    load_tensor,
)

Progress = Callable[[int, int], None]

# By layer, then by fused operator.
FloatLinears = dict[int, dict[LinearOperator, FusedLinear]]
IntegerLinears = dict[int, dict[LinearOperator, QuantizedLinear]]


@dataclass(frozen=True, slots=True)
class SegmentWeights:
    """By layer, norms and `orders`: int64 [H + K, C / 2], where RoPE's pairs stand in another one.

    Where they are held, the final norm and the LM head behind the last layer.
    """

    norms: dict[int, LayerNorms]
    orders: dict[int, torch.Tensor]
    norm: torch.Tensor | None
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

    def __init__(self, directory: Path, columns: Columns) -> None:
        super().__init__(directory)
        self._columns = columns

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[slice, torch.Tensor]]:
        """See `Checkpoint.blocks`; `shape` is that of the part, whose first row is 0."""
        whole = self.entry(name).shape
        part = part_of(whole[0], *self._columns)
        ModelError.unless(
            (part.stop - part.start, *whole[1:]) == shape,
            self._where(name),
            f"{describe(list(whole))} since the file was checked",
            f"such that part {self._columns} is {list(shape)}",
        )
        for rows, found in self._read(name, range(part.start, part.stop)):
            first, last = max(rows.start, part.start), min(rows.stop, part.stop)
            inside = found[first - rows.start : last - rows.start]
            yield slice(first - part.start, last - part.start), inside


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
    checkpoint = PartCheckpoint(directory, columns)

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

    def norm(short: str, name: str) -> torch.Tensor:
        shape = (config.width(config.table.norms[short].outputs),)
        by_head = (heads.get(short, 1), *shape)
        found = _read_either(checkpoint, name, (shape, by_head) if short in heads else (shape,))
        return read(name, tuple(found.shape))

    norms, orders = {}, {}
    for layer in held.held_layers:
        names = norm_names(config, layer).items()
        norms[layer] = LayerNorms(**{short: norm(short, name) for short, name in names})
        order = order_name(layer)
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
        return SegmentWeights(norms, orders, None, None)
    if transformed:
        lm_head = read(TRANSFORMED_HEAD, (config.vocab_size, D))
    return SegmentWeights(norms, orders, read(FINAL_NORM, (D,)), lm_head)


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
