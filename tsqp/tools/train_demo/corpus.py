"""The endless training stream, and the validation documents that it never contains."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tsqp.tools.train_demo.chat_format import render
from tsqp.tools.train_demo.conversation import documents

Encode = Callable[[str], list[int]]


class Corpus:
    """Validation documents and training streams that share no story with them."""

    def __init__(self, seed: int, validation_documents: int) -> None:
        """Draw the validation documents; ``seed`` fixes these and all the streams."""
        self._seed = seed
        self.validation: list[str] = []
        self._held_out: set[str] = set()
        stream = documents(random.Random(f"validation {seed}"))
        while len(self.validation) < validation_documents:
            document = next(stream)
            # A document without a story is small talk, which training repeats word for word.
            if document.stories:
                self.validation.append(render(document))
                self._held_out.update(story.text for story in document.stories)

    def texts(self, purpose: str) -> Iterator[str]:
        """Yield rendered training documents for ever; each purpose has a stream of its own."""
        for document in documents(random.Random(f"{purpose} {self._seed}")):
            if not any(story.text in self._held_out for story in document.stories):
                yield render(document)

    def packed_rows(self, purpose: str, encode: Encode, length: int) -> Iterator[list[int]]:
        """Yield rows cut from the concatenated documents, with no token lost between rows."""
        buffer: list[int] = []
        for text in self.texts(purpose):
            buffer += encode(text)
            while len(buffer) >= length:
                yield buffer[:length]
                del buffer[:length]

    def aligned_rows(self, purpose: str, encode: Encode, length: int) -> Iterator[list[int]]:
        """Yield rows that begin with a document, as every prompt does; the rest is cut off."""
        buffer: list[int] = []
        for text in self.texts(purpose):
            buffer += encode(text)
            if len(buffer) >= length:
                yield buffer[:length]
                buffer.clear()
