"""Checks, before anything secret is sent, that the service holds the model of our own directory.

This catches a service that was started with another model. It proves nothing about what the
service computes: it can answer all of this correctly and lie afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from protocol.errors import ModelMismatchError, ReplyError
from protocol.messages import Arithmetic, InitReply, Response
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from protocol.model.identity import model_digest
from protocol.model.rope import rope_frequencies
from protocol.tensors import to_torch
from tee_side.protect.masks.keyed import TransformKey

_SAME_MODEL = "start service and runner with the same model"
_PROVISIONED = "start gpu-service with the directory that tsqp provision wrote with this key"


class ServiceCheck:
    """What a service must say that it holds; made once, for every service and every connection.

    `norms`: RMSNorm weights [D] of the TEE's own model, by their names in an Init reply, in the
    dtype that both are compared in. `arithmetic`: what it must be able to do; `key`: of the weights
    that a provisioned service must hold, None where it must hold the model's own; `linear`: the
    linear digest that these must have, None where the directory does not say. `whole_layers`:
    whether it is to be asked for segments, which ranks cannot compute.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        norms: Mapping[str, torch.Tensor],
        *,
        arithmetic: Arithmetic = "float",
        key: TransformKey | None = None,
        linear: str | None = None,
        whole_layers: bool = False,
    ) -> None:
        self._layers = config.num_hidden_layers
        self._dtype = norms["final_norm"].dtype
        self._arithmetic, self._whole_layers = arithmetic, whole_layers
        self._norms = key is None
        self._hint = _SAME_MODEL if key is None else _PROVISIONED
        inv_freq, attention_scaling = rope_frequencies(config)
        expected: dict[str, object] = {
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "inv_freq": inv_freq,
            "attention_scaling": attention_scaling,
            "provision_id": key.provision_id if key else None,
        }
        # Digests read some rows of every tensor, with a manifest the whole blocks that they lie in:
        # not once more for each connection.
        if key is None:
            expected |= {**norms, **{f"{name}.eps": config.rms_norm_eps for name in norms}}
            expected["model_digest"] = model_digest(config, checkpoint)
        digest = key.server_linear_digest if key else linear
        if digest is not None:
            expected["linear_digest"] = digest
        self._expected = expected

    def verify(
        self, endpoint: str, reply: Response | None, layers: tuple[int, int] | None = None
    ) -> InitReply:
        """Compare a service's Init reply with the TEE's own copy, and return it.

        `layers`: first and last that it is to be asked for, None for all. Raises ModelMismatchError
        naming the field, and ReplyError for an Init reply that is none.
        """
        if not isinstance(reply, InitReply):
            got = type(reply).__name__
            raise ReplyError(f"Init reply from {endpoint}", got=got, expected="InitReply")
        where, said = f"model at {endpoint}", self._said(reply)
        for name, ours in self._expected.items():
            if name not in said or not _equal(said[name], ours):
                got = _brief(said[name]) if name in said else "nothing"
                expected = f"{_brief(ours)} ({self._hint})"
                raise ModelMismatchError(f"{where}: {name}", got=got, expected=expected)
        if len(said) > len(self._expected):
            expected = f"the {len(self._expected)} of the TEE's own model"
            raise ModelMismatchError(
                f"{where}: fields", got=f"{len(said)} of them", expected=expected
            )
        if self._arithmetic not in reply.arithmetic:
            raise ModelMismatchError(
                f"{where}: arithmetic",
                got=" and ".join(reply.arithmetic) or "none",
                expected=f"{self._arithmetic} (start gpu-service with --arithmetic"
                f" {self._arithmetic} or both)",
            )
        first, last = layers or (0, self._layers - 1)
        if reply.layers[0] > first or reply.layers[1] < last:
            raise ModelMismatchError(
                f"{where}: layers",
                got="{}-{}".format(*reply.layers),
                expected=f"{first}-{last}, which it is to be asked for (gpu-service --layers,"
                " tee-runner --gpu ENDPOINT=LAYERS)",
            )
        if self._whole_layers and reply.ranks != 1:
            expected = "1: the policy has segments (gpu-service without --tensor-parallel)"
            raise ModelMismatchError(f"{where}: ranks", got=str(reply.ranks), expected=expected)
        return reply

    def _said(self, reply: InitReply) -> dict[str, object]:
        """Return what a service says of everything that is compared, and whatever else it says."""
        rotary = reply.rotary_emb_params
        said: dict[str, object] = {}
        for name, norm in reply.norm_weights.items() if self._norms else ():
            said[name] = to_torch(norm.weight).to(self._dtype)
            said[f"{name}.eps"] = norm.eps
        said |= reply.config.model_dump()
        said["inv_freq"] = to_torch(rotary.inv_freq)
        said["attention_scaling"] = rotary.attention_scaling
        for name in ("provision_id", "model_digest", "linear_digest"):
            if name in self._expected:
                said[name] = getattr(reply, name)
        return said


def _equal(theirs: object, ours: object) -> bool:
    """Compare values; numbers may differ by rounding, since two processors computed them."""
    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        # The dtype too: torch compares no tensors of two, and which it is the service chooses.
        same = theirs.dtype == ours.dtype and theirs.shape == ours.shape
        return same and torch.allclose(theirs, ours, rtol=1e-5, atol=0)
    if isinstance(theirs, float) and isinstance(ours, float):
        return math.isclose(theirs, ours, rel_tol=1e-5)
    return type(theirs) is type(ours) and theirs == ours


def _brief(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} with sum {value.sum().item():.6g}"
    return str(value)[:16]
