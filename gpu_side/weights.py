"""The service's weights: read once from safetensors into fused matrices on the device.

Each module is read straight into its rows of the fused matrix, so that nothing is in memory twice:
the int8 weights, too, are made block by block from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.errors import KernelError, ModelError
from protocol.integer import MAX_IN_FEATURES, check_kernels
from protocol.messages import FUSED_MODULES, Arithmetic, LinearOperator, ModuleName
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    Checkpoint,
    light_tensors,
    linear_tensors,
    lm_head_name,
    norm_names,
)
from protocol.model.config import ModelConfig, read_config
from protocol.model.identity import linear_digest, model_digest
from protocol.model.provision import PROVISION_FILE, Provision, read_provision
from protocol.model.quantized import QuantizedLinear, load_quantized
from protocol.model.weights import FusedLinear, load_linear, load_tensor

Progress = Callable[[int, int], None]

# Which fused operator a module belongs to.
OPERATOR_OF: dict[ModuleName, LinearOperator] = {
    module: operator for operator, modules in FUSED_MODULES.items() for module in modules
}


FloatLinears = list[dict[LinearOperator, FusedLinear]]
IntegerLinears = list[dict[LinearOperator, QuantizedLinear]]

BOTH: tuple[Arithmetic, ...] = ("float", "int8")


@dataclass(frozen=True)
class ServiceWeights:
    """Everything that the service multiplies by, on `device`; floats in `dtype`.

    `embedding`, `lm_head`: [vocab_size, hidden_size] (one tensor if tied), None where the
    directory holds weights for somebody's feature mask (`provision`). `linears[layer]` and
    `integers[layer]` by fused operator, None where the service was not told to hold them; not both
    are None. `norms`: float32 on the CPU, only handed out in Init.
    """

    config: ModelConfig
    model_digest: str
    linear_digest: str
    provision: Provision | None
    device: torch.device
    dtype: torch.dtype
    embedding: torch.Tensor | None
    lm_head: torch.Tensor | None
    linears: FloatLinears | None
    integers: IntegerLinears | None
    norms: dict[str, torch.Tensor]

    @property
    def arithmetic(self) -> tuple[Arithmetic, ...]:
        """Which linear weights are held."""
        held = {"float": self.linears, "int8": self.integers}
        return tuple(kind for kind in BOTH if held[kind] is not None)

    @property
    def weight_bytes(self) -> int:
        """Size of all matrices on the device, in bytes."""
        tensors = [] if self.embedding is None else [self.embedding]
        if self.lm_head is not None and self.lm_head is not self.embedding:
            tensors.append(self.lm_head)
        for layer in self.linears or []:
            for linear in layer.values():
                tensors += [linear.weight] + ([] if linear.bias is None else [linear.bias])
        floats = sum(tensor.nbytes for tensor in tensors)
        return floats + sum(
            linear.nbytes for layer in self.integers or [] for linear in layer.values()
        )


def load_weights(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    arithmetic: Sequence[Arithmetic] = BOTH,
    progress: Progress | None = None,
) -> ServiceWeights:
    """Read a model directory. `progress(done, total)` is called after every layer.

    `arithmetic`: which linear weights to hold; a directory for a feature mask has float ones only.
    Raises ModelError that names file and tensor.
    """
    config = read_config(directory)
    provision = read_provision(directory)
    checkpoint = Checkpoint(directory)
    needed = linear_tensors(config, FUSED_MODULES)
    if provision is None:
        needed = light_tensors(config) | needed
    elif "float" not in arithmetic:
        raise ModelError(
            f"{directory / PROVISION_FILE}: mask {provision.mask}",
            got=f"arithmetic {', '.join(arithmetic)}",
            expected="float: transformed weights have no integers",
        )
    else:
        arithmetic = ("float",)
    checkpoint.require(needed)
    checkpoint.refuse_extra(config)

    # Before the weights: the pages that these map would come on top of them.
    digest = model_digest(config, checkpoint) if provision is None else provision.provision_id
    digests = digest, linear_digest(config, checkpoint) or ""

    embedding = lm_head = None
    if provision is None:
        embedding, lm_head = _read_vocabulary(config, checkpoint, dtype, device)
    linears: FloatLinears = []
    integers: IntegerLinears = []
    for layer in range(config.num_hidden_layers):
        if "float" in arithmetic:
            linears.append(
                {
                    operator: load_linear(
                        checkpoint, config, layer, operator, dtype=dtype, device=device
                    )
                    for operator in FUSED_MODULES
                }
            )
        if "int8" in arithmetic:
            # From the file and not from the floats above: those are rounded to `dtype`.
            integers.append(
                {
                    operator: load_quantized(checkpoint, config, layer, operator, device)
                    for operator in FUSED_MODULES
                }
            )
        if progress is not None:
            progress(layer + 1, config.num_hidden_layers)
    return ServiceWeights(
        config,
        *digests,
        provision,
        device,
        dtype,
        embedding,
        lm_head,
        linears or None,
        integers or None,
        _read_norms(config, checkpoint) if provision is None else {},
    )


def check_integers(config: ModelConfig, device: torch.device) -> None:
    """Check that this device computes this model's int8 products exactly. Raises KernelError."""
    widest = max(config.module_shape(module)[1] for module in OPERATOR_OF)
    if widest > MAX_IN_FEATURES:
        raise KernelError(
            "int8 weights of this model",
            got=f"{widest} in_features",
            expected=f"at most {MAX_IN_FEATURES}",
        )
    check_kernels(device)


def _read_vocabulary(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read embedding and LM head, one tensor if they are tied."""
    shape = (config.vocab_size, config.hidden_size)
    embedding = load_tensor(checkpoint, EMBEDDING, shape, dtype=dtype, device=device)
    if config.tie_word_embeddings:
        return embedding, embedding
    name = lm_head_name(config)
    return embedding, load_tensor(checkpoint, name, shape, dtype=dtype, device=device)


def _read_norms(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Read the norms under the names of the wire schema, which knows no q_norm and k_norm."""
    size = (config.hidden_size,)

    def read(name: str) -> torch.Tensor:
        return load_tensor(checkpoint, name, size, dtype=torch.float32)

    norms = {"final_norm": read(FINAL_NORM)}
    for layer in range(config.num_hidden_layers):
        names = norm_names(config, layer)
        for short in ("input_layernorm", "post_attention_layernorm"):
            norms[f"layer_{layer}_{short}"] = read(names[short])
    return norms
