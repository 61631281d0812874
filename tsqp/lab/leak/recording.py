"""Runs prompts under a policy, with services that record; keeps the truth apart, for scoring.

Services are in this process, and write down every byte that reaches them. They stand at the
protocol's boundary: requests and replies are encoded, copied frame by frame as a socket would,
opened and checked; only the socket is missing. So a trace holds what a service gets, and nothing
that only the TEE knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from gpu_side.encoding import encode_reply, open_request, read_request
from gpu_side.handler import RequestHandler, Served
from gpu_side.segment_kernels import read_parts
from gpu_side.session_cache import CacheShape, SessionName, SpilledSession, Window
from gpu_side.sessions import SegmentPart
from gpu_side.weights import ServiceWeights, load_weights
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, decode_reply, encode_request
from protocol.errors import ErrorCode, ProtocolError, ServiceError
from protocol.messages import (
    FloatDtype,
    HealthRequest,
    Request,
    Response,
    RingLinearRequest,
    RingLMHeadRequest,
    SegmentRequest,
    Timing,
)
from protocol.model.checkpoint import Checkpoint, light_tensors
from protocol.model.config import ModelConfig
from protocol.model.weights import CPU
from protocol.prepared import Exchange, Payload, PreparedRequest
from protocol.tensors import from_torch, raw_bytes, to_torch, torch_dtype
from tee_side.assembly import Assembly, MaskSettings
from tee_side.engine.engine import DEFAULT_STEP_TOKENS, Engine
from tee_side.engine.request import SamplingSettings
from tee_side.engine.step import Part, run_step
from tee_side.model.batch import Batch, Chunk, KVCache
from tee_side.model.operators import MicroBatchOperators, TeeModel, load_tee_model
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import AdditiveMask, Mask
from tee_side.protect.sites import LARGEST_INPUT
from tee_side.words import LAYERLESS, PRODUCTS
from tsqp.lab.explain.traffic import AtOnce, Headers, StepTraffic
from tsqp.lab.leak.attack import Added, Trace, TraceError, read_frames
from tsqp.lab.research.provisioning import provision

_TIMEOUT_MS = 60_000
# Of what is there already a service needs no shape.
_NO_SHAPE = CacheShape(0, 0, 0, torch.float32, None)
# What a feature mask's services are given, and the key that they are not, in a folder of their own:
# it is there until the trusted side has read it.
SERVED, KEY = "served", "key"


class RecordingChannel(AtOnce):
    """A `Channel` to a service's operators in this process; keeps all that reached it.

    `recorded`: the requests that have come since the last trace was taken.
    """

    def __init__(self, weights: ServiceWeights | Served, endpoint: str = "recording") -> None:
        super().__init__(endpoint)
        self._handler = RequestHandler(weights, DEFAULT_MAX_MESSAGE_BYTES)
        self.recorded: list[tuple[bytes, ...]] = []

    def take(self) -> Trace:
        """Return what has come since this was last called."""
        trace, self.recorded = Trace(tuple(self.recorded)), []
        return trace

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """See `Channel.start`."""
        return self.submit(prepared.request(payload), timeout_s)

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """Answer at once, and keep the reply until it is waited for. Raises ServiceError."""
        self._submitted += 1
        sent = _copied(encode_request(request, self._submitted, _TIMEOUT_MS))
        self.recorded.append(tuple(bytes(frame) for frame in sent))
        opened = open_request(sent, DEFAULT_MAX_MESSAGE_BYTES)
        result: Response | ErrorCode
        try:
            result = self.answer(read_request(opened))
        except ProtocolError as error:
            result = error.code
        timing = Timing(queue_us=0, compute_us=0)
        frames = _copied(
            encode_reply(opened.form, opened.request_id, opened.method, result, timing)
        )
        reply = decode_reply(frames)
        if reply.response is None:
            raise ServiceError(request.method, code=reply.error or ErrorCode.INTERNAL)
        self._replies[self._submitted] = Exchange(
            reply.response,
            bytes_sent=sum(map(len, sent)),
            bytes_received=sum(map(len, frames)),
            encode_ns=0,
            elapsed_ns=0,
            decode_ns=0,
            timing=reply.timing,
            sent_ns=0,
            endpoint=self.endpoint,
        )
        return self._submitted

    def answer(self, request: Request) -> Response:
        """Compute a reply. Raises ProtocolError; KeyError for Health, which a loop answers."""
        if isinstance(request, HealthRequest):
            raise KeyError(request.method)
        response, _ = self._handler.apply(request)
        return response

    def disk_of(self, trace: Trace, context: int, directory: Path) -> Disk | None:
        """Write a trace's session to disk, and return what stands there; None if there is none.

        `context`: of the model, in tokens; `directory`: for the file, which is gone at the end.
        Raises ProtocolError where the service has lost the session, and OSError.
        """
        requests = map(read_frames, trace.messages)
        segments = [request for request in requests if isinstance(request, SegmentRequest)]
        sessions = self._handler.sessions
        if sessions is None or not segments:
            return None
        last = min(reversed(segments), key=lambda request: request.first_layer)
        layers = last.first_layer, last.last_layer
        part = next(part for part in read_parts(last, context) if part.rows)
        end = part.start + part.rows
        # The session goes on by a token, as for a request that comes next; that one is not written.
        parts = [SegmentPart(part.session, end, 1, end + 1)]
        window = Window(last.sinks, last.recent)
        with sessions.running(b"", layers, parts, _NO_SHAPE, window) as (cache,):
            kept = (tensor[:, :, : cache.stored] for tensor in cache.tensors)
            clear = b"".join(bytes(raw_bytes(tensor)) for tensor in kept)
            name = SessionName(b"", part.session, *layers)
            with closing(_Found(directory, name, cache)) as found:
                return Disk(found.contents(), clear)


def _copied(frames: list[Any]) -> list[memoryview]:
    """Copy frames into memory of their own, writable like what a socket hands out."""
    return [memoryview(bytearray(frame)) for frame in frames]


@dataclass(frozen=True)
class Disk:
    """A session's file: `encrypted`, as the service writes it, and as it would be in the `clear`.

    Of its segment that comes first in the model.
    """

    encrypted: bytes
    clear: bytes


class _Found(SpilledSession):
    """A file whose disk was found, without the key."""

    def contents(self) -> bytes:
        self._file.seek(0)
        return bytes(self._file.read())


# ----------------------------------------------------------------------------------------- sessions


@dataclass(frozen=True)
class Truth:
    """What was said, which no attack is shown. Token ids.

    `tokens`: what a trace is about: the tokens that went through the model while a service was
    asked, in order, and the one that was sampled behind the last of them. `prompted`: how many of
    them are the prompt's, which are the first; the others are the answer's.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    tokens: tuple[int, ...]
    prompted: int


