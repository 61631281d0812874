"""A run refuses what cannot work, believes no attack that fails on its control, keeps what it has."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import ModelError, PolicyError, SettingsError
from tee_side.policy.placement import load_policy
from tests.kit.leaks import VOCABULARY, begun, make_begun_model, policy_of, policy_with
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp import processes
from tsqp.lab.bench import prepare
from tsqp.lab.leak import workers
from tsqp.lab.leak.attack import Attack, Reading, View, Work
from tsqp.lab.leak.attack_runner import Station
from tsqp.lab.leak.attacks.at_rest import CacheAtRest
from tsqp.lab.leak.attacks.direct import NearestEmbedding, TokenIds
from tsqp.lab.leak.attacks.rotations import NormDictionary
from tsqp.lab.leak.interval import needed
from tsqp.lab.leak.laboratory import Laboratory, agreement
from tsqp.lab.leak.model import PolicyLeak, Rate, Report
from tsqp.lab.leak.settings import LeakSettings, Watch
from tsqp.lab.leak.words import above
from tsqp.lab.leak.workers import Job
from tsqp.processes import ProcessError

FIRST = "layer 0 qkv_proj"
PROMPTS = tuple(map(tuple, begun(6, 6, 6)))
# Tokens of prompts, and of answers but for the last of each.
ALL = Rate(hits=30, n=30)
GIVEN_POLICIES = ("attention-in-tee", "row-rotation", "row-mix")


class Mine(Attack):
    """Reads everything in the clear, unless it is told otherwise."""

    name: ClassVar[str] = "mine"
    reads: ClassVar[str] = "what another one reads"
    source: ClassVar[str] = "this test"
    control: ClassVar[str] = "attention-in-tee"
    published: ClassVar[float] = 0.9

    def refuses(self, view: View) -> str | None:
        return None if view.linear_places() else "no activations crossed"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        yield from NearestEmbedding().read(view, work)


class Blind(Mine):
    """Reads nothing anywhere."""

    name: ClassVar[str] = "blind"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        for session, trace in enumerate(view.traces):
            yield Reading(FIRST, session, range(trace.tokens), {})


class OnlyHere(Mine):
    """Has nothing to do on its control."""

    name: ClassVar[str] = "only-here"
    control: ClassVar[str] = "tee-only"


class Interrupts(Mine):
    """Raises an error under one policy."""

    name: ClassVar[str] = "interrupts"
    error: ClassVar[BaseException] = KeyboardInterrupt()

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        if view.policy.name == "row-rotation":
            raise self.error
        yield from super().read(view, work)


def settings_of(
    model: SavedModel, policies: Sequence[Any], attacks: Sequence[type[Attack]], **changed: Any
) -> LeakSettings:
    named = [(p, load_policy(p)) if isinstance(p, str) else (p.name, p) for p in policies]
    settings: dict[str, Any] = {
        "command": "tsqp leak",
        "model": model.directory,
        "policies": tuple(named),
        "attacks": tuple(attacks),
        "prompts": PROMPTS,
        "new_tokens": 5,
    }
    return LeakSettings(**{**settings, **changed})


def run(settings: LeakSettings, folder: Path, watch: Watch | None = None) -> Report:
    folder.mkdir()
    laboratory = Laboratory(settings, folder, watch)
    assert not laboratory.measured
    laboratory.run()
    assert laboratory.measured
    return laboratory.report()


# ---------------------------------------------------------------------------- what is believed


@pytest.fixture(scope="module")
def played() -> Counter[str]:
    """How often each policy was recorded."""
    return Counter()


@pytest.fixture(scope="module")
def report(
    model: SavedModel, played: Counter[str], tmp_path_factory: pytest.TempPathFactory
) -> Report:
    """Many policies, attacked once. Scales are made in this process: another one takes seconds."""
    masked = load_policy("row-rotation").operators["qkv_proj"][0].mask
    untried = policy_with(
        "untried",
        qkv_proj={"place": "gpu", "mask": masked, "verify": "none"},
        down_proj={"place": "gpu", "mask": "none", "verify": "none"},
    )
    policies = [
        *("attention-in-tee", "stip", "row-rotation", "cloak-segment", "tee-only"),
        *("two-server", "quantized-clear"),
        policy_of("qkv_proj", name="decode", phase="decode"),
        untried,
    ]
    attacks = [NearestEmbedding, Blind, OnlyHere, TokenIds, CacheAtRest]
    original = Station._play

    def counted(self: Station, policy: Any, *rest: Any) -> Any:
        played[policy.name] += 1
        return original(self, policy, *rest)

    def run_here(work: Callable[..., None], *arguments: object) -> None:
        work(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Station, "_play", counted)
        patch.setattr(prepare, "in_fresh_process", run_here)
        settings = settings_of(model, policies, attacks, shares_in_the_clear=True)
        return run(settings, tmp_path_factory.mktemp("laboratory") / "run")


def found_in(report: Report, policy: str) -> PolicyLeak:
    return next(found for found in report.policies if found.policy == policy)


def test_no_attack_is_believed_that_reads_nothing_on_its_control(report: Report) -> None:
    """Unless what it reads here is evidence by itself; one that does not apply needs no control."""
    nearest, blind, here, ids, disk = found_in(report, "attention-in-tee").runs
    assert nearest.control is not None
    assert blind.control is not None
    assert here.control is not None
    assert (nearest.control.rate, nearest.control.where, nearest.worked) == (ALL, FIRST, True)
    assert (blind.control.rate, blind.control.published) == (Rate(hits=0, n=30), 0.9)
    assert (blind.worked, here.control.rate, here.control.worked) == (
        False,
        Rate(hits=0, n=0),
        False,
    )
    assert (here.worked, here.scores[0].top1) == (True, ALL)
    assert (ids.refused, ids.control, ids.scores) == ("embedding stays", None, ())
    assert disk.refused == "no cache is at the service"
    found = found_in(report, "stip")
    assert found.best is not None
    assert found.best[0].attack == "nearest-embedding"
    assert (found.above_chance, found.excess_high) == (False, 1.0)
    assert "did not work on their control (blind, only-here)" in above(report, 0.9)[1]


def test_what_was_found_is_reported(report: Report, played: Counter[str]) -> None:
    read = found_in(report, "attention-in-tee")
    assert (read.above_chance, read.sent_prompt, read.sent_answer) == (True, 18, 12)
    assert read.lengths is not None
    assert (read.lengths.prompt, read.blind) == (Rate(hits=3, n=3), 1 / VOCABULARY)
    shown = read.reconstruction
    assert shown is not None
    assert (shown.attack, shown.unseen, len(shown.pieces)) == ("nearest-embedding", 0, 10)
    assert all(piece.right and piece.read == piece.real for piece in shown.pieces)
    decode = found_in(report, "decode")
    assert (decode.sent_prompt, decode.sent_answer) == (0, 12)
    assert decode.runs[0].scores[0].answer == Rate(hits=12, n=12)
    nothing = found_in(report, "tee-only")
    assert (nothing.nothing, nothing.runs, nothing.excess_high) == (
        "nothing leaves the TEE",
        (),
        None,
    )
    # Places that crossed in the clear, and that no attack looked at.
    untried = found_in(report, "untried")
    assert "layer 0 down_proj (in the clear)" in untried.untried
    assert not any("qkv_proj" in place for place in untried.untried)
    # A control is recorded once for all policies.
    twice = {"attention-in-tee", "quantized-clear", "tee-only"}
    once = {found.policy for found in report.policies} - twice | {"clear-segment"}
    assert played == {**dict.fromkeys(twice, 2), **dict.fromkeys(once, 1)}
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_a_file_on_disk_is_read_on_the_control_alone(report: Report) -> None:
    (disk,) = (
        one
        for one in found_in(report, "cloak-segment").runs
        if one.control and one.scores and one.attack == "cache-at-rest"
    )
    assert disk.control is not None
    assert (disk.control.policy, disk.control.rate) == ("clear-segment", ALL)
    assert disk.scores[0].top1.hits <= 2


def test_each_service_is_attacked_and_all_of_them_together(report: Report) -> None:
    """Where links are in the clear their observer has both shares, as services that collude."""
    shares = [found for found in report.policies if found.policy == "two-server"]
    alone, observer, colluding = shares
    assert [found.adversary for found in shares] == [
        "service",
        "observer of all links",
        "colluding services",
    ]
    assert [one.service for one in alone.runs] == [1] * 5 + [2] * 5
    assert not alone.above_chance
    clear = found_in(report, "quantized-clear")
    for found in (observer, colluding):
        assert found.runs[0].scores == clear.runs[0].scores
        assert found.above_chance
    assert clear.runs[0].scores[0].top1 == ALL
    # No policy promises anything against services that collude.
    assert [line.partition(":")[0] for line in above(report, 0.9) if "two-server" in line] == [
        "policy two-server (service)",
        "policy two-server (observer of all links)",
    ]


def test_an_observer_of_encrypted_links_sees_lengths_and_timing(
    model: SavedModel, tmp_path: Path
) -> None:
    shutil.copytree(model.directory, tmp_path / "model")
    shutil.copy(model.calibration, tmp_path / "model")
    calibrated = SavedModel(tmp_path / "model", model.reference)
    found = run(settings_of(calibrated, ["two-server"], [NearestEmbedding]), tmp_path / "run")
    service, observer, _ = found.policies
    assert observer.nothing == "the links are encrypted: their observer sees lengths and timing"
    assert (observer.runs, observer.excess_high, observer.best) == ((), None, None)
    assert observer.lengths == service.lengths


def test_a_curve_begins_with_the_weakest_noise_and_ends_where_nothing_is_read(
    model: SavedModel, tmp_path: Path
) -> None:
    """What reads nothing is not tried under more; no search runs each candidate under noise."""
    steps: list[int] = []
    totals: list[int] = []
    tried: list[tuple[str, int | None]] = []

    class Told(Blind):
        name: ClassVar[str] = "told"

        def read(self, view: View, work: Work) -> Iterator[Reading]:
            tried.append((view.policy.name, view.search_candidates))
            yield from super().read(view, work)

    noise = (6000.0, 7000.0, 8000.0, 9000.0)
    attacks = [Told, NearestEmbedding]
    settings = settings_of(model, ["float-noise"], attacks, curves=(*noise, 0.1))
    found = run(settings, tmp_path / "run", Watch(total=totals.append, step=steps.append))
    (curve,) = found.curves
    first, *others = curve.points
    assert (first.sigma, first.rate) == (0.1, ALL)
    assert 1 <= len(others) < len(noise)
    assert [point.sigma for point in others] == list(noise[: len(others)])
    above_chance = [point.rate.low > point.chance for point in curve.points]
    assert above_chance == [True] * len(others) + [False]
    # Once as it is, once at the first point, and on the control.
    assert sorted(tried) == [("attention-in-tee", 256), *[("float-noise", 256)] * 2]
    assert [sum(steps)] == totals == [1 + len(attacks) + 5]


def test_the_attacker_has_what_is_public_alone(model: SavedModel, tmp_path: Path) -> None:
    """A base model reads one that was made from it, and one that has nothing to do with it none.

    Beside a service that holds linear weights in the clear these are known.
    """
    base = tmp_path / "base"
    shutil.copytree(model.directory, base)
    tensors = load_file(base / "model.safetensors")
    kept = {
        name: one + 0.01 * one.std() * torch.randn(one.shape)
        for name, one in tensors.items()
        if "_proj" not in name
    }
    rates = []
    for number, embedding in enumerate((None, torch.randn(VOCABULARY, 48))):
        if embedding is not None:
            kept["model.embed_tokens.weight"] = embedding
        save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
        policies, attacks = ["attention-in-tee", "stip"], [NearestEmbedding, NormDictionary]
        found = run(settings_of(model, policies, attacks, public=base), tmp_path / str(number))
        assert (found.setup.public, found.setup.public_layers) == ("base", False)
        (nearest, norms), (_, cloaked) = (one.runs for one in found.policies)
        rates.append([(nearest.scores[0].top1.hits, nearest.worked), norms.refused])
        assert cloaked.refused == "no public weights to compare with"
    assert rates[0] == [(30, True), None]
    assert rates[1][0][0] <= 4  # type: ignore[index]
    assert not rates[1][0][1]  # type: ignore[index]


# ------------------------------------------------------------------------------------- refusals

TSQP, NOISE = ("tsqp", load_policy("tsqp")), ("n", load_policy("float-noise"))
PRODUCTS = ("p", policy_of("attn_scores", "attn_values", "o_proj"))
LAYERED = {"place": "gpu", "layers": "0-7", "mask": "none", "verify": "none"}
DEEP = ("d", policy_with("deep", qkv_proj=[LAYERED, {"place": "tee", "layers": "8-"}]))
ALIKE = tuple((1, 2, 3, 4, 5, number) for number in range(10, 13))


@each_row(
    ("changed", "error", "said"),
    [
        ({"new_tokens": 1}, SettingsError, "--new-tokens: got 1,"),
        ({"prompts": PROMPTS[:1]}, SettingsError, "--prompts: got 1,"),
        ({"prompts": ALIKE}, SettingsError, "the same token at 80% of places in two of them"),
        ({"policies": (TSQP, ("b", TSQP[1]))}, SettingsError, "--policy: got two of one name"),
        ({"attacks": (Blind, Blind)}, SettingsError, "--attack: got two of one name"),
        ({"policies": (NOISE,), "curves": (1.0, 2e4)}, SettingsError, "float-noise: sigma: got 2"),
        ({"margin": 0.2}, SettingsError, f"got 12 tokens .*at least {needed(0.2, 1 / 128)},"),
        ({"workers": 2}, SettingsError, "workers: got 2, and no names of attacks"),
        ({"public": "wide"}, SettingsError, "hidden_size: got 24, expected 48"),
        ({"public": "none"}, ModelError, "none"),
        ({"model": "none"}, ModelError, "none"),
        ({"policies": (PRODUCTS,)}, PolicyError, "layer 0: got some of qkv_proj, attn_scores"),
        ({"policies": (DEEP,)}, PolicyError, "deep"),
    ],
    ids=lambda row: str(row[2]),
)
def test_what_cannot_work_is_refused_before_anything_runs(
    model: SavedModel, tmp_path: Path, changed: dict[str, Any], error: type[Exception], said: str
) -> None:
    folder, wide = tmp_path / "run", tmp_path / "wide"
    folder.mkdir(exist_ok=True)
    if changed.get("public") == "wide":
        wide.mkdir()
        make_begun_model(wide, hidden_size=24)
    paths = {name: tmp_path / changed[name] for name in ("model", "public") if name in changed}
    settings = replace(settings_of(model, ["tsqp"], [Blind]), **{**changed, **paths})
    with pytest.raises(error, match=said):
        Laboratory(settings, folder)
    assert not list(folder.iterdir())


def test_a_token_that_all_prompts_begin_with_is_no_likeness(
    model: SavedModel, tmp_path: Path
) -> None:
    """One that some begin with is their text. As many tokens as a margin needs are enough."""
    short = [(1, 10 * number, 10 * number + 1, 10 * number + 2) for number in range(1, 5)]
    assert agreement(short) == 0
    assert agreement([*short, (5, 6, 7, 8)]) == 3 / 16
    assert agreement([(1, 2), (1, 2)]) == 1
    enough = -(-needed(0.2, 1 / VOCABULARY) // 3) + 1
    Laboratory(settings_of(model, ["tsqp"], [Blind], new_tokens=enough, margin=0.2), tmp_path)


# ---------------------------------------------------------------------------- what ends it early


@each_row(
    ("error", "left", "reason"),
    [
        (ModelError("x", got="y", expected="z"), ["row-mix"], "x: got y, expected z"),
        (ValueError("a secret"), ["row-mix"], "ValueError"),
        (KeyboardInterrupt(), [], "interrupted"),
        (SystemExit(130), [], "interrupted"),
    ],
    ids=lambda row: type(row[0]).__name__,
)
def test_a_policy_that_fails_leaves_the_others_and_an_interrupt_ends_the_run(
    model: SavedModel, tmp_path: Path, error: BaseException, left: list[str], reason: str
) -> None:
    """The very error is raised when all is done."""
    said: list[str] = []
    folder = tmp_path / type(error).__name__
    folder.mkdir()
    settings = settings_of(model, GIVEN_POLICIES, [Interrupts])
    laboratory = Laboratory(settings, folder, Watch(say=said.append))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)) as caught:
        patch.setattr(Interrupts, "error", error)
        laboratory.run()
    assert caught.value is error
    report = laboratory.report()
    assert [found.policy for found in report.policies] == ["attention-in-tee", *left]
    lacking = ", ".join(name for name in GIVEN_POLICIES[1:] if name not in left)
    assert report.incomplete == f"{reason}; not attacked: {lacking}"
    assert said[-1:] == ([f"row-rotation: {reason}"] if left else [])


@each_row("part", ["curve", "attack"])
def test_of_a_policy_and_its_curve_one_may_fail(
    model: SavedModel, tmp_path: Path, part: str
) -> None:
    def fails(self: Station, policy: Any) -> None:
        raise ModelError("x", got="y", expected="z")

    settings = settings_of(model, ["float-noise"], [NearestEmbedding], curves=(0.5,))
    (tmp_path / part).mkdir()
    laboratory = Laboratory(settings, tmp_path / part)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ModelError):
        patch.setattr(Station, part, fails)
        laboratory.run()
    report = laboratory.report()
    lacks = "curve of float-noise" if part == "curve" else "float-noise"
    assert report.incomplete == f"x: got y, expected z; not attacked: {lacks}"
    assert (len(report.policies), len(report.curves)) == ((1, 0) if part == "curve" else (0, 1))


# -------------------------------------------------------------------------------------- workers

FAILING = """
from tsqp.lab.leak.attacks.direct import NearestEmbedding


