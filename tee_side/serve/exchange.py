"""What endpoints are given (`Serving`), and one HTTP request of the model (`EngineResponse`).

A request goes from its admission to the last byte, or to the client's leaving.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protocol.errors import EngineError, TsqpError
from tee_side.engine.request import Request
from tee_side.serve.answers import AnswerWriter, OfferedModel, TokenCounts
from tee_side.serve.background import BackgroundEngine, Delivery, QueueFullError, Ticket
from tee_side.serve.errors import ApiError, loading, of_engine
from tee_side.serve.grammar import GrammarMatcher
from tee_side.serve.identity import HEADER, AnswerReceipt, ReceiptChain
from tee_side.serve.watch import RequestWatch, Watch

# Prompts of one HTTP request that wait or run at a time.
_AT_ONCE = 16
# Requests of one owner that compile a grammar, or wait to; others get 503.
_MOST_COMPILING = 64
# After which a request that has begun looks for a place in the queue again.
_RETRY_S = 0.05


def anyone(_request: HttpRequest) -> str:
    """Let everyone in, where no keys are used."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Everything that an endpoint needs.

    `compile_grammar`: of a kind and its text, schema or list of choices, for an owner; raises
    PromptError. `compiling`: of each owner, places for requests that compile a grammar or wait to,
    and turns to compile it.
    `authorise`: returns whose request it is, or raises `errors.ApiError` (401). `tempo_s`: after
    which an answer sends its next token, if there is one; 0: as it comes. `round_usage`: counts are
    told as multiples of it. `receipts`: signs each answer; None: answers have no receipts.
    """

    engine: BackgroundEngine
    model: OfferedModel
    compile_grammar: Callable[..., GrammarMatcher]
    version: str
    watch: Watch
    authorise: Callable[[HttpRequest], str] = anyone
    tempo_s: float = 0.0
    round_usage: int = 1
    receipts: ReceiptChain | None = None
    compiling: dict[str, tuple[asyncio.Semaphore, asyncio.Semaphore]] = field(
        default_factory=lambda: defaultdict(
            lambda: (asyncio.Semaphore(_MOST_COMPILING), asyncio.Semaphore(2))
        ),
        init=False,
    )


def serving_of(request: HttpRequest) -> Serving:
    """Return what the app of a request was made with."""
    serving: Serving = request.app.state.serving
    return serving


class EngineResponse(Response):
    """A response that asks the engine when it is sent.

    The status is sent with the first bytes of the answer: what goes wrong before them is an HTTP
    error, and later an event of the stream, its last one. When the client closes the connection,
    its requests are cancelled at once. `receipt`: signs what is sent, where the server does that.

    Raises ApiError for what could never run, before any of it is accounted for.
    """

    def __init__(
        self,
        serving: Serving,
        caller: RequestWatch,
        requests: Sequence[Request],
        answer: AnswerWriter,
    ) -> None:
        super().__init__()
        for request in requests:
            try:
                serving.engine.check(request)
            except TsqpError as error:
                raise of_engine(error, "body.n" if error.where == "samples" else None) from None
        self._serving, self._watched = serving, caller
        self._requests, self._answer = requests, answer
        self.receipt: AnswerReceipt | None = None
        self._open: dict[int, Ticket] = {}
        self._left_to_do = deque(range(len(requests)))
        self._begun = False
        self._arrived: list[tuple[int, Delivery]] = []
        self._news = asyncio.Event()
        self._started = False
        self._outcome = "cancelled"
        # An answer that comes whole shows no times between tokens.
        self._streamed = answer.streamed
        self._tempo_s = serving.tempo_s if self._streamed else 0.0
        self._next_s = 0.0
        self._counts = TokenCounts(sum(len(request.prompt_ids) for request in requests))
        answer.counts, answer.round_usage = self._counts, serving.round_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError and TsqpError as long as nothing was sent."""
        require_ready(self._serving)
        most = sum(request.samples * request.max_new_tokens for request in self._requests)
        self._watched.begin(self._counts.prompt, most)
        self._departure = asyncio.ensure_future(_leaving(receive))
        self._departure.add_done_callback(self._leave)
        try:
            await self._run(send)
        except Exception as error:
            self._outcome = type(error).__name__
            raise
        finally:
            self._departure.remove_done_callback(self._leave)
            self._departure.cancel()
            self._cancel()
            signed = None if self.receipt is None else self.receipt.digest
            # Of the prompts that had a place in the queue.
            asked = self._counts.prompt - sum(
                len(self._requests[at].prompt_ids) for at in self._left_to_do
            )
            self._watched.end(self._outcome, asked, self._counts.completion, signed)

    async def _run(self, send: Send) -> None:
        try:
            self._submit()
            outcome = "stop"
            while self._open or self._arrived or self._left_to_do:
                if self._open or self._arrived:
                    await self._news.wait()
                else:
                    # No news can come: this waits for a place in the queue.
                    await asyncio.wait([self._departure], timeout=_RETRY_S)
                arrived = await self._due()
                if self._departure.done():
                    return
                if any(token.finish_reason == "length" for _, d in arrived for token in d.tokens):
                    outcome = "length"
                if text := "".join([await self._take(*one) for one in arrived]):
                    await self._send(send, text)
                self._submit()
            await self._tick()
            text, end = self._answer.finish(), self._answer.done
        except (TsqpError, asyncio.CancelledError) as error:
            cause = error if isinstance(error, TsqpError) else ending()
            if not self._started:
                raise cause from None
            text, end = self._answer.failed(of_engine(cause)), ""
            outcome = type(cause).__name__
        if self._departure.done():
            return
        # Settled before the last byte: a client that has all may leave.
        self._outcome = outcome
        await self._send(send, text, end)

    def _submit(self) -> None:
        """Submit the prompts that come next: a few at a time, as each takes a place in the queue.

        Where none is left, what has begun goes on when there is one.
        """
        while self._left_to_do and len(self._open) < _AT_ONCE:
            prompt = self._left_to_do[0]
            deliver = partial(self._deliver, prompt)
            try:
                ticket = self._serving.engine.submit(self._requests[prompt], deliver)
            except QueueFullError:
                # It may wait where others of its request had a place.
                if not self._begun and not self._open:
                    raise
                return
            self._open[prompt] = ticket
            self._left_to_do.popleft()

    def _deliver(self, prompt: int, delivery: Delivery) -> None:
        parts = [delivery]
        if self._tempo_s and len(delivery.tokens) > 1:
            # One for each token, where they are sent on a clock of their own.
            parts = [Delivery((token,)) for token in delivery.tokens]
            parts[0] = replace(parts[0], prompt=delivery.prompt)
            parts[-1] = replace(parts[-1], error=delivery.error, ended=delivery.ended)
        self._arrived += [(prompt, part) for part in parts]
        self._news.set()

    async def _due(self) -> list[tuple[int, Delivery]]:
        """Return what is to be sent now: all that has arrived, or a tick's token of each choice."""
        await self._tick()
        arrived, self._arrived = self._arrived, []
        due: list[tuple[int, Delivery]] = []
        sent: set[tuple[int, int]] = set()
        behind: set[int] = set()
        for prompt, delivery in arrived:
            choices = {(prompt, token.sample) for token in delivery.tokens}
            # What ends a prompt, or has no token, stays behind the tokens that were before it.
            stays = choices & sent or (prompt in behind and (delivery.ended or not choices))
            if self._tempo_s and stays:
                behind.add(prompt)
                self._arrived.append((prompt, delivery))
            else:
                due.append((prompt, delivery))
            sent |= choices
        if not self._arrived:
            self._news.clear()
        return due

    async def _tick(self) -> None:
        """Wait for the answer's clock, whose ticks do not depend on what arrives when."""
        tempo_s, now_s = self._tempo_s, asyncio.get_running_loop().time()
        if not tempo_s:
            return
        # A loop's clock may have ticks of its own, and stand a little before ours.
        behind_s = now_s - self._next_s if self._next_s else 0.0
        self._next_s = (self._next_s or now_s) + max(1, behind_s // tempo_s + 1) * tempo_s
        await asyncio.wait([self._departure], timeout=self._next_s - now_s)

    async def _take(self, prompt: int, delivery: Delivery) -> str:
        """Count what was delivered, and return what is to be sent of it."""
        if delivery.ended:
            self._open.pop(prompt, None)
        if delivery.error is not None:
            if isinstance(delivery.error, QueueFullError):
                self._left_to_do.appendleft(prompt)
                if self._begun or self._open:
                    return ""
            raise delivery.error
        self._begun = True
        if delivery.prompt is not None:
            self._counts.cached += delivery.prompt.reused_tokens
        self._watched.token(len(delivery.tokens))
        self._counts.completion += len(delivery.tokens)
        read = delivery.prompt
        if read is not None and (read.logprobs or read.pooled_D is not None):
            # Of a long prompt, this takes as long as many tokens of others.
            return await asyncio.to_thread(self._answer.add, prompt, delivery)
        return self._answer.add(prompt, delivery)

    async def _send(self, send: Send, text: str, end: str | None = None) -> None:
        """Send a piece; with `end`, the last one, and `end` behind its receipt."""
        body, own = text.encode(), dict[str, str]()
        if self.receipt is not None:
            self.receipt.response.update(body)
        if self.receipt is not None and end is not None:
            told = self._counts.rounded(self._serving.round_usage)
            signed = self.receipt.sign(self._requests, told.prompt, told.completion)
            if self._streamed:
                body += f": {HEADER} {signed}\n\n".encode()
            else:
                own[HEADER] = signed
        body, more = body + (end or "").encode(), end is None
        if not self._started:
            self._started = True
            fields = {"content-type": self._answer.content_type, **self._watched.headers(), **own}
            fields |= {"cache-control": "no-cache"} if more else {"content-length": str(len(body))}
            headers = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in fields.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})

    def _leave(self, _ended: asyncio.Future[None]) -> None:
        self._cancel()
        self._news.set()

    def _cancel(self) -> None:
        for ticket in self._open.values():
            self._serving.engine.cancel(ticket)
        self._open = {}


def require_ready(serving: Serving) -> None:
    """Raise ApiError (503) unless the engine could make a token."""
    state = serving.engine.state
    if state == "starting":
        raise loading()
    ApiError.unless(state != "failed", 503, "the engine has failed", code=state)


def ending() -> EngineError:
    """Return the error of what a server that ends does not answer any more."""
    return EngineError("server", got="a signal to end", expected="more time")


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
