"""The local operators against their formulas, with the weights that the policy keeps in the TEE."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from protocol import integer, native
from protocol.errors import ActivationRangeError, ReplyError
from protocol.integer import int8_product
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.weights import NormTensors
from tee_side.model import local_ops
from tee_side.model.batch import Batch, Chunk, KVCache
from tee_side.model.operators import (
    LocalOperators,
    Tables,
    load_local_operators,
    logits,
    place,
)
from tee_side.native import kernels as compiled_ops
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.sites import IntegerSites, load_biases
from tee_side.remote.call import RunParts, run
from tee_side.words import PHASES, PadsFrom
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.model import CLEAR, Models, SavedModel, policy_of
from tests.kit.rows import each_row

PAD = CLEAR | {"mask": "pad"}
TEE = {"place": "tee"}


def _local(model: SavedModel, policy: Policy, dtype: torch.dtype = torch.float32) -> LocalOperators:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    integers = None
    if policy.arithmetic == "int8":
        biases = load_biases(checkpoint, config, FUSED_MODULES, dtype)
        integers = IntegerSites(config, checkpoint, biases, dtype)
    sites = policy.sites_here(config.num_hidden_layers)
    parts = RunParts(policy, config, checkpoint, dtype)
    return load_local_operators(parts, sites=sites, integers=integers)


def test_sites_are_those_that_stay_in_some_phase_of_some_layer(saved_model: Models) -> None:
    config = read_config(saved_model("llama").directory)
    policy = policy_of(
        {
            "qkv_proj": [TEE | {"layers": 0}, CLEAR | {"layers": "1-"}],
            "o_proj": [TEE | {"phase": "prefill"}, CLEAR | {"phase": "decode"}],
            "gate_up_proj": CLEAR,
            "down_proj": CLEAR,
        }
    )
    assert set(policy.sites_here(config.num_hidden_layers)) == {
        (0, "qkv_proj"),
        *((layer, "o_proj") for layer in range(3)),
    }
    assert load_policy("shielded-prefill").sites_here(config.num_hidden_layers) == []
    assert not _local(saved_model("llama"), load_policy("published"))
    assert len(load_policy("shielded").sites_here(config.num_hidden_layers)) == 12 + 1


@pytest.mark.usefixtures("torch_kernels")
def test_the_digits_of_a_product_are_two_whatever_the_input_is(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer for one of zeros would tell of it by the time."""
    local = _local(saved_model("llama"), load_policy("shielded"))
    rows: list[int] = []

    def counted(part: torch.Tensor, *arguments: Any) -> torch.Tensor:
        rows.append(len(part))
        return int8_product(part, *arguments)

    monkeypatch.setattr(integer, "int8_product", counted)
    for size in (0.0, 1e-3, 1.0, 1e30):
        local[1, "o_proj"](torch.full((5, 96), size))
    assert rows == [2 * 5] * 4


@each_row("arithmetic", ["int8", "int8-dynamic"])
def test_the_integer_lm_head_is_close_to_the_float_one_row_by_row(
    saved_model: Models, arithmetic: str
) -> None:
    """At any size, whatever its neighbours are; and what is no number is no plausible logit."""
    model, weight = saved_model("llama"), saved_model("llama").reference.lm_head.weight
    local = _local(model, policy_of(arithmetic=arithmetic))
    lm_head, h = local[None, "lm_head"], torch.randn(7, 48) * torch.logspace(-20, 20, 7)[:, None]
    expected = (h.double() @ weight.double().t()).detach()
    together = lm_head(h)
    error = (together.double() - expected).norm(dim=1) / expected.norm(dim=1)
    # Eight bits of weight, and of input where it has no more: about half a percent each.
    assert error.max() < 0.02
    for row in range(7):
        assert torch.equal(lm_head(h[row : row + 1])[0], together[row])
    assert torch.equal(lm_head(torch.zeros(1, 48)), torch.zeros(1, 320))
    for value in (float("nan"), float("inf"), -float("inf")):
        h[3, 7] = value
        if arithmetic == "int8":
            with pytest.raises(ActivationRangeError, match="lm_head: input row: got not finite"):
                lm_head(h)
            continue
        logits = lm_head(h)
        assert not logits[3].isfinite().any()
        assert torch.equal(logits[4:], together[4:])


