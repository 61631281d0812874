"""How a single token is written in log-probabilities: as text where it is text, else as bytes."""

from __future__ import annotations

import json

from tee_side.engine.tokenizer import Tokenizer


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
        if not content:
            name = f"token_id:{token_id}"
        else:
            try:
                name = content.decode("utf-8")
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        listed = "null" if not content else json.dumps(list(content), separators=(",", ":"))
        self._known[token_id] = found = json.dumps(name), listed
        return found


def number(logprob: float) -> str:
    """Write a logprob: JSON has no infinity, and clients know -9999.0 as what cannot be."""
    return repr(max(logprob, -9999.0))
