"""Every way in which the malicious service lies.

A lie gets the right reply and returns what is sent instead. `WIRE_LIES` break the form of a reply,
or send it at the wrong time or to the wrong request; `RESULT_LIES` send a good reply whose numbers
are wrong; `INIT_LIES` say something wrong of the model. `silent` ones send nothing that can be a
reply to the request, so that only its deadline ends it. Each says in which errors it may end: a lie
that is met by any other was not understood.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgpack
import torch

from gpu_side.encoding import Form, encode_reply
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
    NormWeight,
    Request,
    Response,
    RingLinearRequest,
    SeededRingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.tensors import WireTensor, from_torch, to_torch

Frames: TypeAlias = list[bytes]

# More than the limit of any client in these tests.
OVERSIZED_BYTES = 8 * 2**20
_TIMING = Timing(queue_us=1, compute_us=2)


@dataclass
class Memory:
    """What the service kept: earlier replies, newest last, and those that it still owes.

    `bystander`: the client of a session that is there at the same time; None: any other client of
    before is one. `had`: how often a lie had what it tells of, by the lie's name; without, it makes
    something up, or waits for it.
    """

    earlier: list[tuple[bytes, Frames]] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    # Sent before the reply to the next request.
    owed: list[Frames] = field(default_factory=list)
    # A request whose reply waits, to be swapped with that of the next one.
    held: Occasion | None = None
    bystander: bytes | None = None
    had: Counter[str] = field(default_factory=Counter)


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

    def encoded(
        self,
        *,
        request_id: int | None = None,
        method: str | None = None,
        result: Response | ErrorCode | None = None,
    ) -> Frames:
        """Return the good reply, or one that says something else."""
        frames = encode_reply(
            Form.FRAMED,
            self.request_id if request_id is None else request_id,
            self.request.method if method is None else method,
            self.response if result is None else result,
            _TIMING,
        )
        return [bytes(frame) for frame in frames]

    def with_header(self, change: Callable[[dict[str, Any]], object]) -> list[Frames]:
        """Return the good reply with a changed header."""
        header, *rest = self.encoded()
        fields = msgpack.unpackb(header)
        change(fields)
        return [[msgpack.packb(fields), *rest]]

    @property
    def output(self) -> torch.Tensor:
        """A copy of the right result."""
        assert isinstance(self.response, TensorReply)
        return to_torch(self.response.output).clone()

    def with_output(self, output: torch.Tensor) -> list[Frames]:
        """Return a good reply with another tensor."""
        return [self.encoded(result=TensorReply(output=from_torch(output.contiguous())))]


@dataclass(frozen=True)
class Lie:
    """`tell`: returns the messages that are sent instead of the right reply.

    `errors`: in which it may end where results are verified, if it is no deadline; () for none.
    """

    name: str
    tell: Callable[[Occasion], Sequence[Frames]] = field(repr=False)
    silent: bool = False
    errors: tuple[type[TsqpError], ...] = field(default=(ProtocolError,), repr=False)

    def __str__(self) -> str:
        return self.name

    @property
    def endings(self) -> tuple[type[TsqpError], ...]:
        """Every error in which it may end."""
        return (*self.errors, DeadlineExceededError) if self.silent else self.errors


# -------------------------------------------------------------------------------- the form


def _truncated_header(occasion: Occasion) -> list[Frames]:
    header, *rest = occasion.encoded()
    return [[header[: occasion.chance.randrange(len(header))], *rest]]


def _truncated_tensor(occasion: Occasion) -> list[Frames]:
    *rest, last = occasion.encoded()
    return [[*rest, last[: occasion.chance.randrange(len(last))]]]


def _flipped(frame: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(8 * len(frame))
    changed = bytearray(frame)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def _flipped_header(occasion: Occasion) -> list[Frames]:
    header, *rest = occasion.encoded()
    return [[_flipped(header, occasion.chance), *rest]]


def _flipped_tensor(occasion: Occasion) -> list[Frames]:
    *rest, last = occasion.encoded()
    return [[*rest, _flipped(last, occasion.chance)]]


def _replayed(occasion: Occasion) -> list[Frames]:
    own = [frames for client, frames in occasion.memory.earlier if client == occasion.client]
    occasion.memory.had["replayed"] += bool(own)
    return own[-1:]


def _of_others(occasion: Occasion, name: str) -> list[Frames]:
    """Return another session's replies; those that fit best come last."""
    memory = occasion.memory
    others = [
        frames
        for client, frames in memory.earlier
        if client != occasion.client and memory.bystander in (None, client)
    ]
    memory.had[name] += bool(others)
    size = len(occasion.encoded()[-1])
    return sorted(others, key=lambda frames: len(frames[-1]) == size)


