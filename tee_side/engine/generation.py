"""A running generation: tokens and text as they come, and everything about it at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from protocol.prepared import Traffic
from tee_side.engine.request import FinishReason
from tee_side.engine.step import Sampled
from tee_side.engine.step import Sequence as EngineSequence
from tee_side.engine.tokenizer import TextStream, Tokenizer


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True)


class Usage(_Report):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerationTiming(_Report):
    """`ttft_s`: time to first token. `tpot_s`: mean time per token after it; None with one."""

    ttft_s: float
    tpot_s: float | None
    total_s: float


class RpcTotals(_Report):
    """Round trips of this generation, and bytes of all their frames."""

    count: int
    bytes_sent: int
    bytes_received: int


class PadTotals(_Report):
    """How the pads stand: `available` tokens are left, as `tee-runner pads status` counts.

    Steps that found too few `waited` until more were made, or were computed `in_tee`.
    """

    available: int
    waited: int
    in_tee: int


class GenerationResult(_Report):
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
    `run_step`: runs one step of every sequence; `totals`: of the whole run so far; `forget`: gives
    the sequence's place back. `policy`: its name.
    """

    def __init__(
        self,
        sequence: EngineSequence,
        tokenizer: Tokenizer | None,
        stop: Sequence[str],
        *,
        run_step: Callable[[], None],
        totals: Callable[[], tuple[Traffic, PadTotals | None]],
        forget: Callable[[EngineSequence], None],
        policy: str,
    ) -> None:
        self._sequence, self._tokenizer, self._stop = sequence, tokenizer, tuple(stop)
        self._run_step, self._totals, self._forget = run_step, totals, forget
        self._policy = policy
        self._begun = False
        self._before, self._pads_before = totals()
        self._started = time.perf_counter()
        self._first: float | None = None
        self._last = self._started

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
        try:
            while (arrived := self._sequence.arrived) or not self._sequence.finish_reason:
                if not arrived:
                    self._run_step()
                    continue
                sampled = arrived.popleft()
                self._last = time.perf_counter()
                if self._first is None:
                    self._first = self._last
                yield sampled
        finally:
            self.close()

    def stop(self) -> None:
        """End after the tokens so far, as a stop string does."""
        self._sequence.stop()

    def text_stream(self) -> TextStream | None:
        """Return what turns the tokens of `steps` into text; None without a tokenizer."""
        return TextStream(self._tokenizer, self._stop) if self._tokenizer else None

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
    def arrived(self) -> bool:
        """Whether tokens were sampled that `steps` has not yielded yet."""
        return bool(self._sequence.arrived)

    @property
    def token_count(self) -> int:
        """Tokens generated so far."""
        return len(self._sequence.token_ids) - len(self._sequence.arrived)

    @property
    def rpc(self) -> RpcTotals:
        """Round trips so far."""
        now, before = self._totals()[0], self._before
        return RpcTotals(
            count=now.round_trips - before.round_trips,
            bytes_sent=now.bytes_sent - before.bytes_sent,
            bytes_received=now.bytes_received - before.bytes_received,
        )

    @property
    def pads(self) -> PadTotals | None:
        """How the pads stand, and how often they were out so far."""
        now, before = self._totals()[1], self._pads_before
        if now is None or before is None:
            return None
        waited, in_tee = now.waited - before.waited, now.in_tee - before.in_tee
        return now.model_copy(update={"waited": waited, "in_tee": in_tee})

    def close(self) -> None:
        """Give the sequence's place back."""
        self._begun = True
        self._forget(self._sequence)

    def result(self) -> GenerationResult:
        """Return everything about the finished generation; RuntimeError if it has not ended."""
        sequence = self._sequence
        if sequence.finish_reason is None:
            raise RuntimeError("the result of a generation that has not ended")
        prompt, new = len(sequence.prompt_ids), self.token_count
        first = self._last if self._first is None else self._first
        return GenerationResult(
            prompt_token_ids=list(sequence.prompt_ids),
            token_ids=self.token_ids,
            text=self.text,
            finish_reason=sequence.finish_reason,
            usage=Usage(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new),
            timing=GenerationTiming(
                ttft_s=first - self._started,
                tpot_s=(self._last - first) / (new - 1) if new > 1 else None,
                total_s=self._last - self._started,
            ),
            policy=self._policy,
            rpc=self.rpc,
            pads=self.pads,
        )
