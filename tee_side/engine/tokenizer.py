"""Text to token ids and back, with the `tokenizers` library alone; also token by token.

Reads `tokenizer.json`. Conversations are read by `tee_side.chat.template`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from protocol.errors import ModelError, PromptError
from protocol.model.files import find_file, limit_structure, read_file, read_json
from protocol.validation import validate_file, validate_known

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

# Those of the supported architectures have up to 33 MB.
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
# Of lists and objects, and of what they hold. The library takes fifty bytes for each before it
# knows what it reads; those of the supported architectures have up to 600,000 and 1,700,000.
_LIMITS = {"lists": 1_200_000, "items": 4_000_000}
# What tells of tokens beside it.
_BESIDE = (CONFIG_FILE, "special_tokens_map.json")
_ADDED_FILE = "added_tokens.json"
# Names of special tokens, in the order in which transformers adds them; a model's own follow.
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_SEVERAL = tuple(f"{kind}_special_tokens" for kind in ("model_specific", "extra", "additional"))
# Special tokens of classes, where the files say nothing of them.
_CLASSES = {
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "GemmaTokenizer": {f"{n}_token": f"<{n}>" for n in ("bos", "eos", "unk", "pad", "mask")},
}


class _Described(BaseModel):
    """A token as a file describes it."""

    model_config = ConfigDict(frozen=True, strict=True)

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


def _described(value: object) -> object:
    """Describe a token that is named, which is a special one."""
    named = {"content": value, "special": True, "normalized": False}
    return named if isinstance(value, str) else value


_Named: TypeAlias = Annotated[_Described | None, BeforeValidator(_described)]


class _Beside(BaseModel):
    """What a file beside tokenizer.json says of tokens."""

    model_config = ConfigDict(frozen=True, strict=True)

    added_tokens_decoder: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], _Described] = {}
    named: dict[str, _Named]
    unnamed: dict[str, list[_Named]]


def _sort_out(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Tell the special tokens with a name, which may be a model's own, from others."""
    kind = str(raw.get("tokenizer_class")).removesuffix("Fast")
    own = {k: v for k, v in raw.items() if k.endswith("_token") and isinstance(v, str | dict)}
    named = _CLASSES.get(kind, {}) | own | {key: raw[key] for key in _NAMES if key in raw}
    several = {key: raw.get(key) or [] for key in _SEVERAL}
    for given in [key for key in _SEVERAL if isinstance(several[key], dict)]:
        named |= several.pop(given)
    return {**raw, "named": named, "unnamed": several}


class _Added(BaseModel):
    """added_tokens.json."""

    model_config = ConfigDict(frozen=True, strict=True)

    tokens: dict[Annotated[str, Field(min_length=1)], Annotated[int, Field(ge=0)]]


