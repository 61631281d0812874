"""Prompts are run as users run them; the truth says what went through, and when it crossed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from protocol.errors import CalibrationError, FeatureKeyError, PromptError
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from tee_side.assembly import MaskSettings
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.masks.mask import Masked, RowMask
from tee_side.protect.randomness import Randomness
from tee_side.words import OPERATORS, Operator
from tests.kit.model import SavedModel, token_ids
from tests.unit.tsqp.leak.leaks import policy_of
from tsqp.lab.leak.record_session import (
    KEY,
    SERVED,
    PlaySettings,
    Recording,
    added_rows,
    logits_of,
    play,
)
from tsqp.lab.leak.trace import PolicyTrace
from tsqp.lab.research.feature_key import FeatureKey

PROMPTS = [token_ids(5), token_ids(8, seed=1)]
POLICIES = {name: load_policy(name) for name in builtin_policies()}
# Noise is no mask that can be undone.
EXACT = [
    name for name, one in POLICIES.items() if one.arithmetic == "float" and name != "float-noise"
]
INTEGER = [name for name, one in POLICIES.items() if one.arithmetic == "int8"]


def settings(model: SavedModel, policy: Policy, folder: Path, new_tokens: int) -> PlaySettings:
    masks = MaskSettings(calibration=model.calibration if policy.arithmetic == "int8" else None)
    return PlaySettings(model.directory, folder, new_tokens, masks=masks)


def played(model: SavedModel, policy: Policy | str, folder: Path, new_tokens: int = 4) -> Recording:
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    return play(chosen, PROMPTS, settings(model, chosen, folder, new_tokens))


@pytest.mark.parametrize("name", EXACT)
def test_answers_are_those_of_the_model(model: SavedModel, tmp_path: Path, name: str) -> None:
    recording = played(model, name, tmp_path, 6)
    answers = [list(session.truth.answer) for session in recording.sessions]
    assert answers == [model.greedy(prompt, 6) for prompt in PROMPTS]
    assert [list(session.truth.prompt) for session in recording.sessions] == PROMPTS


@pytest.mark.parametrize("name", INTEGER)
def test_answers_of_integers_are_one_for_all_masks(
    model: SavedModel, tmp_path: Path, name: str
) -> None:
    recording = played(model, name, tmp_path, 6)
    expected = [model.tee("quantized-clear").greedy(prompt, 6) for prompt in PROMPTS]
    assert [list(session.truth.answer) for session in recording.sessions] == expected


@pytest.mark.parametrize(
    "name", [name for name in POLICIES if name not in ("shielded", "tee-only", "tee-only-int8")]
)
def test_where_prefill_crosses_all_but_the_last_token_is_sent(
    model: SavedModel, tmp_path: Path, name: str
) -> None:
    for session in played(model, name, tmp_path).sessions:
        truth = session.truth
        assert truth.sent == (*truth.prompt, *truth.answer[:-1])
        assert truth.answers == (*[False] * len(truth.prompt), *[True] * 3)
        assert truth.last == truth.answer[-1]
        assert len(truth.answer) == 4


@pytest.mark.parametrize("policy", ["shielded", policy_of("down_proj", phase="decode")])
def test_where_prefill_stays_the_answer_alone_is_sent(
    model: SavedModel, tmp_path: Path, policy: Policy | str
) -> None:
    for session in played(model, policy, tmp_path).sessions:
        truth = session.truth
        assert truth.sent == truth.answer[:-1]
        assert truth.answers == (True,) * 3


def test_where_decode_stays_the_prompt_alone_is_sent(model: SavedModel, tmp_path: Path) -> None:
    for session in played(model, policy_of("down_proj", phase="prefill"), tmp_path).sessions:
        assert session.truth.sent == session.truth.prompt
        assert session.truth.answers == (False,) * len(session.truth.prompt)


def test_where_nothing_crosses_nothing_is_sent(model: SavedModel, tmp_path: Path) -> None:
    recording = played(model, "tee-only", tmp_path)
    assert not recording.observable
    for session in recording.sessions:
        assert (session.traces, session.truth.sent, session.truth.answers) == ((), (), ())
        assert len(session.truth.answer) == 4


def test_one_new_token_goes_through_no_model(model: SavedModel, tmp_path: Path) -> None:
    for session in played(model, "attention-in-tee", tmp_path, 1).sessions:
        assert session.truth.sent == session.truth.prompt
        assert session.truth.last == session.truth.answer[0]


@pytest.mark.parametrize(("name", "services"), [("two-server", 2), ("tsqp", 1)])
def test_each_session_has_a_trace_of_its_own_from_each_service(
    model: SavedModel, tmp_path: Path, name: str, services: int
) -> None:
    recording = played(model, name, tmp_path)
    assert recording.observable
    traces = [session.traces for session in recording.sessions]
    assert [len(found) for found in traces] == [services, services]
    every = {trace.messages for found in traces for trace in found}
    assert len(every) == 2 * services
    lengths = [[step.tokens for step in found[0].steps] for found in traces]
    assert lengths == [[5, 1, 1, 1], [8, 1, 1, 1]]


@pytest.mark.parametrize("name", ["cloak", "stip"])
def test_a_feature_masks_service_gets_other_weights_and_no_key(
    model: SavedModel, tmp_path: Path, name: str
) -> None:
    recording = played(model, name, tmp_path)
    assert recording.served == tmp_path / SERVED
    assert not list(recording.served.rglob("*key*"))
    weight = "model.layers.0.self_attn.q_proj.weight"
    plain, served = (Checkpoint(d).rows(weight, 0, 4) for d in (model.directory, recording.served))
    assert plain.shape == served.shape
    assert not torch.allclose(plain, served, atol=1e-2)


@pytest.mark.parametrize("name", ["cloak", "stip"])
def test_no_key_is_left_beside_what_is_served(model: SavedModel, tmp_path: Path, name: str) -> None:
    """Nor is it there while prompts run."""
    chosen, beside = load_policy(name), list[list[str]]()
    play(
        chosen,
        PROMPTS,
        settings(model, chosen, tmp_path, 2),
        lambda _done, _total: beside.append([path.name for path in tmp_path.iterdir()]),
    )
    assert beside == [[SERVED], [SERVED]]
    assert [path.name for path in tmp_path.iterdir()] == [SERVED]
    # Nor in a link or a copy by another name.
    assert not [path for path in tmp_path.rglob("*") if "key" in path.name.lower()]


def test_no_key_is_left_where_logits_were_asked_for(model: SavedModel, tmp_path: Path) -> None:
    logits_of(load_policy("cloak"), PROMPTS, PlaySettings(model.directory, tmp_path, 2))
    assert [path.name for path in tmp_path.iterdir()] == [SERVED]


def test_no_key_is_left_where_it_was_refused(
    model: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        assert (tmp_path / KEY).exists()
        raise FeatureKeyError("key", got="this one", expected="another")

    monkeypatch.setattr(FeatureKey, "check", refuse)
    with pytest.raises(FeatureKeyError):
        played(model, "cloak", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [SERVED]


@pytest.mark.parametrize("policy", ["tsqp", "tee-only"])
def test_a_file_of_that_name_stays_where_no_key_was_made(
    model: SavedModel, tmp_path: Path, policy: str
) -> None:
    (tmp_path / KEY).write_text("of somebody else")
    played(model, policy, tmp_path)
    assert (tmp_path / KEY).read_text() == "of somebody else"


def test_without_a_feature_mask_the_service_has_the_model(
    model: SavedModel, tmp_path: Path
) -> None:
    assert played(model, "tsqp", tmp_path).served == model.directory
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("prompts", [[], [[]], [[1, 320]], [[-1]]])
def test_prompts_that_are_none_are_refused(
    model: SavedModel, tmp_path: Path, prompts: list[list[int]]
) -> None:
    with pytest.raises(PromptError):
        play(load_policy("tsqp"), prompts, PlaySettings(model.directory, tmp_path, 2))


def test_no_prompts_are_said_to_be_none(model: SavedModel, tmp_path: Path) -> None:
    with pytest.raises(PromptError) as caught:
        play(load_policy("tsqp"), [], PlaySettings(model.directory, tmp_path, 2))
    assert str(caught.value) == "prompts: got none, expected at least one"


def test_what_a_policy_lacks_is_refused(model: SavedModel, tmp_path: Path) -> None:
    """Scales, which the model has none of."""
    with pytest.raises(CalibrationError):
        play(load_policy("shielded"), PROMPTS, PlaySettings(model.directory, tmp_path, 2))


def test_progress_is_told_after_each_prompt(model: SavedModel, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    chosen = load_policy("tsqp")
    play(
        chosen,
        PROMPTS,
        settings(model, chosen, tmp_path, 2),
        lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 2), (2, 2)]


def test_sampling_depends_on_the_seed_alone(model: SavedModel, tmp_path: Path) -> None:
    """At a temperature; each prompt gets a seed of its own."""

    def answers(seed: int) -> list[tuple[int, ...]]:
        chosen = PlaySettings(model.directory, tmp_path, 8, temperature=5.0, seed=seed)
        recording = play(load_policy("tee-only"), [token_ids(4)] * 2, chosen)
        return [session.truth.answer for session in recording.sessions]

    first = answers(1)
    assert first == answers(1)
    assert first != answers(7)
    assert first[0] != first[1]


def test_the_dtype_is_that_of_both_sides(model: SavedModel, tmp_path: Path) -> None:
    chosen = PlaySettings(model.directory, tmp_path, 2, dtype="bfloat16")
    recording = play(load_policy("attention-in-tee"), PROMPTS, chosen)
    assert recording.dtype == torch.bfloat16
    calls = recording.sessions[0].traces[0].calls
    assert {call.rows.dtype for call in calls} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["tee-only", "row-rotation", "cloak"])
def test_logits_behind_every_token(model: SavedModel, tmp_path: Path, name: str) -> None:
    chosen = PlaySettings(model.directory, tmp_path, 2)
    found = logits_of(load_policy(name), PROMPTS, chosen)
    for ids, logits_TV in zip(PROMPTS, found, strict=True):
        assert torch.allclose(logits_TV, model.logits(ids), atol=2e-3)


# ------------------------------------------------------------------------------------ added rows


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
        """Put rows of ones behind."""
        behind = torch.ones(self.straws, x_TI.shape[1], dtype=x_TI.dtype)
        return Masked((torch.cat([x_TI, behind]),), lambda y_RO: y_RO[: len(x_TI)])


def placed(**operators: Any) -> Policy:
    """Return a policy of some placements; all else stays."""
    every = {name: operators.get(name, "tee") for name in OPERATORS}
    return Policy.model_validate({"name": "own", "summary": "own", "operators": every})


def test_added_rows_are_those_of_each_mask(model: SavedModel) -> None:
    policy = placed(
        embedding={
            "place": "gpu",
            "mask": {"name": "row-permutation", "dummy_rows": 6},
            "verify": "none",
        },
        qkv_proj=[
            {"place": "gpu", "layers": "0", "mask": Chaff(straws=5), "verify": "none"},
            {
                "place": "gpu",
                "layers": "1",
                "phase": "prefill",
                "mask": "row-mix",
                "verify": "none",
            },
            {"place": "tee", "layers": "1", "phase": "decode"},
        ],
        down_proj=[
            {
                "place": "gpu",
                "phase": "prefill",
                "mask": {"name": "row-rotation"},
                "verify": "none",
            },
            {"place": "gpu", "phase": "decode", "mask": "none", "verify": "none"},
        ],
        lm_head={"place": "gpu", "mask": Chaff(), "verify": "none"},
    )
    expected: dict[tuple[int | None, Operator, str], int] = {
        (None, "embedding", "prefill"): 6,
        (None, "embedding", "decode"): 6,
        (0, "qkv_proj", "prefill"): 5,
        (0, "qkv_proj", "decode"): 5,
        (1, "qkv_proj", "prefill"): 0,
        (0, "down_proj", "prefill"): 8,
        (1, "down_proj", "prefill"): 8,
        (0, "down_proj", "decode"): 0,
        (1, "down_proj", "decode"): 0,
        (None, "lm_head", "prefill"): 3,
        (None, "lm_head", "decode"): 3,
    }
    found = added_rows(policy, read_config(model.directory))
    assert {(*where, phase): rows for (where, phase), rows in found.items()} == expected


@pytest.mark.parametrize("name", [name for name in POLICIES if POLICIES[name].services])
def test_a_trace_is_told_what_was_added(model: SavedModel, tmp_path: Path, name: str) -> None:
    """To each request that is counted, and to nothing that the policy does not send."""
    recording = played(model, name, tmp_path)
    expected = added_rows(POLICIES[name], read_config(model.directory))
    for session in recording.sessions:
        for trace in session.traces:
            assert isinstance(trace, PolicyTrace)
            assert trace.added == expected
            assert set(trace.places) == {where for where, _ in expected}
            for step in trace.steps:
                for call in step.calls:
                    if call.operator not in ("attn_scores", "attn_values", "lm_head"):
                        assert len(call.rows) == step.tokens + expected[call.where, "decode"]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_mask_of_ones_own_may_add_rows_in_one_phase(
    model: SavedModel, tmp_path: Path, phase: str
) -> None:
    other = "decode" if phase == "prefill" else "prefill"
    masked = {"place": "gpu", "phase": phase, "mask": Chaff(straws=4), "verify": "none"}
    policy = placed(
        qkv_proj=[masked, {"place": "gpu", "phase": other, "mask": "none", "verify": "none"}]
    )
    for session, prompt in zip(played(model, policy, tmp_path).sessions, PROMPTS, strict=True):
        assert [step.tokens for step in session.traces[0].steps] == [len(prompt), 1, 1, 1]
        assert session.truth.sent == (*session.truth.prompt, *session.truth.answer[:-1])
        assert list(session.truth.answer) == model.greedy(prompt, 4)


def test_of_segments_what_crosses_is_the_rows_in_both_phases(model: SavedModel) -> None:
    """An operator within one sends nothing of its own, nor does an LM head in its call."""
    config = read_config(model.directory)
    for name in ("clear-segment", "attested-segment", "stip-segment", "cloak-segment"):
        expected = {((0, "segment"), "prefill"): 0, ((0, "segment"), "decode"): 0}
        assert added_rows(load_policy(name), config) == expected
    clear = {"place": "gpu", "mask": "none", "verify": "none"}
    operators: dict[str, Any] = {one: {"place": "tee", "layers": "1-"} for one in OPERATORS}
    first = Policy.model_validate(
        {
            "name": "own",
            "summary": "own",
            "operators": {
                **operators,
                "segment": {**clear, "layers": "0"},
                "o_proj": {**clear, "layers": "1-"},
                "embedding": "tee",
                "lm_head": clear,
            },
        }
    )
    first.check(config.num_hidden_layers)
    assert {where for where, _ in added_rows(first, config)} == {
        (0, "segment"),
        (1, "o_proj"),
        (None, "lm_head"),
    }


def test_a_segments_session_is_kept_on_disk_beside_its_trace(
    model: SavedModel, tmp_path: Path
) -> None:
    for name, kept in (("cloak-segment", True), ("attention-in-tee", False)):
        (tmp_path / name).mkdir()
        recording = played(model, name, tmp_path / name)
        assert [session.disk is not None for session in recording.sessions] == [kept, kept]
        assert len(recording.disks) == 2 * kept
        sizes = [len(disk.clear) for disk in recording.disks]
        # Longer sessions are larger files, of keys and values in each layer.
        tokens = [len(session.truth.sent) for session in recording.sessions]
        _, heads, size = read_config(model.directory).heads
        assert sizes == [4 * 2 * 2 * heads * size * count for count in tokens][: len(sizes)]
        left = {path.name for path in (tmp_path / name).iterdir()}
        assert left == ({SERVED} if kept else set())
