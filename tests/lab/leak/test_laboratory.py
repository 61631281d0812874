"""A run refuses what cannot work, believes no attack that fails where it must work, and goes on."""

import os
import shutil
import signal
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from protocol.errors import PolicyError, SettingsError, TsqpError
from tee_side.policy.placement import load_policy
from tests.kit.leaks import FIRST_PLACE, VOCABULARY, begun, make_begun_model, policy_with, sending
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tests.kit.service import call
from tsqp.cli.main import command
from tsqp.lab.leak.attack import Attack, Reading, View, Work
from tsqp.lab.leak.attack_runner import AttackRunner, LeakProgress, LeakSettings
from tsqp.lab.leak.attacks.first_layer import CacheAtRest
from tsqp.lab.leak.attacks.static_cloak import NormDictionary
from tsqp.lab.leak.attacks.vocabulary import NearestEmbedding, TokenIds
from tsqp.lab.leak.grids import above
from tsqp.lab.leak.laboratory import Laboratory, agreement
from tsqp.lab.leak.model import DecodeCost, LeakReport, Rate, needed
from tsqp.lab.leak.page import cost_against_leakage
from tsqp.processes import ProcessError

PROMPTS = tuple(map(tuple, begun(6, 6, 6)))
# Tokens of prompts, and of answers but for the last of each.
ALL, NONE = Rate(hits=30, n=30), Rate(hits=0, n=30)
SENT = {"place": "gpu", "verify": "none"}


class Blind(NearestEmbedding):
    name: ClassVar[str] = "blind"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        for session, trace in enumerate(view.traces):
            yield Reading(FIRST_PLACE, session, range(trace.tokens), {})


class OnlyHere(NearestEmbedding):
    name: ClassVar[str] = "only-here"
    control: ClassVar[str] = "tee-only"


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


def run(settings: LeakSettings, folder: Path) -> LeakReport:
    folder.mkdir()
    laboratory = Laboratory(settings, folder)
    laboratory.run()
    return laboratory.report()


def test_no_attack_is_believed_that_reads_nothing_where_it_must_work(
    model: SavedModel, tmp_path: Path
) -> None:
    """What it reads here is evidence all the same; what no attack looked at is said to be so."""
    masked = {**SENT, "mask": "row-rotation"}
    mine = policy_with("mine", qkv_proj=masked, down_proj={**SENT, "mask": "none"})
    policies = ["attention-in-tee", "stip", "cloak-segment", "tee-only", mine]
    attacks = [NearestEmbedding, Blind, OnlyHere, TokenIds, CacheAtRest]
    report = run(settings_of(model, policies, attacks), tmp_path / "run")
    assert LeakReport.model_validate_json(report.model_dump_json()) == report
    clear, stip, segment, nothing, own = report.policies
    found = [
        (one.attack, one.refused, bool(one.meaningful), one.control and one.control.rate)
        for one in clear.runs
    ]
    assert found == [
        ("nearest-embedding", None, True, ALL),
        ("blind", None, False, NONE),
        ("only-here", None, True, Rate(hits=0, n=0)),
        ("token-ids", "embedding stays", False, None),
        ("cache-at-rest", "no cache is at the service", False, None),
    ]
    assert (clear.above_chance, clear.sent_prompt, clear.sent_answer) == (True, 18, 12)
    assert clear.reconstruction is not None
    assert all(piece.right and piece.read == piece.real for piece in clear.reconstruction.pieces)
    assert (stip.above_chance, stip.excess_high, stip.blind) == (False, 1.0, 1 / VOCABULARY)
    assert "did not work on their control (blind, only-here)" in above(report, 0.9)[1]
    assert (nothing.nothing, nothing.runs) == ("nothing leaves the TEE", ())
    assert "layer 0 down_proj (in the clear)" in own.untried
    assert not any("qkv_proj" in place for place in own.untried)
    # A file on the service's disk is read where it is not encrypted alone.
    disk = segment.runs[-1]
    assert disk.control is not None
    assert (disk.control.policy, disk.control.rate) == ("clear-segment", ALL)
    assert disk.scores[0].top1.hits <= 2


@pytest.mark.parametrize("in_the_clear", [True, False])
def test_each_service_is_attacked_and_all_of_them_together(
    model: SavedModel, tmp_path: Path, in_the_clear: bool
) -> None:
    """Where links are in the clear their observer has the pads, as services that collude."""
    settings = settings_of(model, ["dealt"], [NearestEmbedding], dealer_in_the_clear=in_the_clear)
    report = run(settings, tmp_path / "run")
    alone, observer, colluding = report.policies
    assert [one.service for one in alone.runs] == [1, 2]
    assert not alone.above_chance
    assert colluding.runs[0].scores[0].top1 == ALL
    assert observer.runs == (colluding.runs if in_the_clear else ())
    # No policy promises anything against services that collude.
    named = [line.partition(":")[0] for line in above(report, 0.5)]
    assert named == ["policy dealt (observer of all links)"] * in_the_clear


