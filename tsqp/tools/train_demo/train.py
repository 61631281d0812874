"""Trains the demo model and saves it as a Hugging Face directory."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tsqp.tools.train_demo.chat_format import BEGIN, END, END_OF_TURN, train_tokenizer
from tsqp.tools.train_demo.corpus import Corpus
from tsqp.tools.train_demo.evaluation import VALIDATION_FILE, evaluate
from tsqp.tools.train_demo.progress import TrainingProgress, default_progress
from tsqp.tools.train_demo.record import TrainingRecord, write_record

DEFAULT_TOKENS = 10_000_000
VOCABULARY_SIZE = 1024
MAX_LENGTH = 512
_TOKENIZER_DOCUMENTS = 4000
_VALIDATION_DOCUMENTS = 160


class OutputDirectoryError(ValueError):
    """The output directory exists and is not empty, or is not a directory."""


@dataclass(frozen=True)
class Phase:
    """A part of the run with one sequence length."""

    share: float
    length: int
    batch: int
    aligned: bool


# Short rows are faster. The last phase has rows of the full length that start with a document,
# so that every position is trained and a prompt looks the same as in training.
_PHASES = (Phase(0.6, 256, 8, aligned=False), Phase(0.4, 512, 4, aligned=True))
_PEAK_LEARNING_RATE = 2.5e-3
_FINAL_SHARE = 0.02
_WARM_UP_SHARE = 0.04
_WEIGHT_DECAY = 0.1
_BETAS = (0.9, 0.95)
_GRADIENT_NORM = 1.0


def model_config(bos_id: int, end_ids: list[int]) -> LlamaConfig:
    """Return the architecture of the demo model."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=bos_id,
        eos_token_id=end_ids,
        pad_token_id=end_ids[0],
        dtype=torch.float32,
    )


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step counted from 0: linear warm-up, then a cosine."""
    warm_up = max(1, round(steps * _WARM_UP_SHARE))
    if step < warm_up:
        return _PEAK_LEARNING_RATE * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return _PEAK_LEARNING_RATE * (_FINAL_SHARE + (1 - _FINAL_SHARE) * cosine)


def train_demo(
    output: Path,
    *,
    seed: int = 7,
    tokens: int = DEFAULT_TOKENS,
    threads: int | None = None,
    progress: TrainingProgress | None = None,
    validation_documents: int = _VALIDATION_DOCUMENTS,
    tokenizer_documents: int = _TOKENIZER_DOCUMENTS,
) -> TrainingRecord:
    """Train the demo model on about ``tokens`` tokens and save it in an empty directory."""
    _prepare_output(output)
    started = time.monotonic()
    with _threads(threads) as used_threads:
        corpus = Corpus(seed, validation_documents)
        tokenizer = train_tokenizer(
            itertools.islice(corpus.texts("tokenizer"), tokenizer_documents),
            VOCABULARY_SIZE,
            MAX_LENGTH,
        )
        bos, *ends = tokenizer.convert_tokens_to_ids([BEGIN, END, END_OF_TURN])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(model_config(bos, ends))
        steps, seen = _fit(model, tokenizer, corpus, tokens, progress or default_progress())
        model.generation_config = GenerationConfig.from_dict(
            {
                "bos_token_id": bos,
                "eos_token_id": ends,
                "pad_token_id": ends[0],
                "do_sample": False,
            }
        )
        model.save_pretrained(output)
        tokenizer.save_pretrained(output)
        (output / VALIDATION_FILE).write_text("\n".join(corpus.validation) + "\n", "utf-8")
        evaluation = evaluate(output)
        record = TrainingRecord(
            validation_loss_nats_per_token=evaluation.nats_per_token,
            validation_bits_per_byte=evaluation.bits_per_byte,
            validation_documents=evaluation.documents,
            validation_tokens=evaluation.tokens,
            tokens_seen=seen,
            steps=steps,
            seed=seed,
            threads=used_threads,
            seconds=round(time.monotonic() - started, 1),
            parameters=sum(weight.numel() for weight in model.parameters()),
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
        )
    write_record(output, record)
    return record


def _prepare_output(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputDirectoryError(f"output directory is not empty: {output}")
    output.mkdir(parents=True, exist_ok=True)


@contextmanager
def _threads(threads: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _batches(corpus: Corpus, tokenizer: Any, tokens: int) -> tuple[int, Iterator[torch.Tensor]]:
    """Return the number of steps, and one batch of token ids for each."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    counts = [
        max(1, round(tokens * phase.share / (phase.batch * phase.length))) for phase in _PHASES
    ]

    def stream() -> Iterator[torch.Tensor]:
        for number, (phase, count) in enumerate(zip(_PHASES, counts, strict=True)):
            cut = corpus.aligned_rows if phase.aligned else corpus.packed_rows
            # One token more than the length: the inputs are all but the last, the targets all
            # but the first.
            rows = cut(f"training phase {number}", encode, phase.length + 1)
            for _ in range(count):
                yield torch.tensor(list(itertools.islice(rows, phase.batch)))

    return sum(counts), stream()


def _optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    # Norm weights are not decayed: their natural value is 1, not 0.
    norms = [weight for weight in model.parameters() if weight.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": _WEIGHT_DECAY},
            {"params": norms, "weight_decay": 0.0},
        ],
        lr=_PEAK_LEARNING_RATE,
        betas=_BETAS,
    )


def _fit(
    model: LlamaForCausalLM, tokenizer: Any, corpus: Corpus, tokens: int, progress: TrainingProgress
) -> tuple[int, int]:
    """Train the model and return the number of steps and of tokens seen."""
    optimizer = _optimizer(model)
    steps, batches = _batches(corpus, tokenizer, tokens)
    seen = 0
    model.train()
    with progress:
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            inputs, targets = batch[:, :-1], batch[:, 1:]
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten()
            )
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)
            optimizer.step()
            seen += inputs.numel()
            progress.update(step + 1, steps, seen, loss.item())
    model.train(False)
    return steps, seen
