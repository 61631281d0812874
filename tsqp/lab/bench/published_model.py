"""The published way to run a LLaMA over the wire schema: its RPCs, and the half that stays here.

What it is compared with, and how it is run, is in `tsqp.lab.bench.published_client`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch
import zmq

from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ProtocolError,
    ServiceError,
)

_DTYPE = "torch.float32"


@dataclass
class Counters:
    """Round trips and bytes of all messages since it was made."""

    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class PublishedClient:
    """The RPCs of the published schema, one at a time, over a REQ socket.

    Raises EndpointError, DeadlineExceededError, ServiceError for an error reply, and ProtocolError
    for what is no reply.
    """

    def __init__(self, endpoint: str, *, timeout_s: float = 120.0) -> None:
        self.counters = Counters()
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
        self._socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EndpointError(
                "endpoint", got=f"{endpoint!r} ({error})", expected="tcp://HOST:PORT or ipc://PATH"
            ) from None

    def __enter__(self) -> PublishedClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()

    def call(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and return the response's fields."""
        sent = msgpack.packb({"method": method, "request": request}, use_bin_type=True)
        try:
            self._socket.send(sent, copy=False)
            received = self._socket.recv(copy=False).buffer
        except zmq.Again:
            raise DeadlineExceededError(
                self._endpoint,
                got=f"no reply to {method} within {self._timeout_s:g} s",
                expected="a gpu-service that answers there",
            ) from None
        self.counters.round_trips += 1
        self.counters.bytes_sent += len(sent)
        self.counters.bytes_received += len(received)
        reply = msgpack.unpackb(received, raw=False)
        if reply.get("status") != "success":
            code = reply.get("error")
            known = code in ErrorCode.__members__
            raise ServiceError(method, code=ErrorCode(code) if known else ErrorCode.INTERNAL)
        response: dict[str, Any] = reply["response"]
        return response

    def embedding(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Look up float32 [B, T, D] for int64 [B, T]."""
        request = {"input_ids": _bytes(ids_BT), "input_shape": list(ids_BT.shape)}
        return self._tensor("Embedding", request)

    def linear(self, layer: int, module: str, hidden: torch.Tensor) -> torch.Tensor:
        """Apply one module."""
        request = {"layer_idx": layer, "module_name": module, "hidden_states": _bytes(hidden)}
        return self._tensor("Linear", {**request, "shape": list(hidden.shape)})

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply, in batches."""
        request = {"a_buffer": _bytes(a), "a_shape": list(a.shape)}
        return self._tensor("Matmul", {**request, "b_buffer": _bytes(b), "b_shape": list(b.shape)})

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self._tensor(
            "LMHead", {"hidden_states": _bytes(hidden), "shape": list(hidden.shape)}
        )

    def _tensor(self, method: str, request: dict[str, Any]) -> torch.Tensor:
        response = self.call(method, {**request, "dtype": _DTYPE})
        if response["dtype"] != _DTYPE:
            raise ProtocolError(
                method,
                got=str(response["dtype"])[:20],
                expected=_DTYPE,
                code=ErrorCode.MALFORMED_MESSAGE,
            )
        return _floats(response["output"], response["shape"])


@dataclass
class PublishedModel:
    """The trusted half of the forward pass, built from the Init reply; all in float32.

    Shapes: B sequences, T tokens, D hidden, H heads, C head dim, V vocabulary.
    """

    client: PublishedClient
    vocab_size: int = field(init=False)

    def __post_init__(self) -> None:
        init = self.client.call("Init", {})
        sizes: dict[str, int] = init["config"]
        self._layers, self._head_dim = sizes["num_layers"], sizes["head_dim"]
        self._groups = sizes["num_heads"] // sizes["num_kv_heads"]
        rotary = init["rotary_emb_params"]
        self._inv_freq = _floats(rotary["inv_freq"], rotary["inv_freq_shape"])
        self._attention_scaling: float = rotary["attention_scaling"]
        self._norms = {
            name: (_floats(norm["weight"], norm["shape"]), float(norm["eps"]))
            for name, norm in init["norm_weights"].items()
        }
        hidden = torch.zeros(1, 1, sizes["hidden_size"])
        self.vocab_size = self.client.lm_head(hidden).shape[-1]

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last token, float32 [B, 1, V]."""
        x_BTD = self.client.embedding(ids_BT)
        cos_TC, sin_TC = self._rotary(ids_BT.shape[1])
        for layer in range(self._layers):
            h_BTD = self._norm(f"layer_{layer}_input_layernorm", x_BTD)
            x_BTD = x_BTD + self._attention(layer, h_BTD, cos_TC, sin_TC)
            h_BTD = self._norm(f"layer_{layer}_post_attention_layernorm", x_BTD)
            gate_BTF = self.client.linear(layer, "gate_proj", h_BTD)
            up_BTF = self.client.linear(layer, "up_proj", h_BTD)
            activated_BTF = torch.nn.functional.silu(gate_BTF) * up_BTF
            x_BTD = x_BTD + self.client.linear(layer, "down_proj", activated_BTF)
        return self.client.lm_head(self._norm("final_norm", x_BTD[:, -1:]))

    def generate(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """Return greedy token ids; each costs a pass over all tokens before it."""
        ids = list(prompt)
        for _ in range(new_tokens):
            ids.append(int(self.forward(torch.tensor([ids]))[0, -1].argmax()))
        return ids[len(prompt) :]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, eps = self._norms[name]
        variance = x.pow(2).mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(variance + eps))

    def _rotary(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self._attention_scaling, angles.sin() * self._attention_scaling

    def _heads(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BTD.shape
        return x_BTD.view(batch, length, -1, self._head_dim).transpose(1, 2)

    def _attention(
        self, layer: int, h_BTD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor
    ) -> torch.Tensor:
        q_BHTC = self._heads(self.client.linear(layer, "q_proj", h_BTD))
        k_BHTC = self._heads(self.client.linear(layer, "k_proj", h_BTD))
        v_BHTC = self._heads(self.client.linear(layer, "v_proj", h_BTD))
        q_BHTC = q_BHTC * cos_TC + _rotate_half(q_BHTC) * sin_TC
        k_BHTC = k_BHTC * cos_TC + _rotate_half(k_BHTC) * sin_TC
        k_BHTC = k_BHTC.repeat_interleave(self._groups, dim=1)
        v_BHTC = v_BHTC.repeat_interleave(self._groups, dim=1)
        scores_BHTT = self.client.matmul(q_BHTC, k_BHTC.transpose(2, 3))
        weights_BHTT = torch.softmax(scores_BHTT / math.sqrt(self._head_dim), dim=-1)
        mixed_BTHC = self.client.matmul(weights_BHTT, v_BHTC).transpose(1, 2)
        return self.client.linear(layer, "o_proj", mixed_BTHC.reshape(*h_BTD.shape[:2], -1))


def _bytes(tensor: torch.Tensor) -> memoryview:
    """View a tensor's bytes, which msgpack copies into its message."""
    return tensor.contiguous().numpy().data.cast("B")


def _floats(data: bytes, shape: list[int]) -> torch.Tensor:
    """View received bytes, which nothing here writes to, as float32."""
    return torch.frombuffer(data, dtype=torch.float32).view(shape)


def _warn_of_read_only_memory_now() -> None:
    """Take the warning that torch gives once in a process for a view of bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(bytes(4), dtype=torch.float32)


_warn_of_read_only_memory_now()


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