def test_the_attacker_has_what_is_public_alone(model: SavedModel, tmp_path: Path) -> None:
    """A base model reads one that was made from it.

    It lacks linear weights: those that a service holds in the clear are known, others are not.
    """
    base = tmp_path / "base"
    shutil.copytree(model.directory, base)
    tensors = load_file(base / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if "_proj" not in name}
    kept["model.embed_tokens.weight"] += 0.01 * torch.randn(VOCABULARY, 48)
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    policies, attacks = ["attention-in-tee", "stip"], [NearestEmbedding, NormDictionary]
    found = run(settings_of(model, policies, attacks, public=base), tmp_path / "run")
    assert (found.setup.public, found.setup.public_layers) == ("base", False)
    (nearest, norms), (_, cloaked) = (one.runs for one in found.policies)
    assert (nearest.scores[0].top1, norms.refused) == (ALL, None)
    assert cloaked.refused == "no public weights to compare with"


PRODUCTS = ("p", sending("attn_scores", "attn_values", "o_proj"))
LAYERED = {**SENT, "layers": "0-7", "mask": "none"}
DEEP = ("d", policy_with("deep", qkv_proj=[LAYERED, {"place": "tee", "layers": "8-"}]))


@each_row(
    ("changed", "error", "said"),
    [
        ({"new_tokens": 1}, SettingsError, "--new-tokens: got 1,"),
        ({"prompts": PROMPTS[:1]}, SettingsError, "--prompts: got 1,"),
        (
            {"prompts": tuple((1, 2, 3, 4, 5, n) for n in range(10, 13))},
            SettingsError,
            "the same token at 80% of places in two of them",
        ),
        (
            {"policies": (("n", load_policy("float-noise")),), "curves": (1.0, 2e4)},
            SettingsError,
            "float-noise: sigma: got 2",
        ),
        ({"margin": 0.2}, SettingsError, f"got 12 tokens .*at least {needed(0.2, 1 / 128)},"),
        ({"public": "wide"}, SettingsError, "hidden_size: got 24, expected 48"),
        ({"policies": (PRODUCTS,)}, PolicyError, "layer 0: got some of qkv_proj, attn_scores"),
        ({"policies": (DEEP,)}, PolicyError, "deep"),
    ],
    ids=lambda row: str(row[2]),
)
def test_what_cannot_work_is_refused_before_anything_runs(
    model: SavedModel, tmp_path: Path, changed: dict[str, Any], error: type[Exception], said: str
) -> None:
    if "public" in changed:
        changed = {"public": tmp_path / changed["public"]}
        changed["public"].mkdir()
        make_begun_model(changed["public"], hidden_size=24)
    settings = replace(settings_of(model, ["published"], [Blind]), **changed)
    with pytest.raises(error, match=said):
        Laboratory(settings, tmp_path)
    # The token that all prompts begin with is no likeness; one that some begin with is their text.
    short = [(1, 10 * number, 10 * number + 1, 10 * number + 2) for number in range(1, 5)]
    assert [agreement(short), agreement([*short, (5, 6, 7, 8)])] == [0, 3 / 16]


@pytest.mark.parametrize(
    ("error", "left", "said"),
    [
        (ValueError("a secret"), ["row-mix"], "ValueError; not attacked: float-noise"),
        (KeyboardInterrupt(), [], "interrupted; not attacked: float-noise, row-mix"),
    ],
)
def test_a_policy_that_fails_leaves_the_others_and_an_interrupt_ends_the_run(
    model: SavedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    left: list[str],
    said: str,
) -> None:
    """The very error is raised when all is done; the report says what it lacks."""
    original, names = AttackRunner.attack, ["attention-in-tee", "float-noise", "row-mix"]

    def fails(self: AttackRunner, policy: Any) -> Any:
        if policy.name == "float-noise":
            raise error
        return original(self, policy)

    monkeypatch.setattr(AttackRunner, "attack", fails)
    laboratory = Laboratory(settings_of(model, names, [Blind]), tmp_path)
    with pytest.raises(type(error)) as caught:
        laboratory.run()
    assert caught.value is error
    report = laboratory.report()
    assert [found.policy for found in report.policies] == ["attention-in-tee", *left]
    assert report.incomplete == said


class Ends(NearestEmbedding):
    """Ends its process: as a program does under one policy, by a signal under another."""

    name: ClassVar[str] = "ends"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        if view.policy.name == "row-mix":
            raise SystemExit("an end")
        if view.policy.name == "cloak":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(view, work)


