"""The published way to run a LLaMA over the wire schema, as a baseline.

    python -m tsqp.lab.bench.published_client ENDPOINT [--tokens 1,128,512] [--new-tokens 64]
        [--repeats 3] [--threads N] [--against null|cpu|none] [--json FILE]

A REQ socket, the inline form, float32, one RPC for each module (7 Linear and 2 Matmul a layer,
Embedding, LM head). RMSNorm, RoPE, softmax and SiLU run here. No KV cache: every new token runs the
whole sequence again. No fused modules, and no causal mask. Written by us from the schema, with the
cheaper choice where the schema leaves one: the LM head sees the last token only, and tensors are
copied only where msgpack does it.

Prints a list of `tsqp.lab.bench.results.Baseline` as JSON. `--tokens`: one forward pass over so
many tokens, `--repeats` times unless that takes longer than `--case-s`. `--new-tokens`: as many
tokens after the longest of those prompts; `--sampled` of these passes are run, evenly spaced in
length, and those between are interpolated, as each pass costs what its length costs. Sizes come
from Init, the vocabulary's from the LM head's reply.
"""

import math
import warnings
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack
import numpy as np
import torch
import zmq

from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ProtocolError,
    ServiceError,
)
from protocol.prepared import Traffic
from tsqp.lab.bench.results import Against, Baseline, Spread
from tsqp.lab.measure import elapsed_us, random_ids, rounds, script, write_results

_ONE_THREAD_ROWS = 16
_WIRE_DTYPE = "torch.float32"


