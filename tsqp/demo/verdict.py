"""Whether the tokens are right: compared with transformers, and with integers without a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tee_side.engine.tokenizer import Tokenizer
from tee_side.policy.placement import Policy
from tee_side.words import OPERATORS
from tsqp.demo.programs import DTYPE
from tsqp.demo.tap import Lie
from tsqp.page.seen import VocabularyMatcher
from tsqp.run.settings import model_directory

# What the integers of a masked policy must be equal to.
CLEAR_INTEGERS = "quantized-clear"
# What the runner calls what Freivalds' check refuses (tee_side.remote.fault_attribution).
_WRONG_RESULT = "a wrong result"


@dataclass(frozen=True)
class Tokens:
    """What a run came to. `logits`: float32 [tokens, V], those that each token was chosen from."""

    name: str
    ids: list[int]
    logits: torch.Tensor


@dataclass(frozen=True)
class Matched:
    """What vocabulary matching found. `right`: how many tokens are; None where rows are others."""

    text: str
    tokens: int
    right: int | None


@dataclass(frozen=True)
class Verdict:
    """One comparison. `remark`: for information, whatever the outcome."""

    policy: str
    passed: bool
    finding: str
    remark: str = ""


def tokens_of(name: str, report: dict[str, Any], logits_file: Path) -> Tokens:
    """Return what a run of tee-runner came to."""
    return Tokens(name, list(report["token_ids"]), load_file(logits_file)["logits"])


def transformers_tokens(prompt_ids: Sequence[int], max_new_tokens: int) -> Tokens:
    """Run the prompt through transformers, in this process."""
    import transformers

    # Untyped: transformers' annotations of `generate` do not hold for its own models.
    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    model = library.AutoModelForCausalLM.from_pretrained(
        model_directory("demo"), dtype=torch.float32
    )
    prompt = torch.tensor([list(prompt_ids)])
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    ids: list[int] = output.sequences[0, prompt.shape[1] :].tolist()
    name = f"transformers {transformers.__version__} in {DTYPE}"
    return Tokens(name, ids, torch.cat(output.logits).float())


def compare_floats(ours: Tokens, reference: Tokens) -> Verdict:
    """Floats: the same token ids; logits may differ by rounding, and it is said how far."""
    shared = agreeing(ours.ids, reference.ids)
    # Logits are of the same context up to the first token that differs, and that one's own.
    comparable = min(shared + 1, len(ours.ids), len(reference.ids))
    difference = (ours.logits[:comparable] - reference.logits[:comparable]).abs().max().item()
    identical = ours.ids == reference.ids
    word = "identical" if identical else f"NOT identical from token {shared} on"
    return Verdict(
        ours.name,
        identical,
        f"{len(ours.ids)} token ids {word} to {reference.name}; largest logit difference"
        f" {difference:.1e}",
    )


def compare_integers(ours: Tokens, clear: Tokens, reference: Tokens) -> Verdict:
    """Integers: token ids and logits the same bit for bit; `reference`, in floats, is informal."""
    same_ids = ours.ids == clear.ids
    same_logits = torch.equal(ours.logits, clear.logits)
    if same_ids and same_logits:
        finding = f"{len(ours.ids)} token ids and all their logits identical, bit for bit, to"
    elif same_ids:
        finding = f"{len(ours.ids)} token ids identical, but logits NOT identical to"
    else:
        finding = f"token ids NOT identical from token {agreeing(ours.ids, clear.ids)} on to"
    return Verdict(
        ours.name,
        same_ids and same_logits,
        f"{finding} {clear.name}, the same int8 arithmetic without a mask",
        _agreement(ours, reference),
    )


def compare_served(policy: str, served: Sequence[bytes], clear: Tokens) -> Verdict:
    """Of a chat over HTTP, bytes are what each token is known by: the same ones."""
    tokenizer = Tokenizer(model_directory("demo"))
    wanted = [tokenizer.token_bytes(token_id) for token_id in clear.ids]
    same = list(served) == wanted
    word = "identical" if same else f"NOT identical from token {agreeing(served, wanted)} on"
    finding = f"{len(served)} tokens of a chat over HTTP {word} to {clear.name}"
    return Verdict(f"{policy}, served", same, finding)


def check_refusal(
    policy: str, lie: Lie, status: int, complaint: str, story: str, honest: str
) -> Verdict:
    """Judge a run that was lied to: it must end with an error, and show no wrong word before.

    `complaint`: its last line; `story`: what it showed; `honest`: the same run without the lie.
    """
    refused = status != 0 and _WRONG_RESULT in complaint
    unharmed = honest.startswith(story)
    if not refused:
        finding = f"one of {lie.count} numbers of a reply was wrong, and was NOT noticed"
    elif not unharmed:
        finding = "a lie was noticed, but what was shown before is NOT the honest story's beginning"
    else:
        finding = (
            f"one of {lie.count} numbers of a reply was wrong by 1: the run ended, and no token"
            " came of it"
        )
    return Verdict(f"{policy}, lied to", refused and unharmed, finding)


def _agreement(ours: Tokens, reference: Tokens) -> str:
    if ours.ids == reference.ids:
        return f"all {len(ours.ids)} are those of {reference.name}, too"
    equal = sum(a == b for a, b in zip(ours.ids, reference.ids, strict=False))
    return (
        f"{equal} of {len(ours.ids)} are those of {reference.name}; the first that differs is"
        f" number {agreeing(ours.ids, reference.ids) + 1}. int8 weights round, and may choose"
        " another word: no failure"
    )


def agreeing(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many elements two sequences have in common at their start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def clear_reference(policy: Policy, folder: Path) -> str:
    """Return name or path of the policy whose tokens an int8 policy must have exactly.

    That of `CLEAR_INTEGERS` itself is written to `folder`: the same numbers, all in the TEE.
    """
    if policy.masks:
        return CLEAR_INTEGERS
    lines = [
        'name = "int8-in-tee"',
        'summary = "all in the TEE, in integers"',
        'arithmetic = "int8"',
        "[operators]",
        *(f'{name} = "tee"' for name in OPERATORS),
    ]
    path = folder / "int8-in-tee.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def match(
    matcher: VocabularyMatcher, inputs: Sequence[torch.Tensor], truth: Sequence[int]
) -> Matched | None:
    """Match rows [.., D] of the first layer's inputs with the vocabulary; None without rows.

    `truth`: ids of all tokens that went through the model; where less was sent, the last ones.
    """
    if not inputs:
        return None
    ids = matcher.nearest(inputs)
    expected = list(truth)[-len(ids) :]
    right = None
    if len(expected) == len(ids):
        right = sum(a == b for a, b in zip(ids, expected, strict=True))
    return Matched(matcher.tokenizer.decode(ids), len(ids), right)
