"""Who computed wrongly is found, and nobody else is blamed; in time, or everybody is."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import pytest
import torch

from protocol.channel import Exchange
from protocol.errors import DeadlineExceededError, MaskError, VerificationError
from protocol.integer import exact_product
from protocol.messages import (
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    RingLinearRequest,
    TensorReply,
)
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.model.quantized import load_quantized
from protocol.prepared import PreparedRequest
from protocol.tensors import from_torch, to_torch
from tee_side.policy.placement import load_policy
from tee_side.protect.masking import MaskRules
from tee_side.protect.randomness import Randomness
from tee_side.protect.verification import ExactCheck
from tee_side.protect.verifier import Claim, LinearCheck, ResultCheck, Weights
from tee_side.remote.fault_attribution import Answer, Refused, _in_time, find_liars, refuse
from tee_side.remote.registered import RunParts
from tee_side.words import OPERATORS, PRODUCTS, Operator, is_linear
from tests.kit.fakes import World
from tests.kit.lie import (
    Change,
    Lying,
    Models,
    bytes_of,
    everything_verified,
    generate,
    one_more,
    site_of,
)
from tests.kit.model import SavedModel
from tsqp.lab.research.float_check import (
    FloatCheck,
    FloatProductCheck,
    FloatSecrets,
    Tolerance,
)
from tsqp.lab.research.operators import ProductCheck, _lm_head


@pytest.mark.parametrize("liar", [0, 1])
def test_of_two_shares_the_liar_alone_is_blamed(saved_model: Models, liar: int) -> None:
    model = saved_model("llama")
    expected = generate(model.tee("two-server"), 5)
    channels = [
        Lying(model.directory, one_more if index == liar else lambda y: y, at=20, others=True)
        for index in range(2)
    ]
    assert generate(model.tee("two-server", channels=list(channels)), 5) == expected
    assert [len(channel.distrusted) for channel in channels] == [
        int(index == liar) for index in range(2)
    ]
    # The other's share was right, and it is asked for it again: the same bytes.
    crossed = [[bytes_of(request) for request in channel.requests] for channel in channels]
    assert [len(sent) - len(set(sent)) for sent in crossed] == [1, 1]


def test_of_two_shares_both_liars_are_blamed(saved_model: Models) -> None:
    model = saved_model("llama")
    channels = [Lying(model.directory, one_more, at=20) for _ in range(2)]
    with pytest.raises(VerificationError):
        generate(model.tee("two-server", channels=list(channels)), 5)
    # Both, although the first of them was the last of its kind already.
    assert [len(channel.distrusted) for channel in channels] == [1, 1]


def test_errors_that_cancel_change_nothing_and_raise_no_alarm(saved_model: Models) -> None:
    """Of two that collude: what is used is right, so there is nothing to refuse."""
    model = saved_model("llama")
    expected = generate(model.tee("two-server"), 5)
    changes: tuple[Change, Change] = (one_more, lambda y: 2 * y - one_more(y.clone()))
    channels = [Lying(model.directory, change, at=20) for change in changes]
    assert generate(model.tee("two-server", channels=list(channels)), 5) == expected
    assert all(channel.lied and not channel.distrusted for channel in channels)


@pytest.mark.parametrize("alone", [1, 2])
def test_of_several_answers_those_that_are_off_are_blamed(saved_model: Models, alone: int) -> None:
    """q, k and v each asked for alone: somebody else may have answered each."""
    model = saved_model("llama")
    asked = ("q_proj", "k_proj", "v_proj")[alone]
    channel = Lying(
        model.directory, lambda y: -y, lambda request: site_of(request) == (1, asked), others=True
    )
    tee = model.tee(everything_verified("tsqp"), channels=[channel])
    expected = generate(model.tee("tsqp"))
    assert generate(tee) == expected
    ((exchange, error),) = channel.distrusted
    assert error.where == "qkv_proj in layer 1 at loopback"
    reply = exchange.response
    assert isinstance(reply, TensorReply)
    assert reply.output.shape[-1] == 32


def test_factors_that_do_not_fit_are_nobodys_lie(saved_model: Models) -> None:
    """A service that computed rightly is not accused of what a damaged pad does."""
    model = saved_model("llama")
    channel = Lying(model.directory, lambda y: y, others=True)
    tee = model.tee("shielded", channels=[channel])
    (pads,) = tee.assembly.pads.values()
    factors = pads._store.all_factors

    def damaged(indices: range) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {site: (r, u + 1) for site, (r, u) in factors(indices).items()}

    pads._store.all_factors = damaged  # type: ignore[method-assign]
    with pytest.raises(MaskError, match="mask pad: qkv_proj in layer 0: got a wrong result"):
        generate(tee)
    assert not channel.distrusted


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_unmask_is_nobodys_lie_at_any_operator(
    saved_model: Models, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of floats, too, the one answer is compared before the service is blamed for it."""
    model = saved_model("llama")
    channel = Lying(model.directory, lambda y: y)
    check = MaskRules.check_unmasked

    def wrong(self: MaskRules, at: Operator, y: torch.Tensor, *arguments: Any) -> None:
        check(self, at, y, *arguments)
        if at == operator:
            y.mul_(2)

    # The last look at a result before it is verified.
    monkeypatch.setattr(MaskRules, "check_unmasked", wrong)
    tee = model.tee(everything_verified("tsqp-permuted"), channels=[channel])
    with pytest.raises(MaskError) as caught:
        generate(tee)
    layered = is_linear(operator) or operator in PRODUCTS
    where = f"{operator} in layer 0" if layered else operator
    assert caught.value.where == f"mask row-permutation: {where}"
    assert caught.value.got == "a wrong result, unmasked from right answers"
    assert not channel.distrusted


