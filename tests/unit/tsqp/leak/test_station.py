"""A policy is attacked as a service could, and no attack is believed that fails on its control."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tee_side.policy.placement import load_policy
from tests.kit.model import SavedModel
from tests.unit.tsqp.leak.leaks import Models, policy_of, tiny
from tests.unit.tsqp.leak.runs import (
    FIRST,
    PROMPTS,
    Blind,
    OnlyHere,
    Refuses,
    folder_of,
    only,
    run,
    settings_of,
)
from tsqp.cli.leak import leak
from tsqp.lab.leak.attack import Reading, View, Work
from tsqp.lab.leak.attack_runner import Station
from tsqp.lab.leak.attacks.direct import NearestEmbedding, TokenIds
from tsqp.lab.leak.attacks.rotations import NormDictionary
from tsqp.lab.leak.attacks.vocabulary import PlainMatching
from tsqp.lab.leak.laboratory import Laboratory
from tsqp.lab.leak.model import Control, Rate
from tsqp.lab.leak.settings import NOISY_CANDIDATES, Watch
from tsqp.lab.leak.words import warnings


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


# ------------------------------------------------------------------------------------ what is found


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
    shares, _, _, clear = report.policies
    assert [one.service for one in shares.runs] == [1, 2]
    assert {one.control.policy for one in shares.runs if one.control} == {"quantized-clear"}
    assert all(one.worked for one in shares.runs)
    # What is right by chance.
    assert all(one.scores[0].top1.hits <= 8 for one in shares.runs)
    assert clear.best is not None
    assert clear.best[1].top1 == Rate(hits=30, n=30)
    assert sorted(path.name for path in model.directory.iterdir()) == before


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


# ------------------------------------------------------------------------------------------- curves


@pytest.mark.parametrize(("asked", "clear", "noisy"), [(None, None, 256), (9, 9, 9)])
def test_searches_in_noise_end_with_what_is_expected(
    model: SavedModel, tmp_path: Path, asked: int | None, clear: int | None, noisy: int
) -> None:
    """No candidate is certain there, and each would be run. At every strength of a curve, too."""
    told: dict[str, set[int | None]] = {}

    class Told(Blind):
        name: ClassVar[str] = "told"

        def read(self, view: View, work: Work) -> Iterator[Reading]:
            told.setdefault(view.policy.name, set()).add(view.search_candidates)
            yield from super().read(view, work)

    settings = settings_of(
        model.directory, ["float-noise", "cloak"], [Told], search_candidates=asked, curves=(2.0,)
    )
    laboratory = Laboratory(settings, tmp_path)
    laboratory.run()
    # The cloak without noise, and with that of its curve. The control, in the clear, has as few
    # candidates as what it is to vouch for.
    assert told == {
        "attention-in-tee": {clear, noisy},
        "cloak": {clear, noisy},
        "float-noise": {noisy},
    }
    report = laboratory.report()
    assert (report.setup.search_candidates, report.setup.noisy_candidates) == (asked, noisy)
    assert {curve.search_candidates for curve in report.curves} == {noisy}


@pytest.mark.parametrize(
    ("policy", "curves", "noisy"),
    [("cloak", (), None), ("cloak", (2.0,), 256), ("float-noise", (), 256)],
)
def test_where_nothing_is_noisy_no_bound_is_named(
    model: SavedModel, tmp_path: Path, policy: str, curves: tuple[float, ...], noisy: int | None
) -> None:
    """A cloak has noise in its curve alone."""
    settings = settings_of(model.directory, [policy], [NearestEmbedding], curves=curves)
    assert Laboratory(settings, tmp_path).report().setup.noisy_candidates == noisy


def test_the_help_names_the_bound_under_noise() -> None:
    """It is written there as a number, since the settings are imported late."""
    text = " ".join(CliRunner().invoke(leak, ["--help"], terminal_width=200).output.split())
    assert f"{NOISY_CANDIDATES} under noise" in text


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
    """Its last point shows that; stronger noise is not tried, and counts as done.

    A guess is right by luck once in 320. A point of noise alone reads more than chance once in
    twenty (seen: 3 of 60), and the curve goes on, but not through six of them.
    """
    steps: list[int] = []
    noise = (5000.0, 6000.0, 7000.0, 8000.0, 9000.0, 10000.0)
    settings = settings_of(
        model.directory, ["float-noise"], [NearestEmbedding], curves=(0.1, *noise)
    )
    laboratory = Laboratory(settings, tmp_path, Watch(step=steps.append))
    laboratory.run()
    (curve,) = laboratory.report().curves
    first, *others = curve.points
    assert (first.sigma, first.rate) == (0.1, Rate(hits=30, n=30))
    assert 1 <= len(others) < len(noise)
    assert tuple(point.sigma for point in others) == noise[: len(others)]
    assert all(point.rate.n == 30 and point.rate.hits <= 4 for point in others)
    above = [point.rate.low > point.chance for point in curve.points]
    assert above == [True] * len(others) + [False]
    assert sum(steps) == 1 + len(noise) + 2


# ----------------------------------------------------------------------- a model that is not public


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
