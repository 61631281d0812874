"""Runs the laboratory: checks settings, cuts prompts, attacks policies, measures costs, reports."""

import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel

from protocol.errors import PolicyError, PromptError, SettingsError, TsqpError
from protocol.model.checkpoint import Checkpoint, light_tensors
from protocol.model.config import ModelConfig, read_config
from tee_side.engine.tokenizer import Tokenizer
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.masks.mask import is_path
from tee_side.words import OPERATORS, PHASES, PRODUCTS
from tsqp.accuracy import default_text
from tsqp.lab.bench.job import BenchSettings, Plan
from tsqp.lab.bench.prepare import write_random_model
from tsqp.lab.bench.results import Report as BenchReport
from tsqp.lab.bench.run import Bench
from tsqp.lab.bench.shapes import find_shape, require_one
from tsqp.lab.leak.attack_runner import (
    NOISY_CANDIDATES,
    AttackRunner,
    LeakProgress,
    LeakSettings,
    Outcome,
    tasks_of,
)
from tsqp.lab.leak.attacks import ATTACKS, find_attacks
from tsqp.lab.leak.model import Curve, DecodeCost, LeakReport, LeakSetup, PolicyLeak, needed
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.recording import KEY, SERVED
from tsqp.lab.leak.score import is_noisy, noisy_mask, with_sigma
from tsqp.lab.measure import (
    describe_machine,
    in_fresh_process,
    passed_on,
    processes,
    random_ids,
    tell,
)
from tsqp.lab.research.provisioning import provision

R = TypeVar("R", bound=BaseModel)

# Tokens behind the decoded token whose cost is measured.
_CONTEXT = 128
# Share of places at which two prompts may have the same token.
_MOST_ALIKE = 0.2
# What the demo model was validated with stands beside it, one text after each such token.
_TEXT_FILE = "validation.txt"
_LEAST_TOKENS = 4
# Each worker holds the public model, what it computed, and a recording.
_MOST_WORKERS = 8


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
        lost: list[BaseException] = []
        try:
            # First, and alone: what it costs is not to be measured beside attacks.
            for name, policy in settings.policies:
                self._costs[policy.name] = self._cost(name, policy)
            for number, (name, found, trace) in enumerate(self._outcomes(), start=1):
                if isinstance(found, BaseException):
                    lost.append(found)
                    if trace:  # for the attack's author
                        watch.say(trace)
                    watch.say(f"{name}: {_reason(found)}")
                else:
                    self._found[name] = found
                    watch.done(f"{name}: done, {number} of {len(tasks)}")
            if lost:
                raise lost[0]
        except BaseException as error:
            # Policies first, in the order in which they were given.
            names = [task.name for task in sorted(tasks, key=lambda task: task.noisy)]
            missing = ", ".join(name for name in names if name not in self._found)
            reasons = filter(None, (_reason(error), missing))
            self._incomplete = "; not attacked: ".join(reasons)
            raise

    def _outcomes(self) -> Iterator[Outcome]:
        """Do every task, in this process or in others, as each is done.

        Raises ProcessError for a worker that ended early, since its task is lost.
        """
        settings, folder, watch = self._settings, self._folder, self._watch
        if settings.workers < 2:
            yield from map(AttackRunner(settings, folder, watch).do, tasks_of(settings))
            return

        def told(what: tuple[str, Any]) -> None:
            name, value = what
            getattr(watch, name)(value)

        tasks = range(len(tasks_of(settings)))
        given, count = replace(settings, cost="none"), min(settings.workers, len(tasks))
        with processes(count, "a worker", told, _begin, given, folder) as submit:
            for future in as_completed([submit(_attack, number) for number in tasks]):
                yield future.result()

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
                noisy_candidates=settings.search_candidates or NOISY_CANDIDATES if noisy else None,
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
            made = Path(tempfile.mkdtemp(prefix="cost-", dir=self._folder))
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
                defaults=("context",),
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


def read_recorded(path: Path, kind: type[R], command: str) -> R:
    """Read what `tsqp bench` or `leak` wrote by --json, bare or as it is recorded.

    Raises SettingsError.
    """
    with SettingsError.for_os(
        str(path), f"a report of tsqp {command} --json", ValueError, "something else"
    ):
        document = json.loads(path.read_bytes())
        inner = document.get("report", document) if isinstance(document, dict) else document
        return kind.model_validate(inner)


