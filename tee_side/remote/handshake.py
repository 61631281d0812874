"""Checks, before anything secret is sent, that the service holds the model of our own directory.

This catches a service that was started with another model. It proves nothing about what the
service computes: it can answer all of this correctly and lie afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import ModelMismatchError, ReplyError
from protocol.messages import Arithmetic, InitReply, Response
from protocol.model.checkpoint import Checkpoint, model_digest
from protocol.model.config import ModelConfig

if TYPE_CHECKING:
    from tee_side.protect.masks.keyed import TransformKey

_SAME_MODEL = "start service and runner with the same model"
_PROVISIONED = "start gpu-service with the directory that tsqp provision wrote with this key"
_DIGESTS = ("provision_id", "model_digest", "linear_digest")


class ServiceCheck:
    """What a service must say that it holds; made once, for every service and every connection.

    `arithmetic`: what it must be able to do; `key`: of the weights that a provisioned service must
    hold, None where it must hold the model's own; `linear`: the linear digest that these must have,
    None where the directory does not say. `whole_layers`: whether it is to be asked for segments,
    which ranks cannot compute.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        arithmetic: Arithmetic = "float",
        key: TransformKey | None = None,
        linear: str | None = None,
        whole_layers: bool = False,
    ) -> None:
        self._layers = config.num_hidden_layers
        self._arithmetic, self._whole_layers = arithmetic, whole_layers
        self._hint = _SAME_MODEL if key is None else _PROVISIONED
        # The sizes come first, because they tell a person more than a digest that covers them.
        self._expected: dict[str, object] = {
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "provision_id": key.provision_id if key else None,
        }
        # The model digest covers the configuration (RoPE, too) and all norms. Computing it reads
        # some rows of every tensor, so it is not computed again for each connection.
        if key is None:
            self._expected["model_digest"] = model_digest(config, checkpoint)
        digest = key.server_linear_digest if key else linear
        if digest is not None:
            self._expected["linear_digest"] = digest

    def verify(
        self, endpoint: str, reply: Response | None, layers: tuple[int, int] | None = None
    ) -> InitReply:
        """Compare a service's Init reply with the TEE's own copy, and return it.

        `layers`: first and last that it is to be asked for, None for all. Raises ModelMismatchError
        naming the field, and ReplyError for an Init reply that is none.
        """
        if not isinstance(reply, InitReply):
            raise ReplyError(f"Init reply from {endpoint}", type(reply).__name__, "InitReply")

        def require(holds: bool, field: str, got: object, expected: object) -> None:
            where = f"model at {endpoint}: {field}"
            ModelMismatchError.unless(holds, where, str(got), str(expected))

        said = {**reply.config.model_dump(), **{name: getattr(reply, name) for name in _DIGESTS}}
        for name, ours in self._expected.items():
            expected = f"{str(ours)[:16]} ({self._hint})"
            require(said[name] == ours, name, str(said[name])[:16], expected)
        start = (
            f"{self._arithmetic} (start gpu-service with --arithmetic {self._arithmetic} or both)"
        )
        able = self._arithmetic in reply.arithmetic
        require(able, "arithmetic", " and ".join(reply.arithmetic) or "none", start)
        first, last = layers or (0, self._layers - 1)
        require(
            reply.layers[0] <= first and reply.layers[1] >= last,
            "layers",
            "{}-{}".format(*reply.layers),
            f"{first}-{last}, which it is to be asked for (gpu-service --layers, tee-runner --gpu"
            " ENDPOINT=LAYERS)",
        )
        whole = "1: the policy has segments (gpu-service without --tensor-parallel)"
        require(reply.ranks == 1 or not self._whole_layers, "ranks", reply.ranks, whole)
        return reply
