"""Attacks one policy after another: records it, lets every attack at it, scores what they read.

Controls come from the same run: an attack that reads nothing here must read at least its published
share where it is known to work, or its row says that it did not work.
"""

import inspect
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from protocol.errors import TsqpError
from protocol.model.config import read_config
from tee_side.policy.placement import Policy, load_policy
from tee_side.words import PHASES
from tsqp.catalogue import PolicyEntry
from tsqp.lab.bench.results import Report as BenchReport
from tsqp.lab.leak.attack import Attack, Reading, View, Where, Work, place_name
from tsqp.lab.leak.model import (
    Adversary,
    AttackRun,
    Control,
    Curve,
    Point,
    PolicyLeak,
    Rate,
    Score,
)
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.recording import PlaySettings, Recording, logits_of, play, together
from tsqp.lab.leak.score import (
    harm,
    is_noisy,
    lengths,
    noisy_mask,
    reconstruct,
    score,
    strength,
    with_sigma,
)

# Of a control: enough to see whether an attack works, and to learn a basis of ten pads from.
_CONTROL_SESSIONS, _CONTROL_TOKENS = 16, 16
# Of a curve, whose points are many.
_CURVE_SESSIONS, _CURVE_SEARCHES = 12, 1
# Under noise no candidate is certain, and each would be run for every token at every place.
NOISY_CANDIDATES = 256


@dataclass(frozen=True, kw_only=True)
class LeakSettings(PlaySettings):
    """One run of the laboratory.

    `policies`: with the name or path that each was given by; `prompts`: token ids, a session each;
    `public`: what the attacker has, None for the model itself; `margin`: the largest allowed upper
    confidence bound above chance, None: no limit. `cost`: "measure", "none", or a report of `tsqp
    bench`; `curves`: strengths of noise to try, for policies whose mask has any. `workers`:
    processes that attack side by side, with `threads` each. `dealer_in_the_clear`: whether links
    that dealt pads depend on are in the clear, for who observes all of them. `search_candidates`:
    None for all, and for `NOISY_CANDIDATES` of what crossed with noise.
    """

    command: str
    policies: tuple[tuple[str, Policy], ...]
    attacks: tuple[type[Attack], ...]
    prompts: tuple[tuple[int, ...], ...]
    public: Path | None = None
    search_sessions: int = 2
    search_tokens: int = 64
    search_candidates: int | None = None
    threads: int = 1
    margin: float | None = None
    cost: BenchReport | str = "none"
    curves: tuple[float, ...] = ()
    workers: int = 1
    dealer_in_the_clear: bool = False


@dataclass
class LeakProgress:
    """What is told of the progress: `doing` says what, `step` how many of `total` are done.

    `done`: a line of each policy, and of each curve, that is done; `say`: what a person must know.
    """

    total: Callable[[int], None] = field(default=lambda _total: None)
    doing: Callable[[str], None] = field(default=lambda _what: None)
    step: Callable[[int], None] = field(default=lambda _steps: None)
    done: Callable[[str], None] = field(default=lambda _line: None)
    say: Callable[[str], None] = field(default=lambda _line: None)


@dataclass(frozen=True)
class AttackTask:
    """A policy to attack as it is, or with strengths of its noise (`noisy`).

    `name`: what people call it: the policy, or the curve of one.
    """

    name: str
    policy: Policy
    noisy: bool
    steps: int


# Of a task its name, and a policy against each adversary, the curve of one, or the error that ended
# it; the others go on. And the traceback of what is no error of ours.
Outcome = tuple[str, tuple[PolicyLeak, ...] | Curve | BaseException, str]


def tasks_of(settings: LeakSettings) -> list[AttackTask]:
    """Return everything there is to do; first what takes longest, so that all end together."""
    policies = [policy for _, policy in settings.policies]
    curves = [
        AttackTask(f"curve of {policy.name}", policy, noisy=True, steps=len(settings.curves))
        for policy in policies
        if settings.curves and noisy_mask(policy)
    ]
    # Each attack is made at each service, and at all of them together.
    return curves + [
        AttackTask(
            policy.name,
            policy,
            noisy=False,
            steps=1 + len(settings.attacks) * (policy.services + (policy.services > 1)),
        )
        for policy in policies
    ]


