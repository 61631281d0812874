"""Properties of the wire: what is sent is what is read, and noise is a ProtocolError at most."""

import tracemalloc
from collections.abc import Callable
from itertools import product, repeat
from typing import Any, get_args

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_side.encoding import encode_reply
from protocol.encoding import MAX_REPLY_HEADER_BYTES, Reply, decode_reply, encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    MAX_TIMEOUT_MS,
    REQUEST_TYPES,
    EmbeddingRequest,
    HealthReply,
    HealthRequest,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    Response,
    RingLinearRequest,
    RingLMHeadRequest,
    SeededRingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.tensors import ITEMSIZE, Buffer, WireTensor, from_torch
from tests.kit.mutate import Mutator, parts
from tests.kit.rows import each_row
from tests.kit.wire import KnowingReader, as_received, inline, outcome_of, read_in_full

BOMB_BYTES = 3 * 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024

common = settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
noisy = settings(common, max_examples=100)

floats = st.sampled_from(["float32", "float16", "bfloat16"])
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
ids = st.integers(1, 2**63 - 1)


@st.composite
def tensors(draw: st.DrawFn, dtypes: st.SearchStrategy[str] = floats) -> WireTensor:
    dtype, shape = draw(dtypes), draw(shapes)
    size = torch.Size(shape).numel() * ITEMSIZE[dtype]
    return WireTensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


layers = st.integers(0, 4095)
modules = st.lists(st.sampled_from(get_args(ModuleName)), min_size=1, max_size=3).map(tuple)
requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(InitRequest),
    st.builds(HealthRequest),
    st.builds(EmbeddingRequest, input_ids=tensors(st.just("int64")), dtype=floats),
    st.builds(
        LinearRequest,
        layer_idx=layers,
        module_names=modules,
        hidden_states=tensors(),
        bias=st.booleans(),
    ),
    st.builds(
        RingLinearRequest,
        layer_idx=layers,
        module_names=modules,
        elements=tensors(st.just("int32")),
    ),
    st.builds(
        SeededRingLinearRequest,
        layer_idx=layers,
        module_names=modules,
        rows=st.integers(1, 2**14),
        columns=st.integers(1, 2**15),
        seed=st.binary(min_size=32, max_size=32).map(lambda data: WireTensor("int32", (8,), data)),
    ),
    st.builds(MatmulRequest, a=tensors(), b=tensors()),
    st.builds(LMHeadRequest, hidden_states=tensors()),
    st.builds(RingLMHeadRequest, elements=tensors(st.just("int32"))),
)
health_replies = st.builds(
    HealthReply,
    status=st.sampled_from(["ready", "draining"]),
    uptime_s=st.floats(0, allow_nan=False, allow_infinity=False),
    queued_requests=st.integers(0, 2**31 - 1),
    queued_bytes=st.integers(0, 2**53),
)
results: st.SearchStrategy[tuple[str, Response | ErrorCode]] = st.one_of(
    st.tuples(st.just("Health"), health_replies),
    st.tuples(
        st.sampled_from(sorted(REQUEST_TYPES.keys() - {"Init", "Health"})),
        st.builds(TensorReply, output=tensors(floats | st.just("int32"))),
    ),
    st.tuples(st.text(max_size=10), st.sampled_from(ErrorCode)),
)
timings = st.none() | st.builds(
    Timing, queue_us=st.integers(0, 2**53), compute_us=st.integers(0, 2**53)
)


@common
@given(
    message=requests,
    request_id=ids,
    timeout_ms=st.integers(1, MAX_TIMEOUT_MS),
    prefix=st.sampled_from(["", "torch."]),
)
def test_a_request_is_read_as_it_was_written(
    message: Request, request_id: int, timeout_ms: int, prefix: str
) -> None:
    found = read_in_full(encode_request(message, request_id, timeout_ms))
    assert found == ("framed", request_id, timeout_ms, message.method, message)
    if isinstance(message, MatmulRequest) and message.a.dtype != message.b.dtype:
        return  # inline, one dtype field stands for both
    assert read_in_full([_inline(message, prefix)])[-1] == message


@common
@given(result=results, request_id=ids, timing=timings)
def test_a_reply_is_read_as_it_was_written(
    result: tuple[str, Response | ErrorCode], request_id: int, timing: Timing | None
) -> None:
    method, value = result
    reply = decode_reply(as_received(encode_reply("framed", request_id, method, value, timing)))
    failed = isinstance(value, ErrorCode)
    expected = (None, value) if failed else (value, None)
    assert reply == Reply(request_id, method, *expected, timing)
    found = msgpack.unpackb(*encode_reply("inline", 0, method, value))
    if isinstance(value, ErrorCode):
        assert found == {"status": "error", "error": value.value}
    elif isinstance(value, TensorReply):
        assert found["response"] == {
            "output": value.output.data,
            "shape": list(value.output.shape),
            "dtype": f"torch.{value.output.dtype}",
        }


