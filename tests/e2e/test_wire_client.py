"""A client written from wire.md alone: a REQ socket, msgpack and numpy run the forward pass.

Nothing of ours is imported here but the helpers that save a model and start the real process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import transformers
import zmq
from numpy.typing import NDArray

from tests.kit.model import make_model
from tests.kit.service import running_service

Array = NDArray[np.float32]
TOLERANCE = 1e-4
PROMPT = [[1, 17, 300, 5, 5, 319, 42, 0, 128]]


class WireClient:
    """The published schema over a plain REQ socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self.socket.connect(endpoint)
        self.calls: Counter[str] = Counter()

    def call(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        self.calls[method] += 1
        self.socket.send(msgpack.packb({"method": method, "request": request}, use_bin_type=True))
        reply = msgpack.unpackb(self.socket.recv(), raw=False)
        assert set(reply) == {"status", "response"}, reply
        assert reply["status"] == "success"
        response: dict[str, Any] = reply["response"]
        return response

    def tensor(self, method: str, request: dict[str, Any]) -> Array:
        response = self.call(method, request | {"dtype": "torch.float32"})
        assert set(response) == {"output", "shape", "dtype"}
        assert response["dtype"] == "torch.float32"
        return np.frombuffer(response["output"], dtype="<f4").reshape(response["shape"])

    def embedding(self, input_ids: list[list[int]]) -> Array:
        ids = np.array(input_ids, dtype="<i8")
        return self.tensor(
            "Embedding", {"input_ids": ids.tobytes(), "input_shape": list(ids.shape)}
        )

    def linear(self, layer: int, hidden: Array, **modules: Any) -> Array:
        states = {"hidden_states": hidden.tobytes(), "shape": list(hidden.shape)}
        return self.tensor("Linear", {"layer_idx": layer, **modules, **states})

    def ring_linear(self, layer: int, elements: NDArray[np.int32], **modules: Any) -> Any:
        body = {"elements": elements.tobytes(), "shape": list(elements.shape)}
        response = self.call("RingLinear", {"layer_idx": layer, **modules, **body})
        assert set(response) == {"output", "shape", "dtype"}
        assert response["dtype"] == "torch.int32"
        return np.frombuffer(response["output"], dtype="<i4").reshape(response["shape"])

    def matmul(self, a: Array, b: Array) -> Array:
        buffers = {"a_buffer": a.tobytes(), "b_buffer": b.tobytes()}
        return self.tensor(
            "Matmul", {**buffers, "a_shape": list(a.shape), "b_shape": list(b.shape)}
        )

    def lm_head(self, hidden: Array) -> Array:
        return self.tensor(
            "LMHead", {"hidden_states": hidden.tobytes(), "shape": list(hidden.shape)}
        )


class WireModel:
    """The TEE's half of a LLaMA forward pass, built from the Init reply."""

    def __init__(self, client: WireClient, *, fused: bool) -> None:
        init = client.call("Init", {})
        assert set(init) == {"config", "rotary_emb_params", "norm_weights"}
        self.client, self.fused = client, fused
        self.config: dict[str, int] = init["config"]
        rotary = init["rotary_emb_params"]
        inv_freq = np.frombuffer(rotary["inv_freq"], dtype="<f4")
        self.inv_freq = inv_freq.reshape(rotary["inv_freq_shape"])
        self.attention_scaling: float = rotary["attention_scaling"]
        self.norms: dict[str, dict[str, Any]] = init["norm_weights"]

    def norm(self, name: str, x: Array) -> Array:
        norm = self.norms[name]
        weight = np.frombuffer(norm["weight"], dtype="<f4").reshape(norm["shape"])
        variance = np.mean(x * x, axis=-1, keepdims=True)
        return (weight * (x / np.sqrt(variance + np.float32(norm["eps"])))).astype(np.float32)

    def rope(self, x: Array) -> Array:
        angles = np.arange(x.shape[-2], dtype=np.float32)[:, None] * self.inv_freq
        angles = np.concatenate([angles, angles], axis=-1)
        first, second = np.split(x, 2, axis=-1)
        turned = np.concatenate([-second, first], axis=-1)
        scale = np.float32(self.attention_scaling)
        result: Array = (x * np.cos(angles) + turned * np.sin(angles)) * scale
        return result

    def modules(self, layer: int, hidden: Array, *names: str) -> list[Array]:
        if not self.fused:
            return [self.client.linear(layer, hidden, module_name=name) for name in names]
        output = self.client.linear(layer, hidden, module_names=list(names))
        if len(names) == 1:
            return [output]
        if names[0] != "q_proj":
            return np.split(output, 2, axis=-1)
        query = self.config["num_heads"] * self.config["head_dim"]
        key = self.config["num_kv_heads"] * self.config["head_dim"]
        return np.split(output, [query, query + key], axis=-1)

    def heads(self, x: Array) -> Array:
        batch, length, _ = x.shape
        split = x.reshape(batch, length, -1, self.config["head_dim"])
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3))

    def attention(self, layer: int, hidden: Array) -> Array:
        query, key, value = (
            self.heads(x) for x in self.modules(layer, hidden, "q_proj", "k_proj", "v_proj")
        )
        groups = self.config["num_heads"] // self.config["num_kv_heads"]
        key, value = np.repeat(self.rope(key), groups, axis=1), np.repeat(value, groups, axis=1)
        scores = self.client.matmul(self.rope(query), np.swapaxes(key, -1, -2))
        scores = scores / np.float32(np.sqrt(self.config["head_dim"]))
        causal_mask = np.triu(np.full(scores.shape[-2:], -np.inf, dtype=np.float32), 1)
        weights = np.exp(scores + causal_mask - np.max(scores + causal_mask, -1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
        mixed = self.client.matmul(weights, value).transpose(0, 2, 1, 3)
        joined = np.ascontiguousarray(mixed).reshape(*hidden.shape[:2], -1)
        return self.modules(layer, joined, "o_proj")[0]

    def mlp(self, layer: int, hidden: Array) -> Array:
        gate, up = self.modules(layer, hidden, "gate_proj", "up_proj")
        return self.modules(layer, gate / (1 + np.exp(-gate)) * up, "down_proj")[0]

    def forward(self, input_ids: list[list[int]]) -> Array:
        x = self.client.embedding(input_ids)
        for layer in range(self.config["num_layers"]):
            x = x + self.attention(layer, self.norm(f"layer_{layer}_input_layernorm", x))
            x = x + self.mlp(layer, self.norm(f"layer_{layer}_post_attention_layernorm", x))
        return self.client.lm_head(self.norm("final_norm", x))


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[transformers.PreTrainedModel, str]]:
    directory = tmp_path_factory.mktemp("llama")
    model = make_model(directory)
    with running_service(
        directory, "tcp://127.0.0.1:*", "--threads", "1", "--log-level", "info"
    ) as service:
        yield model, service.endpoint


@pytest.fixture
def client(served: tuple[transformers.PreTrainedModel, str]) -> Iterator[WireClient]:
    context = zmq.Context()
    made = WireClient(context, served[1])
    yield made
    made.socket.close()
    context.term()


@torch.no_grad()
@pytest.mark.parametrize("prompt", [PROMPT, [[7]], [PROMPT[0], PROMPT[0][::-1]]])
@pytest.mark.parametrize("fused", [False, True])
def test_logits_equal_transformers(
    served: tuple[transformers.PreTrainedModel, str],
    client: WireClient,
    prompt: list[list[int]],
    fused: bool,
) -> None:
    model, _ = served
    logits = WireModel(client, fused=fused).forward(prompt)
    expected = model(torch.tensor(prompt)).logits.numpy()
    assert logits.shape == expected.shape
    assert float(np.abs(expected).max()) > 1.0
    np.testing.assert_allclose(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _int8(weight: torch.Tensor) -> NDArray[np.int64]:
    """The int8 weights, from wire.md's definition."""
    exact = weight.detach().numpy()
    scale = np.abs(exact).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(exact / scale).astype(np.int64)


@pytest.mark.parametrize("names", [("down_proj",), ("gate_proj", "up_proj")])
def test_ring_linear_is_exact_modulo_the_ring(
    served: tuple[transformers.PreTrainedModel, str], client: WireClient, names: tuple[str, ...]
) -> None:
    mlp = served[0].model.layers[1].mlp
    weight = np.concatenate([_int8(getattr(mlp, name).weight) for name in names])
    shape = (2, 5, weight.shape[1])
    elements = np.random.default_rng(0).integers(-(2**31), 2**31, shape, dtype="<i4")
    modules = {"module_name": names[0]} if len(names) == 1 else {"module_names": list(names)}
    output = client.ring_linear(1, elements, **modules)
    exact = elements.astype(np.int64) @ weight.T
    assert np.array_equal(output, exact.astype("<i4"))  # a narrowing cast keeps the low 32 bits
    assert not np.array_equal(output, exact)
