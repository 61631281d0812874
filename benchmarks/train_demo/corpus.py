"""The training text: its endless stream, validation documents that it never has, its tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.train_demo.stories import Document, documents

Encode = Callable[[str], list[int]]

BEGIN = "<|begin_of_text|>"
END = "<|end_of_text|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END_OF_TURN = "<|end_of_turn|>"
SPECIAL_TOKENS = (BEGIN, END, USER, ASSISTANT, END_OF_TURN)

# The training text has no system messages, so the template leaves them out.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] + '<|end_of_turn|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + '<|end_of_turn|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render(document: Document) -> str:
    """Write a document as training text, special tokens included."""
    if not document.turns:
        return BEGIN + document.stories[0].text + END
    markers = {"user": USER, "assistant": ASSISTANT}
    turns = "".join(markers[role] + text + END_OF_TURN for role, text in document.turns)
    return BEGIN + turns + END


def without_special_tokens(text: str) -> str:
    """Remove every special token from a rendered document."""
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text


def train_tokenizer(texts: Iterable[str], vocabulary_size: int, max_length: int) -> Any:
    """Train a byte-level BPE tokenizer and return it as a transformers tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((without_special_tokens(text) for text in texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN}:1 $B:1",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    # transformers leaves its constructors without annotations.
    wrap: Any = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[USER, ASSISTANT, END_OF_TURN],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=CHAT_TEMPLATE,
    )


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

    def rows(
        self, purpose: str, encode: Encode, length: int, *, aligned: bool
    ) -> Iterator[list[int]]:
        """Yield rows of token ids, cut from the documents one after another.

        `aligned`: rows begin with a document, as every prompt does, and what is left of the last
        one is dropped. Otherwise no token is lost between rows.
        """
        buffer: list[int] = []
        for text in self.texts(purpose):
            buffer += encode(text)
            while len(buffer) >= length:
                yield buffer[:length]
                del buffer[: len(buffer) if aligned else length]
