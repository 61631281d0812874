"""Leaks that are planted: sessions as a service gets them, and how much of them attacks read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from protocol.encoding import encode_request
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    ModuleName,
    Request,
)
from protocol.tensors import from_torch
from tee_side.policy.placement import Policy, load_policy
from tee_side.words import OPERATORS, Operator, is_linear
from tests.kit.model import SavedModel
from tsqp.lab.leak.attack import Attack, View, Work
from tsqp.lab.leak.model import Score
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import Recording, Truth
from tsqp.lab.leak.score import score
from tsqp.lab.leak.trace import Trace, Where

Models = Callable[..., SavedModel]
# What becomes of the rows of one request.
Change = Callable[[torch.Tensor], torch.Tensor]
Message = tuple[bytes, ...]


def tiny(saved_model: Models, **overrides: Any) -> SavedModel:
    """Return a model of two layers. What a test draws is the same whether it was there or not."""
    model = saved_model(**{"num_hidden_layers": 2, **overrides})
    torch.manual_seed(0)
    return model


def message(request: Request) -> Message:
    """Return a request as it crosses."""
    return tuple(map(bytes, encode_request(request, 1, 60_000)))


def linear(
    where: Where, rows_RI: torch.Tensor, modules: tuple[ModuleName, ...] | None = None
) -> Message:
    """Return a request for a linear operator, by default for all of its modules."""
    layer, operator = where
    assert layer is not None
    assert is_linear(operator)
    return message(
        LinearRequest(
            layer_idx=layer,
            module_names=modules or FUSED_MODULES[operator],
            hidden_states=from_torch(rows_RI.contiguous()),
        )
    )


def embedding(ids: Sequence[int]) -> Message:
    """Return a request for embeddings."""
    return message(EmbeddingRequest(input_ids=from_torch(torch.tensor(ids)), dtype="float32"))


def lm_head(rows_RD: torch.Tensor) -> Message:
    """Return a request for logits."""
    return message(LMHeadRequest(hidden_states=from_torch(rows_RD.contiguous())))


def steps_of(tokens: int, prompt: int) -> list[range]:
    """Return the steps of a session: a prompt, then one token after another."""
    return [range(prompt), *(range(token, token + 1) for token in range(prompt, tokens))]


def inputs_of(public: PublicModel, ids: Sequence[int]) -> dict[Where, torch.Tensor]:
    """Return what the model computes for a text: the input [T, I] of every linear operator."""
    prefix, found = public.nothing(), list[Mapping[Where, torch.Tensor]]()
    for token_id in ids:
        inputs = public.states(prefix, [token_id]).inputs
        found.append({where: x_1I for where, x_1I in inputs.items() if where[1] != "segment"})
        prefix = public.extend(prefix, token_id)
    return {where: torch.cat([inputs[where] for inputs in found]) for where in found[0]}


def as_it_is(rows_RI: torch.Tensor) -> torch.Tensor:
    """Return rows as a service gets them in the clear."""
    return rows_RI


def planted(
    public: PublicModel,
    ids: Sequence[int],
    prompt: int,
    change: Change = as_it_is,
    places: Sequence[Where] | None = None,
) -> Trace:
    """Return a session's trace, as some places (None: all) of the model see it under a change."""
    inputs = inputs_of(public, ids)
    return Trace(
        tuple(
            linear(where, change(inputs[where][step.start : step.stop]))
            for step in steps_of(len(ids), prompt)
            for where in places or inputs
        )
    )


def truth_of(ids: Sequence[int], prompt: int, last: int = 0) -> Truth:
    """Return the truth of a session that crossed as a whole. `last`: what was sampled last."""
    return Truth(
        prompt=tuple(ids[:prompt]),
        answer=(*ids[prompt:], last),
        sent=tuple(ids),
        answers=tuple(token >= prompt for token in range(len(ids))),
        last=last,
    )


def view_of(
    public: PublicModel,
    *traces: Trace,
    policy: Policy | str = "attention-in-tee",
    sessions: int = 100,
    tokens: int = 1000,
) -> View:
    """Return what an attack gets. `sessions`, `tokens`: to be searched."""
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    return View(traces, public, chosen, public.directory, sessions, tokens)


def first_view(public: PublicModel, recording: Recording) -> View:
    """Return what a recording's first service saw."""
    traces = [session.traces[0] for session in recording.sessions]
    return view_of(public, *traces, policy=recording.policy)


def scores_of(attack: Attack, view: View, truths: Sequence[Truth]) -> dict[str, Score]:
    """Return what an attack reads, by place."""
    assert attack.refuses(view) is None
    return {one.where: one for one in score(attack.read(view, Work()), truths)}


def recorded_scores(attack: Attack, public: PublicModel, recording: Recording) -> dict[str, Score]:
    """Return what an attack reads at a recording's first service, by place."""
    truths = [session.truth for session in recording.sessions]
    return scores_of(attack, first_view(public, recording), truths)


def share(score: Score) -> float:
    """Return the share of tokens that were read."""
    return score.top1.hits / score.top1.n


def policy_of(*operators: Operator, name: str = "planted", phase: str | None = None) -> Policy:
    """Return a policy that sends some operators in the clear, in one phase or both."""
    sent: list[dict[str, str]] = [{"place": "gpu", "mask": "none", "verify": "none"}]
    if phase is not None:
        other = "decode" if phase == "prefill" else "prefill"
        sent = [sent[0] | {"phase": phase}, {"place": "tee", "phase": other}]
    return Policy.model_validate(
        {
            "name": name,
            "summary": "planted",
            "operators": {one: sent if one in operators else "tee" for one in OPERATORS},
        }
    )
