"""Bytes are read as a service reads them, and cut into the forward passes that they were."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_side.weights import load_weights
from protocol.encoding import encode_request
from protocol.errors import ErrorCode, FeatureKeyError, ServiceError
from protocol.messages import EmbeddingRequest, LinearRequest, Request, TensorReply
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.weights import CPU
from protocol.tensors import from_torch, to_torch
from tee_side.engine.engine import DEFAULT_STEP_TOKENS
from tee_side.policy.placement import Policy, load_policy
from tee_side.words import PHASES
from tests.kit.leaks import (
    begun,
    linear,
    make_begun_model,
    policy_with,
    recorded,
    sending,
    truth_of,
)
from tests.kit.model import SavedModel, token_ids
from tests.kit.rows import each_row
from tsqp.feature_key import FeatureKey
from tsqp.lab.leak.attack import Trace, TraceError
from tsqp.lab.leak.model import Rate
from tsqp.lab.leak.recording import (
    KEY,
    SERVED,
    PlaySettings,
    RecordedSession,
    RecordingChannel,
    added_rows,
    logits_of,
    play,
)
from tsqp.lab.leak.score import lengths, read_lengths

# A row of each kind: in the clear, masks that add rows, products, pads, segments, two services.
SEND = ("attention-in-tee", "row-rotation", "published-permuted", "shielded", "dealt", "cloak")


def sent(phase: str | None = None, mask: Any = "none", **more: Any) -> dict[str, Any]:
    """Return how an operator leaves, in one phase or both; of a number, with so many rows added."""
    if isinstance(mask, int):
        mask = {"name": "row-rotation", "shield_rows": mask}
    found = {"place": "gpu", "mask": mask, "verify": "none", **more}
    return found | ({} if phase is None else {"phase": phase})


def stays(phase: str, **more: Any) -> dict[str, Any]:
    return {"place": "tee", "phase": phase, **more}


def test_a_message_that_is_cut_short_is_named() -> None:
    whole = linear((0, "o_proj"), torch.ones(3, 8))
    torn = (whole[0][:10], *whole[1:])
    for broken in ((*whole[:-1], whole[-1][:-1]), whole[:-1], torn):
        with pytest.raises(TraceError) as caught:
            _ = Trace((whole, broken, whole)).steps
        where = "trace: message 2 of 3"
        assert (caught.value.where, caught.value.expected) == (where, "a whole request")


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
        assert list(truth.tokens) == [*every[-sum(sizes) :], truth.answer[-1]]
        assert (len(truth.answer), truth.prompted) == (4, sum(sizes) - 3)
        assert len(session.traces) == policy.services
        # Of what is decoded the dealer has made the pads before.
        for trace, sizes in zip(session.traces, (sizes, sizes[:1]), strict=False):  # noqa: B020
            assert [step.tokens for step in trace.steps] == sizes
            assert [step.first for step in trace.steps] == [
                sum(sizes[:s]) for s in range(len(sizes))
            ]
            assert set(trace.places) == {where for where, _ in added}
            assert [call for step in trace.steps for call in step.calls] == list(trace.calls)
            # Each step has all that the policy sends away, each module once.
            assert len({tuple(c.where for c in step.calls) for step in trace.steps}) == 1
            for step in trace.steps:
                for call in step.calls:
                    if call.where[1] not in ("attn_scores", "attn_values", "lm_head"):
                        assert len(call.rows) == step.tokens + added[call.where, "decode"]
    found = lengths(played.sessions)
    assert found.prompt == (None if name == "shielded" else Rate(hits=2, n=2))
    assert found.answer == Rate(hits=2, n=2)


PREFILL_ALONE = [sent("prefill", 8), stays("decode")]
PREFILL_MASKED = [sent("prefill", 8), sent("decode")]
DECODE_MASKED = [sent("prefill"), sent("decode", 8)]
BOTH, DECODE = [5, 1, 1, 1], [1, 1, 1]
OTHER_LAYER = [
    sent("prefill", 8, layers="0"),
    stays("prefill", layers="1"),
    stays("decode", layers="0"),
    sent("decode", 2, layers="1"),
]
OWN: list[tuple[Policy, list[int]]] = [
    (sending("qkv_proj", "attn_scores", "attn_values", name="products"), BOTH),
    (sending("lm_head", name="head-alone"), [1, 1, 1, 1]),
    (policy_with("prefill-alone", qkv_proj=PREFILL_ALONE, o_proj=PREFILL_ALONE), [5]),
    (policy_with("prefill-and-a-head", qkv_proj=PREFILL_MASKED, lm_head=sent(mask=3)), BOTH),
    (policy_with("decode-alone", qkv_proj=[stays("prefill"), sent("decode", 3)]), DECODE),
    (policy_with("both", o_proj=[sent("prefill", 2), sent("decode", 6)]), BOTH),
    (policy_with("first-operator", qkv_proj=sent(mask=8), down_proj=sent()), BOTH),
    (policy_with("another-layer-by-phase", qkv_proj=OTHER_LAYER), BOTH),
    (policy_with("ids", embedding=[sent("prefill", "row-permutation"), sent("decode")]), BOTH),
]


@each_row(("policy", "sizes"), OWN, ids=lambda row: str(row[0].name))
def test_rows_that_a_mask_adds_are_known_by_the_policy(
    model: SavedModel, tmp_path: Path, policy: Policy, sizes: list[int]
) -> None:
    """Wherever it adds them, though no smallest step tells; of a head alone the last row."""
    (prompt,) = begun(5)
    (session,) = recorded(model, policy, tmp_path, [prompt]).sessions
    (trace,) = session.traces
    assert [step.tokens for step in trace.steps] == sizes
    every = [*prompt, *session.truth.answer[:-1]]
    start = {5: 0, 1: 5}[sizes[0]] - (len(sizes) == 4 and sizes[0] == 1)
    assert list(session.truth.tokens[:-1]) == every[start : start + sum(sizes)]
    assert {call.where[1] for call in trace.calls} == {one for one, _ in policy.leaving()}


def test_the_rest_of_a_long_prompt_is_not_decode(tmp_path: Path) -> None:
    """It has fewer rows than what is decoded, where that has rows added; a prompt has as many."""
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


def test_lengths_follow_from_rows() -> None:
    """Of three rows that a mask adds to each, too; of a prompt that stays nothing is known."""

    def trace(*rows: int, more: int = 0) -> Trace:
        made = tuple(linear((0, "down_proj"), torch.ones(count + more, 8)) for count in rows)
        return Trace(made, {((0, "down_proj"), phase): more for phase in PHASES} if more else {})

    rows = {(7, 1, 1): (7, 3), (512, 88, 1): (600, 2), (1, 1, 1): (None, 4), (): (None, 1)}
    for more in (0, 3):
        assert {sizes: read_lengths(trace(*sizes, more=more)) for sizes in rows} == rows
    truth = truth_of(begun(6)[0], 4)
    sessions = [RecordedSession((trace(*sizes),), truth) for sizes in ((4, 1, 1), (5, 1), (1, 1))]
    found = lengths(sessions)
    assert (found.prompt, found.answer) == (Rate(hits=1, n=2), Rate(hits=2, n=3))
    assert lengths(sessions[2:]).prompt is None


def linear_request(features: int) -> LinearRequest:
    rows = from_torch(torch.zeros(3, features))
    return LinearRequest(layer_idx=0, module_names=("o_proj",), hidden_states=rows)


def frames_of(request: Request, number: int) -> tuple[bytes, ...]:
    """Return the frames that a socket would get, of a client's request of some number."""
    return tuple(map(bytes, encode_request(request, number, 60_000)))


