"""Every way in which the malicious service lies.

A lie gets the right reply and returns what is sent instead: `WIRE_LIES` something else than a good
reply, or at another time, `RESULT_LIES` one whose numbers are wrong, `INIT_LIES` something wrong of
the model. Each says in which errors it may end: one that is met by any other was not understood.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack
import torch

from gpu_side.encoding import encode_reply
from protocol.encoding import REPLY
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ModelMismatchError,
    ProtocolError,
    ReplyError,
    ServiceError,
    TsqpError,
    VerificationError,
)
from protocol.messages import (
    InitReply,
    LinearRequest,
    Request,
    Response,
    RingLinearRequest,
    SeededRingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.tensors import from_torch, to_torch
from tests.kit.masks import wrapped

Frames: TypeAlias = list[bytes]
Fields: TypeAlias = dict[str, Any]

# More than the limit of any client in these tests.
OVERSIZED_BYTES = 8 * 2**20


@dataclass
class Memory:
    """What the service kept: earlier replies and results, newest last, and what it still owes.

    `owed`: sent before the reply to the next request; `held`: a request whose reply waits, to be
    swapped with that of the next one. `had`: how often a lie had what it tells of, by its name;
    without, it makes something up, or waits for it.
    """

    earlier: list[tuple[bytes, Frames]] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    owed: list[Frames] = field(default_factory=list)
    held: Occasion | None = None
    had: Counter[str] = field(default_factory=Counter)


# More than any session here makes.
_REQUESTS = 4096


@dataclass
class Occasion:
    """One request, and the right reply to it. `compute`: answers any other request."""

    client: bytes
    request: Request
    request_id: int
    response: Response
    compute: Callable[[Request], Response]
    memory: Memory
    chance: random.Random

    def encoded(self, result: Response | ErrorCode | None = None, **changes: Any) -> Frames:
        """Return the good reply, or one of another result, `request_id` or `method`."""
        about = {"request_id": self.request_id, "method": self.request.method, **changes}
        frames = encode_reply(
            "framed",
            about["request_id"],
            about["method"],
            self.response if result is None else result,
            Timing(queue_us=1, compute_us=2),
        )
        return [bytes(frame) for frame in frames]

    @property
    def output(self) -> torch.Tensor:
        assert isinstance(self.response, TensorReply)
        return to_torch(self.response.output).clone()

    def with_output(self, output: torch.Tensor) -> list[Frames]:
        return [self.encoded(TensorReply(output=from_torch(output.contiguous())))]

    def pick(self, *values: Any) -> Any:
        return self.chance.choice(values)

    def cut(self, frame: bytes) -> bytes:
        return frame[: self.chance.randrange(len(frame))]

    def flipped(self, frame: bytes) -> bytes:
        place, changed = self.chance.randrange(8 * len(frame)), bytearray(frame)
        changed[place // 8] ^= 1 << place % 8
        return bytes(changed)

    def flipped_header(self, header: bytes) -> bytes:
        """Flip a bit, but give it no earlier id: that is "replayed", which is silent."""
        changed = self.flipped(header)
        while (split := REPLY.split(changed)) and self.is_earlier(split[0][0]):
            changed = self.flipped(header)
        return changed

    def is_earlier(self, request_id: int) -> bool:
        """Say whether this may be an earlier request of the session; its first id is random."""
        return 0 < self.request_id - request_id < _REQUESTS


@dataclass(frozen=True)
class Lie:
    """`tell`: returns the messages that are sent instead of the right reply.

    `errors`: in which it may end where results are verified, if it is no deadline; () for none.
    `harmless`: by chance it may be a good reply with right numbers. `silent`: it sends nothing that
    can be a reply to the request, so that only its deadline ends it.
    """

    name: str
    tell: Callable[[Occasion], Sequence[Frames]] = field(repr=False)
    errors: tuple[type[TsqpError], ...] = field(default=(ProtocolError,), repr=False)
    silent: bool = False
    harmless: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def endings(self) -> tuple[type[TsqpError], ...]:
        return (*self.errors, DeadlineExceededError) if self.silent else self.errors


def _header(change: Callable[[Fields, Fields, Occasion], object]) -> Callable[[Occasion], Any]:
    """Send the good reply with a changed header. `change`: gets its fields, and the tensor's."""

    def tell(occasion: Occasion) -> list[Frames]:
        header, *rest = occasion.encoded()
        fields = msgpack.unpackb(header)
        change(fields, fields["response"]["output"], occasion)
        return [[msgpack.packb(fields), *rest]]

    return tell