class Tokenizer:
    """The tokenizer of a model directory. Raises ModelError when it is missing or damaged.

    With a manifest, every file must be the one that it names, or ManifestError is raised. `raw`:
    the library's own tokenizer; `special_tokens`: texts of those that files name, by their names.
    """

    def __init__(self, directory: Path, manifest: Manifest | None = None) -> None:
        self.directory = directory
        self.manifest = manifest
        path = find_file(directory, TOKENIZER_FILE, manifest)
        if path is None:
            others = [n for n in ("tokenizer.model", "tekken.json") if (directory / n).exists()]
            got = f"no {TOKENIZER_FILE}{' but ' * bool(others)}{', '.join(others)}"
            made = ", as tsqp import makes of that" * bool(others)
            raise ModelError(str(directory), got, f"one{made} (or a prompt given as token ids)")
        content = read_file(path, MAX_TOKENIZER_BYTES, manifest)
        limit_structure(content, str(path), _LIMITS)
        self.path = path
        with library_errors(path, quoted=True):
            self.raw = RawTokenizer.from_buffer(content)
            # The file may ask for a prompt that is cut off, or filled up to any length. Neither
            # is for one prompt; the first is silent, and the second can end the process.
            self.raw.no_truncation()
            self.raw.no_padding()
        for token in self._add_tokens():
            ids = self.encode(token, add_special_tokens=False)
            ModelError.unless(
                len(ids) == 1, f"{directory}: special token", f"{len(ids)} ids for it", "one"
            )

    def _add_tokens(self) -> list[str]:
        """Add the tokens that stand beside tokenizer.json alone, as transformers does.

        They get the next ids, in the order of those that are listed for them. Returns the special
        ones.
        """
        listed: dict[int, AddedToken] = {}
        by_name: dict[str, _Described | None] = {}
        others: list[_Described | None] = []
        for name in _BESIDE:
            if not (path := find_file(self.directory, name, self.manifest)):
                continue
            said = validate_known(_Beside, _sort_out(read_json(path, self.manifest)), str(path))
            for index, token in said.added_tokens_decoder.items():
                listed[int(index)] = AddedToken(**token.model_dump(exclude_none=True))
            by_name |= said.named
            others += chain.from_iterable(said.unnamed.values())
            if "added_tokens_decoder" in said.model_fields_set:
                break  # it lists all of them
        self.special_tokens = {name: token.content for name, token in by_name.items() if token}
        order = dict.fromkeys((*_NAMES, *by_name))
        named = [token.content for token in (*map(by_name.get, order), *others) if token]
        if path := find_file(self.directory, _ADDED_FILE, self.manifest):
            read = validate_file(_Added, {"tokens": read_json(path, self.manifest)}, str(path))
            for text, place in read.tokens.items():
                listed.setdefault(place, AddedToken(text, special=text in named))
        adding = [listed[index] for index in sorted(listed)]
        adding += [AddedToken(name, special=True, normalized=False) for name in named if name]
        with library_errors(self.path, quoted=True):
            known = {token.content for token in self.raw.get_added_tokens_decoder().values()}
            for new in adding:
                if new.content not in known:
                    known.add(new.content)
                    (self.raw.add_special_tokens if new.special else self.raw.add_tokens)([new])
        return [name for name in dict.fromkeys(named) if name]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with BOS where the model's tokenizer adds one.

        Raises PromptError for text that is not Unicode (a lone surrogate from undecodable bytes),
        ModelError where the tokenizer fails on it.
        """
        with PromptError.instead_of(
            UnicodeEncodeError, "prompt", "bytes that are not UTF-8", "UTF-8 text"
        ):
            text.encode("utf-8")
        with library_errors(self.path, quoted=False):
            # One call of a batch lets other threads run meanwhile; a single one does not.
            (found,) = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens.

        Raises ModelError where the tokenizer fails on them.
        """
        with library_errors(self.path, quoted=False):
            return str(self.raw.decode(list(token_ids), skip_special_tokens=True))


@contextmanager
def library_errors(path: Path, *, quoted: bool) -> Iterator[None]:
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
    end, and what could be the beginning of a stop string until it is decided. `before`: the ids
    that the text goes on behind. `keeps_stop`: the stop string is part of it. The tokenizer
    library's own DecodeStream raises where bytes turn out to be no UTF-8.
    """

    keeps_stop = False

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        # Those read last, which decoding needs as context: it drops the space of a first word. And
        # those that are no text yet.
        # A prompt may be all of tokens without text: only so many are looked at.
        last = reversed(before[-_MAX_HELD * _MAX_HELD :])
        shown = (token_id for token_id in last if tokenizer.decode([token_id]))
        self._ids = list(islice(shown, _MAX_HELD))[::-1]
        if tokenizer.decode(self._ids).endswith("\ufffd"):
            self._ids = []  # within a character
        self._read = len(self._ids)
        self._held = ""
        self.found = False  # whether a stop string has ended the text

    def feed(self, token_id: int) -> str:
        """Add a token and return the text that can be shown now. Raises ModelError."""
        self._ids.append(token_id)
        text = self._new_text()
        held = not text or text.endswith("\ufffd")
        if held and len(self._ids) - self._read < _MAX_HELD:
            return ""
        # What is no text at all does not become the context of what follows.
        del self._ids[slice(None, self._read) if text else slice(self._read, None)]
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
            return held[: min(found)[0 if self.keeps_stop else 1]]
        beginnings = (stop[:length] for stop in self._stop for length in range(1, len(stop)))
        keep = max((len(one) for one in beginnings if held.endswith(one)), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]
