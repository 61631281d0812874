"""What a request costs where several accelerators have a part of each weight."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_side.kernels import request_us
from gpu_side.profiles import find_profile
from gpu_side.tasks import EmbeddingWork, LinearWork, MatmulWork, Task
from tests.kit.rows import each_row
from tsqp.lab.plan.model import Asked, Rpc
from tsqp.lab.plan.parted import ALONE, Parted

from .sample_costs import PLAN, rpc

H100 = find_profile("h100")


def product(rows: int, in_features: int, out_features: int, integer: bool = False) -> Rpc:
    work = LinearWork(rows, in_features, out_features, integer)
    asked = Asked(
        shape=(rows, out_features),
        dtype="int32" if integer else "bfloat16",
        work=work,
        input_bytes=rows * in_features * (4 if integer else 2),
    )
    return rpc(asked=asked, bytes_received=1001)


def test_one_accelerator_costs_what_it_did() -> None:
    assert ALONE.requests(rpc()) == [rpc()]
    assert ALONE.gpu_us(H100, PLAN, 2) == request_us(H100, PLAN, 2)


def test_each_rank_reads_its_columns_and_the_head_exchanges_them() -> None:
    task = product(1, 4096, 1001).asked.plan()
    reads = H100.linear_us(1, 4096, 501, 2)
    copies = H100.transfer_us(8192) + H100.transfer_us(2002)
    exchange = 120 + 8192 / 1.3e3 + H100.transfer_us(2002 // 2)
    assert Parted(ranks=2).gpu_us(H100, task, 2) == pytest.approx(reads + copies + exchange)
    # The head sends to all the others, and gets their parts of the columns.
    reads = H100.linear_us(1, 4096, 251, 2)
    exchange = 120 + 3 * 8192 / 1.3e3 + H100.transfer_us(2002 * 3 // 4)
    assert Parted(ranks=4).gpu_us(H100, task, 2) == pytest.approx(reads + copies + exchange)
    # A single round trip goes to the head.
    assert Parted(ranks=2).requests(rpc()) == [rpc()]


def test_each_service_is_asked_for_its_columns() -> None:
    found = Parted(columns=3).requests(product(2, 64, 100).model_copy(update={"service": 1}))
    assert [one.service for one in found] == [3, 4, 5]
    for one in found:
        assert one.asked.shape == (2, 34)
        assert one.asked.work == LinearWork(2, 64, 34, integer=False)
        assert (one.bytes_sent, one.bytes_received, one.asked.input_bytes) == (4200, 334, 256)


@each_row("work", [MatmulWork(2, 3, 4, 5), EmbeddingWork(7, 64)])
def test_what_has_no_columns_of_a_weight_is_the_firsts(work: Any) -> None:
    asked = Asked(shape=(7, 64), dtype="bfloat16", work=work, input_bytes=56)
    other = rpc(asked=asked, service=1)
    assert Parted(columns=2).requests(other) == [other.model_copy(update={"service": 2})]
    task = Task((7, 64), "bfloat16", work, 56)
    assert Parted(ranks=2).gpu_us(H100, task, 2) == request_us(H100, task, 2)


@each_row(
    ("parted", "integer"),
    [(Parted(2), False), (Parted(4), False), (Parted(2), True), (Parted(1, 2), False)],
)
def test_from_the_crossover_on_it_pays_and_below_it_does_not(parted: Parted, integer: bool) -> None:
    itemsize = 1 if integer else 2
    given = [product(1, 2048, 16, integer), product(1, 2048, 8192, integer), rpc()]
    found = parted.crossover(H100, given, 2)
    assert found is not None
    assert found.largest_bytes == 2048 * 8192 * itemsize
    assert found.weight_bytes is not None
    least = found.weight_bytes // (2048 * itemsize)

    def saved(columns: int) -> float:
        one = product(1, 2048, columns, integer)
        return ALONE.total_us(H100, one, 2) - parted.total_us(H100, one, 2)

    assert saved(least) > 0
    assert saved(least - parted.ranks * parted.columns) <= 0


def test_where_exchanging_costs_more_than_reading_it_never_pays() -> None:
    slow = H100.model_copy(update={"pcie_gb_per_s": 1e-6})
    found = Parted(2).crossover(slow, [product(64, 16, 8192)], 2)
    assert found is not None
    assert found.weight_bytes is None
    assert Parted(2).crossover(H100, [], 2) is None
