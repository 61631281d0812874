"""The bytes that tokens stand for, which may be parts of characters: those of log-probabilities."""

import json
import re
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as RawTokenizer

# How byte-level BPE writes bytes: those that print as themselves, the others from U+0100 on.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED}
_BYTE_OF |= {chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)}
# How sentencepiece names the token of a byte.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Returns the bytes of a token as they are inside of a text.

    A tokenizer that begins a text with a space of its own leaves that one out when it decodes.
    `decode`: see `Tokenizer`.
    """

    def __init__(self, raw: RawTokenizer, decode: Callable[[Sequence[int]], str]) -> None:
        self._raw, self._decode = raw, decode
        self._added = {i: token.content for i, token in raw.get_added_tokens_decoder().items()}
        # Names of the library's decoders that this tokenizer has; its state is their JSON.
        state = {} if raw.decoder is None else json.loads(raw.decoder.__getstate__())
        self._decoders = {part.get("type") for part in state.get("decoders", [state])}

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token.

        A special token stands for its name, an id that is no token's (a padded row of the
        embedding) for nothing. Raises ModelError.
        """
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._raw.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders and all(c in _BYTE_OF for c in token):
            return bytes(_BYTE_OF[c] for c in token)
        if "ByteFallback" in self._decoders and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if self._decoders & {"ByteFallback", "Metaspace"}:
            return token.replace("▁", " ").encode()
        return self._decode([token_id]).encode()
