"""Puts the trusted side together: model directory, policy and service in, generated text out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from protocol import native
from protocol.channel import ChannelWrapper, PendingChannel
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import one_for_each
from protocol.errors import SettingsError
from protocol.liveness import DEFAULT_HEARTBEAT_TIMEOUT_S
from protocol.model.checkpoint import Checkpoint, light_tensors, linear_digest, model_digest
from protocol.tensors import require_little_endian, torch_dtype
from protocol.transport import open_channel
from tee_side.assembly import DEALT_GROUP, Assembly, MaskSettings
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.generation import Generation, Totals
from tee_side.engine.request import SamplingSettings
from tee_side.engine.tokenizer import Tokenizer
from tee_side.model.operators import load_tee_model
from tee_side.observer import Observers
from tee_side.policy.placement import Policy
from tee_side.protect.pads.source import Pads
from tee_side.protect.pads.store import reading_threads
from tee_side.protect.resumption import watch
from tee_side.remote.services.connected import Services
from tee_side.remote.services.member import ConnectOptions, ServiceCheck
from tee_side.remote.services.plan import (
    check_links,
    dealer_names,
    largest_reply,
    plan_services,
    read_services,
)
from tee_side.words import Operator

if TYPE_CHECKING:
    from protocol.curve import ClientKeys, HttpAccess
    from protocol.model.at_rest import Manifest
    from tee_side.engine.embedding import Embedding
    from tee_side.engine.request import Pooling
    from tee_side.protect.pads.background_maker import Load, TellLoad


@dataclass(frozen=True)
class RunnerSettings:
    """What `tee-runner` is told. `dtype`: a short name, or None for the model's own.

    `gpu`, `dealers`: services, and who multiplies their pads, as `read_services` reads them; a
    policy of which nothing leaves connects to none. `connect_timeout_s`: how long they are waited
    for at the start; `request_timeout_s`: for a result, however many services are asked for it.
    `micro_batches`: into how many parts a step is cut that overlap. `spin_us`: how long to look for
    a reply before sleeping, where the last one came as soon. `link`: what each channel is wrapped
    in, such as the model of a slower link.
    `manifest`: what the model directory must hold, None: as it is.
    `keys`: none, one for all services, or one for each in the order of `gpu`, then `dealers`.
    `heartbeat_timeout_s`: see `protocol.zmq_channel`. `dealer_in_the_clear`: whether a policy whose
    pads are dealt may use links of this machine without keys, whose observer takes the pads away.
    `appraise_service`: see `tee_side.attest.appraisal`; a policy with attested services needs it.
    `kernels`: see `protocol.native.use`, None: those in use. `http`: for services, by their URL.
    """

    model: Path
    policy: Policy
    gpu: tuple[str, ...] = ()
    dealers: tuple[str, ...] = ()
    masks: MaskSettings = field(default_factory=MaskSettings)
    dtype: str | None = None
    kernels: str | None = None
    threads: int | None = None
    engine: EngineSettings = field(default_factory=EngineSettings)
    micro_batches: int = 1
    spin_us: float = 0.0
    link: ChannelWrapper | None = None
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 60.0
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    keys: tuple[ClientKeys, ...] = ()
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
    manifest: Manifest | None = None
    dealer_in_the_clear: bool = False
    appraise_service: Callable[[str, ClientKeys | None, bytes, bytes], None] | None = None
    http: Mapping[str, HttpAccess] = field(default_factory=dict)


class Cores(NamedTuple):
    """Which threads a run has, planned once. `usable`: the cores that it may use.

    `step`: compute a step; `make_pads`: make pads, behind steps where they want the same cores;
    `read_pads`: draw pads for a prompt's next operator, or read and decrypt those of a bank for the
    next tokens, beside a step.
    """

    usable: int
    step: int
    make_pads: int
    read_pads: int


class Runner(AbstractContextManager["Runner"]):
    """The trusted side, ready to generate. Use as a context manager.

    `assignments`: a line for each service, of the layers that it gets and its key.
    `services`: those that it uses; whether a step waits for a lost one any thread may ask.
    `links_encrypted`: whether all links that dealt pads depend on are. `cores`: the threads of this
    run. `on_load`: told what is read, how many matrices of it are, and of how many.

    Raises, before anything is computed: ModelError, PolicyError, SettingsError, EndpointError,
    DeadlineExceededError (nothing answers), ModelMismatchError and EvidenceError.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        observer: Observers | None = None,
        tokenizer: Tokenizer | None = None,
        on_load: Callable[[str, int, int], None] | None = None,
    ) -> None:
        require_little_endian()
        watch()
        self.policy = policy = settings.policy
        # Told how many pads are missing, when a step has to wait for them.
        self.on_wait: Callable[[int], None] | None = None
        self.settings, self._tokenizer = settings, tokenizer
        specs = read_services(settings.gpu, settings.dealers, policy)
        endpoints = [spec.endpoint for spec in specs]
        keys = one_for_each(settings.keys, endpoints) if endpoints else []
        allowed = settings.dealer_in_the_clear
        appraise = settings.appraise_service
        SettingsError.unless(
            not policy.services or policy.service.attested == "none" or appraise is not None,
            "--service-appraisal",
            "none",
            f"what services must be: policy {policy.name} asks them for evidence",
        )
        self.links_encrypted = check_links(specs, keys, policy, dealer_in_the_clear=allowed)
        key_of = dict(zip(endpoints, keys, strict=True))
        key_words = {
            endpoint: f"key {own.service.decode()}" if own else "no key"
            for endpoint, own in key_of.items()
        }
        self.cores = _share_cores(settings)
        self.config, self._checkpoint = config, checkpoint = Checkpoint.open(
            settings.model, settings.manifest
        )
        self.dtype = dtype = torch_dtype(settings.dtype or config.dtype)
        checkpoint.require(light_tensors(config))
        model = load_tee_model(config, checkpoint, dtype)
        with ExitStack() as opened:
            self._assembly = assembly = Assembly(
                policy,
                config,
                checkpoint,
                model,
                replace(settings.masks, dealers=dealer_names(specs, keys)),
                step_tokens=settings.engine.step_tokens,
                on_load=on_load,
                on_wait=lambda missing: self.on_wait(missing) if self.on_wait else None,
            )
            opened.callback(assembly.close)
            if not assembly.pads:
                self.cores = self.cores._replace(read_pads=0)
            groups = plan_services(specs, config.num_hidden_layers)
            self.assignments = tuple(
                f"{endpoint}: {group}, {key_words[endpoint]}"
                for group in groups
                for endpoint in group.endpoints
            )
            # Pads are dealt in groups, however small a step is.
            rows = max(settings.engine.step_tokens, DEALT_GROUP if policy.dealt else 0)
            reply_bytes = largest_reply(policy, config, rows, dtype)
            # Made for the first reply: it reads some rows of every tensor, which digests cover.
            check = cache(
                lambda: ServiceCheck(
                    config,
                    checkpoint,
                    arithmetic=policy.served_arithmetic,
                    key=assembly.key,
                    linear=assembly.linear_digest,
                    whole_layers="segment" in policy.operators,
                )
            )
            options = connect_options(settings, key_of, reply_bytes, check)
            self.services = Services(groups, config.num_hidden_layers, options)
            opened.callback(self.services.close)
            self.services.connect(settings.connect_timeout_s)
            if policy.dealt:
                # Connections of their own: pads are made by another thread.
                of_dealers = [group for group in groups if group.dealer]
                dealers = Services(of_dealers, config.num_hidden_layers, options)
                opened.callback(dealers.close)
                dealers.connect(settings.connect_timeout_s)
                assembly.dealers_at = dealers.at
            self._lanes = partial(
                assembly.lanes,
                self.services.at,
                micro_batches=settings.micro_batches,
                timeout_s=settings.request_timeout_s,
            )
            self.engine = Engine(model, self._lanes(observer), settings.engine, tokenizer)
            self._closing = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read when first needed if not given. Raises ModelError."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.settings.model, self.settings.manifest)
        return self._tokenizer

    def embedding(self, pooling: Pooling | None = None) -> Embedding:
        """Return how the model's own files say that texts become vectors; see `read_embedding`."""
        from tee_side.engine.embedding import read_embedding

        return read_embedding(self.settings.model, pooling, self.settings.manifest)

    @property
    def digests(self) -> tuple[str, str | None]:
        """Those of `protocol.model.checkpoint`: of the model, and of its linear weights.

        Raises ModelError, ManifestError.
        """
        given = self.config, self._checkpoint
        return model_digest(*given), linear_digest(*given)

    def totals(self) -> Totals:
        """Return what services and pads have done so far."""
        traffic, pads = self.services.traffic, self.pads
        return Totals(
            pads_ready=min((one.store.left for one in pads), default=None),
            pads_made=sum(one.store.made for one in pads),
            pads_used=sum(one.store.used for one in pads),
            pads_waited=sum(one.waited for one in pads),
            pads_in_tee=sum(one.in_tee for one in pads),
            round_trips=traffic.round_trips,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            services=self.services.connected,
        )

    @contextmanager
    def filling(self) -> Iterator[TellLoad]:
        """Make pads in the background while the block runs, which says how busy it is.

        At first it is idle; see `BackgroundMaker.running`.
        """
        with ExitStack() as filling:
            told = [filling.enter_context(one.filling()) for one in self.pads]

            def tell_load(load: Load) -> None:
                for tell in told:
                    tell(load)

            yield tell_load

    @property
    def pads(self) -> list[Pads]:
        """Its pads, of each mask."""
        return list(self._assembly.pads.values())

    def observe(self, observer: Observers | None, only: Collection[Operator] | None = None) -> None:
        """Tell another observer, or none, from the next step on.

        `only`: of these operators where they run in the TEE, and of nothing else.
        """
        self.engine.lanes = self._lanes(observer, only=only)

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingSettings | None = None,
        stop: Sequence[str] = (),
        with_text: bool = True,
    ) -> Generation:
        """Start generating; nothing runs before the result is iterated over.

        `with_text` False needs no tokenizer, and allows no stop strings. Raises PromptError, and
        LimitError where the memory for keys and values does not suffice.
        """
        self.engine.tokenizer = self.tokenizer if with_text else None
        sequence = self.engine.add(
            prompt_ids, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop
        )
        return Generation(self.engine, sequence, self.totals, self.policy.name)

    def close(self) -> None:
        """Disconnect from the services, and let go of the pad bank."""
        self._closing.close()