def _frame(at: int, change: Callable[[Occasion, bytes], bytes]) -> Callable[[Occasion], Any]:
    """Send the good reply with a frame that is changed."""

    def tell(occasion: Occasion) -> list[Frames]:
        frames = occasion.encoded()
        frames[at] = change(occasion, frames[at])
        return [frames]

    return tell


def _replayed(o: Occasion) -> list[Frames]:
    own = [frames for client, frames in o.memory.earlier if client == o.client]
    o.memory.had["replayed"] += bool(own)
    return own[-1:]


def _of_others(o: Occasion, name: str, made_up: Frames) -> Frames:
    """Return another session's reply, of those that fit best the newest."""
    others = [frames for client, frames in o.memory.earlier if client != o.client]
    o.memory.had[name] += bool(others)
    size = len(o.encoded()[-1])
    return max(others[::-1] or [made_up], key=lambda frames: len(frames[-1]) == size)


def _cross_session(o: Occasion) -> list[Frames]:
    made_up = o.encoded(request_id=o.chance.randrange(1, 2**62))
    return [_of_others(o, "cross-session", made_up)]


def _adopted(o: Occasion) -> list[Frames]:
    header, *rest = _of_others(o, "cross-session, this id", o.with_output(-o.output)[0])
    return [[msgpack.packb(msgpack.unpackb(header) | {"request_id": o.request_id}), *rest]]


def _swapped(o: Occasion) -> list[Frames]:
    """Hold this reply, and answer both requests with each other's result when the next comes."""
    held, o.memory.held = o.memory.held, o
    if held is None:
        return []
    o.memory.held = None
    o.memory.had["reordered"] += 1
    return [o.encoded(held.response), held.encoded(o.response)]


def _late(o: Occasion) -> list[Frames]:
    o.memory.owed.append(o.encoded())
    return []


def _reshaped(o: Occasion) -> list[Frames]:
    output = o.output
    shapes = [
        output.reshape(-1),
        output.reshape(*output.shape, 1),
        output.reshape(output.shape[-1], -1).T.reshape(output.shape[-1], -1),
        output[..., :-1],
        torch.cat([output, output[..., :1]], dim=-1),
        torch.cat([output, output]),
        output.reshape(1, *output.shape),
        output[:1, :1],
    ]
    return o.with_output(o.pick(*(shaped for shaped in shapes if shaped.shape != output.shape)))


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def _not_numbers(o: Occasion) -> list[Frames]:
    output, value = o.output, o.pick(float("nan"), float("inf"), float("-inf"))
    if output.is_floating_point() and o.pick(True, False):
        output.view(-1)[o.chance.randrange(output.numel())] = value
        return o.with_output(output)
    # Integers have none: floats of the same width, as floats and as the integers of their bits.
    full = torch.full(output.shape, value, dtype=torch.float32)
    if output.dtype == torch.int32 and o.pick(True, False):
        return o.with_output(full.view(torch.int32))
    return o.with_output(full if output.dtype == torch.int32 else full.to(output.dtype))


def _wrong_method(o: Occasion) -> list[Frames]:
    names = {"Linear", "RingLinear", "Matmul", "LMHead", "Embedding", "Shutdown", ""}
    return [o.encoded(method=o.pick(*sorted(names - {o.request.method})))]


