"""The text of one sample as its tokens come, and where in it each token begins."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tee_side.engine.request import NewToken
from tee_side.engine.text_stream import TextStream
from tee_side.engine.tokenizer import Tokenizer


class SampleText:
    """Token ids to pieces of text.

    `stop`: strings that end the text, and are no part of it; `stop_ids`: likewise, tokens.
    `offset`: characters in front of the next token. It counts what stop strings hold back, so it
    depends on the tokens alone; a special token, and a part of a character, has no characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], stop_ids: Collection[int], offset: int = 0
    ) -> None:
        self._shown = TextStream(tokenizer, stop)
        # Nothing is held back in this one.
        self._whole = TextStream(tokenizer) if stop else None
        self._stop_ids = stop_ids
        self.offset = offset

    def feed(self, token: NewToken) -> str:
        """Add a token, and return the text that can be shown now: all, with the last token."""
        token_id, finish = token.token_id, token.finish_reason
        if finish == "stop" and token_id in self._stop_ids:
            return self._shown.flush()
        text = self._shown.feed(token_id)
        self.offset += len(text if self._whole is None else self._whole.feed(token_id))
        return text if finish is None else text + self._shown.flush()


def offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Return where in their text each token of a prompt begins."""
    stream, at, found = TextStream(tokenizer), 0, []
    for token_id in token_ids:
        found.append(at)
        at += len(stream.feed(token_id))
    return found
