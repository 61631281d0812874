"""A service that computes, and lies when it is told to.

It answers as gpu-service does, over the same listeners, with keys or without. `tell` has it lie on
one of the next requests; everything else is answered rightly, with what it kept for later before.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_side.access import ServiceKeys
from gpu_side.encoding import encode_reply, open_request, read_request
from gpu_side.handler import RequestHandler
from gpu_side.service import open_listener
from gpu_side.transport.listener import Incoming
from protocol.channel import Channel
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import ErrorCode, ProtocolError, TsqpError
from protocol.messages import (
    FUSED_MODULES,
    HealthReply,
    HealthRequest,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    Request,
    Response,
    RingLinearRequest,
    RingLMHeadRequest,
    SeededRingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.prepared import Exchange
from protocol.tensors import from_torch, to_torch
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.model.operators import MicroBatchOperators
from tee_side.words import Operator
from tests.kit.demo import DEMO, prompt
from tests.kit.lies import REORDERED, Lie, Memory, Occasion
from tests.kit.model import SIZES, LoopbackChannel, Tee, assemble, served_weights, token_ids
from tests.kit.service import Closing

_WAIT_MS = 50
# Replies that it remembers, of each kind.
_REMEMBERED = 200


def operators_of(directory: Path) -> RequestHandler:
    return RequestHandler(served_weights(directory, "float32"), DEFAULT_MAX_MESSAGE_BYTES)


class MaliciousService(Closing):
    """A service in a thread of its own; use as a context manager.

    `told`: lies that were told so far. `requests`: how many came, Init and Health not among them.
    `lying_init`: told in every Init reply. `operators`: what computes, and has the service's name
    for itself: one for each service.
    """

    def __init__(
        self,
        operators: RequestHandler,
        endpoint: str = "tcp://127.0.0.1:*",
        *,
        seed: int = 0,
        keys: ServiceKeys | None = None,
    ) -> None:
        self.told = 0
        self.requests = 0
        self.memory = Memory()
        self._operators = operators
        self._chance = random.Random(seed)
        self._plan: tuple[Lie, int] | None = None
        self.lying_init: Lie | None = None
        self._stop = threading.Event()
        self.listener = open_listener(endpoint, keys=keys)
        self.endpoint = self.listener.endpoint
        self._thread = threading.Thread(target=self._run, name="malicious", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def tell(self, lie: Lie, after: int = 0) -> None:
        """Lie once, when so many further requests have been answered rightly."""
        self._plan = (lie, self.requests + after + 1)

    def be_honest(self) -> None:
        """Lie no more. A reply that is late still comes."""
        self._plan = None
        self.lying_init = None
        self.memory.held = None

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stop.is_set():
                if not self.listener.wait(timeout_ms=_WAIT_MS):
                    continue
                incoming = self.listener.receive()
                if incoming is not None:
                    self._answer(incoming)
        self.listener.close()

    def _answer(self, incoming: Incoming) -> None:
        opened = open_request(incoming.frames, DEFAULT_MAX_MESSAGE_BYTES)
        result: Response | ErrorCode
        try:
            request = read_request(opened)
            result = self._result(request)
        except ProtocolError as error:
            result = error.code
        if isinstance(result, ErrorCode) or isinstance(request, HealthRequest):
            timing = Timing(queue_us=1, compute_us=2)
            frames = encode_reply("framed", opened.request_id, opened.method, result, timing)
            self.listener.send(incoming.route, frames)
            return
        memory = self.memory
        client = incoming.route[0]
        occasion = Occasion(
            client, request, opened.request_id, result, self._result, memory, self._chance
        )
        lie = self._due(request)
        owed, memory.owed = memory.owed, []
        messages = [occasion.encoded()] if lie is None else lie.tell(occasion)
        if isinstance(result, TensorReply):
            memory.earlier.append((client, occasion.encoded()))
            memory.results.append(occasion.output)
            del memory.earlier[:-_REMEMBERED], memory.results[:-_REMEMBERED]
        # Before it is sent: a test that gets the reply may look.
        self.told += lie is not None
        for message in (*owed, *messages):
            self.listener.send(incoming.route, message)

    def _due(self, request: Request) -> Lie | None:
        if isinstance(request, InitRequest):
            return self.lying_init
        self.requests += 1
        if self._plan is None or self.requests < self._plan[1]:
            return None
        lie = self._plan[0]
        # Swapping two replies takes two requests.
        if lie is not REORDERED or self.memory.held is not None:
            self._plan = None
        return lie

    def _result(self, request: Request) -> Response:
        if isinstance(request, HealthRequest):
            return HealthReply(
                status="ready", uptime_s=time.monotonic(), queued_requests=0, queued_bytes=0
            )
        return self._operators.apply(request)[0]


Change = Callable[[torch.Tensor], torch.Tensor]
PROMPT = token_ids(7)


class Lying(LoopbackChannel):
    """A service that changes the tensor of one request: the `at`-th that `picks` chooses.

    `at`: None for every one of them, -1 for none. `distrusted`: what it is told, which it takes as
    if another service answered from then on, if there are `others`. `lied`: at which requests.
    """

    def __init__(
        self,
        directory: Path,
        *lie: Any,
        at: int | None = 0,
        others: bool = False,
        dtype: str = "float32",
    ) -> None:
        super().__init__(directory, dtype)
        self._others = others
        self.tell(*lie, at=at)

    def tell(
        self,
        change: Change,
        picks: Callable[[Request], bool] = lambda _request: True,
        *,
        at: int | None = 0,
    ) -> None:
        """Lie from now on, and forget what was before."""
        self._change, self._picks, self._at, self._seen = change, picks, at, 0
        self.lied: list[int] = []
        self.distrusted: list[tuple[Exchange, TsqpError]] = []

    def answer(self, request: Request) -> Response:
        """Compute the true reply, and change it where that is due."""
        reply = super().answer(request)
        if not isinstance(reply, TensorReply) or not self._picks(request):
            return reply
        due = self._at is None or (self._seen == self._at and not self.distrusted)
        self._seen += 1
        if not due:
            return reply
        self.lied.append(len(self.requests) - 1)
        wrong = self._change(to_torch(reply.output).clone())
        return TensorReply(output=from_torch(wrong.contiguous()))

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """Note it; raise it unless there are others."""
        self.distrusted.append((exchange, error))
        if not self._others:
            raise error


def is_of(operator: Operator, request: Request) -> bool:
    """Say whether a request is one of an operator, by the sizes of `tests.kit.model`."""
    if isinstance(request, MatmulRequest):
        scores = request.a.shape[-1] == SIZES["head_dim"]
        return operator == ("attn_scores" if scores else "attn_values")
    if isinstance(request, RingLMHeadRequest | LMHeadRequest):
        return operator == "lm_head"
    if isinstance(request, RingLinearRequest | SeededRingLinearRequest | LinearRequest):
        return request.module_names[0] in FUSED_MODULES.get(operator, ())
    return operator == "embedding"


def generate(tee: Tee, new_tokens: int = 3) -> list[int]:
    return tee.greedy(PROMPT, new_tokens)


class Outcome(NamedTuple):
    """How a step ended: `error` by name, None for a result, which is `right` or not."""

    error: str | None
    right: bool
    seconds: float = 0.0

    @property
    def accepted(self) -> bool:
        return self.error is None and not self.right


class Victim:
    """The trusted side, put together as Runner does it, which generates one text again and again.

    What it computes is compared with what it computed over honest services. `connect`: opens its
    channels; called again when the last ones have failed. `sequences`: how many run side by side.
    """

    def __init__(
        self,
        policy: str,
        connect: Callable[[], Sequence[Channel]],
        *,
        directory: Path = DEMO,
        sequences: int = 1,
        micro_batches: int = 1,
    ) -> None:
        self._connect, self._micro_batches = connect, micro_batches
        self._channels: Sequence[Any] = connect()
        tee = assemble(directory, policy, channels=list(self._channels), step_tokens=64)
        self.assembly = tee.assembly
        self._engine = Engine(tee.model, self._lanes(), EngineSettings(step_tokens=64))
        chance = random.Random(7)
        self._prompts = [prompt(4, chance) for _ in range(sequences)]
        self._expected: list[list[torch.Tensor]] = []
        self._step = 0
        self._begin()
        for step in self._engine.run(self._engine.running):
            self._expected.append([sampled.logits_V for sampled in step])
        self._begin()

    def close(self) -> None:
        self._disconnect()
        self.assembly.close()

    def _disconnect(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels = ()

    def reconnect(self) -> None:
        self._disconnect()
        self._channels = self._connect()
        self._engine.lanes = self._lanes()

    def _lanes(self) -> list[MicroBatchOperators]:
        self.assembly.dealers_at = lambda _layer: self._channels[1:]
        return self.assembly.lanes(lambda _layer: self._channels, micro_batches=self._micro_batches)

    def step(self) -> Outcome:
        """Run a step. One that fails has changed nothing: the next is the same again."""
        began = time.monotonic()
        try:
            sampled = self._engine.step()
        except TsqpError as error:
            return Outcome(type(error).__name__, False, time.monotonic() - began)
        seconds, expected = time.monotonic() - began, self._expected[self._step]
        logits = [one.logits_V for one in sampled]
        right = len(logits) == len(expected) and all(map(torch.equal, logits, expected))
        self._step += 1
        if self._step == len(self._expected) or not right:
            self._begin()
        return Outcome(None, right, seconds)

    def _begin(self) -> None:
        for running in self._engine.running:
            self._engine.remove(running)
        for ids in self._prompts:
            self._engine.add(ids, max_new_tokens=5, eos_token_ids=frozenset())
        self._step = 0
        for expected in self._expected[:1]:
            logits = [one.logits_V for one in self._engine.step()]
            assert all(map(torch.equal, logits, expected)), "the prompt: got other logits"
            self._step = 1
