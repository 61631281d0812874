"""Text as it may be shown: nothing that could still turn out to be part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tee_side.engine.tokenizer import Tokenizer

# Tokens that are no text yet: of one character there are four at most. To decode more of them again
# with each that follows would take longer and longer.
_MAX_HELD = 16


class TextStream:
    """The text of tokens as they come, up to the first stop string, which is not part of it.

    What it returns never has to be taken back: a character that is split over tokens waits for its
    end, and what could be the beginning of a stop string until it is decided. The tokenizer
    library's own DecodeStream raises where bytes turn out to be no UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        # Those read last, which decoding needs as context, and those that are no text yet.
        self._ids: list[int] = []
        self._read = 0
        self._held = ""
        self.found = False  # whether a stop string has ended the text

    def feed(self, token_id: int) -> str:
        """Add a token and return the text that can be shown now. Raises ModelError."""
        self._ids.append(token_id)
        text = self._new_text()
        held = not text or text.endswith("\ufffd")
        if held and len(self._ids) - self._read < _MAX_HELD:
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        return self._show(text)

    def flush(self) -> str:
        """Return what was held, because no more tokens come. Raises ModelError."""
        text, self._read = self._new_text(), len(self._ids)
        shown, held, self._held = self._show(text), self._held, ""
        return shown + held

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._read])
        return self._tokenizer.decode(self._ids)[len(before) :]

    def _show(self, text: str) -> str:
        """Hold new text, and return what of it is decided."""
        if self.found:
            return ""
        held = self._held + text
        # The one that is complete first counts, however the text was sliced.
        found = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        if found:
            self.found, self._held = True, ""
            return held[: min(found)[1]]
        beginnings = (stop[:length] for stop in self._stop for length in range(1, len(stop)))
        keep = max((len(one) for one in beginnings if held.endswith(one)), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]