def connect_options(
    settings: RunnerSettings,
    key_of: Mapping[str, ClientKeys | None],
    reply_bytes: int,
    check: Callable[[], ServiceCheck],
) -> ConnectOptions:
    """Return how services are reached. `check`: returns what checks an Init reply."""
    appraise = settings.appraise_service
    return ConnectOptions(
        lambda endpoint: _connect(endpoint, settings, key_of[endpoint], reply_bytes),
        lambda *said: check().verify(*said),
        settings.link,
        settings.request_timeout_s,
        appraise and (lambda endpoint, *said: appraise(endpoint, key_of[endpoint], *said)),
    )


def _connect(
    endpoint: str, settings: RunnerSettings, keys: ClientKeys | None, reply_bytes: int
) -> PendingChannel:
    channel = open_channel(
        endpoint,
        timeout_s=settings.request_timeout_s,
        max_message_bytes=settings.max_message_bytes,
        spin_us=settings.spin_us,
        keys=keys,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        http=settings.http.get(endpoint),
    )
    channel.limit_replies(reply_bytes)
    return channel


def _share_cores(settings: RunnerSettings) -> Cores:
    """Set up the kernels and their threads, and say who has which.

    A step's threads wait for each other after every kernel: one whose core reads pads keeps all of
    them waiting. So reading a bank gets a core of its own, but where there are few: it sleeps most
    of the time. A prompt's pads are read while the step waits for its replies. Raises KernelError.
    """
    usable, read = native.usable_cores(), int(settings.masks.bank is not None)
    native.set_up(settings.kernels, settings.threads)
    if settings.threads is None:
        native.set_threads(usable - read if usable > 3 else usable)
    step = native.threads()
    return Cores(usable, step, step, reading_threads())