def _wrong_id(o: Occasion) -> list[Frames]:
    near = [o.request_id + 1, o.request_id ^ (1 << o.chance.randrange(62))]
    wrong = [0, *near, o.chance.randrange(1, 2**63)]
    return [o.encoded(request_id=o.pick(*(one for one in wrong if not o.is_earlier(one))))]


def _missing_field(fields: Fields, tensor: Fields, o: Occasion) -> None:
    # Timing may be left out.
    where, keys = o.pick((fields, fields.keys() - {"timing"}), (tensor, tensor.keys()))
    del where[o.pick(*sorted(keys))]


def _unknown_error(fields: Fields, _: Fields, o: Occasion) -> None:
    del fields["response"]
    fields |= {"status": "error", "error": o.pick("OUT_OF_MEMORY", "", 7, None, "x" * 10_000)}


_SHAPES = ([2**31 - 1] * 4, [2**62], [-1, 4], [0], [1] * 40, [2**63 - 1, 2], "all", None)
# Little on the wire, much in memory.
_BOMBS = (
    b"\x91" * 1_000_000,
    b"\xdd\x00\x0f\xff\xff" + b"\x90" * 0xFFFFF,
    b"\xdf\xff\xff\xff\xff",
    b"\x81\xa1a" * 300_000,
    b"\xc9\x7f\xff\xff\xff\x00",
)
_FINAL = tuple(code for code in ErrorCode if not code.retryable)
_WRONG, _FORM = (VerificationError,), (ReplyError,)
# What is wrong of it depends on chance, or on which session asks.
_EITHER = (ReplyError, VerificationError)
# A wrong id may be that of another request under way, which leaves its own without a reply.
_ID = (ProtocolError, DeadlineExceededError)

REORDERED = Lie("reordered", _swapped, _EITHER, silent=True, harmless=True)

WIRE_LIES = (
    Lie("truncated header", _frame(0, Occasion.cut)),
    Lie("truncated tensor", _frame(-1, Occasion.cut)),
    Lie(
        "bit flipped in the header",
        _frame(0, Occasion.flipped_header),
        (*_ID, ReplyError),
        harmless=True,
    ),
    Lie("bit flipped in the tensor", _frame(-1, Occasion.flipped), _WRONG),
    Lie("replayed", _replayed, (), silent=True),
    Lie("cross-session", _cross_session),
    Lie("cross-session, this id", _adopted, _EITHER),
    REORDERED,
    Lie("late", _late, (), silent=True),
    Lie("duplicate", lambda o: [o.encoded(), o.encoded()], ()),
    # In shared memory the second, which goes over the socket, may be seen first.
    Lie(
        "right, then wrong",
        lambda o: [o.encoded(), *o.with_output(torch.zeros_like(o.output))],
        _WRONG,
        harmless=True,
    ),
    Lie("wrong shape", _reshaped, _FORM),
    Lie(
        "wrong dtype",
        lambda o: o.with_output(o.output.to(o.pick(*(d for d in _DTYPES if d != o.output.dtype)))),
        _FORM,
    ),
    Lie(
        "wrong dtype, same bytes",
        _header(lambda _, t, o: t.update(dtype={"float32": "int32"}.get(t["dtype"], "float32"))),
        _FORM,
    ),
    Lie("NaN or Inf", _not_numbers, _EITHER),
    # ZeroMQ closes the connection; a stream and shared memory say why.
    Lie(
        "oversized",
        # Behind nothing, the header, or the whole reply.
        lambda o: [[*o.encoded()[: o.pick(0, 1, None)], bytes(OVERSIZED_BYTES)]],
        (EndpointError, ProtocolError),
    ),
    Lie("huge claims", _header(lambda _, t, o: t.update(shape=o.pick(*_SHAPES)))),
    Lie("wrong id", _wrong_id, _ID),
    Lie(
        "id of the request before",
        lambda o: [o.encoded(request_id=max(1, o.request_id - 1))],
        (),
        silent=True,
    ),
    Lie("wrong method", _wrong_method, _FORM),
    Lie(
        "extra frames",
        lambda o: [[*o.encoded(), *o.pick([b""], [b"more"], o.encoded()[-1:], [b""] * 10_000)]],
    ),
    Lie("missing frames", lambda o: [o.encoded()[:-1]]),
    Lie(
        "wrong frame index",
        _header(lambda _, t, o: t.update(frame=o.pick(0, 2, -1, 2**40, "1", None, True))),
    ),
    Lie(
        "garbage",
        lambda o: [[o.chance.randbytes(o.pick(0, 1, 16, 300)) for _ in range(o.pick(1, 2, 3, 8))]],
    ),
    Lie("deep or large containers", _frame(0, lambda o, _: o.pick(*_BOMBS))),
    Lie("unknown field", _header(lambda f, t, o: o.pick(f, f["response"], t).update(trusted=True))),
    Lie("missing field", _header(_missing_field)),
    Lie(
        "other version",
        _header(lambda f, _, o: f.update(version=o.pick(0, 2, -1, "1", 1.0, True, None))),
    ),
    Lie("error", lambda o: [o.encoded(o.pick(*_FINAL))], (ServiceError,)),
    Lie("unknown error", _header(_unknown_error)),
    Lie(
        "error and result",
        _header(lambda f, _, o: f.update(status=o.pick("success", "error"), error="INTERNAL")),
    ),
    Lie(
        "wild timing",
        _header(lambda f, _, o: f["timing"].update(queue_us=o.pick(-1, 2**63, float("nan"), "1"))),
    ),
)