def _cross_session(occasion: Occasion) -> list[Frames]:
    made_up = occasion.encoded(request_id=occasion.chance.randrange(1, 2**62))
    return (_of_others(occasion, "cross-session") or [made_up])[-1:]


def _adopted(occasion: Occasion) -> list[Frames]:
    """Another session's reply under this request's id."""
    made_up = occasion.with_output(-occasion.output)
    header, *rest = (_of_others(occasion, "cross-session, this id") or made_up)[-1]
    fields = msgpack.unpackb(header)
    fields["request_id"] = occasion.request_id
    return [[msgpack.packb(fields), *rest]]


def _swapped(occasion: Occasion) -> list[Frames]:
    """Hold this reply, and answer both requests with each other's result when the next comes."""
    held, occasion.memory.held = occasion.memory.held, occasion
    if held is None:
        return []
    occasion.memory.held = None
    occasion.memory.had["reordered"] += 1
    return [
        occasion.encoded(result=held.response),
        held.encoded(result=occasion.response),
    ]


def _late(occasion: Occasion) -> list[Frames]:
    occasion.memory.owed.append(occasion.encoded())
    return []


def _duplicate(occasion: Occasion) -> list[Frames]:
    return [occasion.encoded(), occasion.encoded()]


def _second_thoughts(occasion: Occasion) -> list[Frames]:
    return [occasion.encoded(), *occasion.with_output(torch.zeros_like(occasion.output))]


def _reshaped(occasion: Occasion) -> list[Frames]:
    output = occasion.output
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
    others = [shaped for shaped in shapes if shaped.shape != output.shape]
    return occasion.with_output(occasion.chance.choice(others))


def _retyped(occasion: Occasion) -> list[Frames]:
    output = occasion.output
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]
    dtype = occasion.chance.choice([dtype for dtype in dtypes if dtype != output.dtype])
    return occasion.with_output(output.to(dtype))


def _same_bytes_retyped(occasion: Occasion) -> list[Frames]:
    """Say another dtype of as many bytes."""

    def change(fields: dict[str, Any]) -> None:
        tensor = fields["response"]["output"]
        tensor["dtype"] = "int32" if tensor["dtype"] == "float32" else "float32"

    return occasion.with_header(change)


def _not_numbers(occasion: Occasion) -> list[Frames]:
    output = occasion.output
    value = occasion.chance.choice([float("nan"), float("inf"), float("-inf")])
    if output.is_floating_point() and occasion.chance.random() < 0.5:
        output.view(-1)[occasion.chance.randrange(output.numel())] = value
        return occasion.with_output(output)
    # Integers have none: floats of the same width, as floats and as the integers of their bits.
    full = torch.full(output.shape, value, dtype=torch.float32)
    if output.dtype == torch.int32 and occasion.chance.random() < 0.5:
        return occasion.with_output(full.view(torch.int32))
    return occasion.with_output(full if output.dtype == torch.int32 else full.to(output.dtype))


def _oversized(occasion: Occasion) -> list[Frames]:
    header, *rest = occasion.encoded()
    filler = bytes(OVERSIZED_BYTES)
    return [occasion.chance.choice([[header, filler], [filler], [header, *rest, filler]])]


