"""What an attack is: bytes that reached a service in, tokens out.

An attack gets a `View`: the traces of one service, and what is public. It never sees the truth. A
trace is one session: the requests of one prompt, in order, as bytes and as what the service's owner
reads in them. An attack has to say, as class attributes, which result it must repeat to be
believed; its docstring says what it reads. A new one is one file: see docs/write-an-attack.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, TypeAlias

import torch
from torch.nn.functional import normalize

from gpu_side.encoding import open_request, read_request
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import InputError, ProtocolError
from protocol.keystream import expanded
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    HealthRequest,
    InitRequest,
    LinearOperator,
    LinearRequest,
    MatmulRequest,
    ModuleName,
    Request,
    RingLinearRequest,
    SegmentRequest,
)
from protocol.tensors import WireTensor, to_torch
from tee_side.policy.placement import Policy, Segment
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.words import OPERATORS, PHASES, PRODUCTS, Operator, Phase, is_linear
from tsqp.lab.leak.public import PublicModel

# A layer (None: the operator belongs to none) and an operator.
Where: TypeAlias = tuple[int | None, Operator]

# What a policy sends away in a phase, and how many rows each request's mask adds.
Added: TypeAlias = Mapping[tuple[Where, Phase], int]

_OPERATOR_OF: dict[ModuleName, Operator] = {
    module: operator for operator, modules in FUSED_MODULES.items() for module in modules
}


class TraceError(InputError):
    """A trace that cannot be read, or was cut short."""


@dataclass(frozen=True, eq=False)
class Call:
    """One request as the service read it. `modules`: of a linear operator, else empty."""

    where: Where
    modules: tuple[ModuleName, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def rows(self) -> torch.Tensor:
        """The first tensor, one row a token for all but products of attention: [R, I]."""
        first = self.tensors[0]
        return first if first.dim() == 1 else first.reshape(-1, first.shape[-1])


@dataclass(frozen=True, eq=False)
class TraceStep:
    """The requests of one forward pass.

    `first`: how many tokens went by in earlier steps of the trace; `tokens`: how many went through
    in this one, which is less than the rows where a mask adds some.
    """

    first: int
    tokens: int
    calls: tuple[Call, ...]

    def at(self, where: Where) -> Call | None:
        """Return the first request of an operator in this step, None if it was not sent."""
        return next((call for call in self.calls if call.where == where), None)


@dataclass(frozen=True)
class Trace:
    """The frames of every request that reached a service in one session, in order.

    `added`: what the policy says about the rows of every request, as public as the policy; empty
    where it is not known.
    """

    messages: tuple[tuple[bytes, ...], ...]
    added: Added = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """What carries tensors. Raises TraceError."""
        return tuple(_calls(self.messages))

    @cached_property
    def steps(self) -> tuple[TraceStep, ...]:
        """The forward passes. Raises TraceError.

        A step begins where the order of operators begins anew. Where it is not known what masks
        add, each row is a token.
        """
        groups = list(_groups(self.calls, self.added))
        # What has a row for each token of a step: the LM head has fewer.
        each = [
            [call for call in group if call.where[1] not in (*PRODUCTS, "lm_head")]
            for group in groups
        ]
        rows = [max((len(call.rows) for call in group), default=1) for group in each]
        sizes = _counted(each, self.added) if self.added else rows
        before = accumulate(sizes, initial=0)
        return tuple(
            TraceStep(first, tokens, tuple(group))
            for first, tokens, group in zip(before, sizes, groups, strict=False)
        )

    @property
    def tokens(self) -> int:
        """How many tokens went through the model while the service was asked."""
        return sum(step.tokens for step in self.steps)

    @property
    def places(self) -> list[Where]:
        """What the service was asked for, in the order of a forward pass."""
        return sorted({call.where for call in self.calls}, key=forward_order)


def read_frames(frames: Sequence[bytes]) -> Request:
    """Return the request in the frames of a message, as its service reads it.

    Raises ProtocolError.
    """
    return expanded(read_request(open_request(list(frames), DEFAULT_MAX_MESSAGE_BYTES)))


def _calls(messages: Sequence[Sequence[bytes]]) -> Iterator[Call]:
    layer: int | None = None
    products = 0
    for number, frames in enumerate(messages):
        try:
            request = read_frames(frames)
        except ProtocolError as error:
            raise TraceError(
                f"trace: message {number + 1} of {len(messages)}",
                got=f"{error.where}: {error.got}",
                expected="a whole request",
            ) from error
        where: Where = None, "lm_head"
        modules: tuple[ModuleName, ...] = ()
        match request:
            case InitRequest() | HealthRequest():
                continue
            case LinearRequest() | RingLinearRequest():
                layer, modules, products = request.layer_idx, request.module_names, 0
                where = layer, _OPERATOR_OF[modules[0]]
            case EmbeddingRequest():
                where = None, "embedding"
            case SegmentRequest():
                where = request.first_layer, "segment"
            case MatmulRequest():
                # Products do not say whose they are; their order does.
                where = layer, "attn_values" if products % 2 else "attn_scores"
                products += 1
        tensors = tuple(to_torch(value) for _, value in request if isinstance(value, WireTensor))
        yield Call(where, modules, tensors)


def _groups(calls: Sequence[Call], added: Added) -> Iterator[list[Call]]:
    group: list[Call] = []
    # What is sent in one phase alone.
    alone = {
        where: phase
        for where, phase in added
        if (where, "decode") not in added or (where, "prefill") not in added
    }
    for call in calls:
        # The same modules of the same layer again, or earlier ones: another step.
        again = any((one.where, one.modules) == (call.where, call.modules) for one in group) or (
            bool(group) and forward_order(call.where) < forward_order(group[-1].where)
        )
        # Decode begins: it alone sends this, and prefill alone something before it.
        turns = alone.get(call.where) == "decode" and any(
            alone.get(one.where) == "prefill" for one in group
        )
        if again or turns:
            yield group
            group = []
        group.append(call)
    if group:
        yield group


def place_name(where: Where) -> str:
    """Name a place for people."""
    layer, operator = where
    return operator if layer is None else f"layer {layer} {operator}"


def forward_order(where: Where) -> tuple[int, int]:
    """Return what sorts places as a forward pass goes through them."""
    layer, operator = where
    if layer is None:
        return (-1, 0) if operator == "embedding" else (2**31, 0)
    # A segment stands where its first layer begins.
    return layer, -1 if operator == "segment" else OPERATORS.index(operator)


def _counted(groups: Sequence[Sequence[Call]], added: Added) -> list[int]:
    """Return the tokens of steps under masks that are known."""
    sizes: list[int] = []
    phase: Phase = "prefill" if any(phase == "prefill" for _, phase in added) else "decode"
    for group in groups:
        prompt, decoded = (_tokens(group, phase, added) for phase in PHASES)
        # The first step is of the prompt. Behind it, one of one token is decode: only the rest of
        # a prompt could be mistaken for it.
        if prompt is None or (sizes and decoded == {1}):
            phase = "decode"
        found = decoded if phase == "decode" else prompt
        sizes.append(max(1, *(found or {1})))
    return sizes


def _tokens(group: Sequence[Call], phase: Phase, added: Added) -> set[int] | None:
    """Return how many tokens requests are about in a phase, None where not all are sent in it."""
    if any((call.where, phase) not in added for call in group):
        return None
    return {len(call.rows) - added[call.where, phase] for call in group}


# ----------------------------------------------------------------------------------------- attacks

# Guesses that are scored for each token, best first.
TOP = 5
# Rounding, where there is no noise: relative to activations of unit RMS, more than float32 makes.
LEAST_SIGMA = 1e-3


class AttackError(InputError):
    """An attack that does not say what it has to, or that is not found."""


@dataclass
class Work:
    """What reading cost the attacker.

    `compared`: candidates that were compared with something observed; `modelled`: token positions
    that were run through layers of the public model.
    """

    compared: int = 0
    modelled: int = 0


@dataclass(frozen=True)
class Reading:
    """What an attack read in one session at one place.

    `where`: for people: "layer 0 qkv_proj"; `session`: index of the trace; `tokens`: the indices of
    tokens that it tried to read, in the order in which they went through the model; `guesses`:
    token ids, best first, by such an index, at most `TOP`. What has no guess counts as not read.
    The index behind the last token is that of the token that was sampled last.
    """

    where: str
    session: int
    tokens: range
    guesses: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class View:
    """All that an attack may use.

    `traces`: what reached one service, a trace a session; `policy`, `served`: the policy, and the
    model directory that the service was given; `search_sessions`, `search_tokens`: how much of the
    traces a search through the public model is to go through, which costs more than a look-up, if
    it finds anything; `search_candidates`: how many it may run for a token, those that the model
    expects most; None: all. `disks`: the file of each session on the service's disk, where the
    service keeps a KV cache and has had to make room.
    """

    traces: tuple[Trace, ...]
    public: PublicModel
    policy: Policy
    served: Path
    search_sessions: int
    search_tokens: int
    search_candidates: int | None = None
    disks: tuple[bytes, ...] = ()

    def rows(self, call: Call) -> torch.Tensor:
        """Return the rows of a request as floats [R, I]; integers at length 1, so up to a factor.

        Each row of integers has a scale of its own, which stays in the TEE.
        """
        rows_RI = call.rows.float()
        return normalize(rows_RI, dim=-1) if call.rows.dtype == torch.int32 else rows_RI

    def calls_at(self, where: Where) -> Iterator[tuple[int, TraceStep, Call]]:
        """Yield each step in which something was asked for: its session, itself, the request."""
        for session, trace in enumerate(self.traces):
            for step in trace.steps:
                if (call := step.at(where)) is not None:
                    yield session, step, call

    def readings(
        self, where: str, found: Iterable[tuple[int, int, tuple[int, ...]]]
    ) -> Iterator[Reading]:
        """Put together what was `found`: a session, the index of a token, and guesses for it.

        Of each session that anything was found in, all tokens count as tried.
        """
        sessions: dict[int, dict[int, tuple[int, ...]]] = {}
        for session, token, guesses in found:
            sessions.setdefault(session, {})[token] = guesses
        for session, own in sessions.items():
            yield Reading(where, session, range(self.traces[session].tokens), own)

    def asked_for(self, operator: Operator) -> bool:
        """Whether the service was asked for an operator."""
        return any(call.where[1] == operator for trace in self.traces for call in trace.calls)

    @property
    def has_head(self) -> bool:
        """Whether the LM head is within a segment that crossed."""
        return self.asked_for("segment") and any(segment.head for segment in self.segments)

    @property
    def segments(self) -> list[Segment]:
        """The policy's segments of the model."""
        return self.policy.segments(self.public.config.num_hidden_layers)

    @property
    def masked_segments(self) -> bool:
        """Whether what segments get is masked, in any phase."""
        return any(one.mask is not None for one in self.policy.operators.get("segment", ()))

    def row_places(self) -> list[Where]:
        """Return `linear_places` and segments, whose rows are hidden states before any norm."""
        found = {where for trace in self.traces for where in trace.places}
        return [
            (layer, operator)
            for layer, operator in sorted(found, key=forward_order)
            if layer is not None and (is_linear(operator) or operator == "segment")
        ]

    def sigma(self, where: Where, phase: Phase) -> float | None:
        """Return the standard deviation of what a mask adds at a place, `LEAST_SIGMA` of none.

        None where a mask does anything else.
        """
        layer, operator = where
        mask = self.policy.at(operator, layer or 0, phase).mask
        if mask is None:
            return LEAST_SIGMA
        if not isinstance(mask, AdditiveMask) or mask.arithmetic != "float":
            return None
        sigma = mask.model_dump().get("sigma")
        return max(float(sigma), LEAST_SIGMA) if isinstance(sigma, int | float) else None

    def noisy_places(self) -> list[Where]:
        """Return those of `linear_places` where `sigma` is known, in both phases."""
        return [
            where
            for where in self.linear_places()
            if all(self.sigma(where, phase) is not None for phase in PHASES)
        ]

    def linear_places(self, *operators: LinearOperator) -> list[tuple[int, LinearOperator]]:
        """Return where rows of activations crossed, in the order of a forward pass."""
        return [
            (layer, operator)
            for layer, operator in self.row_places()
            if layer is not None
            and is_linear(operator)
            and (not operators or operator in operators)
        ]


