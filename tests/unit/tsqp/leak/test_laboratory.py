"""A run attacks every policy, and believes no attack that fails on its control."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError, PolicyError, SettingsError
from protocol.model.config import read_config
from tee_side.policy import load_policy
from tee_side.vocabulary import Operator
from tests.support import SavedModel, token_ids
from tests.unit.tsqp.leak.leaks import Models, policy_of, tiny
from tsqp.bench import prepare
from tsqp.leak.attack import Attack, Reading, View, Work
from tsqp.leak.attacks.direct import NearestEmbedding, TokenIds
from tsqp.leak.attacks.rotations import NormDictionary
from tsqp.leak.attacks.vocabulary import PlainMatching
from tsqp.leak.interval import needed
from tsqp.leak.laboratory import Laboratory, agreement
from tsqp.leak.model import Control, PolicyLeak, Rate, Report
from tsqp.leak.settings import LeakSettings, Watch
from tsqp.leak.station import Station
from tsqp.leak.words import warnings

PROMPTS = tuple(tuple(token_ids(6, seed)) for seed in range(3))
FIRST = "layer 0 qkv_proj"


class _Mine(Attack):
    """A family of attacks with a control that is easy."""

    reads: ClassVar[str] = "nothing"
    source: ClassVar[str] = "this test"
    control: ClassVar[str] = "attention-in-tee"
    published: ClassVar[float] = 0.9

    def refuses(self, view: View) -> str | None:
        return None if view.linear_places() else "no activations crossed"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        for session, trace in enumerate(view.traces):
            yield Reading(FIRST, session, range(trace.tokens), {})


class Blind(_Mine):
    """Reads nothing anywhere."""

    name: ClassVar[str] = "blind"


class OnlyHere(_Mine):
    """Reads nothing on its control and everything in the clear under integers."""

    name: ClassVar[str] = "only-here"
    control: ClassVar[str] = "row-rotation"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        if view.policy.name != self.control:
            yield from NearestEmbedding().read(view, work)


class Refuses(_Mine):
    """Finds nothing to do on its control."""

    name: ClassVar[str] = "refuses"
    control: ClassVar[str] = "tee-only"


class Interrupts(_Mine):
    """Raises an error under one policy."""

    name: ClassVar[str] = "interrupts"
    error: ClassVar[BaseException] = KeyboardInterrupt()

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        if view.policy.name == "row-rotation":
            raise self.error
        yield from NearestEmbedding().read(view, work)


@pytest.fixture
def model(saved_model: Models) -> SavedModel:
    return tiny(saved_model)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare in this process: another one takes seconds to start."""

    def run_here(work: Callable[..., None], *arguments: object) -> None:
        work(*arguments)

    monkeypatch.setattr(prepare, "in_fresh_process", run_here)


def settings_of(
    model: Path, policies: Sequence[Any], attacks: Sequence[type[Attack]], **changed: Any
) -> LeakSettings:
    named = [
        (one, load_policy(one)) if isinstance(one, str) else (one.name, one) for one in policies
    ]
    settings: dict[str, Any] = {
        "command": "tsqp leak",
        "model": model,
        "policies": tuple(named),
        "attacks": tuple(attacks),
        "prompts": PROMPTS,
        "new_tokens": 5,
    }
    return LeakSettings(**{**settings, **changed})


def run(
    model: Path, folder: Path, policies: Sequence[Any], attacks: Sequence[type[Attack]], **more: Any
) -> Report:
    laboratory = Laboratory(settings_of(model, policies, attacks, **more), folder)
    laboratory.run()
    return laboratory.report()


def only(report: Report) -> PolicyLeak:
    (found,) = report.policies
    return found


# ------------------------------------------------------------------------------- the control rule


def test_an_attack_that_reads_nothing_on_its_control_is_no_evidence(
    model: SavedModel, tmp_path: Path
) -> None:
    """Its low rate is not reported as what is read, and the policy is not said to be safe."""
    found = only(run(model.directory, tmp_path, ["row-rotation"], [Blind]))
    (blind,) = found.runs
    assert blind.control is not None
    assert (blind.control.policy, blind.control.rate) == ("attention-in-tee", Rate(hits=0, n=30))
    assert blind.control.published == 0.9
    assert not blind.control.worked
    assert not blind.worked
    assert blind.scores[0].top1 == Rate(hits=0, n=30)
    assert found.best is None
    assert found.reconstruction is None
    assert not found.above_chance
    assert found.excess_high == 1