@each_row("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    """A service may send anything, and half precision may overflow; also under a cap."""
    ops: Any = SimpleNamespace(head_in_segment=True)
    for dtype, cap in itertools.product(STEPS, (None, 30.0)):
        model: Any = SimpleNamespace(config=SimpleNamespace(logit_scale=1.0, logit_cap=cap))
        logits_NV = torch.full((2, 5), 60000.0).to(dtype)
        found = run(logits(logits_NV, model, ops))
        assert found is logits_NV if cap is None else (found == cap).all()
        logits_NV[1, 3] = value
        with pytest.raises(ReplyError, match="logits: got values that are not finite"):
            run(logits(logits_NV, model, ops))


def _placed(operators: dict[str, Any]) -> Tables:
    call: Any = lambda *_: lambda x: x  # noqa: E731
    return place(policy_of(operators, arithmetic="int8"), 4, call, call)


def test_pads_are_drawn_in_their_own_phase_and_not_where_they_are_withheld() -> None:
    tables = _placed({"lm_head": PAD, "o_proj": PAD})
    leaves, stays = tables["decode", "stock"], tables["decode", "none"]
    assert tables["decode", "dealers"] is leaves
    assert [[mask.name for mask in table.masks] for table in (leaves, stays)] == [["pad"], []]
    assert (leaves.head_apart, stays.head_apart) == (True, False)
    phases = _placed({"o_proj": [TEE | {"phase": "prefill"}, PAD | {"phase": "decode"}]})
    # One that is dealt is not drawn from the stock where dealers multiply as it is used.
    dealt = PAD | {"mask": {"name": "pad", "pads": "dealt"}}
    both = _placed({"lm_head": dealt, "o_proj": PAD})
    drawn = [{mask.described() for mask in both["prefill", at].masks} for at in get_args(PadsFrom)]
    assert drawn == [{"pad", 'pad pads="dealt"'}, {"pad"}, set()]
    assert [both["prefill", at].head_apart for at in get_args(PadsFrom)] == [True, False, False]
    assert [bool(phases[phase, "stock"].masks) for phase in PHASES] == [False, True]


# How far sums in another order may be apart, and one rounding more, relative to the largest value.
STEPS = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(params=KERNELS)
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    with using_kernels(request.param):
        yield local_ops if request.param == "torch" else compiled_ops


def _dtypes(ops: Any) -> list[torch.dtype]:
    """Compiled operators are for the first two."""
    return list(STEPS)[: 3 if ops is local_ops else 2]


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (2 * torch.randn(shape)).to(dtype)


def _near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    assert (found.shape, found.dtype) == (exact.shape, dtype)
    bound = STEPS[dtype] * float(exact.abs().max())
    return bool(((found.double() - exact).abs() <= bound).all())


def _batch(*parts: Any) -> Batch:
    """Rows, the position behind them, and the whole memory of keys and of values, of each part."""
    chunks = []
    for rows, end, keys_LKSC, values_LKSC in parts:
        cache = KVCache.__new__(KVCache)
        cache.memory, cache.length = (keys_LKSC, values_LKSC), end - (rows.stop - rows.start)
        cache.places = {layer: layer for layer in range(len(keys_LKSC))}
        chunks.append(Chunk(cache, rows, end))
    return Batch(torch.empty(0), tuple(chunks), ())


def test_rows_are_what_the_formulas_say(ops: Any) -> None:
    wrong = []
    for dtype, features in itertools.product(_dtypes(ops), (2, 30, 96, 1000)):
        # A part of a fused product, whose rows are further apart than they are long.
        product = _random(dtype, 5, 2 * features + 6)
        h, up = product[:, :-6].chunk(2, dim=1)
        gain, cos = _random(dtype, features), _random(dtype, 5, 1, features // 2)
        sin = _random(dtype, 5, 1, features // 2)
        kept = [x.clone() for x in (product, gain, cos, sin)]
        x, y = h.double(), up.double()
        first, second = x.unflatten(1, (1, features)).chunk(2, dim=-1)
        c, s = cos.double(), sin.double()
        turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
        # Epsilon is larger than a row of small numbers.
        root = (x.square().mean(-1, keepdim=True) + 0.5).sqrt()
        heads, both_cos = h.unflatten(1, (1, features)), cos.repeat(1, 1, 2)
        rotated = ops.apply_rope(heads, both_cos, sin, features)
        # Neighbours, of the first elements alone.
        pairs = torch.stack((h[:, : features // 2], h[:, features // 2 :]), dim=-1).flatten(1)
        behind = torch.cat((pairs, up), dim=1).unflatten(1, (1, 2 * features))
        near = ops.apply_rope(behind, both_cos, sin, features, neighbours=True)
        right_pairs = torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(2)
        deviation = x - x.mean(-1, keepdim=True)
        spread = (deviation.square().mean(-1, keepdim=True) + 0.5).sqrt()
        g = gain.double()
        weight, shifted = NormTensors(gain), NormTensors(gain, gain.flip(0))
        centred = deviation / spread * g
        gelu = torch.nn.functional.gelu(x, approximate="tanh")
        xielu = torch.tensor([0.8, 1.3, 0.5, -1e-6])
        low = (torch.expm1(x.clamp(max=-1e-6)) - x) * 1.3
        both = product[:, :-6]
        right = {
            "norm": _near(ops.rms_norm(h, weight, 0.5), x / root * g, dtype),
            "LayerNorm": _near(ops.layer_norm(h, weight, 0.5), centred, dtype),
            "its bias": _near(ops.layer_norm(h, shifted, 0.5), centred + g.flip(0), dtype),
            "silu": _near(ops.activate(both, "silu", True), x / (1 + (-x).exp()) * y, dtype),
            "gelu": _near(ops.activate(both, "gelu_pytorch_tanh", True), gelu * y, dtype),
            "gelu alone": _near(ops.activate(h, "gelu_pytorch_tanh", False), gelu, dtype),
            "relu2": _near(ops.activate(h, "relu2", False), x.clamp(min=0).square(), dtype),
            "xielu": _near(
                ops.activate(h, "xielu", False, xielu),
                torch.where(x > 0, 0.8 * x * x, low) + 0.5 * x,
                dtype,
            ),
            "rope": _near(rotated, turned, dtype),
            "neighbours": _near(near[..., :features], right_pairs, dtype),
            "the rest": torch.equal(near[..., features:], behind[..., features:]),
        }
        assert all(map(torch.equal, (product, gain, cos, sin), kept))
        # Keys and values of two heads: rows of a sequence, and one of another with less room.
        keys, values = h.unflatten(1, (2, -1)), up.contiguous().unflatten(1, (2, -1))
        some, last = (torch.zeros(2, 2, 2, S, features // 2, dtype=dtype) for S in (9, 5))
        ops.append(keys, values, _batch((slice(0, 4), 6, *some), (slice(4, 5), 5, *last)), 1)
        both = torch.stack((keys, values)).transpose(1, 2)
        written = torch.equal(some[:, 1, :, 2:6], both[:, :, :4])
        written &= torch.equal(last[:, 1, :, 4:], both[:, :, 4:])
        some[:, 1, :, 2:6], last[:, 1, :, 4:] = 0, 0
        right["append"] = written and not some.any() and not last.any()
        stream = h.contiguous()
        total = stream + up
        right["sum"] = ops.residual(stream, up) is stream and torch.equal(stream, total)
        right["part"] = _near(ops.residual(h.contiguous(), up, 0.3), x + 0.3 * y, dtype)
        wrong += [(name, dtype, features) for name, is_right in right.items() if not is_right]
    assert wrong == []


# Query heads, the key/value heads that they share, head dim.
SHAPES = ((6, 2, 16), (8, 1, 40), (4, 4, 18), (2, 2, 64), (1, 1, 24), (6, 3, 24))

# Tokens, context, window: on either side of the sizes at which something is computed otherwise.
_SHORT = itertools.product((1, 3, 16, 17, 128, 130), (0, 1, 40), (None, 1, 7, 150))
_MIXED = itertools.product((1, 17, 130), (64, 65, 512, 513, 1100), (None, 70, 600))
SIZES = [
    *((tokens, before + tokens, window) for tokens, before, window in _SHORT),
    *((tokens, max(context, tokens), window) for tokens, context, window in _MIXED),
    *itertools.product((2, 129), (1024, 1025), (None, 40, 1024)),
]


def _attended(
    q_THC: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    S: int,
    window: int | None,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    T, H, C = q_THC.shape
    k_KSC, v_KSC = k[0, :, :S], v[0, :, :S]
    K = len(k_KSC)
    query_T1, key_1S = torch.arange(S - T, S)[:, None], torch.arange(S)[None]
    hidden = key_1S > query_T1
    if window is not None:
        hidden |= query_T1 - key_1S >= window
    k_HSC, v_HSC = (x.double().repeat_interleave(H // K, dim=0) for x in (k_KSC, v_KSC))
    scores_HTS = q_THC.double().transpose(0, 1) @ k_HSC.mT * scale
    if cap is not None:
        scores_HTS = cap * (scores_HTS / cap).tanh()
    probs_HTS = scores_HTS.masked_fill(hidden, float("-inf")).softmax(-1)
    return (probs_HTS @ v_HSC).transpose(0, 1).reshape(T, H * C)


def _operands(
    dtype: torch.dtype, tokens: int, context: int, shape: tuple[int, int, int] = SHAPES[0]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, and the memory of k and v, which has room for more positions."""
    heads, shared, size = shape
    k, v = _random(dtype, 2, 1, shared, context + 9, size)
    return _random(dtype, tokens, heads, size), k, v


def test_attention_is_what_the_formula_says(ops: Any) -> None:
    wrong, dtypes = [], _dtypes(ops)
    for number, (tokens, context, window) in enumerate(SIZES):
        shape, dtype = SHAPES[number % 6], dtypes[number // 6 % len(dtypes)]
        operands = _operands(dtype, tokens, context, shape)
        kept = [x.clone() for x in operands]
        q, k, v = operands
        every, row = (slice(0, tokens), context), (slice(0, 1), context)
        seen = (window, shape[2] ** -0.5 * (1 + number % 2), (None, 3.0)[number // 2 % 2])
        found = ops.attention(q, _batch((*every, k, v)), 0, *seen)
        assert all(map(torch.equal, operands, kept))
        # A row's bits do not depend on the rows before it in its chunk, on other sequences, nor on
        # threads.
        native.set_threads(3)
        last = ops.attention(q[-1:], _batch((*row, k, v)), 0, *seen)
        # Of another sequence, with keys and values of its own.
        own, behind = (*row, k.flip(2), v.flip(2)), (slice(1, 1 + tokens), context, k, v)
        other = ops.attention(q[-1:], _batch(own), 0, *seen)
        beside = ops.attention(torch.cat([q[-1:], q]), _batch(own, behind), 0, *seen)
        native.set_threads(1)
        exact = _attended(*operands, context, *seen)
        alike = torch.equal(last, found[-1:]) and torch.equal(beside, torch.cat([other, found]))
        if not (_near(found, exact, dtype) and alike):
            wrong.append((tokens, context, window, dtype, shape))
    assert wrong == []


@each_row("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(ops: Any, broken: float) -> None:
    for dtype, context in itertools.product(_dtypes(ops), (5, 700)):
        q, k, v = _operands(dtype, 2, context, (2, 2, 16))
        # One row's query: none of its scores is a number. One key: of its segment, one score.
        q[0, 0, 3] = broken
        k[0, 1, 0] = torch.nan
        found = ops.attention(q, _batch((slice(0, 2), context, k, v)), 0, None, 0.25, None)
        found = found.unflatten(1, (2, 16))
        assert found[0, 0].isnan().all()
        assert found[1, 0].isfinite().all()
        assert found[:, 1].isnan().all()
