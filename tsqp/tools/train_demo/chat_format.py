"""The demo model's text format: special tokens, chat template, tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tsqp.tools.train_demo.conversation import Document

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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

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