class AttackRunner:
    """Attacks policies. It remembers controls, and what the public model computed.

    `folder`: an empty one, for what services are given.
    """

    def __init__(
        self, settings: LeakSettings, folder: Path, watch: LeakProgress | None = None
    ) -> None:
        self.settings = settings
        self._folder = folder
        self._watch = watch or LeakProgress()
        self._config = read_config(settings.model)
        self._publics: dict[bool, PublicModel] = {}
        self._controls: dict[str, Recording] = {}
        self._results: dict[tuple[str, str, bool], Control] = {}

    def do(self, task: AttackTask) -> Outcome:
        """Do a task. An error of its own, or of an attack, ends this task alone."""
        try:
            work = self.curve if task.noisy else self.attack
            return task.name, work(task.policy), ""
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of any attack; raised at the end
            ours = isinstance(error, TsqpError)
            text = "" if ours else "".join(traceback.format_exception(error)).rstrip()
            return task.name, error, text

    @torch.inference_mode()
    def attack(self, policy: Policy) -> tuple[PolicyLeak, ...]:
        """Record a policy and let every attack at it, once for each adversary; without its cost.

        The adversary is a service, or a dealer, each alone. Where pads are dealt it is also an
        observer of all links, and both together.
        """
        settings, watch = self.settings, self._watch
        watch.doing(f"{policy.name}: recording")
        recording = play(policy, settings.prompts, settings, self._new_folder())
        watch.step(1)
        alone = self._leak(recording, policy, "service")
        if policy.services < 2:
            return (alone,)
        colluding = self._leak(together(recording), policy, "colluding services")
        # In the clear the observer has what the services have together.
        seen: dict[str, object] = {"adversary": "observer of all links"}
        if settings.dealer_in_the_clear:
            return alone, colluding.model_copy(update=seen), colluding
        nothing = "the links are encrypted: their observer sees lengths and timing"
        seen |= {"nothing": nothing, "runs": (), "untried": (), "reconstruction": None}
        return alone, alone.model_copy(update=seen), colluding

    def _leak(self, recording: Recording, policy: Policy, adversary: Adversary) -> PolicyLeak:
        """Let every attack at each service of a recording."""
        settings, watch = self.settings, self._watch
        truths = [session.truth for session in recording.sessions]
        tried: list[tuple[AttackRun, list[Reading]]] = []
        for service in range(recording.policy.services):
            view = self._view(recording, service, settings.search_sessions)
            for attack in settings.attacks:
                watch.doing(f"{policy.name}: {attack.name}")
                tried.append(self._attack(attack, view, recording, service))
                watch.step(1)
        runs = tuple(run for run, _ in tried)
        made = PolicyLeak(
            policy=policy.name,
            adversary=adversary,
            summary=policy.summary,
            standing=PolicyEntry(recording.policy).standing,
            services=policy.services,
            nothing=None if policy.services else "nothing leaves the TEE",
            sent_prompt=sum(truth.prompted for truth in truths),
            # The last one went through no model.
            sent_answer=sum(len(truth.tokens[:-1]) - truth.prompted for truth in truths),
            cost=None,
            runs=runs,
            untried=untried(recording, runs),
            blind=1 / self._config.vocab_size,
            lengths=lengths(recording.sessions) if policy.services else None,
            reconstruction=None,
        )
        if made.best is None:
            return made
        run, best = made.best
        shown = reconstruct(
            next(readings for one, readings in tried if one is run),
            run.attack,
            best.where,
            truths,
            view.public,
        )
        return made.model_copy(update={"reconstruction": shown})

    @torch.inference_mode()
    def curve(self, policy: Policy) -> Curve:
        """Try strengths of a policy's noise: what is read, and what becomes of the output.

        From the weakest on. An attack that reads nothing under some noise is not tried under more,
        and where none reads anything the curve ends.
        """
        settings, attacks, points = self.settings, self.settings.attacks, []
        texts, parameter = settings.prompts[:_CURVE_SESSIONS], ""
        plain = logits_of(load_policy("tee-only"), texts, settings, self._new_folder())
        for sigma in sorted(settings.curves):
            changed = with_sigma(policy, sigma)
            self._watch.doing(f"{policy.name}: sigma {sigma:g}")
            recording = play(changed, texts, settings, self._new_folder())
            view = self._view(recording, 0, _CURVE_SEARCHES)
            runs = [self._attack(attack, view, recording, 0)[0] for attack in attacks]
            scored = ((run, one) for run in runs for one in run.meaningful)
            best = max(scored, key=lambda pair: pair[1].strength, default=None)
            noisy = logits_of(changed, texts, settings, self._new_folder())
            perplexity, output_error = harm(texts, plain, noisy)
            parameter, strong = strength(changed, sigma, view.public)
            points.append(
                Point(
                    strength=strong,
                    sigma=sigma,
                    rate=best[1].top1 if best else Rate(hits=0, n=0),
                    attack=best[0].attack if best else "none",
                    where=best[1].where if best else "none",
                    chance=best[1].chance if best else 0.0,
                    perplexity=perplexity,
                    output_error=output_error,
                )
            )
            # By more than chance anywhere, be it believed or not.
            attacks = tuple(
                attack
                for attack, run in zip(attacks, runs, strict=True)
                if any(one.excess_low > 0 for one in run.meaningful or run.scores)
            )
            self._watch.step(1)
            if not attacks:
                break
        self._watch.step(len(settings.curves) - len(points))
        return Curve(
            policy=policy.name,
            parameter=parameter,
            plain_perplexity=harm(texts, plain, plain)[0],
            search_sessions=_CURVE_SEARCHES,
            search_candidates=settings.search_candidates or NOISY_CANDIDATES,
            points=tuple(sorted(points, key=lambda point: point.strength)),
        )

    def _attack(
        self,
        kind: type[Attack],
        view: View,
        recording: Recording,
        service: int,
        *,
        is_control: bool = False,
    ) -> tuple[AttackRun, list[Reading]]:
        """Let one attack at one service, and where it must work, unless this is that.

        Returns what it read as well.
        """
        attack, work = kind(), Work()
        refused = attack.refuses(view)
        started = time.process_time()
        found = list(attack.read(view, work)) if refused is None else []
        spent = time.process_time() - started
        alone = is_control or refused is not None
        run = AttackRun(
            attack=kind.name,
            service=service + 1,
            refused=refused,
            control=None if alone else self._control(kind, recording.policy),
            scores=score(found, [session.truth for session in recording.sessions]),
            compared=work.compared,
            modelled=work.modelled,
            cpu_s=spent if refused is None else 0.0,
        )
        return run, found

    def _control(self, kind: type[Attack], policy: Policy) -> Control:
        """Run an attack where it must work, once for each scheme that shows it."""
        floats = policy.arithmetic != "int8"
        name = kind.control if floats else kind.integer_control or kind.control
        noisy = is_noisy(policy)
        key = (kind.name, name, noisy)
        if key not in self._results:
            self._watch.doing(f"{kind.name}: control, {Path(name).stem}")
            # A path is one from the attack's file.
            beside = Path(inspect.getfile(kind)).parent / name
            path = str(beside) if name.endswith((".toml", ".py")) else name
            if path not in self._controls:
                few = min(self.settings.new_tokens, _CONTROL_TOKENS)
                self._controls[path] = play(
                    load_policy(path),
                    self.settings.prompts[:_CONTROL_SESSIONS],
                    replace(self.settings, new_tokens=few),
                    self._new_folder(),
                )
            recording = self._controls[path]
            scores: tuple[Score, ...] = ()
            if recording.policy.services:
                # Of noise as few candidates as there.
                view = self._view(recording, 0, self.settings.search_sessions, noisy=noisy)
                # What reads nothing on a disk must read it where nothing is encrypted.
                view = replace(view, disks=tuple(disk.clear for disk in recording.disks))
                scores = self._attack(kind, view, recording, 0, is_control=True)[0].scores
            best = max(scores, key=lambda one: one.strength, default=None)
            self._results[key] = Control(
                attack=kind.name,
                policy=recording.policy.name,
                where=best.where if best else None,
                rate=best.top1 if best else Rate(hits=0, n=0),
                published=kind.published,
                places={one.where: one.top1 for one in scores},
            )
        return self._results[key]

    def _view(
        self, recording: Recording, service: int, sessions: int, *, noisy: bool = False
    ) -> View:
        settings, base = self.settings, self.settings.public
        noisy = noisy or is_noisy(recording.policy)
        # A service holds the linear weights of a model that is not public, unless they are
        # transformed. One model where it is public as a whole: it remembers what it computed.
        clear = base is None or recording.policy.feature_mask is None
        if clear not in self._publics:
            self._publics[clear] = PublicModel(
                base or settings.model,
                settings.model if base is not None and clear else None,
            )
        return View(
            traces=tuple(session.traces[service] for session in recording.sessions),
            public=self._publics[clear],
            policy=recording.policy,
            served=recording.served,
            search_sessions=sessions,
            search_tokens=settings.search_tokens,
            search_candidates=settings.search_candidates or (NOISY_CANDIDATES if noisy else None),
            disks=tuple(disk.encrypted for disk in recording.disks),
        )

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="play-", dir=self._folder))


def untried(recording: Recording, runs: Sequence[AttackRun]) -> tuple[str, ...]:
    """Return what crossed and no attack tried, at its place or under its mask anywhere."""
    policy = recording.policy
    tried = {one.where for run in runs for one in run.meaningful}
    traces = [trace for session in recording.sessions for trace in session.traces]
    places = dict.fromkeys(where for trace in traces for where in trace.places)

    def covers(where: Where) -> set[str]:
        layer, operator = where
        placed = [policy.at(operator, layer or 0, phase) for phase in PHASES]
        return {
            one.mask.described() if one.mask is not None else "in the clear"
            for one in placed
            if one.leaves
        }

    known = {cover for where in places if place_name(where) in tried for cover in covers(where)}
    return tuple(
        f"{place_name(where)} ({', '.join(sorted(covers(where)))})"
        for where in places
        if place_name(where) not in tried and not covers(where) <= known
    )