def test_a_low_rate_of_an_attack_that_works_on_its_control_counts(
    model: SavedModel, tmp_path: Path
) -> None:
    found = only(run(model.directory, tmp_path, ["stip"], [NearestEmbedding]))
    (nearest,) = found.runs
    assert nearest.control is not None
    assert (nearest.control.where, nearest.control.rate) == (FIRST, Rate(hits=30, n=30))
    assert nearest.worked
    assert found.best is not None
    run_, score = found.best
    assert (run_.attack, score.where) == ("nearest-embedding", FIRST)
    assert found.excess_high is not None
    assert found.excess_high == score.excess_high < 1


def test_one_attack_that_did_not_work_spoils_what_the_others_prove(
    model: SavedModel, tmp_path: Path
) -> None:
    found = only(run(model.directory, tmp_path, ["row-rotation"], [NearestEmbedding, Blind]))
    assert [one.worked for one in found.runs] == [True, False]
    assert found.best is not None
    assert found.best[0].attack == "nearest-embedding"
    assert found.excess_high == 1


def test_an_attack_that_reads_here_needs_no_control(model: SavedModel, tmp_path: Path) -> None:
    """What it reads beyond chance is evidence by itself."""
    found = only(run(model.directory, tmp_path, ["attention-in-tee"], [OnlyHere]))
    (here,) = found.runs
    assert here.control is not None
    assert not here.control.worked
    assert here.worked
    assert found.best is not None
    assert found.best[1].top1 == Rate(hits=30, n=30)
    assert found.above_chance


def test_a_control_with_nothing_to_do_is_none_that_worked(
    model: SavedModel, tmp_path: Path
) -> None:
    """Zero of zero tokens is not all of them."""
    found = only(run(model.directory, tmp_path, ["row-rotation"], [Refuses]))
    (one,) = found.runs
    assert one.control is not None
    assert one.control.rate == Rate(hits=0, n=0)
    assert not one.control.worked
    assert found.excess_high == 1


def test_none_of_no_tokens_is_no_control_that_worked() -> None:
    none = Rate(hits=0, n=0)
    control = Control(attack="a", policy="tsqp", where=None, rate=none, published=0.9)
    assert not control.worked
    assert control.model_copy(update={"rate": Rate(hits=18, n=20)}).worked
    assert not control.model_copy(update={"rate": Rate(hits=17, n=20)}).worked


def test_a_control_of_few_tokens_is_none_that_worked() -> None:
    few = Rate(hits=19, n=19)
    control = Control(attack="a", policy="tsqp", where="here", rate=few, published=0.9)
    assert not control.worked
    assert not control.works_at("here")
    elsewhere = control.model_copy(update={"places": {"there": Rate(hits=20, n=20), "here": few}})
    assert elsewhere.works_at("there")
    assert not elsewhere.works_at("here")


def test_an_attack_that_does_not_apply_needs_no_control(model: SavedModel, tmp_path: Path) -> None:
    found = only(run(model.directory, tmp_path, ["row-rotation"], [TokenIds, NearestEmbedding]))
    ids, nearest = found.runs
    assert (ids.refused, ids.control, ids.scores) == ("embedding stays", None, ())
    assert not ids.worked
    assert found.excess_high == nearest.scores[0].excess_high


