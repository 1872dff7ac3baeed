# SPDX-License-Identifier: Apache-2.0
"""Plans of calls on device arrays: as many as fit into the bound, and right ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from device_call_cache import calls_of_python, num_cached, without_python
from staged_ranks import Rank, forget_ranks, on_threads

from commrt import _native
from commrt.backends import shm
from commrt.comm import core_of

LIMIT = 64 << 10


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def check_sum(rank: Rank, size: int, count: int) -> None:
    x = rank.array(np.full(count, rank.rank + 1, "f4"))
    rank.comm.allreduce(x)
    assert (x.get() == size * (size + 1) / 2).all()


def check_split(rank: Rank, size: int, count: int) -> None:
    """Send ``count`` elements to the next rank, and 3 to all others."""
    counts = [count if peer == (rank.rank + 1) % size else 3 for peer in range(size)]
    came = [count if (peer + 1) % size == rank.rank else 3 for peer in range(size)]
    x = rank.array(np.full(sum(counts), rank.rank, "f4"))
    out = rank.array(np.full(sum(came), -1, "f4"))
    rank.comm.alltoallv(x, out=out, send_counts=counts, recv_counts=came)
    wanted = [peer for peer in range(size) for _ in range(came[peer])]
    assert out.get().tolist() == wanted


def test_a_thousand_lengths_stay_within_the_bound() -> None:
    size = 2

    def main(rank: Rank) -> None:
        core = core_of(rank.comm)
        core.plans_limit_nbytes = LIMIT
        for count in range(1, 1001):
            check_sum(rank, size, count)
            if count % 5 == 0:
                check_split(rank, size, count)
            assert core.devices.plans.nbytes <= LIMIT
            assert _native.cached_device_calls_nbytes(core) <= LIMIT
            assert core.plans_nbytes <= LIMIT
        assert 3 < len(core.devices.plans) < 500
        assert 3 < num_cached(rank.comm) < 500
        with without_python(rank.comm):  # the last one is there
            check_sum(rank, size, 1000)
        with calls_of_python(rank.comm) as looked_at:  # the first one has gone
            check_sum(rank, size, 1)
        assert looked_at == ["allreduce"]

    on_threads(size, main)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_new_lengths_have_the_templates_of_old_ones(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    template = shm.schedule_template

    def counted(group: Any, spec: Any) -> Any:
        made.append(spec.op.name)
        return template(group, spec)

    monkeypatch.setattr(shm, "schedule_template", counted)

    def main(rank: Rank) -> None:
        for count in (1000, 1023):  # of one choice
            check_sum(rank, size, count)
            check_split(rank, size, count)
        rank.comm.barrier()
        made.clear()
        rank.comm.barrier()
        for count in (1001, 1022, 1010, 1005):
            check_sum(rank, size, count)
            check_split(rank, size, count)

    on_threads(size, main)
    assert made == []


def test_the_call_that_is_used_again_and_again_stays() -> None:
    size = 1

    def main(rank: Rank) -> None:
        core_of(rank.comm).plans_limit_nbytes = LIMIT
        check_sum(rank, size, 2000)
        for count in range(1, 400):
            check_sum(rank, size, count)
            with without_python(rank.comm):
                check_sum(rank, size, 2000)

    on_threads(size, main)


def check_halo(cart: Any, rank: Rank, cells: int) -> None:
    size = cart.size
    values = np.full(cells + 2, -1, "f4")
    values[1:-1] = rank.rank
    x = rank.array(values)
    cart.halo_exchange(x, 1)
    before, after = (rank.rank - 1) % size, (rank.rank + 1) % size
    assert x.get().tolist() == [before, *[rank.rank] * cells, after]


def check_neighbors(cart: Any, rank: Rank, count: int) -> None:
    size = cart.size
    x = rank.array(np.full(count, rank.rank, "f4"))
    out = rank.array(np.full(2 * count, -1, "f4"))
    cart.neighbor_allgather(x, out=out)
    before, after = (rank.rank - 1) % size, (rank.rank + 1) % size
    assert out.get().tolist() == [before] * count + [after] * count


def test_hundreds_of_shapes_of_boxes_stay_within_the_bound() -> None:
    size = 2

    def main(rank: Rank) -> None:
        cart = rank.comm.cart((size,), (True,))
        core = core_of(cart)
        core.plans_limit_nbytes = LIMIT
        for turn in range(1, 201):
            check_halo(cart, rank, turn)
            check_neighbors(cart, rank, turn)
            assert core.box_plans.kept.nbytes <= LIMIT
            assert core.around.plans.nbytes <= LIMIT
            assert core.plans_nbytes <= LIMIT
        assert 1 < len(core.box_plans.kept) < 100
        assert 1 < len(core.around.plans) < 100
        check_halo(cart, rank, 1)
        cart.free()

    on_threads(size, main)
