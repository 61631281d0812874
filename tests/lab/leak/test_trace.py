"""Bytes are read as a service reads them, and cut into the forward passes that they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from protocol.messages import (
    EmbeddingRequest,
    HealthRequest,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    Request,
    RingLinearRequest,
    SeededRingLinearRequest,
)
from protocol.model.config import read_config
from protocol.tensors import from_torch
from tee_side.engine.engine import DEFAULT_STEP_TOKENS
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.masks.mask import Masked, RowMask, Seed
from tee_side.protect.randomness import Randomness
from tests.kit.leaks import (
    begun,
    embedding,
    linear,
    make_begun_model,
    message,
    policy_of,
    policy_with,
    recorded,
    truth_of,
)
from tests.kit.model import SavedModel, token_ids
from tests.kit.rows import each_row
from tsqp.lab.leak.model import Rate
from tsqp.lab.leak.record_session import Session, added_rows
from tsqp.lab.leak.side_information import lengths, read_lengths
from tsqp.lab.leak.trace import Added, PolicyTrace, Trace, TraceError, Where

ROWS, WORDS = torch.randn(3, 8), torch.arange(16, dtype=torch.int32).reshape(2, 8)
SEED = Seed(bytes(range(32)), (3, 4))
SEND = [name for name in builtin_policies() if load_policy(name).services]
LAYER = ("qkv_proj", "attn_scores", "attn_values", "o_proj", "gate_up_proj", "down_proj")


def sent(phase: str | None = None, mask: Any = "none", **more: Any) -> dict[str, Any]:
    """Return how an operator leaves, in one phase or both."""
    found = {"place": "gpu", "mask": mask, "verify": "none", **more}
    return found | ({} if phase is None else {"phase": phase})


def stays(phase: str, **more: Any) -> dict[str, Any]:
    return {"place": "tee", "phase": phase, **more}


def rotation(rows: int) -> dict[str, Any]:
    """Return a mask that adds rows."""
    return {"name": "row-rotation", "shield_rows": rows}


class Chaff(RowMask):
    """A mask of one's own, whose option is called as no other's."""

    name: ClassVar[str] = "chaff"
    hides: ClassVar[str] = "nothing"
    known_break: ClassVar[str] = "none needed"
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "a test"
    tolerance: ClassVar[float] = 0.0
    cost: ClassVar[str] = "more rows"

    straws: int = 3

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        behind = torch.ones(self.straws, x_TI.shape[1], dtype=x_TI.dtype)
        return Masked((torch.cat([x_TI, behind]),), lambda y_RO: y_RO[: len(x_TI)])


# ------------------------------------------------------------------------------------- requests

NUMBERS = from_torch(ROWS)
REQUESTS: list[tuple[Request, Where, tuple[str, ...], list[torch.Tensor]]] = [
    (
        EmbeddingRequest(input_ids=from_torch(torch.tensor([7, 8])), dtype="float32"),
        (None, "embedding"),
        (),
        [torch.tensor([7, 8])],
    ),
    (
        LinearRequest(layer_idx=2, module_names=("k_proj",), hidden_states=from_torch(ROWS[None])),
        (2, "qkv_proj"),
        ("k_proj",),
        [ROWS[None]],
    ),
    (
        LinearRequest(
            layer_idx=0,
            module_names=("gate_proj", "up_proj"),
            hidden_states=from_torch(ROWS.bfloat16()),
        ),
        (0, "gate_up_proj"),
        ("gate_proj", "up_proj"),
        [ROWS.bfloat16()],
    ),
    (
        RingLinearRequest(layer_idx=1, module_names=("down_proj",), elements=from_torch(WORDS)),
        (1, "down_proj"),
        ("down_proj",),
        [WORDS],
    ),
    (
        SeededRingLinearRequest(
            layer_idx=1,
            module_names=("down_proj",),
            rows=3,
            columns=4,
            seed=from_torch(SEED.words()),
        ),
        (1, "down_proj"),
        ("down_proj",),
        [SEED.elements()],
    ),
    (
        MatmulRequest(a=NUMBERS, b=from_torch(ROWS.T.contiguous())),
        (None, "attn_scores"),
        (),
        [ROWS, ROWS.T],
    ),
    (LMHeadRequest(hidden_states=NUMBERS), (None, "lm_head"), (), [ROWS]),
]


@each_row(
    ("request_", "where", "modules", "tensors"), REQUESTS, ids=lambda row: type(row[0]).__name__
)
def test_a_request_is_read_with_all_its_tensors(
    request_: Request, where: Where, modules: tuple[str, ...], tensors: list[torch.Tensor]
) -> None:
    """Between requests without one, which are no calls."""
    around = [message(InitRequest()), message(HealthRequest())]
    (call,) = Trace((around[0], message(request_), around[1])).calls
    assert (call.where, call.modules) == (where, modules)
    assert len(call.tensors) == len(tensors)
    for ours, theirs in zip(call.tensors, tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert torch.equal(call.rows, tensors[0].squeeze(0))


@each_row(
    "broken",
    [
        lambda frames: (*frames[:-1], frames[-1][:-1]),
        lambda frames: frames[:-1],
        lambda frames: (frames[0][:10], *frames[1:]),
    ],
    ids=["cut short", "without the last", "torn header"],
)
def test_a_message_that_is_cut_short_is_named(broken: Any) -> None:
    whole = linear((0, "o_proj"), ROWS)
    with pytest.raises(TraceError) as caught:
        _ = Trace((whole, broken(whole), whole)).steps
    assert (caught.value.where, caught.value.expected) == (
        "trace: message 2 of 3",
        "a whole request",
    )


# ---------------------------------------------------------------------------------------- steps


@each_row("name", SEND)
def test_of_every_policy_steps_are_the_forward_passes(
    model: SavedModel, tmp_path: Path, name: str
) -> None:
    """What was said crosses but for the last token, and its lengths are there to be counted.

    A trace knows what is added to each request that is counted.
    """
    policy, prompts = load_policy(name), begun(5, 9)
    added = added_rows(policy, read_config(model.directory))
    played = recorded(model, policy, tmp_path / name, prompts)
    for session, prompt in zip(played.sessions, prompts, strict=True):
        sizes = [1, 1, 1] if name == "shielded" else [len(prompt), 1, 1, 1]
        truth, every = session.truth, [*prompt, *session.truth.answer[:-1]]
        assert list(truth.prompt) == prompt
        assert list(truth.sent) == every[-sum(sizes) :]
        assert truth.answers == tuple(at >= len(prompt) for at in range(len(every)))[-sum(sizes) :]
        assert (len(truth.answer), truth.last) == (4, truth.answer[-1])
        assert len(session.traces) == policy.services
        for trace in session.traces:
            assert [step.tokens for step in trace.steps] == sizes
            firsts = [sum(sizes[:step]) for step in range(len(sizes))]
            assert [step.first for step in trace.steps] == firsts
            assert isinstance(trace, PolicyTrace)
            assert trace.added == added
            assert set(trace.places) == {where for where, _ in added}
            # Each step has all that the policy sends away, each module once.
            assert len({tuple(c.where for c in step.calls) for step in trace.steps}) == 1
            assert sum(len(step.calls) for step in trace.steps) == len(trace.messages)
            for step in trace.steps:
                for call in step.calls:
                    if call.operator not in ("attn_scores", "attn_values", "lm_head"):
                        assert len(call.rows) == step.tokens + added[call.where, "decode"]
    found = lengths(played.sessions)
    assert found.prompt == (None if name == "shielded" else Rate(hits=2, n=2))
    assert found.answer == Rate(hits=2, n=2)


def test_calls_are_named_by_their_order(model: SavedModel, tmp_path: Path) -> None:
    """Queries [K, G * T, C] times keys [K, C, S], then weights times values [K, S, C]."""
    (session,) = recorded(model, "tsqp", tmp_path, begun(5)).sessions
    trace = session.traces[0]
    inside: list[Where] = [(number, operator) for number in (0, 1) for operator in LAYER]  # type: ignore[misc]
    assert trace.places == [(None, "embedding"), *inside, (None, "lm_head")]
    for step in trace.steps:
        positions = step.first + step.tokens
        for layer in (0, 1):
            scores, values = step.at((layer, "attn_scores")), step.at((layer, "attn_values"))
            assert scores is not None
            assert values is not None
            assert scores.tensors[1].shape == (2, 16, positions)
            assert values.tensors[1].shape == (2, positions, 16)
    step = trace.steps[0]
    modules = [call.modules for call in step.calls if call.where == (1, "qkv_proj")]
    assert modules == [("q_proj",), ("k_proj",), ("v_proj",)]
    found = step.at((1, "qkv_proj"))
    assert found is not None
    assert found.modules == ("q_proj",)
    assert step.at((7, "qkv_proj")) is None


PREFILL_ALONE = [sent("prefill", "row-rotation"), stays("decode")]
DECODE_ALONE = [stays("prefill"), sent("decode")]
PREFILL_MASKED = [sent("prefill", "row-rotation"), sent("decode")]
DECODE_MASKED = [sent("prefill"), sent("decode", "row-rotation")]
BOTH = [5, 1, 1, 1]
PRODUCTS = policy_of("qkv_proj", "attn_scores", "attn_values")
LAYERED = [sent(mask=rotation(8), layers="0"), sent(layers="1")]
OTHER_LAYER = [
    sent("prefill", rotation(8), layers="0"),
    stays("prefill", layers="1"),
    stays("decode", layers="0"),
    sent("decode", rotation(2), layers="1"),
]
OWN: dict[str, tuple[Policy, list[int]]] = {
    "token ids": (policy_of("embedding"), BOTH),
    "products": (PRODUCTS, BOTH),
    "prefill in the clear": (policy_of("qkv_proj", "o_proj", phase="prefill"), [5]),
    "decode in the clear": (policy_of("qkv_proj", "o_proj", phase="decode"), [1, 1, 1]),
    "prefill alone": (policy_with(qkv_proj=PREFILL_ALONE), [5]),
    "two of prefill alone": (policy_with(qkv_proj=PREFILL_ALONE, o_proj=PREFILL_ALONE), [5]),
    "prefill": (policy_with(qkv_proj=PREFILL_MASKED), BOTH),
    "an LM head": (policy_with(qkv_proj=PREFILL_MASKED, lm_head=sent(mask=rotation(3))), BOTH),
    "decode": (policy_with(qkv_proj=DECODE_MASKED), BOTH),
    "decode alone": (
        policy_with(qkv_proj=[stays("prefill"), sent("decode", rotation(3))]),
        [1, 1, 1],
    ),
    "other masks by phase": (
        policy_with(o_proj=[sent("prefill", rotation(2)), sent("decode", rotation(6))]),
        BOTH,
    ),
    "first operator": (policy_with(qkv_proj=sent(mask=rotation(8)), down_proj=sent()), BOTH),
    "last operator": (policy_with(qkv_proj=sent(), down_proj=sent(mask=rotation(8))), BOTH),
    "one layer": (policy_with(qkv_proj=LAYERED, o_proj=sent()), BOTH),
    "another layer by phase": (policy_with(qkv_proj=OTHER_LAYER), BOTH),
    "another operator by phase": (
        policy_with(qkv_proj=PREFILL_ALONE, o_proj=DECODE_ALONE),
        BOTH,
    ),
    "one more at decode": (policy_with(qkv_proj=PREFILL_MASKED, o_proj=DECODE_ALONE), BOTH),
    "shuffled token ids": (
        policy_with(embedding=[sent("prefill", "row-permutation"), sent("decode")]),
        BOTH,
    ),
    "a mask of one's own": (
        policy_with(qkv_proj=[sent("prefill", Chaff(straws=4)), sent("decode")]),
        BOTH,
    ),
    "its other phase": (
        policy_with(qkv_proj=[sent("prefill"), sent("decode", Chaff(straws=4))]),
        BOTH,
    ),
}


@each_row(("policy", "sizes"), OWN.values(), ids=list(OWN))
def test_rows_that_a_mask_adds_are_known_by_the_policy(
    model: SavedModel, tmp_path: Path, policy: Policy, sizes: list[int]
) -> None:
    """Wherever it adds them, though no smallest step tells."""
    prompt = begun(5)
    (session,) = recorded(model, policy, tmp_path, prompt).sessions
    (trace,) = session.traces
    assert [step.tokens for step in trace.steps] == sizes
    every = [*prompt[0], *session.truth.answer[:-1]]
    start = 0 if sizes[0] == 5 else 5
    assert list(session.truth.sent) == every[start : start + sum(sizes)]
    assert {call.operator for call in trace.calls} == {one for one, _ in policy.leaving()}


def test_a_long_prompt_comes_in_chunks_and_its_rest_is_not_decode(tmp_path: Path) -> None:
    """It has fewer rows than what is decoded, where that has rows added; and as many rows."""
    (tmp_path / "model").mkdir()
    model = make_begun_model(tmp_path / "model", max_position_embeddings=1024)
    long, nine = [0, *token_ids(DEFAULT_STEP_TOKENS + 4, 0, 128)], begun(9)[0]
    for placed, prompt, sizes in (
        (PREFILL_ALONE, long, [DEFAULT_STEP_TOKENS, 5]),
        (PREFILL_MASKED, long, [DEFAULT_STEP_TOKENS, 5, 1, 1]),
        (DECODE_MASKED, long, [DEFAULT_STEP_TOKENS, 5, 1, 1]),
        (DECODE_MASKED, nine, [9, 1, 1]),
    ):
        policy = policy_with(down_proj=placed)
        (session,) = recorded(model, policy, tmp_path / "played", [prompt], 3).sessions
        assert [step.tokens for step in session.traces[0].steps] == sizes


def test_what_is_added_is_no_part_of_what_crossed() -> None:
    """Bytes alone are read as before; who knows what is added reads more in them."""
    where: Where = (0, "o_proj")
    messages = tuple(linear(where, torch.ones(rows, 8)) for rows in (9, 6))
    added: Added = {(where, "prefill"): 2, (where, "decode"): 5}
    assert [step.tokens for step in Trace(messages).steps] == [4, 1]
    known = PolicyTrace(messages, added)
    assert [step.tokens for step in known.steps] == [7, 1]
    assert known == PolicyTrace(messages, {})
    assert Trace(((b"12", b"345"), (b"6",))).payload_bytes == 6
    nothing = Trace(())
    assert (nothing.calls, nothing.steps, nothing.places, nothing.tokens) == ((), (), [], 0)


def test_added_rows_are_those_of_each_mask(model: SavedModel) -> None:
    """Of a segment its rows cross; operators within one send nothing of their own."""
    config = read_config(model.directory)
    shuffled = {"name": "row-permutation", "dummy_rows": 6}
    policy = policy_with(
        embedding=sent(mask=shuffled),
        qkv_proj=[
            sent(mask=Chaff(straws=5), layers="0"),
            sent("prefill", "row-mix", layers="1"),
            stays("decode", layers="1"),
        ],
        lm_head=sent(mask=Chaff()),
    )
    assert added_rows(policy, config) == {
        ((None, "embedding"), "prefill"): 6,
        ((None, "embedding"), "decode"): 6,
        ((0, "qkv_proj"), "prefill"): 5,
        ((0, "qkv_proj"), "decode"): 5,
        ((1, "qkv_proj"), "prefill"): 0,
        ((None, "lm_head"), "prefill"): 3,
        ((None, "lm_head"), "decode"): 3,
    }
    inside: dict[str, Any] = {one: {"place": "tee", "layers": "1-"} for one in LAYER}
    first = policy_with(
        **{**inside, "o_proj": sent(layers="1-")}, segment=sent(layers="0"), lm_head=sent()
    )
    expected = {(0, "segment"), (1, "o_proj"), (None, "lm_head")}
    assert {where for where, _ in added_rows(first, config)} == expected


# ---------------------------------------------------------------------------------------- lengths


def trace(*rows: int) -> Trace:
    return Trace(tuple(linear((0, "down_proj"), torch.ones(count, 8)) for count in rows))


def test_lengths_follow_from_rows() -> None:
    """Of three rows that a mask adds to each, too; where no prompt crosses its length is unknown."""
    rows = [
        ((7, 1, 1), (7, 3)),
        ((512, 88, 1), (600, 2)),
        ((10, 4, 4), (7, 3)),
        ((1, 1, 1), (None, 4)),
        ((), (None, 1)),
    ]
    assert [read_lengths(trace(*sizes)) for sizes, _ in rows] == [found for _, found in rows]
    truth = truth_of(begun(6)[0], 4)
    right, longer, hidden = (
        Session((trace(*sizes),), truth) for sizes in ((4, 1, 1), (5, 1), (1, 1))
    )
    found = lengths([right, longer, hidden])
    assert (found.prompt, found.answer) == (Rate(hits=1, n=2), Rate(hits=2, n=3))
    assert lengths([hidden]).prompt is None