def test_a_control_is_run_once_for_all_policies(
    model: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []
    original = Station._play

    def counted(self: Station, policy: Any, *rest: Any) -> Any:
        played.append(policy.name)
        return original(self, policy, *rest)

    monkeypatch.setattr(Station, "_play", counted)
    run(model.directory, tmp_path, ["row-rotation", "row-mix"], [NearestEmbedding, Blind])
    assert sorted(played) == ["attention-in-tee", "row-mix", "row-rotation"]


# ----------------------------------------------------------------------------------- what is told


def test_a_policy_that_sends_nothing_says_so(model: SavedModel, tmp_path: Path) -> None:
    found = only(run(model.directory, tmp_path, ["tee-only"], [NearestEmbedding]))
    assert found.nothing == "nothing leaves the TEE"
    assert (found.runs, found.lengths, found.best, found.excess_high) == ((), None, None, None)
    assert (found.sent_prompt, found.sent_answer, found.services) == (0, 0, 0)


def test_tokens_are_counted_as_they_were_sent(model: SavedModel, tmp_path: Path) -> None:
    decode = policy_of("qkv_proj", name="decode", phase="decode")
    report = run(model.directory, tmp_path, ["attention-in-tee", decode], [NearestEmbedding])
    both, answers = report.policies
    assert (both.sent_prompt, both.sent_answer) == (18, 12)
    assert (answers.sent_prompt, answers.sent_answer) == (0, 12)
    assert answers.runs[0].scores[0].prompt.n == 0
    assert answers.runs[0].scores[0].answer == Rate(hits=12, n=12)
    assert both.lengths is not None
    assert both.lengths.prompt == Rate(hits=3, n=3)


def test_the_best_is_shown_token_by_token(model: SavedModel, tmp_path: Path) -> None:
    found = only(run(model.directory, tmp_path, ["attention-in-tee"], [PlainMatching]))
    shown = found.reconstruction
    assert shown is not None
    assert (shown.attack, shown.unseen) == ("vocabulary", 0)
    assert all(piece.right and piece.read == piece.real for piece in shown.pieces)
    assert [piece.real for piece in shown.pieces[:6]] == [f"<{one}>" for one in PROMPTS[0]]


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


def test_a_curve_begins_with_the_weakest_noise_and_drops_what_reads_nothing(
    model: SavedModel, tmp_path: Path
) -> None:
    """The best of those that are left gives each point."""
    tried: list[str] = []
    doing: list[str] = []

    class Counted(Blind):
        name: ClassVar[str] = "counted"

        def read(self, view: View, work: Work) -> Iterator[Reading]:
            tried.append(doing[-1])
            yield from super().read(view, work)

    settings = settings_of(
        model.directory, ["float-noise"], [Counted, NearestEmbedding], curves=(64.0, 0.1, 0.5)
    )
    Laboratory(settings, tmp_path, Watch(doing=doing.append)).run()
    curve = [line for line in doing if "sigma" in line]
    assert curve == [f"float-noise: sigma {sigma}" for sigma in ("0.1", "0.5", "64")]
    assert [line for line in tried if "sigma" in line] == curve[:1]


def test_a_curve_ends_where_nothing_is_read(model: SavedModel, tmp_path: Path) -> None:
    """Its last point shows that; stronger noise is not tried, and counts as done."""
    steps: list[int] = []
    settings = settings_of(
        model.directory, ["float-noise"], [NearestEmbedding], curves=(0.1, 4096, 8192, 16384)
    )
    laboratory = Laboratory(settings, tmp_path, Watch(step=steps.append))
    laboratory.run()
    (curve,) = laboratory.report().curves
    assert [point.sigma for point in curve.points] == [0.1, 4096]
    assert [point.rate.n for point in curve.points] == [30, 30]
    assert curve.points[0].rate.hits == 30
    assert curve.points[1].rate.hits <= 3
    assert sum(steps) == 4 + 2


@pytest.mark.usefixtures("here")
def test_each_service_is_attacked(saved_model: Models, tmp_path: Path) -> None:
    """With integers: scales are made for a model that has none, which is not written to."""
    model = tiny(saved_model, vocab_size=128)
    before = sorted(path.name for path in model.directory.iterdir())
    report = run(
        model.directory,
        tmp_path,
        ["two-server", "quantized-clear"],
        [NearestEmbedding],
        prompts=tuple(tuple(one % 128 for one in ids) for ids in PROMPTS),
    )
    shares, clear = report.policies
    assert [one.service for one in shares.runs] == [1, 2]
    assert {one.control.policy for one in shares.runs if one.control} == {"quantized-clear"}
    assert all(one.worked for one in shares.runs)
    # What is right by chance.
    assert all(one.scores[0].top1.hits <= 8 for one in shares.runs)
    assert clear.best is not None
    assert clear.best[1].top1 == Rate(hits=30, n=30)
    assert sorted(path.name for path in model.directory.iterdir()) == before


# --------------------------------------------------------------------------------------- refusals


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


def test_what_no_attack_tried_is_no_evidence(model: SavedModel, tmp_path: Path) -> None:
    """In the clear at a place that the attack does not look at, beside one under a mask."""
    clear = policy_of("qkv_proj")
    mixed = load_policy("row-rotation").operators["qkv_proj"][0]
    policy = clear.model_copy(
        update={
            "operators": {
                **clear.operators,
                "qkv_proj": (mixed,),
                "down_proj": load_policy("attention-in-tee").operators["down_proj"],
            }
        }
    )
    settings = settings_of(model.directory, ["tsqp"], [NearestEmbedding])
    laboratory = Laboratory(replace(settings, policies=(("mine", policy),)), tmp_path)
    laboratory.run()
    (found,) = laboratory.report().policies
    assert "layer 0 down_proj (in the clear)" in found.untried
    assert not any("qkv_proj" in place for place in found.untried)
    assert found.excess_high == 1.0


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
                "qkv_proj": [{"place": "gpu", "layers": "0-7"}, {"place": "tee", "layers": "8-"}],
            },
        }
    )
    with pytest.raises(PolicyError):
        Laboratory(settings_of(model.directory, [layered], [Blind]), tmp_path)
    with pytest.raises(ModelError):
        Laboratory(settings_of(tmp_path, ["tsqp"], [Blind]), tmp_path)
    with pytest.raises(ModelError):
        Laboratory(settings_of(model.directory, ["tsqp"], [Blind], public=tmp_path), tmp_path)


