"""Text to token ids and back, with the `tokenizers` library alone; also token by token.

Reads `tokenizer.json`. Conversations are read by `tee_side.engine.chat_template`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as RawTokenizer

from protocol.errors import ModelError, PromptError
from protocol.model.files import find_file, limit_structure, read_file

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest
    from tee_side.engine.chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"

# Those of the supported architectures have up to 17 MB.
MAX_TOKENIZER_BYTES = 24 * 1024 * 1024
# Of lists and objects, and of what they hold. The library takes fifty bytes for each before it
# knows what it reads; those of the supported architectures have up to 300,000 and 700,000.
_MAX_LISTS = 600_000
_MAX_ITEMS = 2_000_000


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

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, and what stands beside it. Raises ModelError."""
        from tee_side.engine.chat_template import ChatTemplate

        return ChatTemplate(self._directory, self._manifest)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation; raises what `ChatTemplate.render` raises."""
        text = self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)


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
