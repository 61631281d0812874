"""A run refuses what cannot work, keeps what it has, and says what it lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ModelError, PolicyError, SettingsError
from protocol.model.config import read_config
from tee_side.policy.placement import load_policy
from tee_side.words import Operator
from tests.kit.model import SavedModel
from tests.unit.tsqp.leak.leaks import Models, policy_of
from tests.unit.tsqp.leak.runs import (
    PROMPTS,
    Blind,
    Interrupts,
    run,
    settings_of,
)
from tsqp.lab.leak.attack_runner import Station
from tsqp.lab.leak.attacks.direct import NearestEmbedding
from tsqp.lab.leak.attacks.vocabulary import PlainMatching
from tsqp.lab.leak.interval import needed
from tsqp.lab.leak.laboratory import Laboratory, agreement
from tsqp.lab.leak.model import Report
from tsqp.lab.leak.settings import Watch


def test_the_report_says_what_was_attacked(model: SavedModel, tmp_path: Path) -> None:
    report = run(
        model.directory,
        tmp_path,
        ["row-rotation"],
        [PlainMatching],
        search_sessions=1,
        search_tokens=4,
        temperature=0.5,
        seed=3,
    )
    setup = report.setup
    assert (setup.sessions, setup.prompt_tokens, setup.new_tokens) == (3, 18, 5)
    assert (setup.search_sessions, setup.search_tokens) == (1, 4)
    assert (setup.vocab_size, setup.hidden_size, setup.dtype) == (320, 48, "float32")
    assert (setup.temperature, setup.seed, setup.model) == (0.5, 3, model.directory.name)
    assert report.incomplete is None
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_progress_is_told_attack_by_attack(model: SavedModel, tmp_path: Path) -> None:
    """Each of two policies: recorded, attacked once; and two points of a curve."""
    totals: list[int] = []
    steps: list[int] = []
    doing: list[str] = []
    watch = Watch(total=totals.append, doing=doing.append, step=steps.append)
    settings = settings_of(
        model.directory, ["float-noise", "row-mix"], [NearestEmbedding], curves=(0.5, 64.0)
    )
    laboratory = Laboratory(settings, tmp_path, watch)
    assert not laboratory.measured
    laboratory.run()
    assert laboratory.measured
    assert (totals, sum(steps)) == ([6], 6)
    assert "nearest-embedding: control, attention-in-tee" in doing
    (curve,) = laboratory.report().curves
    assert [point.sigma for point in curve.points] == [0.5, 64.0]
    assert curve.points[0].rate.hits > curve.points[1].rate.hits


# ----------------------------------------------------------------------------------------- refusals


def test_too_few_tokens_for_the_margin_are_refused_with_both_numbers(
    model: SavedModel, tmp_path: Path
) -> None:
    """Those of answers, as a policy may send no others; the last of each goes through no model."""
    blind = 1 / read_config(model.directory).vocab_size
    for new_tokens, margin in ((5, 0.2), (64, 0.005)):
        with pytest.raises(SettingsError) as caught:
            Laboratory(
                settings_of(
                    model.directory, ["tsqp"], [Blind], new_tokens=new_tokens, margin=margin
                ),
                tmp_path,
            )
        assert caught.value.where == f"interval of {margin:g}"
        assert caught.value.got.startswith(f"{3 * (new_tokens - 1)} tokens")
        assert f"at least {needed(margin, blind)}," in caught.value.expected
    enough = -(-needed(0.2, blind) // 3) + 1
    settings = settings_of(model.directory, ["tsqp"], [Blind], new_tokens=enough, margin=0.2)
    Laboratory(settings, tmp_path)


@pytest.mark.parametrize(
    ("changed", "where", "got"),
    [
        ({"new_tokens": 1}, "--new-tokens", "1"),
        ({"prompts": PROMPTS[:1]}, "--prompts", "1"),
        (
            {"policies": (("a", load_policy("tsqp")), ("b", load_policy("tsqp")))},
            "--policy",
            "two of one name",
        ),
        (
            {"policies": (("n", load_policy("float-noise")),), "curves": (1.0, 20_000.0)},
            "sigma of a curve, policy float-noise: sigma",
            "20000.0",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    model: SavedModel, tmp_path: Path, changed: dict[str, Any], where: str, got: str
) -> None:
    settings = replace(settings_of(model.directory, ["tsqp"], [Blind]), **changed)
    with pytest.raises(SettingsError) as caught:
        Laboratory(settings, tmp_path)
    assert (caught.value.where, caught.value.got) == (where, got)
    assert not list(tmp_path.iterdir())


def test_prompts_that_are_alike_are_refused(model: SavedModel, tmp_path: Path) -> None:
    """What they share would count as chance, and hide that it is read."""
    prompts = tuple((1, 2, 3, 4, 5, number) for number in range(10, 13))
    settings = replace(settings_of(model.directory, ["tsqp"], [Blind]), prompts=prompts)
    with pytest.raises(SettingsError, match="the same token at 80% of places in two of them") as no:
        Laboratory(settings, tmp_path)
    assert "longer --prompt-tokens, or another --text, helps" in no.value.expected


def test_a_token_that_all_prompts_begin_with_is_no_likeness(
    model: SavedModel, tmp_path: Path
) -> None:
    """It is BOS, and a quarter of a short prompt; one that some begin with is their text."""
    short = [(1, 10 * number, 10 * number + 1, 10 * number + 2) for number in range(1, 5)]
    assert agreement(short) == 0
    settings = settings_of(model.directory, ["tsqp"], [Blind])
    Laboratory(replace(settings, prompts=tuple(short)), tmp_path)
    other = (5, 6, 7, 8)
    assert agreement([*short, other]) == 3 / 16
    assert agreement([(1, 2), (1, 2)]) == 1
    assert agreement([(1,), (1,)]) == 0


def test_two_attacks_of_one_name_are_refused(model: SavedModel, tmp_path: Path) -> None:
    """One would be believed by the other's control."""
    settings = replace(settings_of(model.directory, ["tsqp"], [Blind]), attacks=(Blind, Blind))
    with pytest.raises(SettingsError, match="--attack: got two of one name"):
        Laboratory(settings, tmp_path)


