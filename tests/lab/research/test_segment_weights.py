"""What the server of a segment mask gets, what it does not get, and how much is in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from gpu_side.provision import read_provision
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    SINGLE_FILE,
    Checkpoint,
    light_tensors,
    linear_tensors,
)
from protocol.model.config import read_config
from protocol.model.identity import linear_digest
from tee_side.protect.masks.mask import SegmentMask
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.lab.research.provisioning import provision
from tsqp.lab.research.segment_permutation import SegmentPermutation
from tsqp.lab.research.segment_rotation import SegmentRotation

Models = Callable[..., SavedModel]
STIP, CLOAK = SegmentPermutation(), SegmentRotation()
MASKS: list[SegmentMask] = [STIP, CLOAK]


@each_row(
    ("mask", "kind", "tied"),
    [(mask, kind, tied) for mask in MASKS for kind, tied in (("llama", False), ("qwen3", True))],
    str,
)
def test_the_server_gets_whole_layers_under_their_own_names_and_no_embedding(
    saved_model: Models, tmp_path: Path, mask: SegmentMask, kind: str, tied: bool
) -> None:
    biases = {} if kind == "qwen3" else {"attention_bias": True, "mlp_bias": True}
    source = saved_model(kind, tie_word_embeddings=tied, **biases).directory
    server = tmp_path / f"{mask.name}-{kind}-{tied}"
    made = provision(source, mask, server, server.with_suffix(".key"))
    config, found = read_config(source), dict[str, torch.Tensor]()
    for shard in sorted(server.glob("*.safetensors")):
        found |= load_file(shard)
    H, K, C = config.heads
    norms = {n: s for n, s in light_tensors(config).items() if ".layers." in n}
    expected = norms | linear_tensors(config, FUSED_MODULES)
    if mask is STIP:
        heads = {"q_norm.weight": H, "k_norm.weight": K}
        for name in [n for n in norms if "_norm" in n]:
            expected[name] = (heads[name.split("self_attn.")[1]], C)
        for layer in range(config.num_hidden_layers):
            expected[f"model.layers.{layer}.self_attn.rope_order"] = (K, C // 2)
        expected[FINAL_NORM] = (config.hidden_size,)
        expected["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    assert made.weight_bytes == sum(tensor.nbytes for tensor in found.values())
    assert made.holds == ("model" if mask is STIP else "layers")
    assert read_config(server).tie_word_embeddings == (tied and mask is CLOAK)
    assert read_config(server).model_copy(update={"tie_word_embeddings": tied}) == config
    marker = read_provision(server)
    assert marker is not None
    assert (marker.mask, marker.holds) == (mask.name, made.holds)
    assert marker.provision_id == made.key.provision_id
    assert made.key.server_linear_digest == linear_digest(config, Checkpoint(server))
    seed = made.key.seed.encode()
    assert all(seed not in path.read_bytes() for path in server.iterdir())
    # No tensor is the model's own but what a rotation leaves within a head or an MLP.
    originals = load_file(source / SINGLE_FILE)
    same = {n for n in found if n in originals and torch.equal(found[n], originals[n])}
    inner = {n for n in found if n.endswith((".bias", "q_norm.weight", "k_norm.weight"))}
    inner -= {n for n in found if n.endswith(("o_proj.bias", "down_proj.bias"))}
    assert same == (inner if mask is CLOAK else set())
    assert EMBEDDING not in found