def _huge_claims(occasion: Occasion) -> list[Frames]:
    sizes = [[2**31 - 1] * 4, [2**62], [-1, 4], [0], [1] * 40, [2**63 - 1, 2], "all", None]
    shape = occasion.chance.choice(sizes)
    return occasion.with_header(lambda f: f["response"]["output"].update(shape=shape))


def _wrong_id(occasion: Occasion) -> list[Frames]:
    chance = occasion.chance
    ids = [0, occasion.request_id + 1, occasion.request_id ^ (1 << chance.randrange(62))]
    return [occasion.encoded(request_id=chance.choice([*ids, chance.randrange(1, 2**63)]))]


def _id_of_before(occasion: Occasion) -> list[Frames]:
    return [occasion.encoded(request_id=max(1, occasion.request_id - 1))]


def _wrong_method(occasion: Occasion) -> list[Frames]:
    methods = ["Linear", "RingLinear", "Matmul", "LMHead", "Embedding", "Shutdown", ""]
    others = [method for method in methods if method != occasion.request.method]
    return [occasion.encoded(method=occasion.chance.choice(others))]


def _extra_frames(occasion: Occasion) -> list[Frames]:
    frames = occasion.encoded()
    more = occasion.chance.choice([[b""], [b"more"], [frames[-1]], [b""] * 10_000])
    return [[*frames, *more]]


def _missing_frames(occasion: Occasion) -> list[Frames]:
    return [occasion.encoded()[:-1]]


def _wrong_frame(occasion: Occasion) -> list[Frames]:
    frame = occasion.chance.choice([0, 2, -1, 2**40, "1", None, True])
    return occasion.with_header(lambda f: f["response"]["output"].update(frame=frame))


def _garbage(occasion: Occasion) -> list[Frames]:
    chance = occasion.chance
    count = chance.choice([1, 2, 3, 8])
    return [[chance.randbytes(chance.choice([0, 1, 16, 300])) for _ in range(count)]]


def _deep(occasion: Occasion) -> list[Frames]:
    """Little on the wire, much in memory."""
    bombs = [
        b"\x91" * 1_000_000,
        b"\xdd\x00\x0f\xff\xff" + b"\x90" * 0xFFFFF,
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a" * 300_000,
        b"\xc9\x7f\xff\xff\xff\x00",
    ]
    return [[occasion.chance.choice(bombs), *occasion.encoded()[1:]]]


def _unknown_field(occasion: Occasion) -> list[Frames]:
    def change(fields: dict[str, Any]) -> None:
        where = occasion.chance.choice([fields, fields["response"], fields["response"]["output"]])
        where["trusted"] = True

    return occasion.with_header(change)


def _missing_field(occasion: Occasion) -> list[Frames]:
    def change(fields: dict[str, Any]) -> None:
        tensor = fields["response"]["output"]
        # Timing may be left out.
        keys = [key for key in fields if key != "timing"]
        where = occasion.chance.choice([(fields, keys), (tensor, list(tensor))])
        del where[0][occasion.chance.choice(where[1])]

    return occasion.with_header(change)


def _other_version(occasion: Occasion) -> list[Frames]:
    version = occasion.chance.choice([0, 2, -1, "1", 1.0, True, None])
    return occasion.with_header(lambda fields: fields.update(version=version))


def _error(occasion: Occasion) -> list[Frames]:
    code = occasion.chance.choice([code for code in ErrorCode if not code.retryable])
    return [occasion.encoded(result=code)]


def _unknown_error(occasion: Occasion) -> list[Frames]:
    def change(fields: dict[str, Any]) -> None:
        del fields["response"]
        code = occasion.chance.choice(["OUT_OF_MEMORY", "", 7, None, "x" * 10_000])
        fields.update(status="error", error=code)

    return occasion.with_header(change)


