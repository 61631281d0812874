"""What is asked of services, and taken from them, at every operator; plans and packages."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from protocol import native
from protocol.errors import MaskError, ReplyError
from protocol.messages import LinearRequest
from protocol.prepared import PreparedRequest
from tee_side.protect.masks.mask import Masked
from tee_side.remote.call import run
from tee_side.words import OPERATORS, PRODUCTS, Operator
from tests.kit.kernels import using_kernels
from tests.kit.lie import Change, Lying, generate, is_of
from tests.kit.model import CLEAR, Models, policy_of
from tests.kit.rows import each_row
from tsqp.lab.research.row_masks import RowPermutation

CHANGES: dict[str, Change] = {
    "one row more": lambda output: torch.cat((output, output[..., :1, :]), -2),
    "one column less": lambda output: output[..., :-1],
    "one dimension more": lambda output: output[None],
    "float16": lambda output: output.half(),
    "int64": lambda output: output.long(),
}


@each_row("operator", OPERATORS)
def test_a_reply_of_another_form_is_refused(saved_model: Models, operator: Operator) -> None:
    model = saved_model("llama")
    channel = Lying(model.directory, lambda y: y)
    tee, used = model.tee("published", channels=[channel]), []
    for name, change in CHANGES.items():
        channel.tell(change, partial(is_of, operator))
        with pytest.raises(ReplyError) as caught:
            generate(tee)
        assert caught.value.where == f"{operator} reply from loopback"
        assert caught.value.expected.startswith("float32 [")
        if caught.value.got == caught.value.expected or not channel.distrusted:
            used.append(name)
    assert not used


class Wrong(RowPermutation):
    name = "wrong"
    how: str

    def _spoil(self, masked: Any) -> Any:
        if self.how == "unmasked":
            return dataclasses.replace(masked, unmask=lambda y: masked.unmask(y).double())
        if isinstance(masked, Masked):
            return dataclasses.replace(masked, sent=(masked.sent[0].half(),))
        changes: dict[str, Callable[[], Any]] = {
            "no product": lambda: (masked.a, masked.b),
            "dtype": lambda: dataclasses.replace(masked, a=masked.a.double()),
            "batch": lambda: dataclasses.replace(masked, a=masked.a[:1]),
            "inner size": lambda: dataclasses.replace(masked, b=masked.b[:, :-1]),
            "columns": lambda: dataclasses.replace(masked, b=torch.cat([masked.b] * 2, 2)),
            "dimensions": lambda: dataclasses.replace(masked, a=masked.a[0]),
            "rows": lambda: dataclasses.replace(masked, a=torch.cat([masked.a] * 999, 1)),
        }
        return changes[self.how]()

    def mask(self, *arguments: Any) -> Any:
        return self._spoil(super().mask(*arguments))

    def mask_ids(self, *arguments: Any) -> Any:
        return self._spoil(super().mask_ids(*arguments))

    def mask_product(self, *arguments: Any) -> Any:
        return self._spoil(super().mask_product(*arguments))


SPOILED = ("dtype", "no product", "batch", "inner size", "columns", "dimensions")


@each_row(
    ("operator", "how"),
    [
        *((operator, how) for operator in OPERATORS for how in ("unmasked", "dtype")),
        *((operator, how) for operator in PRODUCTS for how in (*SPOILED, "rows")),
    ],
)
def test_what_a_mask_sends_and_returns_is_checked_at_every_operator(
    saved_model: Models, operator: Operator, how: str
) -> None:
    policy = policy_of({operator: CLEAR | {"mask": Wrong(how=how)}})
    tee = saved_model("llama").tee(policy)
    with pytest.raises(MaskError, match=f"mask wrong: {operator}: got .*, expected .*"):
        generate(tee)
    assert len(tee.channels[0].requests) == (how == "unmasked")


@pytest.mark.parametrize("alone", [False, True])
def test_under_a_row_mask_modules_share_their_rows_and_biases_stay(
    saved_model: Models, alone: bool
) -> None:
    model, mask = saved_model("qwen2"), RowPermutation(dummy_rows=3)
    placed = {"qkv_proj": CLEAR | {"mask": mask}}
    channel = Lying(model.directory, lambda y: y, at=-1)
    tee = model.tee(policy_of(placed, one_rpc_per_module=alone), channels=[channel])
    x = torch.randn(3, 48)
    here = run(model.tee("tee-only").lanes[0].tables["decode", "stock"].qkv_proj[0](x))
    found = run(tee.lanes[0].tables["decode", "stock"].qkv_proj[0](x))
    torch.testing.assert_close(found, here, rtol=0, atol=1e-4)
    sent = [one for one in channel.requests if isinstance(one, LinearRequest)]
    assert len(sent) == (3 if alone else 1)
    # One mask for all of them: two would give two orders of the same rows.
    assert len({bytes(one.hidden_states.data) for one in sent}) == 1
    assert {(one.hidden_states.shape[0], one.bias) for one in sent} == {(3 + 3, False)}
    # A reply with the plain number of rows is of another form.
    channel.tell(lambda y: y[:3])
    with pytest.raises(ReplyError, match=r"got float32 \[3, .*\], expected float32 \[6, "):
        run(tee.lanes[0].tables["decode", "stock"].qkv_proj[0](x))


def test_what_no_dealer_multiplies_for_goes_to_the_service_alone(saved_model: Models) -> None:
    placed = {"qkv_proj": CLEAR | {"mask": {"name": "pad", "pads": "dealt"}}, "o_proj": CLEAR}
    tee = saved_model("llama").tee(policy_of(placed, arithmetic="int8"))
    tee.logits([1, 2, 3], pads="dealers")
    first, second = (len(channel.requests) for channel in tee.channels)
    assert first == 2 * second > 0


@each_row(
    ("policy", "kernels"),
    [("shielded", "auto"), ("shielded", "torch"), ("quantized-clear", "auto")],
)
def test_replies_are_read_where_they_lie_by_one_compiled_pass_alone(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch, policy: str, kernels: str
) -> None:
    made: list[PreparedRequest] = []

    def prepare(*what: Any) -> PreparedRequest:
        made.append(PreparedRequest(*what))
        return made[-1]

    monkeypatch.setattr("tee_side.remote.call.PreparedRequest", prepare)
    with using_kernels(kernels):
        generate(saved_model("llama").tee(policy))
        compiled = native.choice().compiled
    assert {one.read_once for one in made} == {policy == "shielded" and compiled}


def test_requests_are_prepared_once_for_a_row_count_and_their_number_is_bounded(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def prepare(message: Any, shape: tuple[int, ...], dtype: str) -> PreparedRequest:
        made.append(shape[0])
        return PreparedRequest(message, shape, dtype)

    monkeypatch.setattr("tee_side.remote.call.MAX_PREPARED", 2)
    monkeypatch.setattr("tee_side.remote.call.PreparedRequest", prepare)
    call = saved_model("llama").tee("attention-in-tee").lanes[0].tables["decode", "stock"].o_proj[0]
    for rows in (1, 2, 1, 2, 3, 3, 1):
        assert run(call(torch.randn(rows, 96))).shape == (rows, 48)
    assert made == [1, 2, 3, 1]
