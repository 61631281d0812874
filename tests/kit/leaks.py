"""Sessions as services get them, recorded, planted or drawn, and what attacks read of them."""

import os
import random
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from gpu_side.encoding import open_request, read_request
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, encode_request
from protocol.messages import FUSED_MODULES, Request
from protocol.tensors import WireTensor, from_torch, to_torch
from tee_side.policy.placement import Policy, load_policy
from tee_side.words import Operator, is_linear
from tests.kit import ask
from tests.kit.model import SavedModel, make_model, policy_of, token_ids
from tsqp.lab.leak.attack import Attack, Trace, View, Where, Work
from tsqp.lab.leak.model import AttackRun, Control, PolicyLeak, Rate, Score
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.recording import PlaySettings, Recording, Truth, play
from tsqp.lab.leak.score import score
from tsqp.run.settings import model_directory

Message = tuple[bytes, ...]
# What becomes of the rows of one request, and the place that they cross at.
Change = Callable[[torch.Tensor, Where], torch.Tensor]

FIRST_PLACE = "layer 0 qkv_proj"
# Attacks compare rows with all tokens, again and again.
VOCABULARY = 128
# The numbers of a request; a segment's other tensors say which rows belong to which session.
_NUMBERS = {"input_ids", "hidden_states", "elements", "a", "b"}


