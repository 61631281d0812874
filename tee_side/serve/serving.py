"""What the server is put together from: the engine, what is known of the model, and hooks."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request as HttpRequest

from protocol.model.config import ModelConfig
from tee_side.engine.background import BackgroundEngine
from tee_side.engine.request import Grammar, Pooling
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.receipts import ReceiptChain

if TYPE_CHECKING:
    from tee_side.serve.watch import RequestWatch, Watch


class TokenNames:
    """Names of token ids, as pieces of JSON; no two tokens of different bytes have the same one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, str]] = {}

    def of(self, token_id: int) -> tuple[str, str]:
        r"""Return a token's name, and its bytes as a list, or null for an id without a token.

        A part of a character is `bytes:\xe2\x80`, as OpenAI's completions write it.
        """
        if (known := self._known.get(token_id)) is not None:
            return known
        content = self._tokenizer.token_bytes(token_id)
        try:
            name = content.decode("utf-8") or f"token_id:{token_id}"
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        listed = "null" if not content else json.dumps(list(content), separators=(",", ":"))
        self._known[token_id] = found = json.dumps(name), listed
        return found


def number(logprob: float) -> str:
    """Write a logprob: JSON has no infinity, and clients know -9999.0 as what cannot be."""
    return repr(max(logprob, -9999.0))


GrammarKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]


@dataclass(slots=True)
class TokenCounts:
    """Tokens of an HTTP request; `cached`: of the prompt, those that were not computed again."""

    prompt: int
    completion: int = 0
    cached: int = 0

    def rounded(self, to: int) -> TokenCounts:
        """Return them as multiples of `to`, rounded up."""
        prompt, completion, cached = (
            n + -n % to for n in (self.prompt, self.completion, self.cached)
        )
        return TokenCounts(prompt, completion, min(cached, prompt))


def anyone(_request: HttpRequest) -> str:
    """Let everyone in, where no keys are used."""
    return ""


@dataclass(frozen=True, kw_only=True)
class OfferedModel:
    """The model as clients see it.

    `max_model_len`: tokens of a prompt and its completion. `default_max_tokens`: of a chat's answer
    where the client names no limit. `created`: seconds since 1970. `pooling`: of embeddings.
    """

    name: str
    policy: str
    config: ModelConfig
    tokenizer: Tokenizer
    max_model_len: int
    default_max_tokens: int
    system_fingerprint: str
    created: int
    pooling: Pooling = "last"
    names: TokenNames = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", TokenNames(self.tokenizer))


class Compiling:
    """Turns of one owner to compile a grammar. `count`: requests that have one, or wait."""

    def __init__(self) -> None:
        self.count = 0
        self.turns = asyncio.Semaphore(2)


@dataclass(frozen=True)
class Caller:
    """Whose request it is, and what accounts for it since it arrived."""

    owner: str
    watched: RequestWatch


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Everything that an endpoint needs.

    `compile_grammar`: of a kind and its text, schema or list of choices, for an owner; raises
    PromptError. `compiling`: grammars of each owner.
    `authorise`: returns whose request it is, or raises `errors.ApiError` (401). `tempo_s`: after
    which an answer sends its next token, if there is one; 0: as it comes. `round_usage`: counts are
    told as multiples of it. `receipts`: signs each answer; None: answers have no receipts.
    """

    engine: BackgroundEngine
    model: OfferedModel
    compile_grammar: Callable[[GrammarKind, Any, str], Grammar]
    version: str
    watch: Watch
    authorise: Callable[[HttpRequest], str] = anyone
    tempo_s: float = 0.0
    round_usage: int = 1
    receipts: ReceiptChain | None = None
    compiling: dict[str, Compiling] = field(
        default_factory=lambda: defaultdict(Compiling), init=False
    )


def serving_of(request: HttpRequest) -> Serving:
    """Return what the app of a request was made with."""
    serving: Serving = request.app.state.serving
    return serving


def caller_of(request: HttpRequest) -> Caller:
    """Return whose request it is, as `authorise` said."""
    caller: Caller = request.state.caller
    return caller