# ----------------------------------------------------------------------------- what ends it early


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


# -------------------------------------------------------------------- a model that is not public


@pytest.fixture
def base(model: SavedModel, tmp_path: Path) -> Path:
    """Return the model from which the other one was made, with a little training."""
    directory = tmp_path / "base"
    shutil.copytree(model.directory, directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    changed = {
        name: one + 0.01 * one.std() * torch.randn(one.shape, generator=generator)
        for name, one in tensors.items()
    }
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def folder_of(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    return made


def test_the_attacker_has_what_is_public_alone(
    model: SavedModel, base: Path, tmp_path: Path
) -> None:
    """Its base reads a model; one that has nothing to do with it does not."""
    folder = folder_of(tmp_path)
    report = run(model.directory, folder, ["attention-in-tee"], [NearestEmbedding], public=base)
    assert (report.setup.model, report.setup.public) == (model.directory.name, "base")
    (nearest,) = only(report).runs
    assert nearest.scores[0].top1 == Rate(hits=30, n=30)
    tensors = load_file(base / "model.safetensors")
    other = torch.randn(320, 48, generator=torch.Generator().manual_seed(99))
    tensors["model.embed_tokens.weight"] = other
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    report = run(
        model.directory, folder_of(folder), ["attention-in-tee"], [NearestEmbedding], public=base
    )
    (nearest,) = only(report).runs
    assert nearest.scores[0].top1.hits <= 3
    assert not nearest.worked
    assert only(report).excess_high == 1


@pytest.mark.usefixtures("here")
def test_integers_of_a_model_that_is_not_public(
    model: SavedModel, base: Path, tmp_path: Path
) -> None:
    """Neither has scales; those of the attacker are of what it has."""
    report = run(
        model.directory,
        folder_of(tmp_path),
        ["quantized-clear"],
        [NearestEmbedding],
        public=base,
    )
    (nearest,) = only(report).runs
    assert nearest.scores[0].top1.n == 30
    assert nearest.scores[0].top1.hits >= 27


def test_a_public_model_without_linear_weights_is_said_to_be_one(
    model: SavedModel, base: Path, tmp_path: Path
) -> None:
    """Beside a service that holds them in the clear they are known; where not, that is said."""
    kept = {
        name: tensor
        for name, tensor in load_file(base / "model.safetensors").items()
        if "_proj" not in name
    }
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    attacks = [NearestEmbedding, NormDictionary]
    folder = folder_of(tmp_path)
    report = run(model.directory, folder, ["attention-in-tee", "stip"], attacks, public=base)
    clear, transformed = report.policies
    nearest, norms = clear.runs
    assert nearest.scores[0].top1 == Rate(hits=30, n=30)
    assert norms.refused is None
    assert norms.scores[0].top1 == Rate(hits=30, n=30)
    assert transformed.runs[1].refused == "no public weights to compare with"
    warning = warnings(report)[0]
    assert warning.startswith("base has no linear weights: where those that are served are")
    whole = run(model.directory, folder_of(folder), ["attention-in-tee"], [NearestEmbedding])
    assert warnings(whole) == []
