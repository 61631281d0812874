"""The service's weights: read once from safetensors into fused matrices on the device.

Each module is read straight into its rows of the fused matrix, so that nothing is in memory twice:
the int8 weights, too, are made block by block from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_side.cuda.products import check_ring
from gpu_side.segment_weights import SegmentWeights, load_segment_weights
from gpu_side.served_model import BOTH, OPERATOR_OF, ServedModel, read_served_model
from protocol.errors import KernelError, ModelError, describe
from protocol.integer import MAX_IN_FEATURES, check_kernels
from protocol.messages import FUSED_MODULES, WHOLE, Arithmetic, Columns, LinearOperator, part_of
from protocol.model.checkpoint import EMBEDDING, Checkpoint, lm_head_name
from protocol.model.config import ModelConfig
from protocol.model.quantized import QuantizedLinear, load_quantized
from protocol.model.weights import FusedLinear, load_linear, load_tensor

Progress = Callable[[int, int], None]

# By layer, then by fused operator.
FloatLinears = dict[int, dict[LinearOperator, FusedLinear]]
IntegerLinears = dict[int, dict[LinearOperator, QuantizedLinear]]


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
        tensors = [] if self.embedding is None else [self.embedding]
        if self.lm_head is not None and self.lm_head is not self.embedding:
            tensors.append(self.lm_head)
        for layer in (self.linears or {}).values():
            for linear in layer.values():
                tensors += [linear.weight] + ([] if linear.bias is None else [linear.bias])
        for integers in (self.integers or {}).values():
            for quantized in integers.values():
                tensors += [quantized.weight, quantized.scale]
        if self.lm_head_int8 is not None:
            tensors += [self.lm_head_int8.weight, self.lm_head_int8.scale]
        if self.lm_head is None and self.segment is not None and self.segment.lm_head is not None:
            tensors.append(self.segment.lm_head)
        return sum(tensor.nbytes for tensor in tensors)


class PartCheckpoint(Checkpoint):
    """A checkpoint that has of every tensor the rows of a part, and reads no others."""

    def __init__(self, directory: Path, columns: Columns) -> None:
        super().__init__(directory)
        self._columns = columns

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[slice, torch.Tensor]]:
        """See `Checkpoint.blocks`; `shape` is that of the part, whose first row is 0."""
        whole = self._entry(name).shape
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
    held, _ = read_served_model(directory, arithmetic, layers=layers, columns=columns)
    config, arithmetic = held.part, held.arithmetic
    checkpoint = PartCheckpoint(directory, columns)

    embedding, lm_head = _read_vocabulary(held, checkpoint, dtype, device)
    lm_head_int8: QuantizedLinear | None = None
    if held.has_lm_head and "int8" in arithmetic:
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
    segment = None
    if held.has_segments:
        segment = load_segment_weights(
            checkpoint,
            config,
            held.held_layers,
            lm_head=lm_head,
            transformed=held.provision is not None,
            has_head=held.has_segment_head,
            device=device,
            dtype=dtype,
        )
    return ServiceWeights(
        **vars(held),
        device=device,
        dtype=dtype,
        embedding=embedding,
        lm_head=lm_head,
        lm_head_int8=lm_head_int8,
        linears=linears or None,
        integers=integers or None,
        segment=segment,
    )


def check_integers(config: ModelConfig, device: torch.device | None) -> None:
    """Check that this device computes this model's int8 products exactly. Raises KernelError.

    `device`: None for a null one, which has no products: then only the widths must fit.
    """
    widest = max(config.module_shape(module)[1] for module in OPERATOR_OF)
    got, expected = f"{widest} in_features", f"at most {MAX_IN_FEATURES}"
    KernelError.unless(widest <= MAX_IN_FEATURES, "int8 weights of this model", got, expected)
    if device is not None:
        (check_ring if device.type == "cuda" else check_kernels)(device)


def _read_vocabulary(
    held: ServedModel, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Read embedding and LM head as far as they are held, one tensor if they are tied."""
    config = held.part
    shape = (config.vocab_size, config.hidden_size)

    def read(name: str) -> torch.Tensor:
        return load_tensor(checkpoint, name, shape, dtype=dtype, device=device)

    embedding = read(EMBEDDING) if held.has_embedding else None
    if not held.has_lm_head:
        return embedding, None
    if config.tie_word_embeddings:
        lm_head = read(EMBEDDING) if embedding is None else embedding
        return embedding, lm_head
    return embedding, read(lm_head_name(config))
