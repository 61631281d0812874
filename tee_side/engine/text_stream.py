"""Text as it may be shown: nothing that could still turn out to be part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tee_side.engine.tokenizer import Tokenizer


class TextStream:
    """The text of a generation's tokens as they come, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = tokenizer.streamer()
        self._stop = StopStrings(stop)

    @property
    def found(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stop.found

    def feed(self, token_id: int) -> str:
        """Add a token and return the text that can be shown now. Raises ModelError."""
        return self._stop.feed(self._detokenizer.feed(token_id))

    def flush(self) -> str:
        """Return what was held, because no more tokens come. Raises ModelError."""
        return self._stop.feed(self._detokenizer.flush()) + self._stop.flush()


class StopStrings:
    """Watches a growing text for stop strings.

    What `feed` returns never has to be taken back: an ending that could be the beginning of a stop
    string is held until it is decided. The stop string itself is not part of the text.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Add new text and return what can be shown now."""
        if self.found:
            return ""
        self._held += text
        # The one that is complete first counts, however the text was sliced.
        found = [(at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.found = True
            shown, self._held = self._held[: min(found)[1]], ""
            return shown
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Return what was held, because no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
