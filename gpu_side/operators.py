"""What the service computes: one method per request, from message to message.

Floats are converted to the service's dtype and device, outputs back to the dtype of the request,
so a client that sends float32 gets float32 whatever the service computes in. Elements of the ring
are never rounded.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import TypeVar

import torch
from torch.nn.functional import embedding, linear

from gpu_side.weights import OPERATOR_OF, ServiceWeights
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    InitConfig,
    InitReply,
    InitRequest,
    LinearOperator,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    NormWeight,
    Request,
    Response,
    RingLinearRequest,
    RotaryParams,
    TensorReply,
)
from protocol.model.quantized import QuantizedLinear
from protocol.model.rope import rope_frequencies
from protocol.model.weights import FusedLinear
from protocol.tensors import (
    FLOAT_DTYPES,
    ITEMSIZE,
    WireTensor,
    from_torch,
    to_torch,
    torch_dtype,
)

L = TypeVar("L", FusedLinear, QuantizedLinear)


def _refuse(where: str, got: str, expected: str) -> ProtocolError:
    return ProtocolError(where, got=got, expected=expected, code=ErrorCode.INVALID_FIELD)


class Operators:
    """Applies requests to the weights. Stateless between requests. Raises ProtocolError."""

    def __init__(self, weights: ServiceWeights, max_message_bytes: int) -> None:
        self._weights = weights
        self._max_message_bytes = max_message_bytes
        self._instance_id = secrets.token_hex(16)

    def apply(self, request: Request) -> Response:
        """Compute the reply to a checked request."""
        with torch.inference_mode():
            match request:
                case InitRequest():
                    return self._init()
                case EmbeddingRequest():
                    return self._embedding(request)
                case LinearRequest():
                    return self._linear(request)
                case RingLinearRequest():
                    return self._ring_linear(request)
                case MatmulRequest():
                    return self._matmul(request)
                case LMHeadRequest():
                    return self._lm_head(request)

    def _init(self) -> InitReply:
        weights, config = self._weights, self._weights.config
        inv_freq, attention_scaling = rope_frequencies(config)
        return InitReply(
            config=InitConfig(
                num_layers=config.num_hidden_layers,
                hidden_size=config.hidden_size,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
            ),
            rotary_emb_params=RotaryParams(
                inv_freq=from_torch(inv_freq), attention_scaling=attention_scaling
            ),
            norm_weights={
                name: NormWeight(weight=from_torch(norm), eps=config.rms_norm_eps)
                for name, norm in weights.norms.items()
            },
            model_digest=weights.model_digest,
            linear_digest=weights.linear_digest,
            max_message_bytes=self._max_message_bytes,
            arithmetic=weights.arithmetic,
            provision_id=None if weights.provision is None else weights.provision.provision_id,
            instance_id=self._instance_id,
        )

    def _embedding(self, request: EmbeddingRequest) -> TensorReply:
        table = self._weights.embedding
        if table is None:
            raise self._unavailable("Embedding", "an embedding")
        config, tensor = self._weights.config, request.input_ids
        if tensor.dtype != "int64":
            raise _refuse("Embedding.input_ids", tensor.dtype, "int64")
        if len(tensor.shape) > 2:
            raise _refuse("Embedding.input_shape", f"{list(tensor.shape)}", "[T] or [batch, T]")
        self._bound_output(
            "Embedding.input_ids",
            tensor.payload_bytes // ITEMSIZE["int64"] * config.hidden_size,
            request.dtype,
        )
        input_ids = to_torch(tensor)
        low, high = (int(bound) for bound in torch.aminmax(input_ids))
        if low < 0 or high >= config.vocab_size:
            # The ids themselves stay out of the message: messages are logged.
            raise _refuse(
                "Embedding.input_ids",
                "an id outside the vocabulary",
                f"0 to {config.vocab_size - 1}",
            )
        output = embedding(input_ids.to(self._weights.device), table)
        return self._reply(output, request.dtype)

    def _linear(self, request: LinearRequest) -> TensorReply:
        layers = self._weights.linears
        if layers is None:
            raise self._unavailable("Linear", "float weights")
        fused = self._fused(request, layers)
        hidden = self._hidden_states("Linear", request.hidden_states, fused.in_features)
        names, dtype = request.module_names, request.hidden_states.dtype
        self._bound_linear("Linear.hidden_states", request.hidden_states, fused, names)
        applied = fused if request.bias else replace(fused, bias=None)
        return self._reply(applied(hidden, names), dtype)

    def _ring_linear(self, request: RingLinearRequest) -> TensorReply:
        layers = self._weights.integers
        if layers is None:
            raise self._unavailable("RingLinear", "int8 weights")
        fused = self._fused(request, layers)
        tensor, where = request.elements, "RingLinear.elements"
        if tensor.dtype != "int32":
            raise _refuse(where, tensor.dtype, "int32")
        self._check_width(where, tensor, fused.in_features)
        self._bound_linear(where, tensor, fused, request.module_names)
        elements = to_torch(tensor).to(self._weights.device)
        return self._reply(fused.product(elements, request.module_names), "int32")

    def _fused(
        self, request: LinearRequest | RingLinearRequest, layers: list[dict[LinearOperator, L]]
    ) -> L:
        """Return the fused linear that the request's modules are all or one of."""
        method, names = request.method, request.module_names
        if request.layer_idx >= len(layers):
            raise _refuse(f"{method}.layer_idx", str(request.layer_idx), f"0 to {len(layers) - 1}")
        operator = OPERATOR_OF[names[0]]
        if len(names) > 1 and names != FUSED_MODULES[operator]:
            together = " or ".join(" ".join(m) for m in FUSED_MODULES.values() if len(m) > 1)
            raise _refuse(f"{method}.module_names", " ".join(names), f"one module, or {together}")
        return layers[request.layer_idx][operator]

    def _bound_linear(
        self,
        where: str,
        tensor: WireTensor,
        fused: FusedLinear | QuantizedLinear,
        names: tuple[ModuleName, ...],
    ) -> None:
        out_features = sum(fused.rows[name].stop - fused.rows[name].start for name in names)
        rows = math.prod(tensor.shape) // fused.in_features
        self._bound_output(where, rows * out_features, tensor.dtype)

    def _unavailable(self, method: str, needed: str) -> ProtocolError:
        held = " and ".join(self._weights.arithmetic)
        provision = self._weights.provision
        mask = "" if provision is None else f", for the mask {provision.mask} alone"
        return ProtocolError(
            method,
            got=f"a request that needs {needed}",
            expected=f"one that {held} linear weights can answer{mask}",
            code=ErrorCode.UNAVAILABLE,
        )

    def _matmul(self, request: MatmulRequest) -> TensorReply:
        a, b = request.a, request.b
        if a.dtype != b.dtype or a.dtype not in FLOAT_DTYPES:
            raise _refuse("Matmul.dtype", f"{a.dtype} and {b.dtype}", "one float dtype")
        where, got = "Matmul.shape", f"{list(a.shape)} @ {list(b.shape)}"
        if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
            raise _refuse(where, got, "[..., M, K] @ [..., K, N]")
        try:
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except RuntimeError:
            raise _refuse(where, got, "leading dimensions that broadcast") from None
        M, K, N = *a.shape[-2:], b.shape[-1]
        # torch.matmul writes out operands that broadcast.
        self._bound_output(where, batch.numel() * max(M * N, M * K, K * N), a.dtype)
        return self._reply(torch.matmul(self._on_device(a), self._on_device(b)), a.dtype)

    def _lm_head(self, request: LMHeadRequest) -> TensorReply:
        lm_head = self._weights.lm_head
        if lm_head is None:
            raise self._unavailable("LMHead", "an LM head")
        hidden = self._hidden_states("LMHead", request.hidden_states, lm_head.shape[1])
        self._bound_output(
            "LMHead.hidden_states",
            hidden.numel() // lm_head.shape[1] * lm_head.shape[0],
            request.hidden_states.dtype,
        )
        return self._reply(linear(hidden, lm_head), request.hidden_states.dtype)

    def _bound_output(self, where: str, elements: int, dtype: str) -> None:
        """Refuse a request whose small inputs ask for an output that no reply may hold."""
        size = elements * ITEMSIZE[dtype]
        if size > self._max_message_bytes:
            raise ProtocolError(
                where,
                got=f"an output of {size} bytes",
                expected=f"at most {self._max_message_bytes}",
                code=ErrorCode.LIMIT_EXCEEDED,
            )

    def _hidden_states(self, where: str, tensor: WireTensor, in_features: int) -> torch.Tensor:
        if tensor.dtype not in FLOAT_DTYPES:
            raise _refuse(f"{where}.hidden_states", tensor.dtype, "a float dtype")
        self._check_width(f"{where}.hidden_states", tensor, in_features)
        return self._on_device(tensor)

    def _check_width(self, where: str, tensor: WireTensor, in_features: int) -> None:
        if tensor.shape[-1] != in_features:
            raise _refuse(where, f"shape {list(tensor.shape)}", f"{in_features} on the last axis")

    def _on_device(self, tensor: WireTensor) -> torch.Tensor:
        return to_torch(tensor).to(device=self._weights.device, dtype=self._weights.dtype)

    def _reply(self, output: torch.Tensor, dtype: str) -> TensorReply:
        return TensorReply(output=from_torch(output.to(torch_dtype(dtype))))
