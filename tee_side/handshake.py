"""Checks, before anything secret is sent, that the service holds the model of our own directory.

This catches a service that was started with another model. It proves nothing about what the
service computes: it can answer all of this correctly and lie afterwards.
"""

from __future__ import annotations

import math

import torch

from protocol.errors import ModelMismatchError, ReplyError
from protocol.messages import Arithmetic, InitReply, Response
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from protocol.model.identity import model_digest
from protocol.model.rope import rope_frequencies
from protocol.tensors import to_torch
from tee_side.feature_key import FeatureKey
from tee_side.model import TeeModel

_SAME_MODEL = "start service and runner with the same model"
_PROVISIONED = "start gpu-service with the directory that tsqp provision wrote with this key"


class ServiceCheck:
    """What a service must say that it holds; made once, for every service and every connection.

    `arithmetic`: what it must be able to do; `key`: of the weights that a provisioned service must
    hold, None where it must hold the model's own; `linear`: the linear digest that these must have,
    None where the directory does not say.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        model: TeeModel,
        *,
        arithmetic: Arithmetic = "float",
        key: FeatureKey | None = None,
        linear: str | None = None,
    ) -> None:
        self._config = config
        self._dtype = model.dtype
        self._arithmetic = arithmetic
        self._key = key
        self._sizes = _published_sizes(config)
        self._rotary = _own_rotary(config)
        self._norms = _own_norms(config, model)
        # Digests read some rows of every tensor, with a manifest the whole blocks that they lie in:
        # not once more for each connection.
        self._digests: dict[str, object] = {}
        if key is None:
            self._digests["model_digest"] = model_digest(config, checkpoint)
            if linear is not None:
                self._digests["linear_digest"] = linear

    def verify(
        self, endpoint: str, reply: Response, layers: tuple[int, int] | None = None
    ) -> InitReply:
        """Compare a service's Init reply with the TEE's own copy, and return it.

        `layers`: first and last that it is to be asked for, None for all. Raises ModelMismatchError
        naming the field, and ReplyError for an Init reply that is none.
        """
        if not isinstance(reply, InitReply):
            raise ReplyError(
                f"Init reply from {endpoint}", got=type(reply).__name__, expected="InitReply"
            )
        where, key = f"model at {endpoint}", self._key
        _compare(where, reply.config.model_dump(), self._sizes)
        _compare(where, _rotary(reply), self._rotary)
        if key is not None:
            expected = {
                "provision_id": key.provision_id,
                "linear_digest": key.server_linear_digest,
            }
            theirs = {"provision_id": reply.provision_id, "linear_digest": reply.linear_digest}
            _compare(where, dict(theirs), dict(expected), _PROVISIONED)
        elif reply.provision_id is not None:
            raise ModelMismatchError(
                where,
                got="weights that were provisioned for a feature mask",
                expected="the model's own, which this policy needs",
            )
        else:
            _compare(where, _norms(reply, self._dtype), self._norms)
            _compare(where, {name: getattr(reply, name) for name in self._digests}, self._digests)
        if self._arithmetic not in reply.arithmetic:
            raise ModelMismatchError(
                f"{where}: arithmetic",
                got=" and ".join(reply.arithmetic) or "none",
                expected=f"{self._arithmetic} (start gpu-service with --arithmetic"
                f" {self._arithmetic} or both)",
            )
        self._check_layers(where, reply.layers, layers or (0, self._config.num_hidden_layers - 1))
        return reply

    @staticmethod
    def _check_layers(where: str, held: tuple[int, int], asked: tuple[int, int]) -> None:
        if held[0] > asked[0] or held[1] < asked[1]:
            raise ModelMismatchError(
                f"{where}: layers",
                got=f"{held[0]}-{held[1]}",
                expected=f"{asked[0]}-{asked[1]}, which it is to be asked for (gpu-service"
                " --layers, tee-runner --gpu ENDPOINT=LAYERS)",
            )


def _published_sizes(config: ModelConfig) -> dict[str, object]:
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }


def _rotary(reply: InitReply) -> dict[str, object]:
    params = reply.rotary_emb_params
    return {"inv_freq": to_torch(params.inv_freq), "attention_scaling": params.attention_scaling}


def _own_rotary(config: ModelConfig) -> dict[str, object]:
    inv_freq, attention_scaling = rope_frequencies(config)
    return {"inv_freq": inv_freq, "attention_scaling": attention_scaling}


def _norms(reply: InitReply, dtype: torch.dtype) -> dict[str, object]:
    norms: dict[str, object] = {}
    for name, norm in reply.norm_weights.items():
        norms[name] = to_torch(norm.weight).to(dtype)
        norms[f"{name}.eps"] = norm.eps
    return norms


def _own_norms(config: ModelConfig, model: TeeModel) -> dict[str, object]:
    norms: dict[str, object] = {"final_norm": model.final_norm}
    for layer, weights in enumerate(model.norms):
        norms[f"layer_{layer}_input_layernorm"] = weights.input_layernorm
        norms[f"layer_{layer}_post_attention_layernorm"] = weights.post_attention_layernorm
    return norms | {f"{name}.eps": config.rms_norm_eps for name in norms}


def _compare(
    where: str, theirs: dict[str, object], ours: dict[str, object], hint: str = _SAME_MODEL
) -> None:
    """Raise ModelMismatchError at the first of our fields that theirs lacks or has otherwise."""
    for name, value in ours.items():
        if name not in theirs or not _equal(theirs[name], value):
            got = _brief(theirs[name]) if name in theirs else "nothing"
            raise ModelMismatchError(
                f"{where}: {name}",
                got=got,
                expected=f"{_brief(value)} ({hint})",
            )
    if len(theirs) > len(ours):
        raise ModelMismatchError(
            f"{where}: fields",
            got=f"{len(theirs)} of them",
            expected=f"the {len(ours)} of the TEE's own model",
        )


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