def test_a_service_with_other_weights_than_the_tees_is_to_blame_unseen(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers cannot be compared: what it multiplies by is not here."""
    model, policy = saved_model("llama"), everything_verified("cloak")
    assert policy.feature_mask is not None
    channel = Lying(model.provisioned(policy.feature_mask)[0], lambda y: y)
    tee, read = model.tee(policy, channels=[channel]), []
    monkeypatch.setattr(MaskRules, "check_unmasked", lambda _rules, _at, y, *_: y.mul_(2))
    monkeypatch.setattr(Checkpoint, "blocks", lambda *given: read.append(given) or iter(()))
    with pytest.raises(VerificationError, match="qkv_proj in layer 0 at loopback"):
        generate(tee)
    assert not read


def _check(model: SavedModel, held: bool) -> LinearCheck:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    kept: dict[Any, Any] = {
        (1, "gate_up_proj"): load_quantized(checkpoint, config, 1, "gate_up_proj")
    }
    weights = Weights(config, checkpoint, torch.float32, kept if held else {})
    exact = ExactCheck.draw(kept[1, "gate_up_proj"].weight, Randomness())
    return LinearCheck(exact, weights, (1, "gate_up_proj"))


def _ring_answer(model: SavedModel, module_names: tuple[Any, ...], seed: int) -> Claim:
    """Return a request for layer 1, and the right answer."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, (5, 48), dtype=torch.int32, generator=generator)
    request = RingLinearRequest(layer_idx=1, module_names=module_names, elements=from_torch(x))
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    weight = load_quantized(checkpoint, config, 1, "gate_up_proj")
    parts = [weight.weight[weight.rows[module]] for module in module_names]
    return Claim(request, exact_product(x, torch.cat(parts)))


@pytest.mark.parametrize("held", [True, False])
def test_a_claim_about_a_part_is_about_its_columns_alone(saved_model: Models, held: bool) -> None:
    """96 columns each of gate and up, in three parts: 0-31, 32-63 and 64-95 of either."""
    model = saved_model("llama")
    check, modules = _check(model, held), ("gate_proj", "up_proj")
    request, output, _ = _ring_answer(model, modules, 1)
    claims = [Claim(request, output, (part, 3)) for part in range(3)]
    assert find_liars(claims, check, lambda: False) == []
    for column, liar in ((0, 0), (31, 0), (32, 1), (95, 2), (96, 0), (160, 2), (191, 2)):
        output[4, column] += 1
        assert find_liars(claims, check, lambda: False) == [liar]
        output[4, column] -= 1


@pytest.mark.parametrize(
    ("ranks", "columns", "until", "said"),
    [
        (2, (3,), math.inf, " in the columns of rank 0 of 2, counted from 0"),
        (2, (95, 97), math.inf, " in the columns of rank 0 and 1 of 2, counted from 0"),
        (4, (190,), math.inf, " in the columns of rank 3 of 4, counted from 0"),
        (1, (3,), math.inf, ""),
        (2, (3,), -1.0, ""),  # no time is left, and nothing is computed once more
    ],
)
@pytest.mark.parametrize("floats", [False, True])
def test_the_rank_that_computed_wrongly_is_named_and_its_service_is_asked_no_more(
    saved_model: Models,
    ranks: int,
    columns: tuple[int, ...],
    until: float,
    said: str,
    floats: bool,
) -> None:
    model, world = saved_model("llama"), World()
    world.add("a", ranks=ranks)
    check: ResultCheck = _check(model, held=False)
    modules: Any = ("gate_proj", "up_proj")
    request, output, _ = _ring_answer(model, modules, 1)
    assert isinstance(request, RingLinearRequest)
    sent, message = to_torch(request.elements), request
    prepared = PreparedRequest(message, tuple(output.shape), "int32")
    if floats:
        assert isinstance(check, LinearCheck)
        sent = sent.float() / 2**31
        weight = torch.cat(
            [
                model.reference.get_parameter(f"model.layers.1.mlp.{name}.weight").data
                for name in modules
            ]
        )
        output = sent @ weight.t()
        vectors = FloatCheck.draw(weight, Randomness())
        check = FloatSecrets(check.weights, {(1, "gate_up_proj"): vectors}).check(
            (1, "gate_up_proj"), None
        )
        float_message = LinearRequest(
            layer_idx=1, module_names=modules, hidden_states=from_torch(sent), bias=False
        )
        prepared = PreparedRequest(float_message, tuple(output.shape), "float32")
    for column in columns:
        output[2, column] += 3
    exchange = Exchange(endpoint="a", output=output)
    answer = Answer(world.replicas("a"), prepared, sent, exchange)
    refused = Refused("gate_up_proj", 1, [answer], check, MaskRules(None), well_formed=True)
    with pytest.raises(VerificationError) as caught:
        refuse(refused, time.monotonic() + until)
    assert caught.value.where == "gate_up_proj in layer 1 at a"
    assert caught.value.got == f"a wrong result{said}"


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("multiplications", [1, 5 * 48 * 7, 2**31])
def test_every_element_counts_however_the_weight_is_cut(
    saved_model: Models, held: bool, multiplications: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved_model("llama")
    monkeypatch.setattr("tee_side.remote.fault_attribution._MULTIPLICATIONS", multiplications)
    check = _check(model, held)
    modules = (("gate_proj", "up_proj"), ("gate_proj", "up_proj"), ("up_proj",))
    answers = [_ring_answer(model, names, seed) for seed, names in enumerate(modules)]
    assert find_liars(answers, check, lambda: False) == []
    for liar, (_, output, _) in enumerate(answers):
        for column in (0, 6, 7, 95, 96, 97, 191):
            if column < output.shape[1]:
                output[4, column] += 1
                assert find_liars(answers, check, lambda: False) == [liar]
                output[4, column] -= 1


@pytest.mark.parametrize(("rows", "width", "looks"), [(1, 2**14, 1), (4, 2**14, 4), (64, 2**10, 4)])
def test_no_part_of_a_product_takes_more_than_a_moment(rows: int, width: int, looks: int) -> None:
    """The clock is looked at before each 2^31 multiplications, however large a block is."""
    # 2^17 rows that take no memory.
    weight = torch.zeros(1, 1, dtype=torch.int8).expand(2**17, width)
    looked: list[None] = []
    parts = list(
        _in_time(iter([(slice(3, 3 + 2**17), weight)]), rows, lambda: bool(looked.append(None)))
    )
    assert [columns.start for columns, _ in parts] == [
        3 + index * 2**17 // looks for index in range(looks)
    ]
    assert all(rows * part.numel() <= 2**31 for _, part in parts)
    # Once more for the end of the weight.
    assert len(looked) == looks + 1


@pytest.mark.parametrize("kind", ["integers", "floats", "lm_head", "product"])
@pytest.mark.parametrize("looks", [0, 1, 2])
def test_finding_out_ends_at_the_next_block_once_the_time_is_up(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch, kind: str, looks: int
) -> None:
    """No weight is read after that, and none is multiplied: large ones take seconds."""
    model = saved_model("llama")
    monkeypatch.setattr("tee_side.remote.fault_attribution._MULTIPLICATIONS", 1)
    read: list[Any] = []
    x, linear = torch.ones(1, 48), _check(model, held=False)
    parts = RunParts(load_policy("tsqp"), linear.weights.config, linear.weights.checkpoint, x.dtype)
    near = Tolerance.of(x.dtype, None)
    vectors = FloatCheck.draw(torch.ones(2, 2), Randomness())
    floats = FloatSecrets(linear.weights, {(1, "gate_up_proj"): vectors})
    checks: dict[str, ResultCheck] = {
        "integers": linear,
        "floats": floats.check((1, "gate_up_proj"), None),
        "lm_head": FloatProductCheck(vectors, near, partial(_lm_head, parts)),
        "product": ProductCheck(near, Randomness()),
    }
    answers: dict[str, Claim] = {
        "integers": _ring_answer(model, ("gate_proj", "up_proj"), 1),
        "floats": Claim(
            LinearRequest(layer_idx=0, module_names=("q_proj",), hidden_states=from_torch(x)),
            torch.ones(1, 96),
        ),
        "lm_head": Claim(LMHeadRequest(hidden_states=from_torch(x)), torch.ones(1, 320)),
        "product": Claim(
            MatmulRequest(a=from_torch(x[None]), b=from_torch(torch.ones(1, 48, 9))),
            torch.full((1, 1, 9), 48.0),
        ),
    }
    blocks = Checkpoint.blocks

    def noted(self: Checkpoint, *arguments: Any) -> Any:
        read.append(arguments)
        return blocks(self, *arguments)

    monkeypatch.setattr(Checkpoint, "blocks", noted)
    said = iter([False] * looks)
    with pytest.raises(DeadlineExceededError, match="finding out who computed wrongly"):
        find_liars([answers[kind]], checks[kind], lambda: next(said, True))
    assert next(said, None) is None
    assert len(read) == (looks > 0 and kind != "product")
