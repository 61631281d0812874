"""Runs a benchmark: checks everything, starts what is needed, and collects a report.

Every policy is measured by a process of its own (`tsqp.lab.bench.worker`), as are the baselines.
What is there when a run is interrupted is reported as far as it goes.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu_side.devices import parse_device
from protocol.endpoint import parse_endpoint
from protocol.errors import ModelError, SettingsError, TsqpError
from protocol.model.checkpoint import Checkpoint, light_tensors, linear_tensors
from protocol.model.config import read_config
from protocol.tensors import ITEMSIZE
from tee_side.policy.placement import Policy, load_policy
from tee_side.remote.services.plan import check_links, read_services
from tsqp.extras import require
from tsqp.feature_key import FeatureKey
from tsqp.lab.bench import prepare
from tsqp.lab.bench.job import (
    Answer,
    BenchSettings,
    check_disk,
    check_memory,
    needs_linear,
    pad_phases,
)
from tsqp.lab.bench.ping_pong import ping_pong
from tsqp.lab.bench.results import (
    Baseline,
    Case,
    Finished,
    PolicyRun,
    Report,
    RequestTimes,
    Setup,
    Timeline,
)
from tsqp.lab.bench.shapes import shape_of
from tsqp.lab.bench.worker import measure
from tsqp.lab.measure import describe_machine, in_fresh_process, peak_bytes, run_job
from tsqp.leakage_summary import leakage_summary


class Bench:
    """One run. Everything is checked before anything is made or measured."""

    def __init__(self, settings: BenchSettings, say: Callable[[str], None]) -> None:
        self._say = say
        self._shape = shape_of(settings.model, settings.shape)
        self._config = config = self._shape.config()
        fitted = settings.plan.fitted(
            config.context_length, settings.step_tokens, settings.defaults
        )
        self._settings = replace(settings, plan=fitted)
        given = settings.endpoints
        setup = Setup(
            command=settings.command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=describe_machine(),
            model=self._shape.name,
            num_hidden_layers=config.num_hidden_layers,
            dtype=settings.dtype or config.dtype,
            device="given services" if given else settings.device,
            transport=given[0].split("://", 1)[0] if given else settings.transport,
            link=None if settings.link is None else str(settings.link),
            tee_threads=settings.threads,
            gpu_threads=None if given else settings.gpu_threads,
            spin_us=settings.spin_us,
            step_tokens=settings.step_tokens,
            kernels=settings.kernels,
        )
        self._report = Report(setup=setup, policies=(), baselines=(), ping_pong=())
        self._all_policies = [*settings.policies]
        if settings.baselines and all(policy.services for _, policy in settings.policies):
            # What needs no service: in the model's own floats, and in int8 by the kernels of
            # `shielded`.
            alone = ("tee-only", "tee-only-int8")
            self._all_policies += [(name, load_policy(name)) for name in alone]
        # Whether a service that computes, or the TEE, needs linear weights.
        self._linear = (
            settings.baselines
            or (settings.computes and not given)
            or any(needs_linear(policy, config) for _, policy in self._all_policies)
        )
        # Those that verify what services answer that compute nothing.
        self._hollow = [p for _, p in self._all_policies if p.verified and not settings.computes]
        self._check()
        if fitted != settings.plan:
            prompts = ", ".join(map(str, fitted.prefill))
            contexts = ", ".join(map(str, sorted({context for context, _ in fitted.decode})))
            say(
                f"prompts and contexts that fit the model: prefill {prompts};"
                f" context {contexts or 'none'}"
            )

    def run(self) -> Report:
        """Measure, and return the report. What ends it early is in the report, and raised."""
        try:
            with tempfile.TemporaryDirectory(prefix="tsqp-bench-") as folder:
                self._run(Path(folder))
        except BaseException as error:
            self._add(incomplete="; ".join([_reason(error), *self._missing()]))
            raise
        return self._report

    def _add(self, **found: Any) -> None:
        self._report = self._report.model_copy(update=found)

    def _missing(self) -> Iterator[str]:
        """Say what has not been measured, or not to its end."""
        # What the end of a policy's measurements says is not 0.
        begun = {run.policy: run.tee_peak_bytes > 0 for run in self._report.policies}
        names = [policy.name for _, policy in self._all_policies]
        for what, found in (
            ("in part", [name for name in names if begun.get(name) is False]),
            ("not", [name for name in names if name not in begun]),
        ):
            if found:
                yield f"{what} measured: {', '.join(found)}"
        if self._settings.baselines and not self._report.ping_pong:
            yield "not all baselines measured"

    @property
    def measured(self) -> bool:
        """Whether there is anything to report."""
        return bool(self._report.policies or self._report.baselines or self._report.ping_pong)

    def report(self) -> Report:
        """Return what has been measured so far."""
        return self._report

    # ------------------------------------------------------------------------- before the run

    def _check(self) -> None:
        """Refuse what cannot work.

        Raises SettingsError, PolicyError, ModelError, EndpointError, FeatureKeyError.
        """
        settings, config, plan = self._settings, self._config, self._settings.plan
        places: dict[str, str] = {}
        for place, policy in self._all_policies:
            # The report could not tell two policies of one name apart.
            SettingsError.unless(
                policy.name not in places,
                "--policy",
                f"{places.get(policy.name)} and {place}, both named {policy.name}",
                "policies of different names",
            )
            places[policy.name] = place
        if settings.baselines:
            require(
                "transformers",
                "tsqp bench",
                "the extra bench (pip install '.[bench]'), or no baselines",
            )
        if settings.model is not None:
            Checkpoint.open(settings.model)[1].require(light_tensors(config))
        if not settings.endpoints:
            parse_device(settings.device)
        for endpoint in settings.endpoints:
            parse_endpoint(endpoint)
        policies = [policy for _, policy in self._all_policies]
        for policy in policies:
            policy.check(config.num_hidden_layers)
            used = settings.endpoints[: policy.services]
            SettingsError.unless(
                not settings.endpoints or len(set(used)) == policy.services,
                f"--gpu, for policy {policy.name}",
                " and ".join(used),
                f"{policy.services} services that do not collude",
            )
            check_links(
                read_services(used[:1], used[1:], policy) if used else (),
                [None] * len(used),
                policy,
                dealer_in_the_clear=settings.dealer_in_the_clear,
            )
            self._check_feature_mask(policy)
        plan.check(config.context_length, settings.step_tokens)
        check_memory(
            config,
            policies,
            device=settings.device,
            services=0 if settings.endpoints else max(policy.services for policy in policies),
            sequences=plan.sequences,
            tokens=plan.longest(settings.step_tokens),
            itemsize=ITEMSIZE[settings.dtype or config.dtype],
            step_tokens=settings.step_tokens,
        )
        banks = (
            prepare.bank_bytes(
                config,
                policy,
                plan.pads(pad_phases(policy), settings.step_tokens) + prepare.TIMED_PADS,
            )
            for policy in policies
        )
        weights = 0
        if settings.shape is not None:
            weights += prepare.required_bytes(config, linear=self._linear)
        if self._hollow:
            weights += prepare.required_bytes(config, linear=False)
        check_disk(max(banks) + weights)

    def _check_feature_mask(self, policy: Policy) -> None:
        settings, mask = self._settings, policy.feature_mask
        if mask is None:
            return
        if settings.model is None:
            raise SettingsError(
                f"policy {policy.name}",
                got="--shape",
                expected="MODEL, to which the key of its mask belongs",
            )
        served = settings.server_model is not None or bool(settings.endpoints)
        if settings.key is None or not served:
            raise SettingsError(
                f"policy {policy.name}",
                "no --key, or no --server-model",
                f"both, as tsqp provision MODEL --mask {mask.name} writes them",
            )
        FeatureKey.load(settings.key).check(*Checkpoint.open(settings.model), mask)
        if settings.server_model is not None and not settings.endpoints:
            served_config = read_config(settings.server_model)
            Checkpoint(settings.server_model).require(linear_tensors(served_config))
            ModelError.unless(
                served_config.num_hidden_layers == self._config.num_hidden_layers,
                str(settings.server_model),
                f"{served_config.num_hidden_layers} layers",
                f"{self._config.num_hidden_layers}, as {settings.model} has",
            )

    # --------------------------------------------------------------------------------- the run

    def _run(self, folder: Path) -> None:
        settings = self._settings
        given = settings.model
        if given is None:
            self._say(f"making random weights of {self._shape.name}")
            given = in_fresh_process(
                prepare.write_random_model, folder / "model", self._shape, self._linear
            )
        model = prepare.endless(given, folder)
        hollow = (
            in_fresh_process(prepare.write_hollow, model, folder / "hollow")
            if self._hollow
            else model
        )
        for name, policy in self._all_policies:
            # A service a policy: a fresh one, whose peak of memory is that policy's.
            with ExitStack() as running:
                used = hollow if policy in self._hollow else model
                self._measure(running, folder, used, name, policy)
        if settings.baselines:
            for found in self._measure_baselines(folder, model):
                self._add(baselines=(*self._report.baselines, *found))
            self._say("baseline: raw ping-pong")
            self._add(ping_pong=ping_pong())

    def _measure(
        self, running: ExitStack, folder: Path, model: Path, name: str, policy: Policy
    ) -> None:
        settings = self._settings
        if settings.endpoints:
            services = [(0, endpoint) for endpoint in settings.endpoints[: policy.services]]
        else:
            served = settings.server_model if policy.feature_mask else None
            services = prepare.start_services(running, policy, served or model, folder, settings)
        bank = Path(running.enter_context(tempfile.TemporaryDirectory(dir=folder))) / "pads"
        if policy.masks:
            self._say(f"{policy.name}: making what its masks need")
        needed = settings.plan.pads(pad_phases(policy), settings.step_tokens)
        given = prepare.pad_bank(model, policy, needed, bank, zeros=not settings.computes)
        # Without a last answer, 0 for what only that says.
        answers: list[Answer] = [Finished()]
        try:
            for answer in run_job(
                f"policy {name}",
                measure,
                # Policies are read again there.
                replace(settings, policies=()),
                *(model, name, services, given),
            ):
                if isinstance(answer, str):
                    self._say(f"{policy.name}: {answer}")
                else:
                    answers.append(answer)
        finally:
            gpu_peak_bytes: int | None = None
            with suppress(OSError):
                gpu_peak_bytes = sum(peak_bytes(pid) for pid, _ in services if pid) or None
            if answers[1:]:
                run = PolicyRun(
                    policy=policy.name,
                    summary=policy.summary,
                    leakage_summary=leakage_summary(policy),
                    cases=tuple(one for one in answers if isinstance(one, Case)),
                    generation=next((a for a in answers if isinstance(a, RequestTimes)), None),
                    timelines=tuple(one for one in answers if isinstance(one, Timeline)),
                    gpu_peak_bytes=gpu_peak_bytes,
                    **dict(next(a for a in reversed(answers) if isinstance(a, Finished))),
                )
                self._add(policies=(*self._report.policies, run))

    def _measure_baselines(self, folder: Path, model: Path) -> Iterator[Sequence[Baseline]]:
        """Measure those that can be: of the same cases, with the same threads and dtype.

        `folder`: for the sockets of services. Raises ProcessError.
        """
        settings, plan = self._settings, self._settings.plan
        contexts = tuple(sorted({context for context, _ in plan.decode}))
        common: dict[str, Any] = {
            "threads": settings.threads,
            "tokens": plan.prefill,
            # For one length; the slowest take 6 s a pass.
            "case_s": 5.0,
        }
        if Checkpoint.open(model)[1].holds(linear_tensors(self._config)):
            self._say("baseline: transformers")
            options = common | {
                "model": model,
                "dtype": settings.dtype or self._config.dtype,
                "attention": "sdpa",
                "context": contexts,
                "new_tokens": plan.decode_steps if contexts else 0,
                "repeats": plan.repeats,
            }
            yield in_fresh_process(
                _baseline, "transformers_baseline", options, where="baseline transformers"
            )
        if not settings.endpoints:
            self._say("baseline: the published client")
            with ExitStack() as running:
                # Its socket is ZeroMQ's, whatever ours is.
                policy, served = load_policy("published"), replace(settings, transport="tcp")
                services = prepare.start_services(running, policy, model, folder, served)
                options = common | {
                    "endpoint": services[0][1],
                    # It has no KV cache, and recomputes all of them for each.
                    "new_tokens": 64,
                    "sampled": 2,
                    "repeats": 5,
                    "against": "cpu" if settings.computes else "null",
                    "timeout_s": 120.0,
                }
                yield in_fresh_process(
                    _baseline, "published_client", options, where="baseline published client"
                )
        # There is an accelerator here, that of our own services.
        if settings.device.startswith("cuda") and not settings.endpoints and contexts:
            self._say("baseline: the GPU alone, unmasked")
            options = {"model": model, "device": settings.device, "context": contexts, "steps": 50}
            yield in_fresh_process(_baseline, "unmasked_gpu", options, where="baseline GPU alone")


def _baseline(module: str, options: dict[str, Any]) -> Any:
    """Return what a baseline's script measures; what it imports is for its process alone."""
    return import_module(f"tsqp.lab.bench.{module}").measure_all(SimpleNamespace(**options))


def _reason(error: BaseException) -> str:
    if isinstance(error, TsqpError):
        return str(error)
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "interrupted"