def test_what_is_recorded_is_what_a_socket_gets(model: SavedModel) -> None:
    """Nothing but bytes, which stay when the sender's memory is used again."""
    channel = RecordingChannel(load_weights(model.directory, device=CPU, dtype=torch.float32))
    rows, ids = torch.zeros(3, 96), torch.tensor([3, 5])
    look_up = EmbeddingRequest(input_ids=from_torch(ids), dtype="float32")
    exchange = channel.wait(channel.submit(look_up))
    expected = frames_of(look_up, 1), frames_of(linear_request(96), 2)
    channel.submit(linear_request(96).model_copy(update={"hidden_states": from_torch(rows)}))
    rows.fill_(7)
    assert len(channel.recorded) == 2
    trace = channel.take()
    assert trace.messages == expected
    assert (vars(trace).keys(), trace.added) == ({"messages", "added"}, {})
    assert {type(frame) for message in trace.messages for frame in message} == {bytes}
    assert isinstance(exchange.response, TensorReply)
    weight = model.reference.get_input_embeddings().weight
    assert torch.equal(to_torch(exchange.response.output), weight[ids])
    # A request that fails is recorded as well, in a trace that begins where the last one ended.
    with pytest.raises(ServiceError) as caught:
        channel.submit(linear_request(48))
    assert caught.value.code == ErrorCode.INVALID_FIELD
    assert channel.take().messages == (frames_of(linear_request(48), 3),)
    assert channel.take() == Trace(())


@each_row("name", ["cloak", "stip"])
def test_a_cloaks_service_gets_other_weights_and_no_key(
    model: SavedModel, tmp_path: Path, name: str
) -> None:
    """Nor is a key beside them while prompts run."""
    folder, beside = tmp_path / name, list[list[str]]()
    folder.mkdir()
    played = play(
        load_policy(name),
        begun(4, 3),
        PlaySettings(model.directory, 2),
        folder,
        lambda _done, _total: beside.append([path.name for path in folder.iterdir()]),
    )
    assert beside == [[SERVED], [SERVED]]
    assert played.served == folder / SERVED
    assert not [path for path in folder.rglob("*") if "key" in path.name.lower()]
    weight = "model.layers.0.self_attn.q_proj.weight"
    plain, served = (Checkpoint(d).rows(weight, 0, 4) for d in (model.directory, played.served))
    assert not torch.allclose(plain, served, atol=1e-2)


def test_no_key_is_left_where_logits_were_asked_for_or_it_was_refused(
    model: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, refused, prompts = tmp_path / "logits", tmp_path / "refused", begun(5, 4)
    logits.mkdir()
    found = logits_of(load_policy("cloak"), prompts, PlaySettings(model.directory, 2), logits)
    for ids, logits_TV in zip(prompts, found, strict=True):
        assert torch.allclose(logits_TV, model.logits(ids), atol=2e-3)

    def refuse(*_: object) -> None:
        assert (refused / KEY).exists()
        raise FeatureKeyError("key", got="this one", expected="another")

    monkeypatch.setattr(FeatureKey, "check", refuse)
    with pytest.raises(FeatureKeyError):
        recorded(model, "cloak", refused, prompts)
    for folder in (logits, refused):
        assert [path.name for path in folder.iterdir()] == [SERVED]