def cost_in(report: BenchReport, policy: str) -> DecodeCost | None:
    """Return a policy's decoded token of one sequence, with the shortest context measured."""
    cases = [
        case
        for run in report.policies
        if run.policy == policy
        for case in run.cases
        if case.phase == "decode" and case.batch == 1
    ]
    case = min(cases, key=lambda one: one.tokens, default=None)
    return (
        None
        if case is None
        else DecodeCost(
            overhead_ms=case.overhead_ms,
            rpcs=case.rpcs,
            bytes_sent=case.bytes_sent,
            bytes_received=case.bytes_received,
            context=case.tokens,
        )
    )


# -------------------------------------------------------------------------------------- settings


def settings_of(
    command: str,
    model: Path | None,
    shape: str | None,
    folder: Path,
    fail_above: float | None,
    options: dict[str, Any],
) -> LeakSettings:
    """Find what the options of `tsqp leak` name, and cut the prompts.

    `folder`: for the model of a shape. Raises SettingsError and errors of what is read.
    """
    require_one(model, shape)
    SettingsError.unless(
        shape is None or options["text"] is None,
        "--text",
        "it together with --shape",
        "one of them: its tokens are random",
    )
    names = options["policy"] or (*sorted(builtin_policies()), *weakened_policies())
    policies = tuple((name, load_policy(name)) for name in dict.fromkeys(names))
    # Those that were given by their names, or all, and behind them those of files.
    paths = [one for one in options["attack"] if is_path(one)]
    chosen = [one for one in options["attack"] if not is_path(one)] or ATTACKS.names()
    attacks = dict.fromkeys(attack for name in (*chosen, *paths) for attack in find_attacks(name))
    torch.set_num_threads(options["threads"])
    count, tokens = options["prompts"], options["prompt_tokens"]
    if model is not None:
        prompts = cut_prompts(Tokenizer(model), text_of(model, options["text"]), count, tokens)
    else:
        # The first layer alone.
        first = find_shape(shape or "").with_layers(1)
        model = in_fresh_process(write_random_model, folder / first.name, first)
        vocabulary, seed = read_config(model).vocab_size, options["seed"]
        prompts = random_ids(vocabulary, tokens, seed=seed, sequences=count).tolist()
    SettingsError.unless(
        not options["curves"] or any(noisy_mask(policy) for _, policy in policies),
        "--curves",
        "no policy whose mask has noise",
        "one with an option sigma, as of float-noise and cloak",
    )
    cost = options["cost"]
    if cost not in ("measure", "none"):
        path, cost = cost, read_recorded(Path(cost), BenchReport, "bench")
        SettingsError.unless(
            cost.setup.model == model.name,
            path,
            f"the cost of {cost.setup.model}",
            f"that of {model.name}",
        )
    margins = [m for m in (options["margin"], fail_above) if m is not None]
    return LeakSettings(
        command=command,
        model=model,
        policies=policies,
        attacks=tuple(attacks),
        prompts=tuple(map(tuple, prompts)),
        new_tokens=options["new_tokens"],
        public=options["public"],
        dtype=options["dtype"],
        temperature=options["temperature"],
        seed=options["seed"],
        search_sessions=options["search_prompts"],
        search_tokens=options["search_tokens"],
        search_candidates=options["search_candidates"],
        threads=options["threads"],
        workers=options["workers"] or min(len(os.sched_getaffinity(0)), _MOST_WORKERS),
        margin=min(margins, default=None),
        cost=cost,
        curves=options["sigma"] if options["curves"] else (),
        dealer_in_the_clear=options["dealer_in_the_clear"],
    )


