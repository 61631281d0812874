"""The text of docs/models.md, from the table of architectures and from what was measured.

    python -m tests.kit.models_page FILE            write it (`make docs`)
    python -m tests.kit.models_page --record FILE   measure first (two minutes)

Measured is a tiny random model of each kind in `tests.kit.model.KINDS`, as the tests of equivalence
do it.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from protocol.model.architectures import ARCHITECTURES, WRAPPERS
from protocol.model.config import read_config
from tests.kit.model import KINDS, SavedModel, assemble, make_model, token_ids
from tsqp.importing.gguf_file import NAMES

RECORD = Path(__file__).with_name("models.json")
_TOKENS = 24
# Which published models an architecture is of.
PUBLISHED = {
    "LlamaForCausalLM": "Llama 2, 3, 3.1, 3.2; SmolLM 1, 2; Yi; DeepSeek-LLM; many more",
    "MistralForCausalLM": "Mistral 7B, Nemo, Small; Devstral; Magistral",
    "MinistralForCausalLM": "Ministral 8B",
    "Ministral3ForCausalLM": "Ministral 3",
    "Qwen2ForCausalLM": "Qwen 2, 2.5; QwQ; DeepSeek-R1-Distill-Qwen",
    "Qwen3ForCausalLM": "Qwen 3; Qwen3-Embedding",
    "GemmaForCausalLM": "Gemma 1",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 270M, 1B; the text model of 4B and up",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    "GraniteForCausalLM": "Granite 3 dense",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "Exaone4ForCausalLM": "EXAONE 4",
    "SmolLM3ForCausalLM": "SmolLM3",
    "CohereForCausalLM": "Command R; Aya",
    "Cohere2ForCausalLM": "Command R7B, A",
    "GlmForCausalLM": "GLM-4 9B",
    "Glm4ForCausalLM": "GLM-4-0414",
    "Ernie4_5ForCausalLM": "ERNIE 4.5 0.3B",
    "HeliumForCausalLM": "Helium 1",
    "HunYuanDenseV1ForCausalLM": "Hunyuan 0.5B to 7B",
    "StableLmForCausalLM": "StableLM 2 1.6B, 3B",
    "Starcoder2ForCausalLM": "StarCoder2",
    "NemotronForCausalLM": "Nemotron-4, Minitron",
    "SeedOssForCausalLM": "Seed-OSS",
    "CwmForCausalLM": "CWM",
    "ArceeForCausalLM": "AFM-4.5B",
    "ApertusForCausalLM": "Apertus",
}

_HEAD = """\
# Models

For operators. Afterwards you know which checkpoints run, what was compared, and how a published
file becomes a directory that runs.

`make docs` writes this page from `protocol/model/architectures.py` and from what was measured
({date}, transformers {version}): of each kind a tiny random model with every part that the
architecture has, {tokens} tokens of a prompt and {tokens} behind it. **Logits** is the largest
difference from transformers in float32 under `tee-only`, relative to the largest logit; **tokens**
says how many greedy ones are transformers'. **Integers** says whether `shielded` and `dealt` give
the bits of `quantized-clear`.

**Whole layers at a service** (policies of segments): `clear-segment` and `attested-segment` take
all of these but Gemma 2, whose scores are capped; masks of whole layers (`stip-segment`,
`cloak-segment`) take those like Llama, and say so of others.
"""

_TAIL = """
Text models inside multimodal files run as text models: {wrappers}. A request with an image is
refused. Mixtures of experts, state-space layers and latent attention do not run.

## Files

A run reads `config.json`, safetensors with floats, and, for text, `tokenizer.json`. Two commands
make such a directory, on a machine that you trust (`pip install 'tsqp[import]'`):

    tsqp pull HuggingFaceTB/SmolLM2-135M-Instruct smollm2
    tsqp import SmolLM2-135M-Instruct.Q4_1.gguf smollm2-q4

