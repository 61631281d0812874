"""Text to token ids and back, with the `tokenizers` library alone.

Reads `tokenizer.json`, and for chat the template in `chat_template.jinja` or
`tokenizer_config.json`, which runs in Jinja's immutable sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from protocol.errors import ModelError, PromptError
from protocol.model.config import read_json

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """The tokenizer of a model directory. Raises ModelError when it is missing or damaged."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise ModelError(
                str(directory),
                got=f"no {TOKENIZER_FILE}",
                expected="one (or a prompt given as token ids)",
            )
        try:
            self._raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises nothing more specific
            raise ModelError(str(path), got=f"{error}"[:120], expected="a tokenizer") from None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with BOS where the model's tokenizer adds one.

        Raises PromptError for text that is not Unicode (a lone surrogate from undecodable bytes).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise PromptError(
                "prompt", got="bytes that are not UTF-8", expected="UTF-8 text"
            ) from None
        ids: list[int] = self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self._raw.decode(list(token_ids), skip_special_tokens=True)
        return text

    def streamer(self) -> Detokenizer:
        """Return a decoder that is fed one token at a time."""
        return Detokenizer(self._raw)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's next turn.

        Raises ModelError if the model has no chat template, PromptError if it refuses the messages.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template, special = self._chat_template()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment.globals["raise_exception"] = raise_exception
        try:
            text = environment.from_string(template).render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            raise PromptError(
                f"{self._directory}: chat template",
                got=f"{type(error).__name__}: {error}"[:120],
                expected="a conversation that the template accepts",
            ) from None
        return self.encode(text, add_special_tokens=False)

    def _chat_template(self) -> tuple[str, dict[str, Any]]:
        config_path = self._directory / CONFIG_FILE
        config = read_json(config_path) if config_path.exists() else {}
        template_path = self._directory / TEMPLATE_FILE
        template = config.get("chat_template")
        if isinstance(template, list):
            # Several named templates, of which "default" is the one for chat.
            named = [entry for entry in template if isinstance(entry, dict)]
            template = {e.get("name"): e.get("template") for e in named}.get("default")
        if template_path.exists():
            try:
                template = template_path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                raise ModelError(
                    str(template_path), got="bytes that are not UTF-8", expected="a template"
                ) from None
        if not isinstance(template, str):
            raise ModelError(
                str(self._directory),
                got="no chat template",
                expected=f"one in {TEMPLATE_FILE} or {CONFIG_FILE} (or use generate)",
            )
        special = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = config.get(name)
            special[name] = value.get("content") if isinstance(value, dict) else value
        return template, {name: value for name, value in special.items() if value is not None}


class Detokenizer:
    """Turns tokens into text as they come; a character split over tokens waits for its end.

    The library's own DecodeStream raises where bytes turn out to be no UTF-8.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._ids: list[int] = []
        self._shown = 0  # of the ids before `_read`, those that decoding needs as context
        self._read = 0

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes, which may be empty."""
        self._ids.append(token_id)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._shown, self._read = self._read, len(self._ids)
        return text

    def flush(self) -> str:
        """Return the unfinished end, because no more tokens come."""
        text, self._read = self._new_text(), len(self._ids)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._shown : self._read])
        return self._decode(self._ids[self._shown :])[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._raw.decode(token_ids, skip_special_tokens=True)
        return text