# Returns a wrong result from the right one; the chance, and the occasion where there is one.
Wrong: TypeAlias = Callable[[torch.Tensor, random.Random], torch.Tensor]


def one_element(right: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Change one number: of integers by one bit, of floats by a part of the largest."""
    wrong = right.clone()
    flat = wrong.view(-1)
    place = chance.randrange(flat.numel())
    if wrong.is_floating_point():
        flat[place] += right.abs().max() * chance.choice([-1, 1]) * chance.uniform(0.05, 1) + 1e-3
    else:
        flat[place] ^= 1 << chance.randrange(31)
    return wrong


def low_rank(right: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Add an outer product, as a changed weight would."""
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    rows = right.reshape(-1, right.shape[-1])
    if right.is_floating_point():
        column = torch.randn(rows.shape[0], 1, generator=generator)
        row = torch.randn(1, rows.shape[1], generator=generator)
        error = column @ row * right.abs().max() * 0.1 + 1e-3
        return (rows + error).to(right.dtype).reshape(right.shape)
    column = torch.randint(1, 4, (rows.shape[0], 1), generator=generator)
    row = torch.randint(-3, 4, (1, rows.shape[1]), generator=generator)
    row[0, 0] = 1
    return wrapped(rows.to(torch.int64) + column * row).reshape(right.shape)


def scaled(right: torch.Tensor, chance: random.Random) -> torch.Tensor:
    if right.is_floating_point():
        return (right.double() * 1.001).to(right.dtype)
    return wrapped((right.double() * 1.001).round().to(torch.int64))


def surely_wrong(wrong: torch.Tensor, right: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Return what differs: a lie that happens to be true is none."""
    return one_element(right, chance) if torch.equal(wrong, right) else wrong


WRONG: dict[str, Wrong] = {
    "one element": one_element,
    "low-rank error": low_rank,
    "sign": lambda right, _: -right,
    "x(1 + 1e-3)": scaled,
    # At once, without computing anything.
    "zeros": lambda right, _: torch.zeros_like(right),
}


def _result(wrong: Callable[[Occasion], torch.Tensor]) -> Callable[[Occasion], list[Frames]]:
    return lambda o: o.with_output(surely_wrong(wrong(o), o.output, o.chance))


def _other_layer(o: Occasion) -> torch.Tensor:
    request = o.request
    if not isinstance(request, LinearRequest | RingLinearRequest | SeededRingLinearRequest):
        return o.output
    layer = request.layer_idx - 1 if request.layer_idx else 1
    reply = o.compute(request.model_copy(update={"layer_idx": layer}))
    assert isinstance(reply, TensorReply)
    o.memory.had["swapped layer"] += 1
    return to_torch(reply.output)


def _stale(o: Occasion) -> torch.Tensor:
    right = o.output
    same = [r for r in o.memory.results if (r.shape, r.dtype) == (right.shape, right.dtype)]
    o.memory.had["stale reply"] += bool(same)
    return same[-1] if same else torch.zeros_like(right)


RESULT_LIES = (
    *(
        Lie(name, _result(lambda o, wrong=wrong: wrong(o.output, o.chance)), _WRONG)  # type: ignore[misc]
        for name, wrong in WRONG.items()
    ),
    Lie("swapped layer", _result(_other_layer), _WRONG),
    Lie("stale reply", _result(_stale), _WRONG),
)
# Lies that tell of something that has to be there: `Memory.had` says how often it was.
CROSS_SESSION = tuple(lie for lie in WIRE_LIES if lie.name.startswith("cross-session"))
NEEDY = (*(lie for lie in WIRE_LIES if lie.name == "replayed"), *CROSS_SESSION, REORDERED)
NEEDY += RESULT_LIES[-2:]


# Returns fields of an Init reply that are another model's, or nonsense.
Change: TypeAlias = Callable[[InitReply, Occasion], dict[str, object]]


def _init(change: Change) -> Callable[[Occasion], list[Frames]]:
    def tell(o: Occasion) -> list[Frames]:
        assert isinstance(o.response, InitReply)
        # Not validated: a liar's own library lets everything through.
        return [o.encoded(o.response.model_copy(update=change(o.response, o)))]

    return tell


def _wrong_size(reply: InitReply, o: Occasion) -> dict[str, object]:
    name = o.pick(*sorted(type(reply.config).model_fields))
    value = o.pick(getattr(reply.config, name) + 1, 0, -1, 2**40, "5")
    return {"config": reply.config.model_copy(update={name: value})}


def _one_of(name: str, *values: object) -> Change:
    """Choose a value of a field. `...`: a digest of something else."""

    def change(_: InitReply, o: Occasion) -> dict[str, object]:
        value = o.pick(*values)
        return {name: o.chance.randbytes(32).hex() if value is ... else value}

    return change


# Told in a good message; or by chance in one that breaks the schema. The others always break it.
_OTHER, _SCHEMA = (ModelMismatchError,), (ProtocolError,)
_INIT: dict[str, tuple[Change, tuple[type[TsqpError], ...]]] = {
    "wrong size": (_wrong_size, _OTHER + _SCHEMA),
    "other model": (_one_of("model_digest", ..., "", "0" * 63, 7), _OTHER + _SCHEMA),
    "other weights": (_one_of("linear_digest", ..., "", "0" * 63, 7), _OTHER + _SCHEMA),
    "provisioned": (_one_of("provision_id", ...), _OTHER),
    "no integers": (_one_of("arithmetic", ("float",), (), ("x",)), _OTHER + _SCHEMA),
    "message limit": (_one_of("max_message_bytes", 0, -1, 2**50), _SCHEMA),
    "instance id": (_one_of("instance_id", "", "x" * 32, 5), _SCHEMA),
    "layers": (_one_of("layers", (0, 0), (3, 2), (-1, 4), (0,), None), _OTHER + _SCHEMA),
}
_TENSOR = TensorReply(output=from_torch(torch.ones(4)))
INIT_LIES = (
    *(Lie(f"Init: {name}", _init(change), errors) for name, (change, errors) in _INIT.items()),
    Lie("Init: a tensor", lambda o: [o.encoded(_TENSOR)]),
)