`tsqp pull ORG/NAME[@REVISION] DIRECTORY` gets a model from a hub: settings, tokenizer and
safetensors, no code. It compares each file with what the hub says of the commit, writes that to
`pull.json`, and pins the directory in `manifest.json`. HF_ENDPOINT names another hub, HF_TOKEN is
for models that need one.

`tsqp import SOURCE DIRECTORY` turns quantised weights into floats again: a GGUF file; a directory
with fp8 (blocks or not), compressed-tensors (int8, fp8, packed words of any bits, MXFP4), AWQ or
GPTQ (both versions, any order); or an adapter (LoRA) with `--base`, whose own tokenizer and
template count where it has them. `import.json` says what was read and written, with digests; no run
reads it: pin the result with `tsqp manifest`. The disk needs room for both, bfloat16 taking two
bytes a weight.

Both work in a folder beside DIRECTORY (`.DIRECTORY.pull`, `.DIRECTORY.import`) until all is there;
the same command goes on with what an interrupted one left. A tokenizer in another form
(`tokenizer.model`, `tekken.json`) becomes `tokenizer.json`.

GGUF files are read of llama.cpp's architectures {gguf} (Mistral's are `llama`, OLMo 3's `olmo2`).
Keys of the architecture and ways to cut texts that are not known are refused. What such a file does
not say is as llama.cpp has it: the scale of Gemma's scores, how often a layer has no window or no
RoPE, and no window for Mistral 7B v0.1, which was trained with one of 4,096 tokens.

Tensors that are no part of the model are skipped, and logged once: layers that predict several
tokens ahead, scales of a cache in fp8. A key of `config.json` that changes another architecture's
numbers is refused by its name.

## Known differences

- A sequence of Phi-4-mini that grows over `original_max_position_embeddings` begins anew there, as
  with `generate` of transformers: its prompt is computed once more.
- StableLM 2 12B and Command R+ are refused: they norm queries and keys of each head by weights of
  its own.
"""


def measure() -> dict[str, Any]:
    """Compare each kind; return what docs/models.md says of it."""
    kinds: dict[str, Any] = {}
    ids = token_ids(_TOKENS)
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = SavedModel(folder, make_model(folder, kind))
            right, found = model.logits(ids), assemble(folder).logits(ids)
            said, greedy = model.greedy(ids, _TOKENS), assemble(folder).greedy(ids, _TOKENS)
            policies = ("quantized-clear", "shielded", "dealt")
            clear, *hidden = (model.tee(policy).logits(ids) for policy in policies)
            kinds[kind] = {
                "architecture": read_config(folder).architecture,
                "logits": float((found - right).abs().max() / right.abs().max()),
                "tokens": sum(a == b for a, b in zip(said, greedy, strict=True)),
                "integers": all(torch.equal(clear, one) for one in hidden),
            }
    date = datetime.now(UTC).date().isoformat()
    return {"date": date, "transformers": transformers.__version__, "kinds": kinds}


def page(record: dict[str, Any]) -> str:
    """Return the text of docs/models.md."""
    head = _HEAD.format(date=record["date"], version=record["transformers"], tokens=_TOKENS)
    lines = [head, _row(("architecture", "models", "logits", "tokens", "integers"))]
    lines.append(_row(["---"] * 2 + ["---:"] * 2 + ["---"]))
    for name in ARCHITECTURES:
        own = [one for one in record["kinds"].values() if one["architecture"] == name]
        logits, tokens = max(one["logits"] for one in own), min(one["tokens"] for one in own)
        same = "the same" if all(one["integers"] for one in own) else "**differ**"
        cells = (f"`{name}`", PUBLISHED[name], f"{logits:.1e}", f"{tokens} of {_TOKENS}", same)
        lines.append(_row(cells))
    wrappers = " and ".join(f"`{name}`" for name in WRAPPERS)
    gguf = ", ".join(f"`{name}`" for name in NAMES)
    return "\n".join(lines) + "\n" + _TAIL.format(wrappers=wrappers, gguf=gguf)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true")
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    if given.record:
        RECORD.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    given.file.write_text(page(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
