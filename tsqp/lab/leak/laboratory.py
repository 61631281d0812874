"""Runs the laboratory: has every policy attacked, measures what each costs, and reports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from protocol.errors import SettingsError, TsqpError
from protocol.model.config import read_config
from tee_side.policy.placement import Policy
from tsqp.lab.bench.job import BenchSettings, Plan
from tsqp.lab.bench.model import Report as BenchReport
from tsqp.lab.bench.run import Bench
from tsqp.lab.leak.attack_runner import AttackRunner, Lost, Outcome, tasks_of
from tsqp.lab.leak.model import Curve, DecodeCost, LeakReport, LeakSetup, PolicyLeak
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import KEY, SERVED
from tsqp.lab.leak.settings import LeakProgress, LeakSettings, check_settings, is_noisy
from tsqp.lab.measure import describe_machine, passed_on, processes, tell
from tsqp.lab.research.provisioning import provision

# Tokens behind the decoded token whose cost is measured.
_CONTEXT = 128


class Laboratory:
    """One run. What cannot work is refused before anything is recorded.

    `folder`: an empty one, for what is made on the way.
    """

    def __init__(
        self, settings: LeakSettings, folder: Path, watch: LeakProgress | None = None
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._watch = watch or LeakProgress()
        self._created = datetime.now(UTC)
        self._config = read_config(settings.model)
        check_settings(settings, self._config)
        self._public_layers = PublicModel(settings.public or settings.model).has_layers
        self._costs: dict[str, DecodeCost | None] = {}
        self._found: dict[str, tuple[PolicyLeak, ...] | Curve] = {}
        self._incomplete: str | None = None

    @property
    def measured(self) -> bool:
        """Whether there is anything to report."""
        return bool(self._found)

    def run(self) -> None:
        """Attack everything. What goes wrong is in the report, and raised at the end.

        A policy that fails does not end the others; an interrupt does, and a worker that is killed.
        """
        settings, watch, tasks = self._settings, self._watch, tasks_of(self._settings)
        measured = settings.cost == "measure"
        watch.total(len(settings.policies) * measured + sum(task.steps for task in tasks))
        lost: list[Lost] = []
        try:
            # First, and alone: what it costs is not to be measured beside attacks.
            for name, policy in settings.policies:
                self._costs[policy.name] = self._cost(name, policy)
            for number, found in enumerate(self._outcomes(), start=1):
                if isinstance(found, Lost):
                    lost.append(found)
                    if found.traceback:  # for the attack's author
                        watch.say(found.traceback)
                    watch.say(f"{found.task}: {_reason(found.error)}")
                    continue
                name = f"curve of {found.policy}" if isinstance(found, Curve) else found[0].policy
                self._found[name] = found
                watch.done(f"{name}: done, {number} of {len(tasks)}")
            if lost:
                raise lost[0].error
        except BaseException as error:
            # Policies first, in the order in which they were given.
            names = [task.name for task in sorted(tasks, key=lambda task: task.noisy)]
            missing = ", ".join(name for name in names if name not in self._found)
            reasons = filter(None, (_reason(error), missing))
            self._incomplete = "; not attacked: ".join(reasons)
            raise

    def _outcomes(self) -> Iterator[Outcome]:
        settings = self._settings
        if settings.workers > 1:
            yield from side_by_side(settings, self._folder, self._watch)
            return
        runner = AttackRunner(settings, self._folder, self._watch)
        yield from map(runner.do, tasks_of(settings))

    def report(self) -> LeakReport:
        """Return what has been found so far."""
        settings, config = self._settings, self._config
        names = [policy.name for _, policy in settings.policies]
        leaks = [found for name in names if isinstance(found := self._found.get(name), tuple)]
        curves = [self._found.get(f"curve of {name}") for name in names]
        noisy = bool(settings.curves) or any(is_noisy(policy) for _, policy in settings.policies)
        return LeakReport(
            setup=LeakSetup(
                command=settings.command,
                created=self._created.isoformat(timespec="seconds"),
                machine=describe_machine(),
                model=settings.model.name,
                public=(settings.public or settings.model).name,
                public_layers=self._public_layers,
                dtype=settings.dtype or config.dtype,
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                sessions=len(settings.prompts),
                prompt_tokens=sum(map(len, settings.prompts)),
                new_tokens=settings.new_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
                search_sessions=settings.search_sessions,
                search_tokens=settings.search_tokens,
                search_candidates=settings.search_candidates,
                noisy_candidates=settings.noisy_candidates if noisy else None,
            ),
            policies=tuple(
                leak.model_copy(update={"cost": self._costs[leak.policy]})
                for found in leaks
                for leak in found
            ),
            curves=tuple(curve for curve in curves if isinstance(curve, Curve)),
            incomplete=self._incomplete,
        )

    def _cost(self, name: str, policy: Policy) -> DecodeCost | None:
        """Return what a policy costs. `name`: as it was given. Raises what `tsqp bench` raises."""
        settings = self._settings
        if isinstance(settings.cost, BenchReport):
            return cost_in(settings.cost, policy.name)
        if settings.cost != "measure":
            return None
        self._watch.doing(f"{policy.name}: measuring what it costs")
        served = key = None
        if policy.feature_mask is not None:
            made = self._folder / f"cost-{policy.name}"
            made.mkdir()
            served, key = made / SERVED, made / KEY
            provision(settings.model, policy.feature_mask, served, key)
        bench = Bench(
            BenchSettings(
                command="tsqp leak",
                policies=((name, policy),),
                model=settings.model,
                device="null",
                transport="tcp",
                threads=settings.threads,
                gpu_threads=1,
                dtype=settings.dtype,
                key=key,
                server_model=served,
                baselines=False,
                default_context=True,
                plan=Plan(prefill=(1,), decode=((_CONTEXT, 1),), generation=None, repeats=2),
            ),
            lambda _line: None,
        )
        bench.run()
        self._watch.step(1)
        return cost_in(bench.report(), policy.name)


def _reason(error: BaseException) -> str:
    """Say in a few words what ended a run; no more than the class of what is no error of ours."""
    if isinstance(error, TsqpError):
        return str(error)
    return type(error).__name__ if isinstance(error, Exception) else "interrupted"


def read_report(path: Path, model: str) -> BenchReport:
    """Read what `tsqp bench --json` wrote of a model. Raises SettingsError."""
    report = read_recorded(path)
    SettingsError.unless(
        report.setup.model == model,
        str(path),
        f"the cost of {report.setup.model}",
        f"that of {model}",
    )
    return report


def read_recorded(path: Path) -> BenchReport:
    """Read what `tsqp bench --json` wrote, bare or as it is recorded. Raises SettingsError."""
    try:
        document = json.loads(path.read_bytes())
        inner = document.get("report", document) if isinstance(document, dict) else document
        return BenchReport.model_validate(inner)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "something else"
        raise SettingsError(
            str(path), got=reason or "an error", expected="a report of tsqp bench --json"
        ) from None


def cost_in(report: BenchReport, policy: str) -> DecodeCost | None:
    """Return a policy's decoded token of one sequence, with the shortest context measured."""
    cases = [
        case
        for run in report.policies
        if run.policy == policy
        for case in run.cases
        if case.phase == "decode" and case.batch == 1
    ]
    if not cases:
        return None
    case = min(cases, key=lambda one: one.tokens)
    return DecodeCost(
        overhead_ms=case.overhead_ms,
        rpcs=case.rpcs,
        bytes_sent=case.bytes_sent,
        bytes_received=case.bytes_received,
        context=case.tokens,
    )


