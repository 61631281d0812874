"""Runs the laboratory: refuses what cannot work, has every policy attacked, and reports."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from protocol.errors import PolicyError, SettingsError, TsqpError
from protocol.model.checkpoint import Checkpoint, light_tensors
from protocol.model.config import ModelConfig, read_config
from tee_side.policy.placement import Policy
from tee_side.words import OPERATORS, PHASES, PRODUCTS
from tsqp.lab.bench.machine import describe_machine
from tsqp.lab.bench.model import Report as BenchReport
from tsqp.lab.leak.attack_runner import Station
from tsqp.lab.leak.cost import cost_in, measure_cost
from tsqp.lab.leak.curves import is_noisy, with_sigma
from tsqp.lab.leak.interval import needed
from tsqp.lab.leak.model import Cost, Curve, PolicyLeak, Report, Setup
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import KEY, SERVED
from tsqp.lab.leak.settings import LeakSettings, Watch
from tsqp.lab.leak.workers import Attacked, Lost, Noised, side_by_side, tasks_of
from tsqp.lab.research.provisioning import provision

_HERE = Path(__file__).parent
# Share of places at which two prompts may have the same token.
_MOST_ALIKE = 0.2


class Laboratory:
    """One run. What cannot work is refused before anything is recorded.

    `folder`: an empty one, for what is made on the way.
    """

    def __init__(self, settings: LeakSettings, folder: Path, watch: Watch | None = None) -> None:
        self._settings = settings
        self._folder = folder
        self._watch = watch or Watch()
        self._created = datetime.now(UTC)
        self._config = read_config(settings.model)
        self._check()
        self._costs: dict[str, Cost | None] = {}
        self._found: dict[str, list[PolicyLeak]] = {}
        self._curves: dict[str, Curve] = {}
        self._lost: list[Lost] = []
        self._incomplete: str | None = None

    @property
    def measured(self) -> bool:
        """Whether there is anything to report."""
        return bool(self._found or self._curves)

    def run(self) -> None:
        """Attack everything. What goes wrong is in the report, and raised at the end.

        A policy that fails does not end the others; an interrupt does, and a worker that is killed.
        """
        settings, tasks = self._settings, tasks_of(self._settings)
        measured = settings.cost == "measure"
        self._watch.total(len(settings.policies) * measured + sum(task.steps for task in tasks))
        try:
            # First, and alone: what it costs is not to be measured beside attacks.
            for name, policy in settings.policies:
                self._costs[policy.name] = self._cost(name, policy)
            for number, found in enumerate(self._attack(), start=1):
                if isinstance(found, Lost):
                    self._lost.append(found)
                    self._watch.say(f"{found.task}: {_reason(found.error)}")
                else:
                    self._watch.done(f"{self._keep(found)}: done, {number} of {len(tasks)}")
            if self._lost:
                raise self._lost[0].error
        except BaseException as error:
            self._incomplete = "; not attacked: ".join(
                filter(None, (_reason(error), ", ".join(self._lacking())))
            )
            raise

    def _keep(self, found: Attacked | Noised) -> str:
        """Keep what was found, and return what people call it."""
        if isinstance(found, Noised):
            self._curves[found.curve.policy] = found.curve
            return f"curve of {found.curve.policy}"
        name = found.leaks[0].policy
        cost = {"cost": self._costs[name]}
        self._found[name] = [leak.model_copy(update=cost) for leak in found.leaks]
        return name

    def _lacking(self) -> list[str]:
        """Return the policies and curves of which nothing was found."""
        settings = self._settings
        noisy = [task.name(settings) for task in tasks_of(settings) if task.noisy]
        found = {*self._found, *(f"curve of {name}" for name in self._curves)}
        return [name for name in (*self._names, *noisy) if name not in found]

    def _attack(self) -> Iterator[Attacked | Noised | Lost]:
        settings = self._settings
        if settings.workers > 1:
            yield from side_by_side(settings, self._folder, self._watch)
            return
        station = Station(settings, self._folder, self._watch)
        for task in tasks_of(settings):
            found = task.done_at(station, settings)
            if isinstance(found, Lost) and not isinstance(found.error, TsqpError):
                # For the attack's author, as workers do.
                self._watch.say("".join(traceback.format_exception(found.error)).rstrip())
            yield found

    @property
    def _noisy(self) -> bool:
        """Whether anything crosses with noise."""
        policies = [policy for _, policy in self._settings.policies]
        return bool(self._settings.curves) or any(map(is_noisy, policies))

    def report(self) -> Report:
        """Return what has been found so far."""
        settings, config = self._settings, self._config
        return Report(
            setup=Setup(
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
                noisy_candidates=settings.noisy_candidates if self._noisy else None,
            ),
            policies=tuple(leak for name in self._names for leak in self._found.get(name, ())),
            curves=tuple(self._curves[name] for name in self._names if name in self._curves),
            incomplete=self._incomplete,
        )

    @property
    def _names(self) -> list[str]:
        return [policy.name for _, policy in self._settings.policies]

    def _cost(self, name: str, policy: Policy) -> Cost | None:
        settings = self._settings
        if isinstance(settings.cost, BenchReport):
            return cost_in(settings.cost, policy.name)
        if settings.cost != "measure":
            return None
        self._watch.doing(f"{policy.name}: measuring what it costs")
        provisioned = None
        if policy.feature_mask is not None:
            made = self._folder / f"cost-{policy.name}"
            made.mkdir()
            provisioned = made / SERVED, made / KEY
            provision(settings.model, policy.feature_mask, *provisioned)
        cost = measure_cost(
            name,
            policy,
            settings.model,
            threads=settings.threads,
            dtype=settings.dtype,
            provisioned=provisioned,
            say=lambda _line: None,
        )
        self._watch.step(1)
        return cost

    # ------------------------------------------------------------------------- before the run

    def _check(self) -> None:
        """Refuse what cannot work. Raises SettingsError, PolicyError, ModelError."""
        settings = self._settings
        Checkpoint(settings.model).require(light_tensors(self._config))
        for _, policy in settings.policies:
            policy.check(self._config.num_hidden_layers)
            _check_products(policy, self._config.num_hidden_layers)
            for sigma in settings.curves:
                with_sigma(policy, sigma)
        self._public_layers = PublicModel(settings.public or settings.model).has_layers
        if len(set(self._names)) < len(self._names):
            raise SettingsError("--policy", got="two of one name", expected="a name for each")
        if settings.new_tokens < 2:
            raise SettingsError(
                "--new-tokens",
                got=str(settings.new_tokens),
                expected="at least 2: the token that is sampled last goes through no model",
            )
        if settings.workers > 1 and not settings.attack_names:
            raise SettingsError(
                "workers",
                got=f"{settings.workers}, and no names of attacks",
                expected="one, or names or paths by which each of them finds the attacks",
            )
        attacks = [attack.name for attack in settings.attacks]
        if len(set(attacks)) < len(attacks):
            raise SettingsError("--attack", got="two of one name", expected="a name for each")
        if settings.public is not None:
            _check_public(read_config(settings.public), self._config, settings.public)
        if len(settings.prompts) < 2:
            raise SettingsError(
                "--prompts",
                got=str(len(settings.prompts)),
                expected="at least 2: chance is measured on the other sessions' texts",
            )
        alike = agreement(settings.prompts)
        if alike > _MOST_ALIKE:
            raise SettingsError(
                "prompts",
                got=f"the same token at {alike:.0%} of places in two of them",
                expected=f"at most {_MOST_ALIKE:.0%}: what they share counts as chance (longer"
                " --prompt-tokens, or another --text, helps)",
            )
        # Where prefill stays only the answer's tokens cross, the last one of each excepted.
        tokens = len(settings.prompts) * (settings.new_tokens - 1)
        margin, blind = settings.margin, 1 / self._config.vocab_size
        if margin is not None and tokens < (least := needed(margin, blind)):
            raise SettingsError(
                f"interval of {margin:g}",
                got=f"{tokens} tokens of answers ({len(settings.prompts)} prompts)",
                expected=f"at least {least}, or the upper end is higher even where nothing is read,"
                " by luck (more --prompts or --new-tokens)",
            )


def agreement(prompts: Sequence[Sequence[int]]) -> float:
    """Return the share of places at which two prompts have the same token, mean of neighbours.

    Without the token that all begin with, as BOS: it says nothing of the texts.
    """
    begun = len({tuple(ids[:1]) for ids in prompts}) == 1
    rests = [ids[begun:] for ids in prompts]
    same = size = 0
    for one, other in itertools.pairwise(rests):
        same += sum(a == b for a, b in zip(one, other, strict=False))
        size += min(len(one), len(other))
    return same / size if size else 0.0


def _reason(error: BaseException) -> str:
    """Say in a few words what ended a run; no more than the class of what is no error of ours."""
    if isinstance(error, TsqpError):
        return str(error)
    return type(error).__name__ if isinstance(error, Exception) else "interrupted"


def _check_public(public: ModelConfig, config: ModelConfig, directory: Path) -> None:
    """Refuse a model of another shape. Raises SettingsError."""
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "heads"):
        if (got := getattr(public, name)) != (expected := getattr(config, name)):
            raise SettingsError(
                f"--public {directory}: {name}", got=str(got), expected=f"{expected}, as MODEL has"
            )


def weakened_policies() -> list[str]:
    """Return the paths of the policies that are broken on purpose."""
    return sorted(map(str, (_HERE / "weakened").glob("*.toml")))


def _check_products(policy: Policy, layers: int) -> None:
    """Refuse attention products whose layer no other request tells. Raises PolicyError."""
    for layer in range(layers):
        for phase in PHASES:
            leaves = {op for op in OPERATORS if policy.at(op, layer, phase).leaves}
            if leaves.intersection(PRODUCTS) and not leaves.issuperset((*PRODUCTS, "qkv_proj")):
                raise PolicyError(
                    f"policy {policy.name}, layer {layer}",
                    got="some of qkv_proj, attn_scores and attn_values on the GPU",
                    expected="all or none: a product does not say whose it is, the requests around"
                    " it do",
                )