def check_settings(settings: LeakSettings, config: ModelConfig) -> None:
    """Refuse what cannot work, before anything runs. `config`: of the model.

    Raises SettingsError, PolicyError, ModelError.
    """
    Checkpoint.open(settings.model)[1].require(light_tensors(config))
    for _, policy in settings.policies:
        policy.check(config.num_hidden_layers)
        for layer, phase in itertools.product(range(config.num_hidden_layers), PHASES):
            leaves = {op for op in OPERATORS if policy.at(op, layer, phase).leaves}
            PolicyError.unless(
                not leaves.intersection(PRODUCTS) or leaves.issuperset((*PRODUCTS, "qkv_proj")),
                f"policy {policy.name}, layer {layer}",
                "some of qkv_proj, attn_scores and attn_values on the GPU",
                "all or none: a product does not say whose it is, the requests around it do",
            )
        for sigma in settings.curves:
            with_sigma(policy, sigma)
    if settings.public is not None:
        public = read_config(settings.public)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "heads"):
            got, expected = getattr(public, name), getattr(config, name)
            where = f"--public {settings.public}: {name}"
            SettingsError.unless(got == expected, where, str(got), f"{expected}, as MODEL has")
    prompts, new_tokens, margin = settings.prompts, settings.new_tokens, settings.margin
    policies = [policy.name for _, policy in settings.policies]
    attacks = [attack.name for attack in settings.attacks]
    alike = agreement(prompts)
    # Where prefill stays only the answer's tokens cross, the last one of each excepted.
    tokens = len(prompts) * (new_tokens - 1)
    least = 0 if margin is None else needed(margin, 1 / config.vocab_size)
    twice, once = "two of one name", "a name for each"
    rows = [
        (len(set(policies)) < len(policies), "--policy", twice, once),
        (len(set(attacks)) < len(attacks), "--attack", twice, once),
        (
            new_tokens < 2,
            "--new-tokens",
            str(new_tokens),
            "at least 2: the token that is sampled last goes through no model",
        ),
        (
            len(prompts) < 2,
            "--prompts",
            str(len(prompts)),
            "at least 2: chance is measured on the other sessions' texts",
        ),
        (
            alike > _MOST_ALIKE,
            "prompts",
            f"the same token at {alike:.0%} of places in two of them",
            f"at most {_MOST_ALIKE:.0%}: what they share counts as chance (longer --prompt-tokens,"
            " or another --text, helps)",
        ),
        (
            tokens < least,
            f"interval of {margin}",
            f"{tokens} tokens of answers ({len(prompts)} prompts)",
            f"at least {least}, or the upper end is higher even where nothing is read, by luck"
            " (more --prompts or --new-tokens)",
        ),
    ]
    for refused, where, got, expected in rows:
        SettingsError.unless(not refused, where, got, expected)


def agreement(prompts: Sequence[Sequence[int]]) -> float:
    """Return the share of places at which two prompts have the same token, mean of neighbours.

    Without the token that all begin with, as BOS: it says nothing of the texts.
    """
    begun = len({tuple(ids[:1]) for ids in prompts}) == 1
    rests = [ids[begun:] for ids in prompts]
    beside = [
        (a, b) for one, other in itertools.pairwise(rests) for a, b in zip(one, other, strict=False)
    ]
    return sum(a == b for a, b in beside) / max(1, len(beside))


def weakened_policies() -> list[str]:
    """Return the paths of the policies that are broken on purpose."""
    return sorted(map(str, (Path(__file__).parent / "weakened").glob("*.toml")))


# -------------------------------------------------------------------------------------- texts


def text_of(model: Path, file: Path | None) -> str:
    """Return the text that prompts are cut from: a file's, the model's own, or ours.

    Raises PromptError.
    """
    path = file if file is not None else model / _TEXT_FILE
    if file is None and not path.is_file():
        return default_text()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(str(path), got=type(error).__name__, expected="UTF-8 text") from None


def cut_prompts(tokenizer: Tokenizer, text: str, count: int, tokens: int) -> list[tuple[int, ...]]:
    """Cut a text into prompts of at most `tokens` tokens, each from the beginning of a piece.

    A piece begins with each BOS token in the text, or else after an empty line, and then gets what
    the tokenizer puts before a text. Raises PromptError where there are too few.
    """
    start = tokenizer.encode("")
    every = tokenizer.encode(text, add_special_tokens=False)
    if start and start[0] in every:
        begins = [index for index, token in enumerate(every) if token == start[0]]
        pieces = [every[one:end] for one, end in itertools.pairwise([*begins, len(every)])]
    else:
        pieces = [
            [*start, *tokenizer.encode(part, add_special_tokens=False)]
            for part in text.split("\n\n")
            if part.strip()
        ]
    long_enough = (tuple(piece[:tokens]) for piece in pieces if len(piece) >= _LEAST_TOKENS)
    # Two that are equal would be each other's chance.
    found = list(dict.fromkeys(long_enough))
    PromptError.unless(
        len(found) >= count,
        "prompts",
        f"{len(found)} different ones of at least {_LEAST_TOKENS} tokens in the text",
        f"{count} (--text FILE with more, or fewer --prompts)",
    )
    return found[:count]


# ---------------------------------------------------------------------------------- side by side

# Of a worker: its attack runner, once `_begin` has made it.
_runner: list[AttackRunner] = []


def _begin(settings: LeakSettings, folder: Path) -> None:
    """Make the worker's attack runner."""
    torch.set_num_threads(settings.threads)
    own = Path(tempfile.mkdtemp(prefix="worker-", dir=folder))
    watch = LeakProgress(
        doing=lambda what: tell(("doing", what)), step=lambda steps: tell(("step", steps))
    )
    _runner.append(AttackRunner(settings, own, watch))


def _attack(number: int) -> Outcome:
    (runner,) = _runner
    name, found, trace = runner.do(tasks_of(runner.settings)[number])
    return name, passed_on(found) if isinstance(found, BaseException) else found, trace
