"""What whole layers need beside their linear weights: norms, the order of RoPE's pairs, an LM head.

From a model's own directory, or from one that a segment mask has transformed for a server
(`gpu_side.provision`): there norms of queries and keys may differ by head, and RoPE's pairs may
stand in another order in each key/value head and its query heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from protocol.errors import ModelError
from protocol.model.checkpoint import FINAL_NORM, Checkpoint, norm_names
from protocol.model.config import ModelConfig
from protocol.model.weights import LayerNorms, load_tensor

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class SegmentWeights:
    """By layer, norms and `orders`: int64 [H + K, C / 2], where RoPE's pairs stand in another one.

    Where they are held, the final norm and the LM head behind the last layer.
    """

    norms: dict[int, LayerNorms]
    orders: dict[int, torch.Tensor]
    norm: torch.Tensor | None
    lm_head: torch.Tensor | None


def order_name(layer: int) -> str:
    """Return the name of the tensor that says in which order RoPE's pairs stand."""
    return f"model.layers.{layer}.self_attn.rope_order"


def transformed_tensors(config: ModelConfig, *, head: bool) -> dict[str, tuple[int, ...]]:
    """Return what a directory of transformed whole layers has beside linear weights, and shapes.

    Without the norms of queries and keys, which may have one of two. `head`: with the final norm
    and the LM head.
    """
    D = config.hidden_size
    tensors: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_hidden_layers):
        names = norm_names(config, layer)
        tensors |= {names[name]: (D,) for name in ("input_layernorm", "post_attention_layernorm")}
    return tensors | ({FINAL_NORM: (D,), _HEAD: (config.vocab_size, D)} if head else {})


def load_segment_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layers: Iterable[int],
    *,
    lm_head: torch.Tensor | None,
    transformed: bool,
    has_head: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> SegmentWeights:
    """Read what is there once `Checkpoint.require` has found the tensors.

    `lm_head`: the one that the service has; `transformed`: whether a mask has made the directory.
    `has_head`: whether the last layer's segment can end with the LM head. Raises ModelError.
    """
    H, K, C = config.heads
    heads = {"q_norm": H, "k_norm": K} if transformed else {}

    def norm(short: str, name: str) -> torch.Tensor:
        width = config.width(config.table.norms[short].outputs)
        shapes = ((width,), (heads.get(short, 1), width))
        found = _read_either(checkpoint, name, shapes[: 2 if short in heads else 1])
        return found.to(device, dtype)

    def read(name: str, *shape: int) -> torch.Tensor:
        return load_tensor(checkpoint, name, shape, dtype=dtype, device=device)

    norms, orders = {}, {}
    for layer in layers:
        names = norm_names(config, layer).items()
        norms[layer] = LayerNorms(**{short: norm(short, name) for short, name in names})
        order_Kc = _read_order(checkpoint, layer, K, C // 2) if transformed else None
        if order_Kc is not None:
            order_Xc = torch.cat((order_Kc.repeat_interleave(H // K, 0), order_Kc))
            orders[layer] = order_Xc.to(device)
    if not has_head:
        return SegmentWeights(norms, orders, None, None)
    if transformed:
        lm_head = read(_HEAD, config.vocab_size, config.hidden_size)
    return SegmentWeights(norms, orders, read(FINAL_NORM, config.hidden_size), lm_head)


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


def _read_order(checkpoint: Checkpoint, layer: int, heads: int, pairs: int) -> torch.Tensor | None:
    """Read in which order RoPE's pairs stand, int64 [K, C / 2]; None: in the usual one."""
    name = order_name(layer)
    if not checkpoint.holds([name]):
        return None
    found = _read_either(checkpoint, name, ((heads, pairs),))
    usual = torch.arange(pairs).to(found.dtype).expand(heads, -1)
    ModelError.unless(
        torch.equal(found.sort().values, usual),
        f"{checkpoint.directory}: {name}",
        "other numbers",
        f"each of 0-{pairs - 1} in each head",
    )
    return found.to(torch.int64)
