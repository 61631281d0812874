"""Bytes are read as a service reads them, and cut into the forward passes that they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from protocol.tensors import from_torch
from tee_side.assembly import MaskSettings
from tee_side.engine.engine import DEFAULT_STEP_TOKENS
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.masks.mask import Seed
from tee_side.words import OPERATORS
from tests.kit.model import SavedModel, token_ids
from tests.unit.tsqp.leak.leaks import Models, embedding, linear, message, policy_of, tiny
from tsqp.lab.leak.record_session import PlaySettings, Recording, play
from tsqp.lab.leak.trace import Added, PolicyTrace, Trace, TraceError, Where

ROWS = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
WORDS = torch.arange(16, dtype=torch.int32).reshape(2, 8)
SEED = Seed(bytes(range(32)), (3, 4))
SEND = [name for name in builtin_policies() if load_policy(name).services]


def played(
    model: SavedModel, policy: Policy, folder: Path, *prompts: list[int], new_tokens: int = 4
) -> Recording:
    """Run prompts under a policy."""
    masks = MaskSettings(calibration=model.calibration if policy.arithmetic == "int8" else None)
    return play(policy, prompts, PlaySettings(model.directory, folder, new_tokens, masks=masks))


def sent(phase: str | None = None, mask: Any = None, **more: Any) -> dict[str, Any]:
    """Return how an operator leaves, in one phase or both."""
    found = {"place": "gpu", "mask": "none" if mask is None else mask, "verify": "none", **more}
    return found | ({} if phase is None else {"phase": phase})


def stays(phase: str | None = None, **more: Any) -> dict[str, Any]:
    """Return that it does not."""
    return {"place": "tee", **more} | ({} if phase is None else {"phase": phase})


def policy_with(**operators: Any) -> Policy:
    """Return a policy of some placements; all else stays."""
    placed = {name: operators.get(name, "tee") for name in OPERATORS}
    return Policy.model_validate({"name": "own", "summary": "own", "operators": placed})


def rotation(rows: int) -> dict[str, Any]:
    """Return a mask that adds rows."""
    return {"name": "row-rotation", "shield_rows": rows}


# ------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("request_", "where", "modules", "tensors"),
    [
        (
            EmbeddingRequest(input_ids=from_torch(torch.tensor([7, 8])), dtype="float32"),
            (None, "embedding"),
            (),
            [torch.tensor([7, 8])],
        ),
        (
            LinearRequest(
                layer_idx=2, module_names=("k_proj",), hidden_states=from_torch(ROWS.bfloat16())
            ),
            (2, "qkv_proj"),
            ("k_proj",),
            [ROWS.bfloat16()],
        ),
        (
            LinearRequest(
                layer_idx=0, module_names=("gate_proj", "up_proj"), hidden_states=from_torch(ROWS)
            ),
            (0, "gate_up_proj"),
            ("gate_proj", "up_proj"),
            [ROWS],
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
            MatmulRequest(a=from_torch(ROWS), b=from_torch(ROWS.T.contiguous())),
            (None, "attn_scores"),
            (),
            [ROWS, ROWS.T],
        ),
        (LMHeadRequest(hidden_states=from_torch(ROWS)), (None, "lm_head"), (), [ROWS]),
    ],
)
def test_a_request_is_read_with_all_its_tensors(
    request_: Request, where: Where, modules: tuple[str, ...], tensors: list[torch.Tensor]
) -> None:
    (call,) = Trace((message(request_),)).calls
    assert (call.where, call.layer, call.operator, call.modules) == (where, *where, modules)
    assert len(call.tensors) == len(tensors)
    for ours, theirs in zip(call.tensors, tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("request_", [InitRequest(), HealthRequest()])
def test_what_carries_no_tensor_is_no_call(request_: Request) -> None:
    trace = Trace((message(request_), linear((0, "o_proj"), ROWS), message(request_)))
    assert [call.where for call in trace.calls] == [(0, "o_proj")]
    assert len(trace.steps) == 1


def test_rows_are_those_of_every_batch() -> None:
    batched = from_torch(ROWS[None])
    request = LinearRequest(layer_idx=0, module_names=("o_proj",), hidden_states=batched)
    trace = Trace((message(request), embedding([4, 5, 6])))
    assert torch.equal(trace.calls[0].rows, ROWS)
    assert trace.calls[1].rows.tolist() == [4, 5, 6]


def test_payload_is_every_byte_of_every_frame() -> None:
    assert Trace(((b"12", b"345"), (b"6",))).payload_bytes == 6


def cut_short(frames: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (*frames[:-1], frames[-1][:-1])


def without_the_last(frames: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return frames[:-1]


def torn_header(frames: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (frames[0][:10], *frames[1:])


@pytest.mark.parametrize("broken", [cut_short, without_the_last, torn_header])
def test_a_message_that_is_cut_short_is_named(broken: object) -> None:
    whole = linear((0, "o_proj"), ROWS)
    assert callable(broken)
    with pytest.raises(TraceError) as caught:
        _ = Trace((whole, broken(whole), whole)).steps
    assert caught.value.where == "trace: message 2 of 3"
    assert caught.value.expected == "a whole request"
    assert caught.value.got


# ---------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("name", SEND)
def test_steps_are_the_forward_passes(model: SavedModel, tmp_path: Path, name: str) -> None:
    """Their tokens are those that were sent, though a mask adds rows."""
    policy = load_policy(name)
    recording = played(model, policy, tmp_path, token_ids(5), token_ids(9, seed=1))
    for session, prompt in zip(recording.sessions, (5, 9), strict=True):
        sizes = [1, 1, 1] if name == "shielded" else [prompt, 1, 1, 1]
        firsts = [sum(sizes[:step]) for step in range(len(sizes))]
        assert len(session.traces) == policy.services
        for trace in session.traces:
            assert [step.tokens for step in trace.steps] == sizes
            assert [step.first for step in trace.steps] == firsts
            assert trace.tokens == len(session.truth.sent)
            # Each step has all that the policy sends away, each module once.
            assert len({tuple(c.where for c in step.calls) for step in trace.steps}) == 1
            assert sum(len(step.calls) for step in trace.steps) == len(trace.messages)


@pytest.mark.parametrize("name", ["tsqp-permuted", "row-rotation"])
def test_a_mask_adds_rows_to_each_request(model: SavedModel, tmp_path: Path, name: str) -> None:
    (session,) = played(model, load_policy(name), tmp_path, token_ids(5)).sessions
    added = {"tsqp-permuted": 4, "row-rotation": 8}[name]
    places = [(0, "qkv_proj"), (1, "down_proj")]
    sizes = [
        len(call.rows) - step.tokens
        for step in session.traces[0].steps
        for call in step.calls
        if call.where in places
    ]
    assert sizes == [added] * len(sizes)
    assert sizes


def test_places_are_all_that_was_asked_for_in_order(model: SavedModel, tmp_path: Path) -> None:
    (session,) = played(model, load_policy("tsqp"), tmp_path, token_ids(5)).sessions
    trace = session.traces[0]
    layer = ("qkv_proj", "attn_scores", "attn_values", "o_proj", "gate_up_proj", "down_proj")
    assert trace.places == [
        (None, "embedding"),
        *((number, operator) for number in (0, 1) for operator in layer),
        (None, "lm_head"),
    ]


def test_a_module_in_a_request_of_its_own_belongs_to_its_operator(
    model: SavedModel, tmp_path: Path
) -> None:
    (session,) = played(model, load_policy("tsqp"), tmp_path, token_ids(5)).sessions
    step = session.traces[0].steps[0]
    modules = [call.modules for call in step.calls if call.where == (1, "qkv_proj")]
    assert modules == [("q_proj",), ("k_proj",), ("v_proj",)]
    found = step.at((1, "qkv_proj"))
    assert found is not None
    assert found.modules == ("q_proj",)
    assert step.at((7, "qkv_proj")) is None


def test_products_are_of_scores_then_values(model: SavedModel, tmp_path: Path) -> None:
    """Queries [K, G * T, C] times keys [K, C, S], then weights times values [K, S, C]."""
    (session,) = played(model, load_policy("tsqp"), tmp_path, token_ids(5)).sessions
    for step in session.traces[0].steps:
        positions = step.first + step.tokens
        for layer in (0, 1):
            scores, values = step.at((layer, "attn_scores")), step.at((layer, "attn_values"))
            assert scores is not None
            assert values is not None
            assert scores.tensors[1].shape == (2, 16, positions)
            assert values.tensors[1].shape == (2, positions, 16)
            assert scores.tensors[0].shape[-1] == 16
            assert values.tensors[0].shape[-1] == positions


@pytest.mark.parametrize("name", ["attention-in-tee", "row-rotation"])
def test_a_long_prompt_comes_in_chunks(saved_model: Models, tmp_path: Path, name: str) -> None:
    model = tiny(saved_model, max_position_embeddings=1024)
    prompt = token_ids(DEFAULT_STEP_TOKENS + 40)
    recording = played(model, load_policy(name), tmp_path, prompt, new_tokens=3)
    (session,) = recording.sessions
    sizes = [step.tokens for step in session.traces[0].steps]
    assert sizes == [DEFAULT_STEP_TOKENS, 40, 1, 1]
    assert [*prompt, *session.truth.answer[:-1]] == list(session.truth.sent)


@pytest.mark.parametrize(
    "policy",
    [
        policy_of("embedding"),
        policy_of("down_proj"),
        policy_of("qkv_proj", "attn_scores", "attn_values"),
        policy_of("qkv_proj", "o_proj", phase="prefill"),
        policy_of("qkv_proj", "o_proj", phase="decode"),
    ],
    ids=lambda policy: "+".join(dict.fromkeys(one for one, _ in policy.leaving())),
)
def test_steps_of_a_policy_of_ones_own(model: SavedModel, tmp_path: Path, policy: Policy) -> None:
    """Whatever it sends, and in whichever phase."""
    (session,) = played(model, policy, tmp_path, token_ids(5)).sessions
    (trace,) = session.traces
    assert trace.tokens == len(session.truth.sent)
    assert {call.operator for call in trace.calls} == {one for one, _ in policy.leaving()}


PREFILL_ALONE = [sent("prefill", "row-rotation"), stays("decode")]
DECODE_ALONE = [stays("prefill"), sent("decode")]
PREFILL_MASKED = [sent("prefill", "row-rotation"), sent("decode")]
DECODE_MASKED = [sent("prefill"), sent("decode", "row-rotation")]


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        (policy_with(qkv_proj=PREFILL_ALONE), [5]),
        (policy_with(qkv_proj=PREFILL_ALONE, o_proj=PREFILL_ALONE), [5]),
        (policy_with(qkv_proj=PREFILL_MASKED), [5, 1, 1, 1]),
        (policy_with(qkv_proj=PREFILL_MASKED, lm_head=sent(mask=rotation(3))), [5, 1, 1, 1]),
        (policy_with(qkv_proj=DECODE_MASKED), [5, 1, 1, 1]),
        (policy_with(qkv_proj=[stays("prefill"), sent("decode", rotation(3))]), [1, 1, 1]),
        (
            policy_with(o_proj=[sent("prefill", rotation(2)), sent("decode", rotation(6))]),
            [5, 1, 1, 1],
        ),
        (policy_with(qkv_proj=sent(mask=rotation(8)), down_proj=sent()), [5, 1, 1, 1]),
        (policy_with(qkv_proj=sent(), down_proj=sent(mask=rotation(8))), [5, 1, 1, 1]),
        (
            policy_with(
                qkv_proj=[sent(mask=rotation(8), layers="0"), sent(layers="1")], o_proj=sent()
            ),
            [5, 1, 1, 1],
        ),
        (
            policy_with(
                qkv_proj=[
                    sent("prefill", rotation(8), layers="0"),
                    stays("prefill", layers="1"),
                    stays("decode", layers="0"),
                    sent("decode", rotation(2), layers="1"),
                ]
            ),
            [5, 1, 1, 1],
        ),
        (policy_with(qkv_proj=PREFILL_ALONE, o_proj=DECODE_ALONE), [5, 1, 1, 1]),
        (policy_with(qkv_proj=PREFILL_MASKED, o_proj=DECODE_ALONE), [5, 1, 1, 1]),
        (policy_with(embedding=sent(mask="row-permutation")), [5, 1, 1, 1]),
        (
            policy_with(embedding=[sent("prefill", "row-permutation"), sent("decode")]),
            [5, 1, 1, 1],
        ),
    ],
    ids=[
        "prefill alone",
        "two operators of prefill alone",
        "prefill",
        "prefill and an LM head",
        "decode",
        "decode alone",
        "other masks by phase",
        "first operator",
        "last operator",
        "one layer",
        "another layer by phase",
        "another operator by phase",
        "one more operator at decode",
        "token ids",
        "token ids of prefill",
    ],
)
def test_rows_that_a_mask_adds_are_known_by_the_policy(
    model: SavedModel, tmp_path: Path, policy: Policy, sizes: list[int]
) -> None:
    """Wherever it adds them, though no smallest step tells."""
    for session in played(model, policy, tmp_path, token_ids(5)).sessions:
        (trace,) = session.traces
        assert [step.tokens for step in trace.steps] == sizes
        assert [step.first for step in trace.steps] == [sum(sizes[:n]) for n in range(len(sizes))]
        every = [*session.truth.prompt, *session.truth.answer[:-1]]
        start = 0 if sizes[0] == 5 else 5
        assert list(session.truth.sent) == every[start : start + sum(sizes)]


def test_a_prompt_of_as_many_rows_as_decode_sends_is_no_decode(
    model: SavedModel, tmp_path: Path
) -> None:
    """Nine rows: a prompt in the clear, and then one token behind eight rows that were added."""
    policy = policy_with(qkv_proj=DECODE_MASKED)
    (session,) = played(model, policy, tmp_path, token_ids(9)).sessions
    assert [step.tokens for step in session.traces[0].steps] == [9, 1, 1, 1]


@pytest.mark.parametrize("new_tokens", [1, 4])
def test_one_step_is_enough_to_know_it(model: SavedModel, tmp_path: Path, new_tokens: int) -> None:
    policy = policy_with(qkv_proj=PREFILL_ALONE)
    (session,) = played(model, policy, tmp_path, token_ids(5), new_tokens=new_tokens).sessions
    ((step,),) = (trace.steps for trace in session.traces)
    assert (step.tokens, {len(call.rows) for call in step.calls}) == (5, {13})


@pytest.mark.parametrize(
    ("placed", "sizes"),
    [
        (PREFILL_ALONE, [DEFAULT_STEP_TOKENS, 5]),
        (PREFILL_MASKED, [DEFAULT_STEP_TOKENS, 5, 1, 1]),
        (DECODE_MASKED, [DEFAULT_STEP_TOKENS, 5, 1, 1]),
    ],
    ids=["prefill alone", "prefill", "decode"],
)
def test_the_rest_of_a_long_prompt_is_not_decode(
    saved_model: Models, tmp_path: Path, placed: list[dict[str, Any]], sizes: list[int]
) -> None:
    """It has fewer rows than what is decoded, where that has rows added."""
    model = tiny(saved_model, max_position_embeddings=1024)
    prompt = token_ids(DEFAULT_STEP_TOKENS + 5)
    policy = policy_with(down_proj=placed)
    (session,) = played(model, policy, tmp_path, prompt, new_tokens=3).sessions
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
    assert hash(known) == hash(PolicyTrace(messages, {}))
    assert known.payload_bytes == Trace(messages).payload_bytes


def test_nothing_sent_is_no_step() -> None:
    trace = Trace(())
    assert (trace.calls, trace.steps, trace.places, trace.tokens) == ((), (), [], 0)
