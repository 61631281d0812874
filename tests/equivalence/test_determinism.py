"""Under integer policies a request gives the same bits, whatever runs beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, product
from random import Random
from typing import Any

import torch

from protocol import native
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.request import SamplingSettings
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.model import Models, Tee
from tests.kit.rows import each_row

DTYPES = ("float32", "bfloat16", "float16")

# On either side of what the kernels do differently: a window; one key/value head, and as many as
# query heads; a head dim that is no multiple of 16; RoPE whose frequencies change with the length.
CONTEXT = {"max_position_embeddings": 640, "num_hidden_layers": 2}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", CONTEXT),
    "sliding window": ("mistral", CONTEXT | {"sliding_window": 70}),
    "norms of q and k": (
        "qwen3",
        CONTEXT | {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1},
    ),
    "biases": ("qwen2", CONTEXT),
    "a head a key": (
        "llama",
        CONTEXT | {"head_dim": 18, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "wide heads": ("llama", CONTEXT | {"head_dim": 128, "num_attention_heads": 8}),
    "RoPE by length": (
        "llama",
        {
            "max_position_embeddings": 40,
            "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "dynamic", "factor": 16.0, "rope_theta": 10000.0},
        },
    ),
}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = native.threads(), torch.get_num_threads()
    native.set_up(None, count)
    try:
        yield
    finally:
        native.set_threads(before[0])
        torch.set_num_threads(before[1])


def _bits(x: torch.Tensor) -> torch.Tensor:
    """NaN is the same as itself, and -0 not the same as 0."""
    return x.contiguous().view(torch.uint8)


def _prompt(random: Random, most: int, vocabulary: int) -> list[int]:
    return [random.randrange(vocabulary) for _ in range(random.randint(1, most))]


class _Target:
    """A request, and what it gives alone, in one step and on one thread.

    Tokens are drawn, so that the generator of each sequence is watched, too: another token would
    lead to other logits.
    """

    def __init__(self, tee: Tee, random: Random, most: int) -> None:
        self._vocabulary = min(tee.model.config.vocab_size, 320)
        self._most = most
        self.prompt = _prompt(random, most, self._vocabulary)
        self._sampling = SamplingSettings(temperature=1.0, seed=random.randrange(1000))
        with _threads(1):
            self.alone = self._run(tee.engine(), {0: 1}, random)

    def in_company(self, tee: Tee, random: Random) -> torch.Tensor:
        """Return the logits with others, which come and go, and steps that cut it anywhere."""
        arrivals = dict.fromkeys((random.randrange(8) for _ in range(4)), 2)
        step_tokens = random.randint(1, 600) if random.random() < 0.7 else random.randint(1, 40)
        settings = EngineSettings(
            step_tokens=step_tokens,
            speculative_tokens=random.choice([0, 4]),
            prefix_reuse=random.random() < 0.5,
        )
        with _threads(random.randint(1, 2)):
            engine = Engine(tee.model, tee.lanes, settings)
            return self._run(engine, arrivals | {random.randrange(6): 3}, random)

    def _run(self, engine: Engine, arrivals: dict[int, int], random: Random) -> torch.Tensor:
        """Return the logits [N, V]. `arrivals`: by step; the last is this request's and others'."""
        own = list(arrivals)[-1]
        sequence, found, steps = None, [], 0
        while sequence is None or sequence.finish_reason is None:
            others = arrivals.get(steps, 0) - (steps == own)
            # On both sides of the target, whose row is not always the first.
            for place in range(others + 1):
                if steps == own and place == others // 2:
                    sequence = engine.add(
                        self.prompt,
                        max_new_tokens=4,
                        sampling=self._sampling,
                        eos_token_ids=frozenset(),
                    )
                if place < others:
                    other = _prompt(random, random.choice([2, self._most]), self._vocabulary)
                    if random.random() < 0.3:  # keys and values that it may begin with
                        other = self.prompt[: random.randint(1, len(self.prompt))]
                    engine.add(other, max_new_tokens=random.randint(1, 8))
            found += [s.logits_V for s in engine.step() if s.sequence is sequence]
            steps += 1
        return torch.stack(found)


@each_row(
    ("architecture", "dtype", "kernels"),
    [
        *zip(ARCHITECTURES, cycle(DTYPES), cycle(KERNELS[-1:])),
        ("sliding window", "bfloat16", "torch"),
    ],
    slow=product(ARCHITECTURES, DTYPES, KERNELS),
)
def test_a_request_gives_the_same_bits_in_any_company(
    saved_model: Models, architecture: str, dtype: str, kernels: str
) -> None:
    kind, settings = ARCHITECTURES[architecture]
    model, random = saved_model(kind, **settings), Random(architecture + dtype + kernels)
    with using_kernels(kernels):
        whole, cut = (model.tee("quantized-clear", dtype, micro_batches=n) for n in (1, 3))
        target = _Target(whole, random, 110)
        assert torch.equal(_bits(target.in_company(cut, random)), _bits(target.alone))