class PublishedModel:
    """The trusted half of the forward pass, in float32, and its RPCs, one at a time.

    Shapes: B sequences, T tokens, D hidden, H heads, C head dim, V vocabulary.

    Raises EndpointError, DeadlineExceededError, ServiceError for an error reply, and ProtocolError
    for what is no reply.
    """

    def __init__(self, endpoint: str, *, timeout_s: float = 120.0) -> None:
        self.traffic = Traffic()
        self._endpoint, self._timeout_s = endpoint, timeout_s
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

        init = self.call("Init", {})
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
        self.vocab_size = self.tensor("LMHead", _field(hidden, "hidden_states", "shape")).shape[-1]

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
        self.traffic.round_trips += 1
        self.traffic.bytes_sent += len(sent)
        self.traffic.bytes_received += len(received)
        reply = msgpack.unpackb(received, raw=False)
        if reply.get("status") != "success":
            code = reply.get("error")
            raise ServiceError(
                method,
                code=ErrorCode(code) if code in ErrorCode.__members__ else ErrorCode.INTERNAL,
            )
        response: dict[str, Any] = reply["response"]
        return response

    def linear(self, layer: int, module: str, hidden: torch.Tensor) -> torch.Tensor:
        """Apply one module."""
        sent = _field(hidden, "hidden_states", "shape")
        return self.tensor("Linear", {"layer_idx": layer, "module_name": module, **sent})

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Multiply, in batches."""
        return self.tensor(
            "Matmul", _field(a, "a_buffer", "a_shape") | _field(b, "b_buffer", "b_shape")
        )

    def tensor(self, method: str, request: dict[str, Any]) -> torch.Tensor:
        """Send one request, and return the tensor of its response."""
        response = self.call(method, {**request, "dtype": _WIRE_DTYPE})
        ProtocolError.unless(
            response["dtype"] == _WIRE_DTYPE,
            method,
            str(response["dtype"])[:20],
            _WIRE_DTYPE,
            code=ErrorCode.MALFORMED_MESSAGE,
        )
        return _floats(response["output"], response["shape"])

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last token, float32 [B, 1, V]."""
        x_BTD = self.tensor("Embedding", _field(ids_BT, "input_ids", "input_shape"))
        angles_TC = torch.outer(torch.arange(ids_BT.shape[1]).float(), self._inv_freq).repeat(1, 2)
        cos_TC, sin_TC = (x * self._attention_scaling for x in (angles_TC.cos(), angles_TC.sin()))
        for layer in range(self._layers):
            h_BTD = self._norm(f"layer_{layer}_input_layernorm", x_BTD)
            x_BTD = x_BTD + self._attention(layer, h_BTD, cos_TC, sin_TC)
            h_BTD = self._norm(f"layer_{layer}_post_attention_layernorm", x_BTD)
            gate_BTF = self.linear(layer, "gate_proj", h_BTD)
            up_BTF = self.linear(layer, "up_proj", h_BTD)
            activated_BTF = torch.nn.functional.silu(gate_BTF) * up_BTF
            x_BTD = x_BTD + self.linear(layer, "down_proj", activated_BTF)
        h_B1D = self._norm("final_norm", x_BTD[:, -1:])
        return self.tensor("LMHead", _field(h_B1D, "hidden_states", "shape"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, eps = self._norms[name]
        variance = x.pow(2).mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(variance + eps))

    def _attention(
        self, layer: int, h_BTD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor
    ) -> torch.Tensor:
        heads = (*h_BTD.shape[:2], -1, self._head_dim)
        q_BHTC, k_BHTC, v_BHTC = (
            self.linear(layer, name, h_BTD).view(heads).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q_BHTC, k_BHTC = (x * cos_TC + _rotate_half(x) * sin_TC for x in (q_BHTC, k_BHTC))
        k_BHTC, v_BHTC = (x.repeat_interleave(self._groups, dim=1) for x in (k_BHTC, v_BHTC))
        scores_BHTT = self.matmul(q_BHTC, k_BHTC.transpose(2, 3))
        weights_BHTT = torch.softmax(scores_BHTT / math.sqrt(self._head_dim), dim=-1)
        mixed_BTHC = self.matmul(weights_BHTT, v_BHTC).transpose(1, 2)
        return self.linear(layer, "o_proj", mixed_BTHC.reshape(*h_BTD.shape[:2], -1))


def _field(tensor: torch.Tensor, name: str, shape: str) -> dict[str, Any]:
    """Name a tensor's bytes, of which msgpack copies a view into its message, and its shape."""
    return {name: tensor.contiguous().numpy().data.cast("B"), shape: list(tensor.shape)}


def _floats(data: bytes, shape: list[int]) -> torch.Tensor:
    """View received bytes, which nothing here writes to, as float32."""
    return torch.frombuffer(data, dtype=torch.float32).view(shape)


# torch gives a warning once in a process for a view of bytes: take it now.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(4), dtype=torch.float32)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


# -------------------------------------------------------------------------------- measurement


def measure_new_tokens(
    model: PublishedModel, tokens: int, new_tokens: int, sampled: int, against: Against
) -> Baseline:
    """Estimate the time per new token after a prompt, from some of the passes that they take.

    `step_ms`: mean of all of them, with the fastest and the slowest that were run. Of passes that
    are not run, the time lies between those of the next shorter and the next longer one.
    """
    before, lengths = replace(model.traffic), np.arange(tokens, tokens + new_tokens)
    # The first, the last, evenly between; of one the middle.
    count = min(sampled, new_tokens)
    places = np.linspace(0, new_tokens - 1, count) if count > 1 else [(new_tokens - 1) / 2]
    run = lengths[np.round(places).astype(int)]
    prompts = (random_ids(model.vocab_size, length, seed=length) for length in run.tolist())
    times_ms = [_timed_ms(model, ids) for ids in prompts]
    mean_ms = float(np.interp(lengths, run, times_ms).mean())
    step_ms = Spread.of(times_ms).model_copy(update={"median": mean_ms})
    about = (
        "every new token runs the whole sequence again (no KV cache); mean per token from"
        f" {len(run)} of {new_tokens} passes"
    )
    return _baseline(model, before, about, tokens, new_tokens, against, step_ms)


def _baseline(
    model: PublishedModel,
    before: Traffic,
    description: str,
    tokens: int,
    new_tokens: int,
    against: Against,
    step_ms: Spread,
) -> Baseline:
    """Put together a result; round trips and bytes are means of the passes since `before`."""
    now, passes = model.traffic, step_ms.runs
    return Baseline(
        name="published",
        description=description,
        phase="decode" if new_tokens else "prefill",
        tokens=tokens,
        new_tokens=new_tokens,
        dtype="float32",
        against=against,
        step_ms=step_ms,
        round_trips=(now.round_trips - before.round_trips) // passes,
        bytes_sent=(now.bytes_sent - before.bytes_sent) // passes,
        bytes_received=(now.bytes_received - before.bytes_received) // passes,
    )


def _timed_ms(model: PublishedModel, ids: torch.Tensor) -> float:
    # One for a few rows makes this client faster. For 128 tokens and more it does not: most of what
    # it computes is softmax.
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if ids.shape[1] <= _ONE_THREAD_ROWS else threads)
    try:
        return elapsed_us(partial(model.forward, ids)) / 1e3
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def measure_all(options: Any) -> list[Baseline]:
    """Measure what the command line asks for."""
    torch.set_num_threads(options.threads)
    with closing(PublishedModel(options.endpoint, timeout_s=options.timeout_s)) as model:
        model.forward(random_ids(model.vocab_size, 1, seed=1))  # warms up
        found = []
        about = "REQ socket, inline schema, one RPC per module, no fused modules"
        for tokens in options.tokens:
            before, ids = replace(model.traffic), random_ids(model.vocab_size, tokens, seed=tokens)
            step_ms = Spread.of(
                [_timed_ms(model, ids) for _ in rounds(options.repeats, options.case_s)]
            )
            found.append(_baseline(model, before, about, tokens, 0, options.against, step_ms))
        if options.new_tokens:
            found.append(
                measure_new_tokens(
                    model,
                    max(options.tokens),
                    options.new_tokens,
                    options.sampled,
                    options.against,
                )
            )
    return found


if __name__ == "__main__":
    write_results(
        *script(
            __doc__,
            measure_all,
            "endpoint",
            tokens=(1, 128, 512),
            new_tokens=0,
            sampled=2,
            repeats=5,
            case_s=10.0,
            threads=torch.get_num_threads(),
            against=("cpu", "null", "none"),
            timeout_s=120.0,
        )
    )