def test_workers_pass_on_what_they_find_and_end_with_one_that_is_killed(
    model: SavedModel, tmp_path: Path
) -> None:
    steps, said = list[int](), list[str]()
    given = settings_of(model, ["attention-in-tee", "row-rotation", "row-mix"], [Ends], workers=2)
    laboratory = Laboratory(given, tmp_path, LeakProgress(step=steps.append, say=said.append))
    with pytest.raises(ProcessError, match="SystemExit: an end"):
        laboratory.run()
    report = laboratory.report()
    assert [one.policy for one in report.policies] == ["attention-in-tee", "row-rotation"]
    assert report.policies[0].runs[0].scores[0].top1 == ALL
    assert (report.incomplete or "").endswith("not attacked: row-mix")
    assert ("Traceback" in said[0], sum(steps)) == (True, 5)
    with pytest.raises(ProcessError, match="a process killed by SIGKILL"):
        Laboratory(settings_of(model, ["cloak", "stip"], [Ends], workers=2), tmp_path).run()


ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "my_attack.py"
RECORDED = ROOT / "benchmarks" / "results" / "bench_null_tcp.json"


def _cost(overhead_ms: float) -> DecodeCost:
    others = dict.fromkeys(DecodeCost.model_fields, 1)
    return DecodeCost.model_validate({**others, "overhead_ms": overhead_ms})


@pytest.mark.slow
def test_what_is_read_is_printed_written_and_judged(tmp_path: Path) -> None:
    """A file's attacks join those that are named; a pad passes, and rows in the clear do not."""
    report, page, picture = (tmp_path / name for name in ("r.json", "p.html", "p.svg"))
    policies = ("attention-in-tee", "float-noise", "shielded", "tee-only")
    done = call(
        *("tsqp", "leak", "demo", "--threads", "1", "--workers", "1", "--details"),
        *("--prompts", "6", "--prompt-tokens", "12", "--new-tokens", "8", "--curves"),
        *(part for name in policies for part in ("--policy", name)),
        *("--attack", str(EXAMPLE), "--attack", "nearest-embedding", "--sigma", "64,0.05"),
        *("--json", str(report), "--html", str(page), "--picture", str(picture)),
        *("--fail-above", "0.25"),
    )
    assert done.returncode == 1, done.stderr
    found = LeakReport.model_validate_json(report.read_bytes())
    clear, noise, shielded, nothing = found.policies
    assert [run.attack for run in clear.runs] == ["nearest-embedding", "largest-features"]
    assert clear.runs[0].scores[0].top1.value == 1.0
    assert (shielded.sent_prompt, shielded.sent_answer, shielded.above_chance) == (0, 42, False)
    assert nothing.nothing == "nothing leaves the TEE"
    # A curve begins with the weakest noise, under which no search runs each candidate.
    (curve,) = found.curves
    assert (curve.policy, curve.search_candidates) == (noise.policy, 256)
    weak, strong = curve.points
    assert (weak.sigma, strong.sigma, weak.rate.value) == (0.05, 64.0, 1.0)
    assert strong.rate.hits < weak.rate.hits
    assert strong.output_error > weak.output_error > 0
    # Each policy that fails is a line, with what is read, where, and of how many.
    failed = [
        line for line in done.stderr.splitlines() if "expected at most 0.25 above chance" in line
    ]
    assert [line.split(":")[1] for line in failed] == [
        " policy attention-in-tee",
        " policy float-noise",
    ]
    n = clear.runs[0].scores[0].top1.n
    assert f"{n} of {n} tokens read by nearest-embedding at layer 0 qkv_proj" in failed[0]
    assert all(name in done.stdout for name in (*policies, "largest-features"))
    ET.parse(picture)
    assert "<script src" not in page.read_text(encoding="utf-8")
    # Costs a decade apart stand on an axis of numbers, and not of what would have to be typeset.
    made = [
        one.model_copy(update={"cost": _cost(5.0 * 2.5**n)}) for n, one in enumerate(found.policies)
    ]
    plot = cost_against_leakage(found.model_copy(update={"policies": tuple(made)}))
    assert plot is not None
    assert "$" not in plot.svg


@each_row(
    ("arguments", "message"),
    [
        ("demo --margin 0.005 --prompts 4", f"expected at least {needed(0.005, 1 / 1024)}"),
        ("demo --attack nobody", "expected one of"),
        ("demo --plot x.svg", "--cost measure"),
        (f"demo --cost {EXAMPLE}", "expected a report of tsqp bench --json"),
        (f"demo --cost {RECORDED}", "got the cost of llama-3.2-1b, expected that of demo"),
        ("demo --sigma 1,2", "got no --curves"),
        ("demo --curves --policy published", "whose mask has noise"),
        ("demo --text no-such-text", "no-such-text: got FileNotFoundError"),
    ],
)
def test_bad_input_is_refused(arguments: str, message: str) -> None:
    done = CliRunner().invoke(command, ["leak", *arguments.split()])
    assert isinstance(done.exception, TsqpError)
    assert (message in str(done.exception), done.output) == (True, "")