@dataclass(frozen=True)
class RecordedSession:
    """One prompt with its answer. `traces`: of the service, and of the dealer for the prompt.

    `ahead`: what the dealer was sent beside, for pads of tokens to come. `disk`: what the service's
    has of its cache once that had to make room; None without one.
    """

    traces: tuple[Trace, ...]
    truth: Truth
    disk: Disk | None = None
    ahead: tuple[Trace, ...] = ()


@dataclass(frozen=True)
class Recording:
    """What a policy's services got to see. `served`: the model directory that they were given."""

    policy: Policy
    served: Path
    sessions: tuple[RecordedSession, ...]

    @property
    def disks(self) -> list[Disk]:
        """The sessions' files, none where the service keeps no cache."""
        return [session.disk for session in self.sessions if session.disk is not None]


@dataclass(frozen=True)
class PlaySettings:
    """How prompts are run. `dtype`: None for the model's own. `temperature`: 0 is greedy."""

    model: Path
    new_tokens: int
    dtype: FloatDtype | None = None
    temperature: float = 0.0
    seed: int = 0


def play(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    settings: PlaySettings,
    folder: Path,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Recording:
    """Run every prompt, one after another, each a session of its own.

    `folder`: for what a feature mask's services are given; `progress(done, total)` is called after
    each. Raises what `Runner` raises before it connects, PromptError, and TraceError.
    """
    with _stage(policy, settings, folder) as (model, lanes, (*channels, maker), served):
        engine, config = Engine(model, lanes), model.config
        added = added_rows(policy, config)
        sessions = []
        for done, prompt in enumerate(prompts):
            sampling = SamplingSettings(temperature=settings.temperature, seed=settings.seed + done)
            sequence = engine.add(
                prompt,
                max_new_tokens=settings.new_tokens,
                sampling=sampling,
                eos_token_ids=frozenset(),
            )
            parts: list[tuple[int, int]] = []
            before, start = sum(len(c.recorded) for c in channels), 0
            for _ in engine.run([sequence]):
                after, end = sum(len(c.recorded) for c in channels), sequence.cache.length
                if after > before:
                    parts.append((start, end))
                before, start = after, end
            traces = tuple(Trace(channel.take().messages, added) for channel in channels)
            every = sequence.ids
            steps = traces[0].steps if traces else ()
            if len(steps) == len(parts):
                # Of an LM head alone the last token, whose row it gets; else all of a step.
                parts = [
                    (max(start, end - step.tokens), end)
                    for (start, end), step in zip(parts, steps, strict=True)
                ]
            positions = [position for part in parts for position in range(*part)]
            for channel, trace in zip(channels[:1], traces, strict=False):
                TraceError.unless(
                    trace.tokens == len(positions),
                    channel.endpoint,
                    f"requests about {trace.tokens} tokens, by their rows",
                    f"{len(positions)}, which went through the model: steps of this policy"
                    " cannot be told apart, or what its mask adds cannot",
                )
            about = [*positions, positions[-1] + 1] if positions else []
            truth = Truth(
                prompt=tuple(prompt),
                answer=tuple(sequence.token_ids),
                tokens=tuple(every[position] for position in about),
                prompted=sum(position < len(prompt) for position in positions),
            )
            disk = None
            if policy.segments(config.num_hidden_layers):
                (service,), (trace,) = channels, traces
                disk = service.disk_of(trace, config.context_length, folder)
            sessions.append(RecordedSession(traces, truth, disk, (Trace(maker.take().messages),)))
            progress(done + 1, len(prompts))
    return Recording(policy, served, tuple(sessions))


def logits_of(
    policy: Policy, texts: Sequence[Sequence[int]], settings: PlaySettings, folder: Path
) -> list[torch.Tensor]:
    """Return what the model says behind every token of some texts under a policy: [T, V] each.

    One step a text. Raises as `play`.
    """
    found = []
    with _stage(policy, settings, folder) as (model, lanes, *_):
        for ids in texts:
            cache = KVCache(model.config, len(ids), model.dtype)
            chunks = (Chunk(cache, slice(0, len(ids)), len(ids)),)
            batch = Batch(torch.tensor(list(ids)), chunks, tuple(range(len(ids))))
            ((logits_NV, _),) = run_step([Part(batch, "prefill")], lanes)
            found.append(logits_NV.float())
    return found


def added_rows(policy: Policy, config: ModelConfig) -> Added:
    """Return what a policy sends, and how many rows its masks add: public, as the policy is.

    Found by what crosses for one row, as a mask may call its option what it likes. The rows of
    products are of heads and tokens, which nothing counts.
    """
    one = StepTraffic(
        *(policy, config, torch.float32, Headers()), context=1, prompt_tokens=1, step_tokens=1
    )
    return {
        ((None if operator in LAYERLESS else layer, operator), phase): (
            0 if operator in PRODUCTS else rows - 1
        )
        for (phase, operator, layer), rows in one.rows.items()
    }


@contextmanager
def _stage(
    policy: Policy, settings: PlaySettings, folder: Path
) -> Iterator[tuple[TeeModel, list[MicroBatchOperators], tuple[RecordingChannel, ...], Path]]:
    """Put the trusted side together as `Runner` does, over services that record.

    Gives its model and lanes, the services and behind them the dealer of pads that are made ahead,
    and the model directory that they were given.
    """
    config, checkpoint = Checkpoint.open(settings.model)
    dtype = torch_dtype(settings.dtype or config.dtype)
    checkpoint.require(light_tensors(config))
    model = load_tee_model(config, checkpoint, dtype)
    served, key = settings.model, folder / KEY
    if policy.feature_mask is not None:
        served = folder / SERVED
        provision(settings.model, policy.feature_mask, served, key)
    try:
        assembly = Assembly(
            policy,
            config,
            checkpoint,
            model,
            MaskSettings(key=None if policy.feature_mask is None else key),
            step_tokens=DEFAULT_STEP_TOKENS,
        )
    finally:
        # It has been read. An attack is given `served`, and would find the key beside it.
        key.unlink(missing_ok=True)
    with closing(assembly):
        weights = load_weights(
            served, device=CPU, dtype=dtype, arithmetic=[policy.served_arithmetic]
        )
        names = [*(f"service {number + 1}" for number in range(policy.services)), "dealer, ahead"]
        *channels, maker = (RecordingChannel(weights, name) for name in names)
        assembly.dealers_at = lambda _layer: [maker]
        yield model, assembly.lanes(lambda _layer: channels), (*channels, maker), served


# ------------------------------------------------------------------------------------- adversaries


def together(recording: Recording) -> Recording:
    """Return a recording of dealt pads as an adversary of all links reads it: in the clear.

    Raises TraceError where requests to the services do not belong together.
    """
    pads: dict[str, list[torch.Tensor]] = {}
    sessions = tuple(
        RecordedSession((_unmasked(pads, *session.traces, *session.ahead),), session.truth)
        for session in recording.sessions
    )
    # Without the masks whose pads are known.
    policy = with_masks(
        recording.policy,
        lambda mask: None if isinstance(mask, AdditiveMask) and mask.dealt else mask,
    )
    return replace(recording, policy=policy, sessions=sessions)


def with_masks(policy: Policy, change: Callable[[Mask], Mask | None]) -> Policy:
    """Return a policy with what `change` makes of each mask; None: in the clear."""
    operators = {
        operator: tuple(
            one.model_copy(update={"mask": one.mask and change(one.mask)}) for one in placements
        )
        for operator, placements in policy.operators.items()
    }
    return policy.model_copy(update={"operators": operators})


def _unmasked(pads: dict[str, list[torch.Tensor]], service: Trace, *dealers: Trace) -> Trace:
    """Take from what the service got the pads that the dealer got seeds of, now or before.

    `pads`: rows by site, of earlier sessions that none has used. Which row hides which is not
    written down: the right one leaves a small number.
    """
    for frames in chain.from_iterable(dealer.messages for dealer in dealers):
        request = read_frames(frames)
        if isinstance(request, RingLinearRequest | RingLMHeadRequest):
            pads.setdefault(_site(request), []).extend(to_torch(request.elements))
    messages: list[tuple[bytes, ...]] = []
    for sent in service.messages:
        frames, request = sent, read_frames(sent)
        if isinstance(request, RingLinearRequest | RingLMHeadRequest):
            left = pads.get(_site(request), [])
            plain_TI = torch.stack([_plain(row_I, left) for row_I in to_torch(request.elements)])
            whole = request.model_copy(update={"elements": from_torch(plain_TI)})
            crossed = encode_request(whole, len(messages) + 1, 1)
            frames = tuple(bytes(frame) for frame in crossed)
        messages.append(frames)
    return Trace(tuple(messages), service.added)


def _site(request: RingLinearRequest | RingLMHeadRequest) -> str:
    return request.model_dump_json(exclude={"elements"})


def _plain(row_I: torch.Tensor, pads: list[torch.Tensor]) -> torch.Tensor:
    """Return a row without its pad, which is used up. Raises TraceError where none fits."""
    for index, pad_I in enumerate(pads):
        plain_I = row_I - pad_I
        if int(plain_I.long().abs().max()) <= LARGEST_INPUT:
            del pads[index]
            return plain_I
    raise TraceError("dealt pads", got="a row that none of them fits", expected="one")
