"""Under integer policies a request gives the same bits, whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from random import Random
from typing import Any, TypeAlias

import pytest
import torch

from protocol import native
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.sampling import SamplingSettings
from tee_side.model.layers import _ops_for
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.model import SavedModel, Tee, assemble
from tests.pairwise import covering
from tsqp.cli.program import model_directory

Models: TypeAlias = Callable[..., SavedModel]
Rows: TypeAlias = Callable[[slice], torch.Tensor]

DTYPES = ("float32", "bfloat16", "float16")

# On either side of what the kernels do differently: a window; one key/value head, and as many as
# query heads; a head dim that is no multiple of 16; RoPE whose frequencies change with the length.
CONTEXT = {"max_position_embeddings": 640}
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
    "wide heads": (
        "llama",
        CONTEXT | {"head_dim": 128, "num_attention_heads": 8, "num_hidden_layers": 2},
    ),
    "RoPE by length": (
        "llama",
        {
            "max_position_embeddings": 40,
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
                    engine.add(other, max_new_tokens=random.randint(1, 16))
            found += [s.logits_V for s in engine.step() if s.sequence is sequence]
            steps += 1
        return torch.stack(found)


def _check(tees: list[Tee], random: Random, *, targets: int, companies: int, most: int) -> None:
    """Compare requests in company, on each of `tees` in turn, with the same alone on the first."""
    for _ in range(targets):
        target = _Target(tees[0], random, most)
        for number in range(companies):
            found = target.in_company(tees[number % len(tees)], random)
            assert torch.equal(_bits(found), _bits(target.alone)), f"company {number}"


def _model(models: Models, architecture: str) -> SavedModel:
    kind, settings = ARCHITECTURES[architecture]
    return models(kind, **settings)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_request_gives_the_same_bits_in_any_company(
    saved_model: Models, architecture: str, dtype: str
) -> None:
    model = _model(saved_model, architecture)
    tees = [model.tee("quantized-clear", dtype, micro_batches=parts) for parts in (1, 3)]
    _check(tees, Random(architecture + dtype), targets=1, companies=2, most=110)


@pytest.mark.parametrize("policy", ["shielded", "shielded-prefill", "two-server", "tee-only-int8"])
def test_what_computes_the_products_changes_no_bit(saved_model: Models, policy: str) -> None:
    """Pads, shares, another service, another start."""
    model = _model(saved_model, "llama")
    dynamic = policy == "tee-only-int8"
    alone = model.tee(policy if dynamic else "quantized-clear", "bfloat16")
    company = model.tee(policy, "bfloat16", step_tokens=600, micro_batches=2)
    _check([alone, company], Random(policy), targets=1, companies=2, most=40)


def test_without_a_compiler_a_request_gives_the_same_bits_in_any_company(
    saved_model: Models,
) -> None:
    with using_kernels("torch"):
        tee = _model(saved_model, "sliding window").tee("quantized-clear", "bfloat16")
        _check([tee], Random(0), targets=1, companies=2, most=100)


def _pairs(*values: Iterable[str]) -> list[tuple[str, ...]]:
    """Return so many of all combinations that every pair of values is among them."""
    cases = list(product(*values))
    return [cases[position] for position in sorted(covering(cases, 2))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "architecture", "dtype"), _pairs(KERNELS, ARCHITECTURES, DTYPES)
)
def test_a_request_gives_the_same_bits_in_many_companies(
    saved_model: Models, kernels: str, architecture: str, dtype: str
) -> None:
    model = _model(saved_model, architecture)
    with using_kernels(kernels):
        tees = [model.tee("quantized-clear", dtype, micro_batches=parts) for parts in (1, 2)]
        _check(tees, Random(kernels + architecture), targets=1, companies=3, most=200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "policy", "dtype"),
    _pairs(KERNELS, ["quantized-clear", "tee-only-int8"], DTYPES),
)
def test_the_demo_model_gives_the_same_bits_in_any_company(
    kernels: str, policy: str, dtype: str
) -> None:
    with using_kernels(kernels):
        tee = assemble(model_directory("demo"), policy, dtype)
        _check([tee], Random(kernels + policy), targets=1, companies=2, most=200)


# ------------------------------------------------------------------------ each local operator


def _norm(ops: Any, x: Callable[..., torch.Tensor], random: Random) -> tuple[int, Rows]:
    rows, heads, dim = random.randint(1, 400), random.choice([1, 6]), random.choice([16, 30, 192])
    h_TXD, weight_D = x(rows, heads + 2, dim), x(dim)
    return rows, lambda part: ops.rms_norm(h_TXD[part][:, :heads], weight_D, 1e-5)


def _silu(ops: Any, x: Callable[..., torch.Tensor], random: Random) -> tuple[int, Rows]:
    rows, features = random.randint(1, 600), random.choice([30, 96, 101, 1000])
    x_TF = x(rows, 2 * features)
    return rows, lambda part: ops.silu_mul(*x_TF[part].clone().chunk(2, dim=-1))


def _rope(ops: Any, x: Callable[..., torch.Tensor], random: Random) -> tuple[int, Rows]:
    rows, heads, dim = random.randint(1, 600), random.choice([1, 8]), random.choice([16, 18, 64])
    x_TXC, cos_T1C, sin_T1c = x(rows, heads + 2, dim), x(rows, 1, dim), x(rows, 1, dim // 2)
    return rows, lambda part: ops.apply_rope(x_TXC[part, :heads], cos_T1C[part], sin_T1c[part])


def _residual(ops: Any, x: Callable[..., torch.Tensor], random: Random) -> tuple[int, Rows]:
    rows, features = random.randint(1, 600), random.choice([48, 101, 1000])
    h_TD, y_TD = x(rows, features), x(rows, features)
    return rows, lambda part: ops.residual(h_TD[part].clone(), y_TD[part])


def _attention(ops: Any, x: Callable[..., torch.Tensor], random: Random) -> tuple[int, Rows]:
    shared, group = random.choice([1, 1, 2, 4]), random.choice([1, 2, 3, 4, 6, 8])
    rows, dim = random.randint(1, 300), random.choice([16, 18, 64, 80, 128])
    before, window = random.choice([0, 1, 63, 500, 1100]), random.choice([None, 1, 5, 150])
    q_THC = x(rows, shared * group, dim)
    k_KSC, v_KSC = x(2, shared, before + rows + 9, dim).unbind(0)

    def run(part: slice) -> torch.Tensor:
        context = before + part.stop
        out: torch.Tensor = ops.attention(
            q_THC[part].clone(), k_KSC[:, :context], v_KSC[:, :context], window
        )
        return out

    return rows, run


OPERATORS = [_norm, _silu, _rope, _residual, _attention]


def _check_rows(
    kernels: str, dtype: torch.dtype, operator: Callable[..., tuple[int, Rows]], trials: int
) -> None:
    random = Random(operator.__name__)
    with using_kernels(kernels), torch.inference_mode():
        for _ in range(trials):
            count, run = operator(
                _ops_for(dtype), lambda *shape: (2 * torch.randn(shape)).to(dtype), random
            )
            with _threads(1):
                whole = run(slice(0, count))
            start = 0
            while start < count:
                part = slice(start, min(count, start + random.choice([1, 2, 7, 33, 128, 600])))
                # Three: between two, torch's library cuts most products where it does not matter.
                with _threads(random.choice([1, 2, 3, 3])):
                    assert torch.equal(_bits(run(part)), _bits(whole[part]))
                start = part.stop


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernels", sorted({"torch", native.choice().variant}))
def test_a_row_does_not_depend_on_the_rows_beside_it(
    kernels: str, dtype: torch.dtype, operator: Callable[..., tuple[int, Rows]]
) -> None:
    _check_rows(kernels, dtype, operator, 10)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_of_many_shapes_does_not_depend_on_the_rows_beside_it(
    kernels: str, dtype: torch.dtype, operator: Callable[..., tuple[int, Rows]]
) -> None:
    _check_rows(kernels, dtype, operator, 30)