class Failing(NearestEmbedding):
    name = "failing"

    def read(self, view, work):
        print("looking at", view.policy.name)
        if view.policy.name == "row-rotation":
            raise ValueError("of mine")
        yield from super().read(view, work)
"""
# Two workers: one ends by a signal as soon as the other has no ear for the one that ends it.
KILLED = """
import os, pathlib, signal, sys, json
folder = pathlib.Path(json.loads(sys.stdin.read())["folder"])
try:
    (folder / "first").touch(exist_ok=False)
except FileExistsError:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"deaf-{os.getpid()}").touch()
    while True:
        signal.pause()
while not list(folder.glob("deaf-*")):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_side_by_side_find_what_one_finds_and_a_failure_ends_its_task_alone(
    model: SavedModel, tmp_path: Path
) -> None:
    """An attack of one's own is loaded by its path; what it prints and its traceback are told."""
    path = tmp_path / "failing.py"
    path.write_text(FAILING, encoding="utf-8")
    said: list[str] = []
    names = (str(path),)
    settings = settings_of(model, GIVEN_POLICIES, [Mine], workers=2, attack_names=names)
    (tmp_path / "two").mkdir()
    laboratory = Laboratory(settings, tmp_path / "two", Watch(say=said.append))
    with pytest.raises(ProcessError, match="a worker: got ValueError: of mine, expected no error"):
        laboratory.run()
    two = laboratory.report()
    assert [found.policy for found in two.policies] == ["attention-in-tee", "row-mix"]
    assert two.incomplete is not None
    assert two.incomplete.endswith("; not attacked: row-rotation")
    assert any("failing.py" in text and "Traceback" in text for text in said)
    assert "looking at row-mix" in said
    (one,) = two.policies[0].runs
    assert (one.attack, one.scores[0].top1, one.worked) == ("failing", ALL, True)