# ---------------------------------------------------------------------------------- side by side

# Of a worker: its attack runner, once `_begin` has made it.
_runner: list[AttackRunner] = []


def side_by_side(settings: LeakSettings, folder: Path, watch: LeakProgress) -> Iterator[Outcome]:
    """Have every task done by `settings.workers` processes; yields in the order of completion.

    An attack that raises ends its own task. `folder`: an empty one, for what the workers make.
    Raises ProcessError for a worker that ended early, since its task is lost.
    """

    def told(what: tuple[str, Any]) -> None:
        name, value = what
        getattr(watch, name)(value)

    tasks = range(len(tasks_of(settings)))
    given, count = replace(settings, cost="none"), min(settings.workers, len(tasks))
    with processes(count, "a worker", told, _begin, given, folder) as submit:
        for future in as_completed([submit(_attack, number) for number in tasks]):
            yield future.result()


def _begin(settings: LeakSettings, folder: Path) -> None:
    """Make the worker's attack runner."""
    torch.set_num_threads(settings.threads)
    own = folder / f"worker-{os.getpid()}"
    own.mkdir()
    watch = LeakProgress(
        doing=lambda what: tell(("doing", what)), step=lambda steps: tell(("step", steps))
    )
    _runner.append(AttackRunner(settings, own, watch))


def _attack(number: int) -> Outcome:
    (runner,) = _runner
    found = runner.do(tasks_of(runner.settings)[number])
    return replace(found, error=passed_on(found.error)) if isinstance(found, Lost) else found