def _inline(message: Request, prefix: str) -> bytes:
    """Lay a request out by hand, as wire.md has it."""
    body: dict[str, Any] = {}
    for name in type(message).model_fields:
        value = getattr(message, name)
        if name == "module_names":
            body |= {"module_name": value[0]} if len(value) == 1 else {"module_names": list(value)}
        elif isinstance(value, WireTensor):
            shape = {"input_ids": "input_shape", "seed": "seed_shape"}.get(name, "shape")
            shape = f"{name}_shape" if isinstance(message, MatmulRequest) else shape
            buffer = f"{name}_buffer" if isinstance(message, MatmulRequest) else name
            body |= {buffer: value.data, shape: list(value.shape)}
            if value.dtype not in ("int32", "int64"):
                body["dtype"] = prefix + value.dtype
        elif name == "dtype":
            body[name] = prefix + value
        elif (name, value) != ("bias", True):  # true where it is left out
            body[name] = value
    return inline(message.method, body)


BOMBS = {
    "empty lists in a list": b"\xdd" + BOMB_BYTES.to_bytes(4, "big") + b"\x90" * BOMB_BYTES,
    "empty lists in a map": b"\xdf"
    + (BOMB_BYTES // 3).to_bytes(4, "big")
    + b"\xa1a\x90" * (BOMB_BYTES // 3),
    "short lists": b"\x81\xa1a" + (b"\xdc\0\x40" + b"\x90" * 64) * (BOMB_BYTES // 67),
    "deep lists": b"\x91" * 100_000,
    "deep maps": b"\x81\xa1a" * 100_000,
    "deep wide lists": b"\xdc\0\x40" * 100_000,
    "deep wide maps": b"\xde\x20\0\xa1a" * 100_000,
    "declared list": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "declared map": b"\xdf\xff\xff\xff\xff",
    "declared string": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "declared bytes": b"\x81\xa1a\xc6\xff\xff\xff\xff",
    "declared extension": b"\x81\xa1a\xc9\xff\xff\xff\xff\x05",
    "wide maps": b"\xde\0\x40"
    + b"".join(
        b"\xa2%02d" % n + b"\xde\x20\0" + b"".join(b"\xa4%04x\xcd\x10\0" % k for k in range(8192))
        for n in range(64)
    ),
}


def _peak_bytes(decode: Callable[[list[Buffer]], object], data: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode([data])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@each_row("name", list(BOMBS))
def test_bomb_is_refused_in_little_memory(name: str) -> None:
    assert _peak_bytes(read_in_full, BOMBS[name]) < MEMORY_BYTES
    reply = BOMBS[name][:MAX_REPLY_HEADER_BYTES]
    assert _peak_bytes(decode_reply, reply) < MEMORY_BYTES


# Around every bound that a number of a header has.
BORDERS = (0, 1, 2, MAX_TIMEOUT_MS, MAX_TIMEOUT_MS + 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)


def _judge(reader: KnowingReader, frames: list[Buffer]) -> None:
    """Read a message as a request, known or not, and as a reply: it is valid or refused."""
    in_full = outcome_of(read_in_full, frames)
    for told in (in_full, outcome_of(lambda given: decode_reply(as_received(given)), frames)):
        assert isinstance(told[0], tuple) or len(str(told[1])) < 8192
    # Twice: the first may be what is remembered.
    assert outcome_of(reader.read_known, frames) == in_full
    assert outcome_of(reader.read_known, frames) == in_full


def test_numbers_of_a_header_at_their_bounds_are_valid_or_refused_known_or_not() -> None:
    reader = KnowingReader()
    message = LMHeadRequest(hidden_states=from_torch(torch.ones(1, 4)))
    for pair in ((1, 1), *zip(BORDERS, repeat(1)), *zip(repeat(1), BORDERS)):
        _judge(reader, encode_request(message, *pair))
    assert len(reader.known) == 1


@noisy
@given(
    message=requests,
    result=results,
    prefix=st.sampled_from(["", "torch."]),
    noise=st.lists(st.binary(max_size=200), max_size=6),
    mutator=st.builds(Mutator, st.integers(0, 2**32 - 1)),
)
def test_noise_damage_and_what_is_tampered_with_is_valid_or_refused_known_or_not(
    message: Request,
    result: tuple[str, Response | ErrorCode],
    prefix: str,
    noise: list[Buffer],
    mutator: Mutator,
) -> None:
    request, reply = encode_request(message, 1, 1000), encode_reply("framed", 1, *result)
    good = [tuple(map(bytes, one)) for one in (request, reply, [_inline(message, prefix)])]
    header, *frames = request
    # The first is what is remembered; behind it its header with other frames.
    wrong = [request, noise, [header, *mutator.sample(frames, len(frames))], request[:-1]]
    wrong += [[*request, b""], [header, *(bytes(frame) + b"x" for frame in frames)]]
    for case, other in product(good, good):
        wrong += [parts(mutator, case, other), [mutator.structured(case[0]), *case[1:]]]
    reader = KnowingReader()
    for one in wrong:
        _judge(reader, one)