def test_a_public_model_of_another_shape_is_refused(
    model: SavedModel, saved_model: Models, tmp_path: Path
) -> None:
    other = saved_model(hidden_size=24).directory
    settings = replace(settings_of(model.directory, ["tsqp"], [Blind]), public=other)
    with pytest.raises(SettingsError, match="hidden_size: got 24, expected 48"):
        Laboratory(settings, tmp_path)


@pytest.mark.parametrize(
    "operators", [("qkv_proj", "attn_values"), ("attn_scores", "attn_values", "o_proj")]
)
def test_products_that_nothing_tells_apart_are_refused(
    model: SavedModel, tmp_path: Path, operators: tuple[Operator, ...]
) -> None:
    policies = (("mine", policy_of(*operators)),)
    settings = replace(settings_of(model.directory, ["tsqp"], [Blind]), policies=policies)
    with pytest.raises(PolicyError, match="layer 0: got some of qkv_proj, attn_scores"):
        Laboratory(settings, tmp_path)


def test_a_policy_or_a_model_that_does_not_fit_is_refused(
    model: SavedModel, tmp_path: Path
) -> None:
    policy = load_policy("tsqp")
    layered = policy.model_validate(
        {
            **policy.model_dump(),
            "name": "deep",
            "operators": {
                **dict.fromkeys(policy.operators, "tee"),
                "qkv_proj": [
                    {"place": "gpu", "layers": "0-7", "mask": "none", "verify": "none"},
                    {"place": "tee", "layers": "8-"},
                ],
            },
        }
    )
    with pytest.raises(PolicyError):
        Laboratory(settings_of(model.directory, [layered], [Blind]), tmp_path)
    with pytest.raises(ModelError):
        Laboratory(settings_of(tmp_path, ["tsqp"], [Blind]), tmp_path)
    with pytest.raises(ModelError):
        Laboratory(settings_of(model.directory, ["tsqp"], [Blind], public=tmp_path), tmp_path)


# ------------------------------------------------------------------------------- what ends it early


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModelError("x", got="y", expected="z"), "x: got y, expected z"),
        (ValueError("a secret"), "ValueError"),
    ],
)
def test_a_policy_that_fails_leaves_the_others(
    model: SavedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
) -> None:
    """The very error is raised when all is done."""
    monkeypatch.setattr(Interrupts, "error", error)
    said: list[str] = []
    done: list[str] = []
    policies = ["attention-in-tee", "row-rotation", "row-mix"]
    settings = settings_of(model.directory, policies, [Interrupts])
    laboratory = Laboratory(settings, tmp_path, Watch(say=said.append, done=done.append))
    with pytest.raises(type(error)) as caught:
        laboratory.run()
    assert caught.value is error
    report = laboratory.report()
    assert [found.policy for found in report.policies] == ["attention-in-tee", "row-mix"]
    assert report.incomplete == f"{reason}; not attacked: row-rotation"
    assert said[-1] == f"row-rotation: {reason}"
    assert done == ["attention-in-tee: done, 1 of 3", "row-mix: done, 3 of 3"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(130)])
def test_an_interrupted_run_keeps_what_it_has(
    model: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """And ends at once."""
    monkeypatch.setattr(Interrupts, "error", error)
    policies = ["attention-in-tee", "row-rotation", "row-mix"]
    laboratory = Laboratory(settings_of(model.directory, policies, [Interrupts]), tmp_path)
    with pytest.raises(type(error)):
        laboratory.run()
    assert laboratory.measured
    report = laboratory.report()
    assert [found.policy for found in report.policies] == ["attention-in-tee"]
    assert report.incomplete == "interrupted; not attacked: row-rotation, row-mix"


def test_a_run_that_has_nothing_says_so(
    model: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interrupts, "error", ValueError("a secret"))
    laboratory = Laboratory(settings_of(model.directory, ["row-rotation"], [Interrupts]), tmp_path)
    with pytest.raises(ValueError, match="secret"):
        laboratory.run()
    assert not laboratory.measured
    assert laboratory.report().incomplete == "ValueError; not attacked: row-rotation"


@pytest.mark.parametrize("part", ["curve", "attack"])
def test_a_curve_is_something_and_is_missed(
    model: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Of a policy and its curve one fails."""

    def fails(self: Station, policy: Any) -> None:
        raise ModelError("x", got="y", expected="z")

    monkeypatch.setattr(Station, part, fails)
    settings = settings_of(model.directory, ["float-noise"], [NearestEmbedding], curves=(0.5,))
    laboratory = Laboratory(settings, tmp_path)
    with pytest.raises(ModelError):
        laboratory.run()
    assert laboratory.measured
    report = laboratory.report()
    lacks = "curve of float-noise" if part == "curve" else "float-noise"
    assert report.incomplete == f"x: got y, expected z; not attacked: {lacks}"
    assert (len(report.policies), len(report.curves)) == ((1, 0) if part == "curve" else (0, 1))