def make_begun_model(folder: Path, kind: str = "llama", **overrides: Any) -> SavedModel:
    """Save a random model of two layers whose tokenizer puts token 0 in front of every text."""
    sizes = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, **overrides}
    made = SavedModel(folder, make_model(folder, kind, **sizes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_directory("demo") / name, folder / name)
    return made


def begun(*lengths: int) -> list[list[int]]:
    """Return prompts of some lengths: token 0, and random ones."""
    return [[0, *token_ids(length - 1, seed, VOCABULARY)] for seed, length in enumerate(lengths)]


def recorded(
    model: SavedModel,
    policy: Policy | str,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int = 4,
) -> Recording:
    """Run prompts under a policy; what the masks draw is the same each time."""
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    folder.mkdir(exist_ok=True)
    played = PlaySettings(model.directory, new_tokens)
    draw = random.Random(0).randbytes
    with patch.object(os, "urandom", draw), patch.object(secrets, "token_bytes", draw):
        return play(chosen, prompts, played, folder)


def sending(*operators: Operator, name: str = "planted", phase: str | None = None) -> Policy:
    """Return a policy that sends some operators in the clear, in one phase or both."""
    sent: list[dict[str, str]] = [{"place": "gpu", "mask": "none", "verify": "none"}]
    if phase is not None:
        other = "decode" if phase == "prefill" else "prefill"
        sent = [sent[0] | {"phase": phase}, {"place": "tee", "phase": other}]
    return policy_with(name, **dict.fromkeys(operators, sent))


def policy_with(name: str = "planted", **operators: Any) -> Policy:
    """Return a policy of some placements; all else stays."""
    return policy_of(operators, name=name, summary=name)


def message(request: Request) -> Message:
    return tuple(map(bytes, encode_request(request, 1, 60_000)))


def linear(where: Where, rows_RI: torch.Tensor) -> Message:
    """Return a request for all modules of a linear operator, in floats or in integers."""
    layer, operator = where
    assert layer is not None
    assert is_linear(operator)
    made = ask.ring if rows_RI.dtype == torch.int32 else ask.linear
    return message(made(rows_RI.contiguous(), *FUSED_MODULES[operator], layer=layer))


def embedding(ids: Sequence[int]) -> Message:
    return message(ask.embedding(torch.tensor(ids)))


def lm_head(rows_RD: torch.Tensor) -> Message:
    return message(ask.head(rows_RD.contiguous()))


def inputs_of(public: PublicModel, ids: Sequence[int]) -> dict[Where, torch.Tensor]:
    """Return what the model computes for a text: the input [T, I] of every linear operator."""
    prefix, found = public.nothing(), list[Mapping[Where, torch.Tensor]]()
    for token_id in ids:
        inputs = public.states(prefix, [token_id]).inputs
        found.append({where: x_1I for where, x_1I in inputs.items() if where[1] != "segment"})
        prefix = public.extend(prefix, token_id)
    return {where: torch.cat([inputs[where] for inputs in found]) for where in found[0]}


def planted(
    public: PublicModel,
    ids: Sequence[int],
    prompt: int,
    places: Sequence[Where],
    change: Change = lambda rows_RI, _where: rows_RI,
) -> Trace:
    """Return a session's trace, as some places of the model see it under a change."""
    inputs = inputs_of(public, ids)
    steps = [range(prompt), *(range(token, token + 1) for token in range(prompt, len(ids)))]
    return Trace(
        tuple(
            linear(where, change(inputs[where][step.start : step.stop], where))
            for step in steps
            for where in places
        )
    )


def truth_of(ids: Sequence[int], prompt: int, last: int = 0) -> Truth:
    """Return the truth of a session that crossed as a whole. `last`: what was sampled last."""
    return Truth(
        prompt=tuple(ids[:prompt]),
        answer=(*ids[prompt:], last),
        tokens=(*ids, last),
        prompted=min(prompt, len(ids)),
    )


def uniform(trace: Trace) -> Trace:
    """Return requests of the same shapes whose numbers are drawn anew, and say nothing."""
    messages = []
    for frames in trace.messages:
        request = read_request(open_request(list(frames), DEFAULT_MAX_MESSAGE_BYTES))
        drawn = {
            name: from_torch(_uniform(to_torch(value)))
            for name, value in request
            if name in _NUMBERS and isinstance(value, WireTensor)
        }
        messages.append(message(request.model_copy(update=drawn)))
    return Trace(tuple(messages), trace.added)


def _uniform(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.int32:
        return torch.randint(-(2**31), 2**31, values.shape).to(torch.int32)
    if values.is_floating_point():
        return torch.rand(values.shape).mul(2).sub(1).to(values.dtype)
    return torch.randint(0, VOCABULARY, values.shape).to(values.dtype)


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
    """Return what a recording's first service saw, and its sessions' files without encryption."""
    traces = [session.traces[0] for session in recording.sessions]
    view = view_of(public, *traces, policy=recording.policy)
    disks = tuple(disk.clear for disk in recording.disks)
    return replace(view, served=recording.served, disks=disks)


def scores_of(attack: Attack, view: View, truths: Sequence[Truth]) -> dict[str, Score]:
    assert attack.refuses(view) is None, attack.refuses(view)
    return {one.where: one for one in score(attack.read(view, Work()), truths)}


def score_of(hits: int, n: int, where: str = "here", chance: float = 0.0, **more: Any) -> Score:
    """Return a score at a place; half of the tokens are the prompts'."""
    fields: dict[str, Any] = {
        "where": where,
        "top1": Rate(hits=hits, n=n),
        "top5": Rate(hits=hits, n=n),
        "prompt": Rate(hits=hits // 2, n=n // 2),
        "answer": Rate(hits=hits - hits // 2, n=n - n // 2),
        "whole": Rate(hits=0, n=0),
        "chance": chance,
        "guessed": n,
        "kinds": hits,
    }
    return Score(**{**fields, **more})


def run_of(attack: str, *scores: Score, worked: bool = True, **more: Any) -> AttackRun:
    """Return the run of an attack that works on its control, or does not."""
    control = Control(
        attack=attack,
        policy="attention-in-tee",
        where="there",
        rate=Rate(hits=100 if worked else 10, n=100),
        published=0.9,
    )
    fields: dict[str, Any] = {"service": 1, "refused": None, "control": control}
    work = {"compared": 0, "modelled": 0, "cpu_s": 0.0}
    return AttackRun(attack=attack, scores=scores, **{**fields, **work, **more})


def leak_of(*runs: AttackRun, **more: Any) -> PolicyLeak:
    fields: dict[str, Any] = {
        "policy": "mine",
        "summary": "mine",
        "standing": "broken",
        "services": 1,
        "nothing": None,
        "sent_prompt": 100,
        "sent_answer": 100,
        "cost": None,
        "lengths": None,
        "reconstruction": None,
    }
    return PolicyLeak(runs=runs, **{**fields, **more})