def _error_and_result(occasion: Occasion) -> list[Frames]:
    status = occasion.chance.choice(["success", "error"])
    return occasion.with_header(lambda f: f.update(status=status, error="INTERNAL"))


def _wild_timing(occasion: Occasion) -> list[Frames]:
    value = occasion.chance.choice([-1, 2**63, float("nan"), "1", None])
    return occasion.with_header(lambda f: f["timing"].update(queue_us=value))


_WRONG_RESULT = (VerificationError,)
_WRONG_FORM = (ReplyError,)
# What is wrong of it depends on chance, or on who asks.
_WRONG_FORM_OR_RESULT = (ReplyError, VerificationError)
# One wrong bit of an id may make it that of an earlier request, which nobody waits for any more.
_ANOTHER_ID = (ProtocolError, DeadlineExceededError)

REORDERED = Lie("reordered", _swapped, silent=True, errors=_WRONG_FORM_OR_RESULT)

WIRE_LIES = (
    Lie("truncated header", _truncated_header),
    Lie("truncated tensor", _truncated_tensor),
    Lie("bit flipped in the header", _flipped_header, errors=(*_ANOTHER_ID, ReplyError)),
    Lie("bit flipped in the tensor", _flipped_tensor, errors=_WRONG_RESULT),
    Lie("replayed", _replayed, silent=True, errors=()),
    Lie("cross-session", _cross_session),
    Lie("cross-session, this id", _adopted, errors=_WRONG_FORM_OR_RESULT),
    REORDERED,
    Lie("late", _late, silent=True, errors=()),
    Lie("duplicate", _duplicate, errors=()),
    # In shared memory the second, which goes over the socket, may be seen first.
    Lie("right, then wrong", _second_thoughts, errors=_WRONG_RESULT),
    Lie("wrong shape", _reshaped, errors=_WRONG_FORM),
    Lie("wrong dtype", _retyped, errors=_WRONG_FORM),
    Lie("wrong dtype, same bytes", _same_bytes_retyped, errors=_WRONG_FORM),
    Lie("NaN or Inf", _not_numbers, errors=_WRONG_FORM_OR_RESULT),
    # ZeroMQ closes the connection; a stream and shared memory say why.
    Lie("oversized", _oversized, errors=(EndpointError, ProtocolError)),
    Lie("huge claims", _huge_claims),
    Lie("wrong id", _wrong_id, errors=_ANOTHER_ID),
    Lie("id of the request before", _id_of_before, silent=True, errors=()),
    Lie("wrong method", _wrong_method, errors=_WRONG_FORM),
    Lie("extra frames", _extra_frames),
    Lie("missing frames", _missing_frames),
    Lie("wrong frame index", _wrong_frame),
    Lie("garbage", _garbage),
    Lie("deep or large containers", _deep),
    Lie("unknown field", _unknown_field),
    Lie("missing field", _missing_field),
    Lie("other version", _other_version),
    Lie("error", _error, errors=(ServiceError,)),
    Lie("unknown error", _unknown_error),
    Lie("error and result", _error_and_result),
    Lie("wild timing", _wild_timing),
)


# ------------------------------------------------------------------------------- the numbers

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
    return in_ring(rows.to(torch.int64) + column * row).reshape(right.shape)


