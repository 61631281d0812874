"""What a mask may send and must return, at every operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from protocol.errors import MaskError
from tee_side.protect.masks.mask import Mask, Masked, MaskedProduct, Seed, SharingMask
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import FloatSites
from tee_side.remote.overlap import run
from tee_side.words import OPERATORS, PRODUCTS, Operator, is_linear
from tests.kit.fakes import ARGUMENTS, Models, OneSite, remote_under
from tests.kit.model import LoopbackChannel
from tests.kit.rows import each_row
from tsqp.lab.research.row_permutation import RowPermutation


@pytest.mark.parametrize(
    ("mask", "named"), [(RowPermutation(), "mask row-permutation"), (None, "no mask")]
)
@each_row(
    ("masked", "said"),
    [
        (lambda x: x, "got Tensor, expected Masked"),
        (lambda x: Masked(x, lambda y: y), "got Masked, expected Masked"),
        (lambda x: Masked((x, x), lambda y: y), "got 2 tensors to send, expected 1 tensors"),
        (
            lambda x: Masked((x.double(),), lambda y: y),
            "got float64 .3, 96. to send",
        ),
        (lambda x: Masked((x[:, :5],), lambda y: y), "got float32 .3, 5. to send, expected floa"),
        (
            lambda x: Masked((x[0],), lambda y: y),
            "got float32 .96. to send, expected float32 .rows",
        ),
        (lambda x: Masked((x,), lambda y: None), "got nothing from unmask, expected float32"),
        (lambda x: Masked((x,), lambda y: y.double()), "got float64 .3, 48. from unmask"),
        (lambda x: Masked((x,), lambda y: y[:2]), "got float32 .2, 48. from unmask, expected floa"),
    ],
)
def test_a_mask_that_is_wrong_is_named_with_its_operator(
    saved_model: Models,
    masked: Callable[[torch.Tensor], Any],
    said: str,
    mask: Mask | None,
    named: str,
) -> None:
    model = saved_model("llama")
    channel = LoopbackChannel(model.directory)
    hide: Any = lambda _site: masked  # noqa: E731
    remote = remote_under(model, [channel], mask, hide=hide)
    # No mask has to be said; and it is not a reason to look away.
    with pytest.raises(MaskError, match=f"{named}: o_proj: {said}"):
        run(remote.o_proj(0, torch.ones(3, 96)))


class Halves(SharingMask):
    """A mask of before there were seeds, as a user may have one: two tensors."""

    name = "halves"
    hides = known_break = source = cost = "x"
    broken = True
    tolerance = 0.0
    arithmetic = "int8"

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        half = x_TI // 2
        return Masked((half, x_TI - half), lambda one, two: one + two)


@pytest.mark.parametrize("kind", ["halves", "seed first", "seed last"])
def test_a_sharing_mask_may_send_tensors_or_seeds(saved_model: Models, kind: str) -> None:
    model, x = saved_model("llama"), torch.arange(3.0 * 96).reshape(3, 96)
    plain_channel, channels = (
        LoopbackChannel(model.directory),
        [LoopbackChannel(model.directory) for _ in range(2)],
    )
    sites = OneSite(torch.int32)
    plain = run(remote_under(model, [plain_channel], None, sites=sites).linear(0, "o_proj", x))

    def hide(encoded: torch.Tensor) -> Masked:
        seed = Seed(bytes(range(32)), tuple(encoded.shape))
        sent = [seed, encoded - seed.elements()]
        return Masked(tuple(sent if kind == "seed first" else sent[::-1]), torch.add)

    chosen: Any = None if kind == "halves" else lambda _site: hide
    remote = remote_under(model, channels, Halves(), sites=sites, hide=chosen)
    assert torch.equal(run(remote.linear(0, "o_proj", x)), plain)
    methods = [[request.method for request in channel.requests] for channel in channels]
    seeded = {"halves": None, "seed first": 0, "seed last": 1}[kind]
    assert methods == [
        ["SeededRingLinear" if index == seeded else "RingLinear"] for index in range(2)
    ]


@each_row(
    ("size", "shape", "said"),
    [
        (31, (3, 96), "a seed of 31 bytes, expected 32"),
        (33, (3, 96), "a seed of 33 bytes, expected 32"),
        (32, (2, 96), "int32 .2, 96. to send, expected int32 .rows, 96., at most 3 rows"),
        (32, (3, 95), "int32 .3, 95. to send, expected int32 .rows, 96., at most 3 rows"),
        (32, (4, 96), "int32 .4, 96. to send, expected int32 .rows, 96., at most 3 rows"),
    ],
)
def test_a_seed_that_is_wrong_is_refused(
    saved_model: Models, size: int, shape: tuple[int, ...], said: str
) -> None:
    model = saved_model("llama")
    channels = [LoopbackChannel(model.directory) for _ in range(2)]

    def hide(encoded: torch.Tensor) -> Masked:
        return Masked((encoded, Seed(bytes(size), shape)), torch.add)

    hides: Any = lambda _site: hide  # noqa: E731
    remote = remote_under(model, channels, Halves(), sites=OneSite(torch.int32), hide=hides)
    with pytest.raises(MaskError, match=f"mask halves: o_proj: got {said}"):
        run(remote.linear(0, "o_proj", torch.ones(3, 96)))
    assert not any(channel.requests for channel in channels)


def test_a_seed_of_floats_is_refused(saved_model: Models) -> None:
    model = saved_model("llama")

    def hide(x: torch.Tensor) -> Masked:
        return Masked((Seed(bytes(32), tuple(x.shape)),), lambda y: y)

    hides: Any = lambda _site: hide  # noqa: E731
    channel = LoopbackChannel(model.directory)
    remote = remote_under(model, [channel], RowPermutation(), hide=hides)
    with pytest.raises(MaskError, match=r"o_proj: got int32 .3, 96. to send, expected float32"):
        run(remote.linear(0, "o_proj", torch.ones(3, 96)))


UNMASKED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "nothing": (lambda y: None, "nothing from unmask"),
    "another dtype": (lambda y: y.double(), "float64 .* from unmask"),
    "a row less": (lambda y: y[..., :-1, :], "float32 .* from unmask"),
    "a column more": (lambda y: torch.cat((y, y[..., :1]), -1), "float32 .* from unmask"),
}


class Wrong(RowPermutation):
    """A mask that permutes, and returns something else than the result."""

    name = "wrong"
    unmasked: str

    def _spoil(self, masked: Any) -> Any:
        change, _ = UNMASKED[self.unmasked]
        return dataclasses.replace(masked, unmask=lambda y: change(masked.unmask(y)))

    def mask(self, *arguments: Any) -> Any:
        return self._spoil(super().mask(*arguments))

    def mask_ids(self, *arguments: Any) -> Any:
        return self._spoil(super().mask_ids(*arguments))

    def mask_product(self, *arguments: Any) -> Any:
        return self._spoil(super().mask_product(*arguments))


@each_row("unmasked", UNMASKED)
@pytest.mark.parametrize("operator", OPERATORS)
def test_what_unmask_returns_is_checked_at_every_operator(
    saved_model: Models, operator: Operator, unmasked: str
) -> None:
    model = saved_model("llama")
    remote = remote_under(
        model, [LoopbackChannel(model.directory)], Wrong(unmasked=unmasked), sites=FloatSites({})
    )
    with pytest.raises(MaskError, match=f"mask wrong: {operator}: got {UNMASKED[unmasked][1]}"):
        run(getattr(remote, operator)(*ARGUMENTS[operator][0]))


@pytest.mark.parametrize(
    ("mask", "operator"),
    [(RowPermutation(dummy_rows=3), operator) for operator in OPERATORS]
    + [(None, operator) for operator in OPERATORS if is_linear(operator)],
)
def test_more_rows_than_a_reply_may_have_are_refused_before_they_are_sent(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch, operator: Operator, mask: Mask | None
) -> None:
    """The service would answer honestly, and be barred for a reply that is too large."""
    model, most = saved_model("llama"), 4096
    plain = ARGUMENTS[operator][0][-2 if operator in PRODUCTS else -1]
    assert isinstance(plain, torch.Tensor)
    rows = plain.shape[0] if operator not in PRODUCTS else plain.shape[1]
    allowed = rows if mask is None else 2 * rows + most
    for extra, refused in ((0, False), (1, True)):
        channel = LoopbackChannel(model.directory)

        def padded(x: torch.Tensor, axis: int, size: int = allowed + extra) -> torch.Tensor:
            shape = list(x.shape)
            shape[axis] = size - shape[axis]
            return torch.cat([x, torch.zeros(shape, dtype=x.dtype)], axis)

        def many(x_TI: torch.Tensor) -> Masked:
            return Masked((padded(x_TI, 0),), lambda y: y[: len(x_TI)])

        def product(a: torch.Tensor, b: torch.Tensor) -> MaskedProduct:
            return MaskedProduct(padded(a, 1), b, lambda y: y[:, : a.shape[1]])

        if mask is None:
            hide: Any = lambda _site: many  # noqa: E731
            remote = remote_under(model, [channel], None, sites=FloatSites({}), hide=hide)
        else:
            monkeypatch.setattr(RowPermutation, "mask", lambda _self, x, _randomness: many(x))
            monkeypatch.setattr(RowPermutation, "mask_ids", lambda _self, ids, *_: many(ids))
            monkeypatch.setattr(
                RowPermutation, "mask_product", lambda _self, a, b, _: product(a, b)
            )
            remote = remote_under(model, [channel], mask, sites=FloatSites({}))
        if refused:
            with pytest.raises(MaskError, match=f": {operator}: got .* at most {allowed} rows"):
                run(getattr(remote, operator)(*ARGUMENTS[operator][0]))
        else:
            run(getattr(remote, operator)(*ARGUMENTS[operator][0]))
        assert len(channel.requests) == (0 if refused else 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda masked: (masked.a, masked.b),
        lambda masked: dataclasses.replace(masked, a=masked.a.double()),
        lambda masked: dataclasses.replace(masked, a=masked.a[:1]),
        lambda masked: dataclasses.replace(masked, a=masked.a[:1], b=masked.b[:1]),
        lambda masked: dataclasses.replace(masked, b=masked.b[:, :-1]),
        lambda masked: dataclasses.replace(masked, b=torch.cat([masked.b] * 2, 2)),
        lambda masked: dataclasses.replace(masked, a=masked.a[0]),
    ],
    ids=["no product", "dtype", "batch", "both batches", "inner size", "columns", "dimensions"],
)
@pytest.mark.parametrize("operator", PRODUCTS)
def test_operands_that_do_not_fit_are_the_masks_fault(
    saved_model: Models, operator: Operator, change: Callable[[Any], Any]
) -> None:
    model = saved_model("llama")
    channel = LoopbackChannel(model.directory)

    class Spoiled(RowPermutation):
        name = "spoiled"

        def mask_product(self, *arguments: Any) -> Any:
            return change(super().mask_product(*arguments))

    remote = remote_under(model, [channel], Spoiled(), sites=FloatSites({}))
    with pytest.raises(MaskError, match=f"mask spoiled: {operator}: got .*, expected .*"):
        run(getattr(remote, operator)(*ARGUMENTS[operator][0]))
    assert not channel.requests