def test_a_worker_that_is_killed_ends_all_even_those_that_do_not_listen(
    model: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_early.py").write_text(KILLED, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(workers, "_MODULE", "ends_early")
    monkeypatch.setattr(processes, "END_TIMEOUT_S", 0.1)
    settings = settings_of(model, GIVEN_POLICIES, [Mine], workers=2, attack_names=("mine",))
    with pytest.raises(ProcessError, match="a process killed by SIGKILL"):
        run(settings, tmp_path / "run")
    (deaf,) = (tmp_path / "run").glob("deaf-*")
    with pytest.raises(ProcessLookupError):
        os.kill(int(deaf.name.removeprefix("deaf-")), 0)


def test_a_job_says_all_that_settings_do(model: SavedModel, tmp_path: Path) -> None:
    """Who starts the workers keeps the command, the cost and how many there are."""
    changed: dict[str, Any] = {
        "public": model.directory,
        "dtype": "bfloat16",
        "temperature": 0.5,
        "seed": 7,
        "search_sessions": 3,
        "search_tokens": 5,
        "search_candidates": 9,
        "threads": 2,
        "curves": (0.5,),
        "shares_in_the_clear": True,
    }
    names = ("nearest-embedding",)
    settings = settings_of(model, ["tsqp"], [NearestEmbedding], attack_names=names, **changed)
    again = Job.model_validate_json(Job.of(settings, tmp_path).model_dump_json()).settings()
    kept = {"command", "margin", "cost", "workers", "attack_names"}
    differ = {name for name in vars(settings) if getattr(again, name) != getattr(settings, name)}
    assert differ <= kept
