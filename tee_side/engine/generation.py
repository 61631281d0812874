"""A running generation: tokens and text as they come, and everything about it at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from pydantic import BaseModel

from tee_side.engine.engine import Engine
from tee_side.engine.request import FinishReason
from tee_side.engine.step import Sampled, Sequence
from tee_side.engine.tokenizer import TextStream


@dataclass(kw_only=True)
class Totals:
    """What services and pads have done since the start of a run.

    Pads are counted in tokens; but steps waited for pads, or were computed in the TEE. `pads_ready`
    is None where no operator is under pads. `services`: those that are connected.
    """

    pads_ready: int | None = None
    pads_made: int = 0
    pads_used: int = 0
    pads_waited: int = 0
    pads_in_tee: int = 0
    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    services: int = 0


class Usage(BaseModel, frozen=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerationTiming(BaseModel, frozen=True):
    """`ttft_s`: time to first token. `tpot_s`: mean time per token after it; None with one."""

    ttft_s: float
    tpot_s: float | None
    total_s: float


class RpcTotals(BaseModel, frozen=True):
    """Round trips of this generation, and bytes of all their frames."""

    count: int
    bytes_sent: int
    bytes_received: int


class PadTotals(BaseModel, frozen=True):
    """How the pads stand: `available` tokens are left, as `tee-runner pads status` counts.

    Steps that found too few `waited` until more were made, or were computed `in_tee`.
    """

    available: int
    waited: int
    in_tee: int

    @classmethod
    def since(cls, before: Totals, now: Totals) -> PadTotals | None:
        """Return what pads did between two moments; None for a policy that needs none."""
        if now.pads_ready is None:
            return None
        return cls(
            available=now.pads_ready,
            waited=now.pads_waited - before.pads_waited,
            in_tee=now.pads_in_tee - before.pads_in_tee,
        )


class GenerationResult(BaseModel, frozen=True):
    """What `tee-runner generate --json` prints. `text` is None without a tokenizer."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    usage: Usage
    timing: GenerationTiming
    policy: str
    rpc: RpcTotals
    pads: PadTotals | None


class Generation:
    """A running generation: iterate over it for the text as it comes, then ask for `result`.

    `steps` yields the sampled tokens instead. Either is iterated over once; `close` gives up.
    Only that moves it on: of several generations of one engine, one runs at a time. `totals`: of
    the whole run so far; `policy`: its name. `token_count`: tokens that `steps` has yielded so far.
    """

    def __init__(
        self, engine: Engine, sequence: Sequence, totals: Callable[[], Totals], policy: str
    ) -> None:
        self._engine, self._sequence, self._tokenizer = engine, sequence, engine.tokenizer
        self._totals, self._policy = totals, policy
        self.token_count = 0
        self._begun = False
        self._before = totals()
        self._started = time.perf_counter()
        self._first = self._last = self._started

    def __iter__(self) -> Iterator[str]:
        """Yield the text as it comes. Raises RuntimeError as `steps` does."""
        shown = self.text_stream()
        for sampled in self.steps():
            if shown and (text := shown.feed(sampled.token_id)):
                yield text
        if shown and (text := shown.flush()):
            yield text

    def steps(self) -> Iterator[Sampled]:
        """Yield every token as it is sampled; only stop strings make the engine decode text.

        Every token takes the same work from here to the next request, whatever its text is.
        Raises RuntimeError if it was iterated over or closed before: its sequence is gone.
        """
        if self._begun:
            raise RuntimeError("a generation that was iterated over or closed before")
        self._begun = True
        with closing(self._engine.run([self._sequence])) as run:
            for step in run:
                for sampled in step:
                    self._last = time.perf_counter()
                    if not self.token_count:
                        self._first = self._last
                    self.token_count += 1
                    yield sampled

    def stop(self) -> None:
        """End after the tokens so far, as a stop string does."""
        self._sequence.finish_reason = "stop"

    def text_stream(self) -> TextStream | None:
        """Return what turns the tokens of `steps` into text; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        request = self._sequence.request
        return TextStream(self._tokenizer, request.stop, request.prompt_ids)

    @property
    def token_ids(self) -> list[int]:
        """Token ids that `steps` has yielded so far."""
        return self._sequence.token_ids[: self.token_count]

    @property
    def text(self) -> str | None:
        """Text of `token_ids`, up to a stop string; None without a tokenizer."""
        if (stream := self.text_stream()) is None:
            return None
        return "".join(map(stream.feed, self.token_ids)) + stream.flush()

    @property
    def rpc(self) -> RpcTotals:
        """Round trips so far."""
        now, before = self._totals(), self._before
        return RpcTotals(
            count=now.round_trips - before.round_trips,
            bytes_sent=now.bytes_sent - before.bytes_sent,
            bytes_received=now.bytes_received - before.bytes_received,
        )

    @property
    def pads(self) -> PadTotals | None:
        """How the pads stand, and how often they were out so far."""
        return PadTotals.since(self._before, self._totals())

    def close(self) -> None:
        """Give the sequence's place back."""
        self._begun = True
        self._engine.remove(self._sequence)

    def result(self) -> GenerationResult:
        """Return everything about the finished generation; RuntimeError if it has not ended."""
        sequence = self._sequence
        if sequence.finish_reason is None:
            raise RuntimeError("the result of a generation that has not ended")
        prompt_ids, new = list(sequence.request.prompt_ids), self.token_count
        return GenerationResult(
            prompt_token_ids=prompt_ids,
            token_ids=self.token_ids,
            text=self.text,
            finish_reason=sequence.finish_reason,
            usage=Usage(
                prompt_tokens=len(prompt_ids),
                completion_tokens=new,
                total_tokens=len(prompt_ids) + new,
            ),
            timing=GenerationTiming(
                ttft_s=self._first - self._started,
                tpot_s=(self._last - self._first) / (new - 1) if new > 1 else None,
                total_s=self._last - self._started,
            ),
            policy=self._policy,
            rpc=self.rpc,
            pads=self.pads,
        )