def far_if_nan(distances_N: torch.Tensor) -> torch.Tensor:
    """Return distances without NaN, which is farther than anything."""
    return distances_N.nan_to_num(nan=float("inf"), posinf=float("inf"))


def best(distances_N: torch.Tensor) -> tuple[int, ...]:
    """Return which candidates are nearest, best first; none where all are infinitely far."""
    distances_N = far_if_nan(distances_N)
    if distances_N.isinf().all():
        return ()
    return tuple(distances_N.topk(min(TOP, len(distances_N)), largest=False).indices.tolist())


# What an attack may need, as the reason why there is nothing for it otherwise.
NEEDS: Mapping[str, Callable[[View], object]] = {
    "embedding stays": lambda view: view.asked_for("embedding"),
    "lm_head stays": lambda view: view.has_head or view.asked_for("lm_head"),
    "integers": lambda view: view.policy.arithmetic != "int8",
    "floats": lambda view: any(
        call.rows.dtype == torch.int32 and len(call.rows) == step.tokens
        for _, step, call in view.calls_at((0, "qkv_proj"))
    ),
    "weights are not cloaked": lambda view: view.policy.feature_mask is not None,
    "no cache is at the service": lambda view: view.disks,
    "layer 0 is in no cache": lambda view: not view.segments[0].first,
    "layer 0 stays": lambda view: any(
        where in ((0, "qkv_proj"), (0, "segment")) for where in view.row_places()
    ),
    "no session's beginning crossed": lambda view: view.policy.at("qkv_proj", 0, "prefill").leaves,
    "no public weights to compare with": lambda view: view.public.has_layers,
    "no token that every prompt begins with": lambda view: view.public.first_id is not None,
    "the tokenizer puts no token in front": lambda view: view.public.first_id is not None,
    "no activations crossed": lambda view: view.row_places(),
    "no linear operator crossed": lambda view: view.linear_places(),
    "the hidden axis is transformed": lambda view: view.linear_places() or not view.masked_segments,
    "neither clear nor under noise": lambda view: view.noisy_places(),
    "no keys of layer 0 crossed": lambda view: any(
        (0, "attn_scores") in trace.places for trace in view.traces
    ),
}


