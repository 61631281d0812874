"""Text to token ids and back, with the `tokenizers` library alone; also token by token.

Reads `tokenizer.json`, and for chat the template in `chat_template.jinja` or
`tokenizer_config.json` (`tee_side.engine.chat_template`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as RawTokenizer

from protocol.errors import ModelError, PromptError
from protocol.model.files import MAX_JSON_BYTES, find_file, limit_structure, read_file, read_json

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

# Those of the supported architectures have up to 17 MB.
MAX_TOKENIZER_BYTES = 24 * 1024 * 1024
# Of lists and objects, and of what they hold. The library takes fifty bytes for each before it
# knows what it reads; those of the supported architectures have up to 300,000 and 700,000.
_MAX_LISTS = 600_000
_MAX_ITEMS = 2_000_000

# How byte-level BPE writes bytes: those that print as themselves, the others from U+0100 on.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED}
_BYTE_OF |= {chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)}
# How sentencepiece names the token of a byte.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of a model directory. Raises ModelError when it is missing or damaged.

    With a manifest, every file must be the one that it names, or ManifestError is raised. `raw`:
    the library's own tokenizer.
    """

    def __init__(self, directory: Path, manifest: Manifest | None = None) -> None:
        self._directory = directory
        self._manifest = manifest
        path = find_file(directory, TOKENIZER_FILE, manifest)
        if path is None:
            raise ModelError(
                str(directory), f"no {TOKENIZER_FILE}", "one (or a prompt given as token ids)"
            )
        content = read_file(path, MAX_TOKENIZER_BYTES, manifest)
        limit_structure(content, str(path), lists=_MAX_LISTS, items=_MAX_ITEMS)
        self._path = path
        with _library_errors(path, quoted=True):
            self.raw = RawTokenizer.from_buffer(content)
            # The file may ask for a prompt that is cut off, or filled up to any length. Neither
            # is for one prompt; the first is silent, and the second can end the process.
            self.raw.no_truncation()
            self.raw.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with BOS where the model's tokenizer adds one.

        Raises PromptError for text that is not Unicode (a lone surrogate from undecodable bytes),
        ModelError where the tokenizer fails on it.
        """
        with PromptError.instead_of(
            UnicodeEncodeError, "prompt", "bytes that are not UTF-8", "UTF-8 text"
        ):
            text.encode("utf-8")
        with _library_errors(self._path, quoted=False):
            # One call of a batch lets other threads run meanwhile; a single one does not.
            (found,) = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens.

        Raises ModelError where the tokenizer fails on them.
        """
        with _library_errors(self._path, quoted=False):
            return str(self.raw.decode(list(token_ids), skip_special_tokens=True))

    def info(self) -> dict[str, str | None]:
        """Return what the model's files name, as in `tokenizer_config.json`.

        `tokenizer_class`, `chat_template` (None for none) and the special tokens. Raises ModelError
        where a file is damaged.
        """
        _, template, special, config = self._find_template()
        named = config.get("tokenizer_class")
        found = {"tokenizer_class": named, "chat_template": template, **special}
        return {name: text if isinstance(text, str) else None for name, text in found.items()}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, which may be part of a character.

        They are those inside of a text: a tokenizer that begins a text with a space of its own
        leaves that one out when it decodes. A special token stands for its name, an id that is no
        token's (a padded row of the embedding) for nothing. Raises ModelError.
        """
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self.raw.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders and all(c in _BYTE_OF for c in token):
            return bytes(_BYTE_OF[c] for c in token)
        if "ByteFallback" in self._decoders and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if self._decoders & {"ByteFallback", "Metaspace"}:
            return token.replace("▁", " ").encode()
        return self.decode([token_id]).encode()

    @cached_property
    def _added(self) -> dict[int, str]:
        return {i: token.content for i, token in self.raw.get_added_tokens_decoder().items()}

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """Names of the library's decoders that this tokenizer has; its state is their JSON."""
        decoder = self.raw.decoder
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        return frozenset(part.get("type") for part in state.get("decoders", [state]))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of `render_chat`; raises what it raises."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the model reads it, by default up to the assistant's next turn.

        Raises ModelError if the model has no chat template, a damaged one, or one that does not end
        in time, PromptError if it refuses the messages.
        """
        render, special = self._chat_template
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return render(given | special)

    @cached_property
    def _chat_template(self) -> tuple[Callable[[Mapping[str, Any]], str], dict[str, Any]]:
        """What renders, and the special tokens for it: compiling takes longer than rendering."""
        path, template, special, _ = self._find_template()
        if path is None or not isinstance(template, str):
            raise ModelError(
                str(self._directory),
                "no chat template",
                f"one in {TEMPLATE_FILE} or {CONFIG_FILE} (or use generate)",
            )
        from tee_side.engine.chat_template import compiled

        return compiled(template, path, f"{self._directory}: chat template"), special

    def _find_template(self) -> tuple[Path | None, object, dict[str, Any], dict[str, Any]]:
        """Return the file of the chat template, it, special tokens, and the configuration."""
        path = find_file(self._directory, CONFIG_FILE, self._manifest)
        config: dict[str, Any] = {} if path is None else read_json(path, self._manifest)
        template = config.get("chat_template")
        if isinstance(template, list):
            # Several named templates, of which "default" is the one for chat.
            named = [entry for entry in reversed(template) if isinstance(entry, dict)]
            template = next((e.get("template") for e in named if e.get("name") == "default"), None)
        if own := find_file(self._directory, TEMPLATE_FILE, self._manifest):
            path, content = own, read_file(own, MAX_JSON_BYTES, self._manifest)
            with ModelError.instead_of(
                UnicodeDecodeError, str(path), "bytes that are not UTF-8", "a template"
            ):
                template = content.decode("utf-8")
        special = {name: config.get(name) for name in _SPECIAL_TOKENS}
        texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in special.items()}
        special = {name: text for name, text in texts.items() if text is not None}
        return path, template, special, config


@contextmanager
def _library_errors(path: Path, *, quoted: bool) -> Iterator[None]:
    """Turn what the library raises into a ModelError.

    `quoted`: with its message, which may hold the text that it works on. What it raises is a plain
    Exception, or, for a panic of its Rust code, one that derives from BaseException alone.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - see above; `from error` would quote it
        name = type(error).__name__
        raise ModelError(
            str(path),
            f"{name}: {error}"[:160] if quoted else f"{name} on use",
            "a tokenizer" if quoted else "a tokenizer that takes any text",
        ) from None


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
