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
from protocol.model.config import MAX_JSON_BYTES, read_json
from protocol.model.manifest import Manifest, find_file, read_file

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

# Those of the supported architectures have up to 17 MB.
MAX_TOKENIZER_BYTES = 24 * 1024 * 1024
# Of lists and objects, and of what they hold. The library takes fifty bytes for each before it
# knows what it reads; those of the supported architectures have up to 300,000 and 700,000.
_MAX_LISTS = 600_000
_MAX_ITEMS = 2_000_000


class Tokenizer:
    """The tokenizer of a model directory. Raises ModelError when it is missing or damaged.

    With a manifest, every file must be the one that it names, or ManifestError is raised.
    """

    def __init__(self, directory: Path, manifest: Manifest | None = None) -> None:
        self._directory = directory
        self._manifest = manifest
        path = find_file(directory, TOKENIZER_FILE, manifest)
        if path is None:
            raise ModelError(
                str(directory),
                got=f"no {TOKENIZER_FILE}",
                expected="one (or a prompt given as token ids)",
            )
        content = read_file(path, MAX_TOKENIZER_BYTES, manifest)
        lists, items = content.count(b"[") + content.count(b"{"), content.count(b",")
        if lists > _MAX_LISTS or items > _MAX_ITEMS:
            raise ModelError(
                str(path),
                got=f"{lists} lists of {items} items",
                expected=f"at most {_MAX_LISTS} and {_MAX_ITEMS}",
            )
        try:
            self._raw = RawTokenizer.from_buffer(content)
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
        config_path = find_file(self._directory, CONFIG_FILE, self._manifest)
        config = {} if config_path is None else read_json(config_path, self._manifest)
        template_path = find_file(self._directory, TEMPLATE_FILE, self._manifest)
        template = config.get("chat_template")
        if isinstance(template, list):
            # Several named templates, of which "default" is the one for chat.
            named = [entry for entry in template if isinstance(entry, dict)]
            template = {e.get("name"): e.get("template") for e in named}.get("default")
        if template_path is not None:
            try:
                template = read_file(template_path, MAX_JSON_BYTES, self._manifest).decode("utf-8")
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
