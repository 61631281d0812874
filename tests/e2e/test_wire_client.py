"""A client written from wire.md alone: a REQ socket, msgpack and numpy use every operator.

Nothing of ours is imported here but the helpers that save a model and start the real process.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch
import transformers
import zmq
from numpy.typing import NDArray

from tests.kit.model import make_model
from tests.kit.rows import each_row
from tests.kit.service import running_service

TOLERANCE = 1e-4


class Client(NamedTuple):
    """The published schema over a plain REQ socket; `model`: what is served."""

    model: transformers.PreTrainedModel
    socket: zmq.Socket[bytes]

    def call(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        self.socket.send(msgpack.packb({"method": method, "request": request}, use_bin_type=True))
        reply = msgpack.unpackb(self.socket.recv(), raw=False)
        assert (set(reply), reply["status"]) == ({"status", "response"}, "success"), reply
        response: dict[str, Any] = reply["response"]
        return response

    def tensor(self, method: str, dtype: str = "float32", **request: Any) -> NDArray[Any]:
        asked = request if dtype == "int32" else request | {"dtype": f"torch.{dtype}"}
        response = self.call(method, asked)
        assert set(response) == {"output", "shape", "dtype"}
        assert response["dtype"] == f"torch.{dtype}"
        return np.frombuffer(response["output"], dtype=dtype).reshape(response["shape"])

    def weight(self, *names: str) -> NDArray[np.float32]:
        """Return weights of layer 1, those of several modules below each other."""
        found = dict(self.model.model.layers[1].named_modules())
        parts = [found[f"{'self_attn' if n[0] in 'qkvo' else 'mlp'}.{n}"].weight for n in names]
        return torch.cat(parts).detach().numpy()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("llama")
    model = make_model(directory)
    options = ("--threads", "1", "--log-level", "info")
    with (
        running_service(directory, "tcp://127.0.0.1:*", *options) as service,
        zmq.Context() as context,
        context.socket(zmq.REQ) as socket,
    ):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 30_000)
        socket.connect(service.endpoint)
        yield Client(model, socket)


def test_init_says_what_the_tee_s_half_needs(client: Client) -> None:
    init = client.call("Init", {})
    assert set(init) == {"config", "rotary_emb_params", "norm_weights"}
    config, rotary, norms = init["config"], init["rotary_emb_params"], init["norm_weights"]
    wanted: Any = client.model.config
    assert config["num_layers"] == wanted.num_hidden_layers
    assert config["num_heads"] == wanted.num_attention_heads
    assert config["num_kv_heads"] == wanted.num_key_value_heads
    assert config["head_dim"] == wanted.head_dim
    inv_freq = np.frombuffer(rotary["inv_freq"], "<f4").reshape(rotary["inv_freq_shape"])
    np.testing.assert_allclose(inv_freq, client.model.model.rotary_emb.inv_freq, rtol=TOLERANCE)
    assert rotary["attention_scaling"] == client.model.model.rotary_emb.attention_scaling
    names = {"input_layernorm", "post_attention_layernorm"}
    layers = enumerate(client.model.model.layers)
    expected = {
        f"layer_{at}_{name}": getattr(layer, name) for at, layer in layers for name in names
    }
    expected["final_norm"] = client.model.model.norm
    assert norms.keys() == expected.keys()
    for name, norm in norms.items():
        weight = np.frombuffer(norm["weight"], "<f4").reshape(norm["shape"])
        assert np.array_equal(weight, expected[name].weight.detach()), name
        assert norm["eps"] == pytest.approx(expected[name].variance_epsilon)


@torch.no_grad()
@each_row("shape", [(1, 9), (1, 1), (2, 9)])
def test_operators_equal_transformers(client: Client, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 320, shape, dtype="<i8")
    found = client.tensor("Embedding", input_ids=ids.tobytes(), input_shape=list(shape))
    assert np.array_equal(found, client.model.model.embed_tokens(torch.from_numpy(ids)))

    def states(width: int) -> tuple[NDArray[np.float32], dict[str, Any]]:
        made = random.standard_normal((*shape, width), dtype="<f4")
        return made, {"hidden_states": made.tobytes(), "shape": list(made.shape)}

    for names in (
        *(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",)),
        *(("q_proj",), ("k_proj",), ("v_proj",), ("o_proj",), ("gate_proj",), ("up_proj",)),
    ):
        weight = client.weight(*names)
        x, said = states(weight.shape[1])
        for modules in ({"module_names": list(names)}, {"module_name": names[0]})[: 3 - len(names)]:
            found = client.tensor("Linear", layer_idx=1, **modules, **said)
            np.testing.assert_allclose(found, x @ weight.T, rtol=TOLERANCE, atol=TOLERANCE)
    (x, said), head = states(client.model.config.hidden_size), client.model.lm_head
    found, expected = client.tensor("LMHead", **said), head(torch.from_numpy(x))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    a, b = (random.standard_normal((shape[0], 4, *s), dtype="<f4") for s in ((5, 8), (8, 5)))
    asked = {"a_buffer": a.tobytes(), "a_shape": list(a.shape)}
    asked |= {"b_buffer": b.tobytes(), "b_shape": list(b.shape)}
    found = client.tensor("Matmul", **asked)
    np.testing.assert_allclose(found, a @ b, rtol=TOLERANCE, atol=TOLERANCE)


@each_row("names", [("down_proj",), ("gate_proj", "up_proj")])
def test_ring_linear_is_exact_modulo_the_ring(client: Client, names: tuple[str, ...]) -> None:
    parts = [client.weight(name) for name in names]
    # The int8 weights, from wire.md's definition.
    scales = [np.abs(part).max(axis=1, keepdims=True) / np.float32(127) for part in parts]
    integers = [np.rint(part / by) for part, by in zip(parts, scales, strict=True)]
    weight = np.concatenate(integers).astype(np.int64)
    shape = [2, 5, weight.shape[1]]
    elements = np.random.default_rng(0).integers(-(2**31), 2**31, shape, dtype="<i4")
    asked = {"layer_idx": 1, "module_names": list(names), "elements": elements.tobytes()}
    output = client.tensor("RingLinear", "int32", **asked, shape=shape)
    exact = elements.astype(np.int64) @ weight.T
    assert np.array_equal(output, exact.astype("<i4"))  # a narrowing cast keeps the low 32 bits
    assert not np.array_equal(output, exact)
