"""Runs the laboratory: records each policy, lets every attack at it, and scores what they read.

Controls come from the same run: an attack that reads nothing here must read at least its published
share where it is known to work, or its row says that it did not work.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from protocol.errors import PolicyError, SettingsError, TsqpError
from protocol.messages import FloatDtype
from protocol.model.checkpoint import Checkpoint, light_tensors
from protocol.model.config import ModelConfig, read_config
from tee_side.calibration import CALIBRATION_FILE
from tee_side.policy import Policy, load_policy
from tee_side.vocabulary import OPERATORS, PHASES, PRODUCTS
from tsqp.bench import prepare
from tsqp.bench.machine import describe_machine
from tsqp.bench.model import Report as BenchReport
from tsqp.catalogue import policy_entry
from tsqp.leak.attack import Attack, Reading, View, Work
from tsqp.leak.cost import cost_in, measure_cost
from tsqp.leak.curves import curve, harm, noisy_mask, point_of, with_sigma
from tsqp.leak.interval import needed
from tsqp.leak.matching import place_name
from tsqp.leak.model import (
    AttackRun,
    Control,
    Cost,
    Curve,
    PolicyLeak,
    Rate,
    Report,
    Setup,
)
from tsqp.leak.play import KEY, PlaySettings, Recording, logits_of, play
from tsqp.leak.public import PublicModel
from tsqp.leak.reading import reconstruct
from tsqp.leak.score import score
from tsqp.leak.side_information import lengths
from tsqp.leak.trace import Where

_HERE = Path(__file__).parent
# Of a control: enough to see whether an attack works, and to learn a basis of ten pads from.
_CONTROL_SESSIONS, _CONTROL_TOKENS = 16, 16
# Of a point of a curve.
_CURVE_SESSIONS = 12
# Share of places at which two prompts may have the same token.
_MOST_ALIKE = 0.2


@dataclass(frozen=True)
class LeakSettings:
    """One run of the laboratory.

    `policies`: with the name or path that each was given by; `prompts`: token ids, a session each;
    `public`: what the attacker has, None for the model itself; `margin`: how far above nothing the
    upper end of an interval may be at most, None: whatever it is. `cost`: "measure", "none", or a
    report of `tsqp bench`; `curves`: strengths of noise to try, for policies whose mask has any.
    """

    command: str
    model: Path
    policies: tuple[tuple[str, Policy], ...]
    attacks: tuple[type[Attack], ...]
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    public: Path | None = None
    dtype: FloatDtype | None = None
    temperature: float = 0.0
    seed: int = 0
    search_sessions: int = 2
    search_tokens: int = 64
    threads: int = 1
    margin: float | None = None
    cost: BenchReport | str = "none"
    curves: tuple[float, ...] = ()


@dataclass
class Watch:
    """What is told of the progress: `doing` says what, `step` that one of `total` is done."""

    total: Callable[[int], None] = field(default=lambda _total: None)
    doing: Callable[[str], None] = field(default=lambda _what: None)
    step: Callable[[], None] = field(default=lambda: None)
    say: Callable[[str], None] = field(default=lambda _line: None)


class Laboratory:
    """One run. What cannot work is refused before anything is recorded."""

    def __init__(self, settings: LeakSettings, folder: Path, watch: Watch | None = None) -> None:
        self._settings = settings
        self._folder = folder
        self._watch = watch or Watch()
        self._created = datetime.now(UTC)
        self._config = read_config(settings.model)
        self._check()
        self._public = PublicModel(settings.public or settings.model)
        self._policies: list[PolicyLeak] = []
        self._curves: list[Curve] = []
        self._controls: dict[str, Recording] = {}
        self._results: dict[tuple[str, str], Control] = {}
        self._model = settings.model
        self._incomplete: str | None = None
        self._plays = 0

    @property
    def measured(self) -> bool:
        """Whether there is anything to report."""
        return bool(self._policies)

    def run(self) -> None:
        """Attack everything. What ends it early is in the report, and raised."""
        settings, watch = self._settings, self._watch
        noisy = [one for one in settings.policies if settings.curves and noisy_mask(one[1])]
        watch.total(
            sum(1 + policy.services * len(settings.attacks) for _, policy in settings.policies)
            + len(noisy) * len(settings.curves)
        )
        try:
            if any(policy.arithmetic == "int8" for _, policy in settings.policies):
                watch.doing("choosing scales")
                self._calibrate()
            with torch.inference_mode():
                for name, policy in settings.policies:
                    self._policies.append(self._policy(name, policy))
                for _, policy in noisy:
                    self._curves.append(self._curve(policy))
        except BaseException as error:
            reason = str(error) if isinstance(error, TsqpError) else type(error).__name__
            done = {found.policy for found in self._policies}
            missing = [policy.name for _, policy in settings.policies if policy.name not in done]
            self._incomplete = f"{reason}; not attacked: {', '.join(missing) or 'none'}"
            raise

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
            ),
            policies=tuple(self._policies),
            curves=tuple(self._curves),
            incomplete=self._incomplete,
        )

    # ------------------------------------------------------------------------- before the run

    def _check(self) -> None:
        """Refuse what cannot work. Raises SettingsError, PolicyError, ModelError."""
        settings = self._settings
        Checkpoint(settings.model).require(light_tensors(self._config))
        for _, policy in settings.policies:
            policy.check(self._config.num_hidden_layers)
            _check_products(policy, self._config.num_hidden_layers)
        names = [policy.name for _, policy in settings.policies]
        if len(set(names)) < len(names):
            raise SettingsError("--policy", got="two of one name", expected="a name for each")
        if settings.new_tokens < 2:
            raise SettingsError(
                "--new-tokens",
                got=str(settings.new_tokens),
                expected="at least 2: the token that is sampled last goes through no model",
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
                expected=f"at most {_MOST_ALIKE:.0%}: what they share counts as chance",
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

    # ------------------------------------------------------------------------------ a policy

    def _policy(self, name: str, policy: Policy) -> PolicyLeak:
        settings, watch = self._settings, self._watch
        watch.doing(f"{policy.name}: recording")
        recording = self._play(policy, settings.prompts, settings.new_tokens)
        cost = self._cost(name, policy, recording)
        watch.step()
        truths = [session.truth for session in recording.sessions]
        answers = [flag for truth in truths for flag in truth.answers]
        runs: list[AttackRun] = []
        readings: dict[tuple[str, int], list[Reading]] = {}
        if recording.observable:
            for service in range(policy.services):
                view = self._view(recording, service, settings.search_sessions)
                for attack in settings.attacks:
                    watch.doing(f"{policy.name}: {attack.name}")
                    run, found = self._attack(attack, view, recording, service)
                    watch.step()
                    runs.append(run)
                    readings[attack.name, service] = found
        made = PolicyLeak(
            policy=policy.name,
            summary=policy.summary,
            standing=policy_entry(policy).standing,
            services=policy.services,
            nothing=None if recording.observable else "nothing leaves the TEE",
            sent_prompt=answers.count(False),
            sent_answer=answers.count(True),
            cost=cost,
            runs=tuple(runs),
            untried=untried(recording, runs),
            blind=1 / self._config.vocab_size,
            lengths=lengths(recording.sessions) if recording.observable else None,
            reconstruction=None,
        )
        if made.best is None:
            return made
        run, best = made.best
        shown = reconstruct(
            readings[run.attack, run.service - 1], run.attack, best.where, truths, self._public
        )
        return made.model_copy(update={"reconstruction": shown})

    def _attack(
        self, kind: type[Attack], view: View, recording: Recording, service: int
    ) -> tuple[AttackRun, list[Reading]]:
        """Let one attack at one service; returns what it read as well."""
        attack, work = kind(), Work()
        if (refused := attack.refuses(view)) is not None:
            run = AttackRun(
                attack=kind.name,
                service=service + 1,
                refused=refused,
                control=None,
                scores=(),
                compared=0,
                modelled=0,
                cpu_s=0.0,
            )
            return run, []
        started = time.process_time()
        found = list(attack.read(view, work))
        spent = time.process_time() - started
        truths = [session.truth for session in recording.sessions]
        run = AttackRun(
            attack=kind.name,
            service=service + 1,
            refused=None,
            control=self._control(kind, recording.policy),
            scores=score(found, truths),
            compared=work.compared,
            modelled=work.modelled,
            cpu_s=spent,
        )
        return run, found

    def _control(self, kind: type[Attack], policy: Policy) -> Control:
        """Run an attack where it must work, once for each scheme that shows it."""
        integers = policy.arithmetic == "int8" and kind.integer_control is not None
        name = kind.integer_control if integers and kind.integer_control else kind.control
        key = (kind.name, name)
        if key not in self._results:
            settings = self._settings
            self._watch.doing(f"{kind.name}: control, {Path(name).stem}")
            recording = self._recorded_control(kind, name)
            found: list[Reading] = []
            if recording.observable:
                view = self._view(recording, 0, settings.search_sessions)
                attack = kind()
                found = [] if attack.refuses(view) else list(attack.read(view, Work()))
            scores = score(found, [session.truth for session in recording.sessions])
            best = max(scores, key=lambda one: (one.excess_low, one.top1.n), default=None)
            self._results[key] = Control(
                attack=kind.name,
                policy=recording.policy.name,
                where=best.where if best else None,
                rate=best.top1 if best else Rate(hits=0, n=0),
                published=kind.published,
                places={one.where: one.top1 for one in scores},
            )
        return self._results[key]

    def _calibrate(self) -> None:
        """Have scales for integers; they are no secret, and the attacker gets them, too."""
        self._model = prepare.calibration(self._model, self._folder)
        self._public = PublicModel(
            self._settings.public or self._model, self._model / CALIBRATION_FILE
        )

    def _recorded_control(self, kind: type[Attack], name: str) -> Recording:
        path = _control_path(kind, name)
        if path not in self._controls:
            settings = self._settings
            policy = load_policy(path)
            if policy.arithmetic == "int8":
                self._calibrate()
            self._controls[path] = self._play(
                policy,
                settings.prompts[:_CONTROL_SESSIONS],
                min(settings.new_tokens, _CONTROL_TOKENS),
            )
        return self._controls[path]

    def _view(self, recording: Recording, service: int, sessions: int) -> View:
        settings = self._settings
        return View(
            traces=tuple(session.traces[service] for session in recording.sessions),
            public=self._public,
            policy=recording.policy,
            served=recording.served,
            search_sessions=sessions,
            search_tokens=settings.search_tokens,
        )

    def _play(self, policy: Policy, prompts: Sequence[Sequence[int]], new_tokens: int) -> Recording:
        return play(policy, prompts, replace(self._play_settings(), new_tokens=new_tokens))

    def _cost(self, name: str, policy: Policy, recording: Recording) -> Cost | None:
        settings = self._settings
        if isinstance(settings.cost, BenchReport):
            return cost_in(settings.cost, policy.name)
        if settings.cost != "measure":
            return None
        self._watch.doing(f"{policy.name}: measuring what it costs")
        provisioned = None
        if policy.feature_mask is not None:
            provisioned = recording.served, recording.served.with_name(KEY)
        return measure_cost(
            name,
            policy,
            self._model,
            threads=settings.threads,
            dtype=settings.dtype,
            provisioned=provisioned,
            say=lambda _line: None,
        )

    def _curve(self, policy: Policy) -> Curve:
        """Try strengths of noise: what is read, and what becomes of the output."""
        settings = self._settings
        prompts = settings.prompts[:_CURVE_SESSIONS]
        texts = [list(prompt) for prompt in prompts]
        plain = logits_of(load_policy("tee-only"), texts, self._play_settings())
        points = []
        for sigma in settings.curves:
            changed = with_sigma(policy, sigma)
            self._watch.doing(f"{policy.name}: sigma {sigma:g}")
            recording = self._play(changed, prompts, settings.new_tokens)
            view = self._view(recording, 0, settings.search_sessions)
            runs = [self._attack(attack, view, recording, 0)[0] for attack in settings.attacks]
            noisy = logits_of(changed, texts, self._play_settings())
            self._watch.step()
            points.append(point_of(changed, sigma, runs, harm(texts, plain, noisy), self._config))
        return curve(policy, harm(texts, plain, plain), points)

    def _play_settings(self) -> PlaySettings:
        settings = self._settings
        self._plays += 1
        folder = self._folder / f"play-{self._plays}"
        folder.mkdir()
        return PlaySettings(
            model=self._model,
            folder=folder,
            new_tokens=settings.new_tokens,
            dtype=settings.dtype,
            temperature=settings.temperature,
            seed=settings.seed,
        )


def agreement(prompts: Sequence[Sequence[int]]) -> float:
    """Return the share of places at which two prompts have the same token, mean of neighbours."""
    same = size = 0
    for one, other in itertools.pairwise(prompts):
        same += sum(a == b for a, b in zip(one, other, strict=False))
        size += min(len(one), len(other))
    return same / size if size else 0.0


def untried(recording: Recording, runs: Sequence[AttackRun]) -> tuple[str, ...]:
    """Return what crossed and no attack tried, at its place or under its mask anywhere."""
    policy = recording.policy
    tried = {one.where for run in runs for one in run.meaningful}
    traces = [trace for session in recording.sessions for trace in session.traces]
    places = dict.fromkeys(where for trace in traces for where in trace.places)

    def covers(where: Where) -> set[str]:
        layer, operator = where
        placed = [policy.at(operator, layer or 0, phase) for phase in PHASES]
        masks = [one.mask for one in placed if one.place == "gpu"]
        return {mask.described() if mask is not None else "in the clear" for mask in masks}

    known: set[str] = set()
    for where in places:
        if place_name(where) in tried:
            known |= covers(where)
    return tuple(
        f"{place_name(where)} ({', '.join(sorted(covers(where)))})"
        for where in places
        if place_name(where) not in tried and not covers(where) <= known
    )


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


def _control_path(kind: type[Attack], name: str) -> str:
    """Return a control as `load_policy` takes it: a path is one from the attack's file, or ours."""
    if not name.endswith((".toml", ".py")):
        return name
    beside = Path(inspect.getfile(kind)).parent / name
    return str(beside if beside.is_file() else _HERE / name)


def _check_products(policy: Policy, layers: int) -> None:
    """Refuse attention products whose layer no other request tells. Raises PolicyError."""
    for layer in range(layers):
        for phase in PHASES:
            leaves = {op for op in OPERATORS if policy.at(op, layer, phase).place == "gpu"}
            if leaves.intersection(PRODUCTS) and not leaves.issuperset((*PRODUCTS, "qkv_proj")):
                raise PolicyError(
                    f"policy {policy.name}, layer {layer}",
                    got="some of qkv_proj, attn_scores and attn_values on the GPU",
                    expected="all or none: a product does not say whose it is, the requests around"
                    " it do",
                )
