"""What an attack is: bytes that reached a service in, tokens out.

An attack gets a `View`: the traces of one service, and what is public. It never sees the truth. It
has to say, as class attributes, which result it must repeat to be believed; its docstring says what
it reads. A new one is one file: see docs/write-an-attack.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from protocol.errors import InputError
from protocol.messages import LinearOperator
from tee_side.policy.placement import Policy, Segment
from tee_side.words import Operator, is_linear
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.trace import Call, Trace, TraceStep, Where, forward_order

# Guesses that are scored for each token, best first.
TOP = 5


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
        """Return the rows of a request as floats [R, I]; integers by the public scales.

        Raises CalibrationError where there are none.
        """
        rows_RI, (layer, operator) = call.rows, call.where
        if rows_RI.dtype != torch.int32 or layer is None or not is_linear(operator):
            return rows_RI.float()
        return rows_RI.float() * self.public.input_scale((layer, operator))

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

    def row_places(self) -> list[Where]:
        """Return `linear_places` and segments, whose rows are hidden states before any norm."""
        found = {where for trace in self.traces for where in trace.places}
        return [
            (layer, operator)
            for layer, operator in sorted(found, key=forward_order)
            if layer is not None and (is_linear(operator) or operator == "segment")
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


def far_if_nan(distances_N: torch.Tensor) -> torch.Tensor:
    """Return distances without NaN, which is farther than anything."""
    return distances_N.nan_to_num(nan=float("inf"), posinf=float("inf"))


def best(distances_N: torch.Tensor, ids_N: torch.Tensor) -> tuple[int, ...]:
    """Return the nearest candidates, best first; none where all are infinitely far."""
    distances_N = far_if_nan(distances_N)
    if distances_N.isinf().all():
        return ()
    order = distances_N.topk(min(TOP, len(distances_N)), largest=False).indices
    return tuple(ids_N[order].tolist())


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
