"""The service's weights: read once from safetensors into fused matrices on the device.

Each module is read straight into its rows of the fused matrix, so that nothing is in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.messages import FUSED_MODULES, LinearOperator, ModuleName
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
from protocol.model.weights import FusedLinear, load_linear, load_tensor

Progress = Callable[[int, int], None]

# Which fused operator a module belongs to.
OPERATOR_OF: dict[ModuleName, LinearOperator] = {
    module: operator for operator, modules in FUSED_MODULES.items() for module in modules
}


@dataclass(frozen=True)
class ServiceWeights:
    """Everything that the service multiplies by, on `device` in `dtype`.

    `embedding`, `lm_head`: [vocab_size, hidden_size] (one tensor if tied); `linears[layer]` by
    fused operator. `norms`: float32 on the CPU, only handed out in Init.
    """

    config: ModelConfig
    model_digest: str
    linear_digest: str
    device: torch.device
    dtype: torch.dtype
    embedding: torch.Tensor
    lm_head: torch.Tensor
    linears: list[dict[LinearOperator, FusedLinear]]
    norms: dict[str, torch.Tensor]

    @property
    def weight_bytes(self) -> int:
        """Size of all matrices on the device, in bytes."""
        tensors = [self.embedding]
        if self.lm_head is not self.embedding:
            tensors.append(self.lm_head)
        for layer in self.linears:
            for linear in layer.values():
                tensors += [linear.weight] + ([] if linear.bias is None else [linear.bias])
        return sum(tensor.nbytes for tensor in tensors)


def load_weights(
    directory: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> ServiceWeights:
    """Read a model directory. `progress(done, total)` is called after every layer.

    Raises ModelError that names file and tensor.
    """
    config = read_config(directory)
    checkpoint = Checkpoint(directory)
    checkpoint.require(light_tensors(config) | linear_tensors(config, FUSED_MODULES))
    checkpoint.refuse_extra(config)

    # Before the weights: the pages that these map would come on top of them.
    digests = model_digest(config, checkpoint), linear_digest(config, checkpoint) or ""

    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = load_tensor(checkpoint, EMBEDDING, vocabulary, dtype=dtype, device=device)
    lm_head = embedding
    if not config.tie_word_embeddings:
        name = lm_head_name(config)
        lm_head = load_tensor(checkpoint, name, vocabulary, dtype=dtype, device=device)
    linears = []
    for layer in range(config.num_hidden_layers):
        linears.append(
            {
                operator: load_linear(
                    checkpoint, config, layer, operator, dtype=dtype, device=device
                )
                for operator in FUSED_MODULES
            }
        )
        if progress is not None:
            progress(layer + 1, config.num_hidden_layers)
    return ServiceWeights(
        config,
        *digests,
        device,
        dtype,
        embedding,
        lm_head,
        linears,
        _read_norms(config, checkpoint),
    )


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