class Attack(ABC):
    """Base of all attacks.

    Required class attributes:
      name        how reports name it
      control     policy under which it must work, by name or path, so that failing elsewhere means
                  something; for a policy of integers `integer_control`, if that is another one
      published   the share of tokens that it must read there, 0 to 1
    Optional:
      needs       keys of `NEEDS`, without which there is nothing here for it
    """

    name: ClassVar[str]
    control: ClassVar[str]
    integer_control: ClassVar[str | None] = None
    published: ClassVar[float]
    needs: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse an attack that does not say what it must, when its file is loaded."""
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            return  # a family, whose members have names
        missing = [
            attribute for attribute in ("control", "published") if not hasattr(cls, attribute)
        ]
        AttackError.unless(
            not missing,
            f"attack {cls.__name__}",
            f"no {', '.join(missing)}",
            "what every attack has to say",
        )
        AttackError.unless(
            0 < cls.published <= 1,
            f"attack {cls.__name__}",
            f"published = {cls.published!r}",
            "a share of tokens above 0, at most 1",
        )

    def refuses(self, view: View) -> str | None:
        """Say why there is nothing here for this attack, in a few words; None: it applies."""
        return next((reason for reason in self.needs if not NEEDS[reason](view)), None)

    @abstractmethod
    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Read tokens. Raises TraceError."""
