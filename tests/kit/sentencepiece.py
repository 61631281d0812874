"""A small tokenizer as Llama 2 has it: bytes, "▁" for a space, and one in front of a text."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers


def write_sentencepiece(directory: Path) -> None:
    """Write its tokenizer.json."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "t", "h", "e", "c", "a", "é", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    raw = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.save(str(directory / "tokenizer.json"))