def opposite(right: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Change the sign."""
    return -right


def scaled(right: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Multiply by 1 + 1e-3."""
    if right.is_floating_point():
        return (right.double() * 1.001).to(right.dtype)
    return in_ring((right.double() * 1.001).round().to(torch.int64))


def zeros(right: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Answer at once and compute nothing."""
    return torch.zeros_like(right)


def in_ring(wide: torch.Tensor) -> torch.Tensor:
    """Take int64 modulo 2^32, as int32."""
    return ((wide + 2**31) % 2**32 - 2**31).to(torch.int32)


def surely_wrong(wrong: torch.Tensor, right: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Return what differs: a lie that happens to be true is none."""
    return one_element(right, chance) if torch.equal(wrong, right) else wrong


WRONG: dict[str, Wrong] = {
    "one element": one_element,
    "low-rank error": low_rank,
    "sign": opposite,
    "x(1 + 1e-3)": scaled,
    "zeros": zeros,
}


def _lie_of(wrong: Wrong) -> Callable[[Occasion], list[Frames]]:
    def tell(occasion: Occasion) -> list[Frames]:
        right = occasion.output
        lie = surely_wrong(wrong(right, occasion.chance), right, occasion.chance)
        return occasion.with_output(lie)

    return tell


def _other_layer(occasion: Occasion) -> list[Frames]:
    """Compute what was asked for, with the weights of another layer."""
    request, right = occasion.request, occasion.output
    wrong = right
    if isinstance(request, LinearRequest | RingLinearRequest | SeededRingLinearRequest):
        layer = request.layer_idx - 1 if request.layer_idx else 1
        reply = occasion.compute(request.model_copy(update={"layer_idx": layer}))
        assert isinstance(reply, TensorReply)
        wrong = to_torch(reply.output)
        occasion.memory.had["swapped layer"] += 1
    return occasion.with_output(surely_wrong(wrong, right, occasion.chance))


def _stale(occasion: Occasion) -> list[Frames]:
    """Answer with an earlier result of the same shape."""
    right = occasion.output
    same = [r for r in occasion.memory.results if (r.shape, r.dtype) == (right.shape, right.dtype)]
    occasion.memory.had["stale reply"] += bool(same)
    wrong = same[-1] if same else torch.zeros_like(right)
    return occasion.with_output(surely_wrong(wrong, right, occasion.chance))


RESULT_LIES = (
    *(Lie(name, _lie_of(wrong), errors=_WRONG_RESULT) for name, wrong in WRONG.items()),
    Lie("swapped layer", _other_layer, errors=_WRONG_RESULT),
    Lie("stale reply", _stale, errors=_WRONG_RESULT),
)


# Lies that tell of something that has to be there: `Memory.had` says how often it was.
CROSS_SESSION = tuple(lie for lie in WIRE_LIES if lie.name.startswith("cross-session"))
NEEDY = (
    *(lie for lie in WIRE_LIES if lie.name == "replayed"),
    *CROSS_SESSION,
    REORDERED,
    *(lie for lie in RESULT_LIES if lie.name in ("swapped layer", "stale reply")),
)


# --------------------------------------------------------------------------------- the model


def _init(change: Callable[[InitReply, random.Random], dict[str, object]]) -> Callable[..., Any]:
    def tell(occasion: Occasion) -> list[Frames]:
        right = occasion.response
        assert isinstance(right, InitReply)
        # Not validated: a liar's own library lets everything through.
        wrong = right.model_copy(update=change(right, occasion.chance))
        return [occasion.encoded(result=wrong)]

    return tell


def _wrong_size(reply: InitReply, chance: random.Random) -> dict[str, object]:
    name = chance.choice(sorted(type(reply.config).model_fields))
    value = chance.choice([getattr(reply.config, name) + 1, 0, -1, 2**40, "5"])
    return {"config": reply.config.model_copy(update={name: value})}


def _wrong_norm(reply: InitReply, chance: random.Random) -> dict[str, object]:
    norms = dict(reply.norm_weights)
    name = chance.choice(sorted(norms))
    weight = to_torch(norms[name].weight).clone()
    weight[chance.randrange(len(weight))] = chance.choice([float("nan"), float("inf"), 7.0])
    norms[name] = NormWeight(weight=from_torch(weight), eps=norms[name].eps)
    return {"norm_weights": norms}


def _fewer_norms(reply: InitReply, chance: random.Random) -> dict[str, object]:
    left_out = chance.choice(sorted(reply.norm_weights))
    return {"norm_weights": {n: v for n, v in reply.norm_weights.items() if n != left_out}}


def _wrong_eps(reply: InitReply, chance: random.Random) -> dict[str, object]:
    norms = dict(reply.norm_weights)
    name = chance.choice(sorted(norms))
    eps = chance.choice([0.0, -1.0, float("nan"), 1e-3])
    norms[name] = norms[name].model_copy(update={"eps": eps})
    return {"norm_weights": norms}


def _wrong_rope(reply: InitReply, chance: random.Random) -> dict[str, object]:
    params = reply.rotary_emb_params
    inv_freq = to_torch(params.inv_freq) * chance.choice([2.0, 0.0, float("nan")])
    return {"rotary_emb_params": params.model_copy(update={"inv_freq": from_torch(inv_freq)})}


def _wrong_scaling(reply: InitReply, chance: random.Random) -> dict[str, object]:
    params = reply.rotary_emb_params
    value = chance.choice([2.0, float("nan"), float("inf")])
    return {"rotary_emb_params": params.model_copy(update={"attention_scaling": value})}


def _wrong_digest(name: str) -> Callable[[InitReply, random.Random], dict[str, object]]:
    def change(reply: InitReply, chance: random.Random) -> dict[str, object]:
        return {name: chance.choice([chance.randbytes(32).hex(), "", "0" * 63, 7])}

    return change


def _truncated_norm(reply: InitReply, chance: random.Random) -> dict[str, object]:
    norms = dict(reply.norm_weights)
    name = chance.choice(sorted(norms))
    held = norms[name].weight
    short = WireTensor(held.dtype, held.shape, bytes(held.data)[:-4])
    norms[name] = norms[name].model_copy(update={"weight": short})
    return {"norm_weights": norms}


# Told in a good message; or by chance in one that breaks the schema. The others always break it.
_OTHER_MODEL = (ModelMismatchError,)
_OTHER_MODEL_OR_FORM = (ModelMismatchError, ProtocolError)

INIT_LIES = (
    Lie("Init: wrong size", _init(_wrong_size), errors=_OTHER_MODEL_OR_FORM),
    Lie("Init: wrong norm", _init(_wrong_norm), errors=_OTHER_MODEL),
    Lie("Init: truncated norm", _init(_truncated_norm)),
    Lie("Init: fewer norms", _init(_fewer_norms), errors=_OTHER_MODEL),
    Lie("Init: wrong eps", _init(_wrong_eps), errors=_OTHER_MODEL_OR_FORM),
    Lie("Init: wrong RoPE", _init(_wrong_rope), errors=_OTHER_MODEL),
    Lie("Init: wrong scaling", _init(_wrong_scaling), errors=_OTHER_MODEL_OR_FORM),
    Lie("Init: other model", _init(_wrong_digest("model_digest")), errors=_OTHER_MODEL_OR_FORM),
    Lie("Init: other weights", _init(_wrong_digest("linear_digest")), errors=_OTHER_MODEL_OR_FORM),
    Lie(
        "Init: provisioned",
        _init(lambda r, c: {"provision_id": c.randbytes(32).hex()}),
        errors=_OTHER_MODEL,
    ),
    Lie(
        "Init: no integers",
        _init(lambda r, c: {"arithmetic": c.choice([("float",), (), ("x",)])}),
        errors=_OTHER_MODEL_OR_FORM,
    ),
    Lie("Init: message limit", _init(lambda r, c: {"max_message_bytes": c.choice([0, -1, 2**50])})),
    Lie("Init: instance id", _init(lambda r, c: {"instance_id": c.choice(["", "x" * 32, 5])})),
    Lie(
        "Init: layers",
        _init(lambda r, c: {"layers": c.choice([(0, 0), (3, 2), (-1, 4), (0,), None])}),
        errors=_OTHER_MODEL_OR_FORM,
    ),
    Lie(
        "Init: a tensor",
        lambda o: [o.encoded(result=TensorReply(output=from_torch(torch.ones(4))))],
    ),
)
