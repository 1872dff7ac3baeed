# SPDX-License-Identifier: Apache-2.0
"""Neighbours, halos and redistributions by NCCL: results, order, captures, limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import halo_cases
import numpy as np
import pytest
from boxes_on_device import OnDevice
from layout_cases import move_drawn
from nccl_ranks import nccl_here, on_nccl_threads
from neighbor_cases import check_all, draw_graph, draw_grid, grid_edges
from staged_ranks import Rank, attach_anew, forget_ranks, kept_ranks
from test_nccl_order import OF_BOXES
from test_staged_boxes import CASE, FORMS, HaloRanks, halo_verdict

from commrt import Block, Layout
from commrt.comm import core_of
from commrt.errors import CaptureError, RevokedError, TimeoutError_
from commrt.nccl.orders import end_all

SEEDS, FULL_SEEDS = 1, 60
GOOD_SEEDS, FULL_GOOD_SEEDS = 2, 150
BUGS = (*OF_BOXES, "no_ready", "no_end_wait", "end_early", "end_other_stream")


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def all_right(size: int, check: Callable[[OnDevice], int], **device: Any) -> None:
    """Run a check on ranks with NCCL; it says how much it compared."""

    def main(rank: Rank) -> int:
        rank.carrier = "nccl"
        return check(OnDevice(rank.comm, rank))

    with nccl_here() as nccl:
        assert sum(on_nccl_threads(size, main, **device)) > 0
        if size > 2:
            assert nccl.counter("groups") > 0


@pytest.mark.parametrize("flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_drawn_halos_agree_with_numpy(
    size: int, flags: bool, seed: int, full: bool
) -> None:
    rng = random.Random(f"nccl halo {size} {flags} {seed}")
    cases = [halo_cases.draw(rng, size) for _ in range(40 if full else 3)]
    wanted = [halo_cases.expected(case) for case in cases]

    def check(comm: OnDevice) -> int:
        return sum(
            halo_cases.check(comm, case, results)
            for case, results in zip(cases, wanted, strict=True)
        )

    all_right(size, check, memory_flags=flags, seed=seed)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_drawn_redistributions_agree_with_numpy(
    size: int, seed: int, full: bool
) -> None:
    def check(comm: OnDevice) -> int:
        rng = random.Random(f"nccl layouts {size} {seed}")
        return sum(move_drawn(comm, rng) for _ in range(60 if full else 5))

    all_right(size, check, seed=seed)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_neighbors_on_grids_and_graphs_agree_with_numpy(size: int, seed: int) -> None:
    rng = random.Random(f"nccl neighbors {size} {seed}")
    dims, periodic = draw_grid(rng, size)
    sources, destinations, edges = draw_graph(rng, size)

    def check(comm: OnDevice) -> int:
        cart = comm.cart(dims, periodic)
        compared = check_all(
            cart, grid_edges(dims, periodic), [2 * len(dims)] * size, seed
        )
        cart.comm.free()
        graph = comm.graph(sources[comm.rank], destinations[comm.rank])
        compared += check_all(graph, edges, [len(each) for each in destinations], seed)
        graph.comm.free()
        return compared + 1

    all_right(size, check, seed=seed)


def test_who_carries_them_is_said() -> None:
    def main(rank: Rank) -> set[str]:
        cart = rank.comm.cart((2,), (True,))
        x, out = rank.array(np.ones(3, "f4")), rank.array(np.zeros((2, 3), "f4"))
        rows = Layout((6,), (2,), (Block(0),))
        calls: list[Any] = [
            cart.plan.neighbor_allgather(x, out=out),
            cart.plan.halo_exchange(rank.array(np.ones(6, "f4")), 1),
            rank.comm.plan.redistribute(
                x, rows, rows, out=rank.array(np.ones(3, "f4"))
            ),
        ]
        rank.stream.synchronize()
        found = {call.label.partition("/")[0] for call in calls}
        cart.free()
        return found

    with nccl_here():
        assert on_nccl_threads(2, main) == [{"nccl"}] * 2
    assert on_nccl_threads(2, main) == [{"staged"}] * 2


# --- order, on simulated devices ---


class NcclHaloRanks(HaloRanks):
    """Ranks in a grid whose boxes NCCL moves."""

    def prepare(self, cart: Any, rank: Rank) -> None:
        """Make NCCL's communicators, once the last rank has its device."""
        attach_anew(cart, "nccl")
        core_of(cart).devices.forget_choices()
        if rank.rank < len(self.ranks) - 1:
            return

        def join(comm: Any) -> None:
            own, device = self.carts[comm.rank], self.ranks[comm.rank].device
            assert core_of(own).devices.can_carry("nccl", device, "first", 0, 20.0)
            if self.bug is not None:
                core_of(own).attached["nccl"].runner(device).plant(self.bug)

        kept_ranks(2).each(join)

    def close(self) -> None:
        for cart in self.carts:
            core_of(cart).attached["nccl"].close()
        end_all(5.0)
        super().close()


def verdict(seed: int, queues: int, bug: str | None, form: str) -> str:
    """What is found of ordering bugs, and of what NCCL would not like."""
    with nccl_here(is_clean=False) as nccl:
        found = halo_verdict(seed, queues, bug, FORMS[form], NcclHaloRanks)
        assert nccl.counter("groups") > 0
        return found + " ".join(nccl.violations())


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
@pytest.mark.parametrize("form", list(FORMS))
def test_halos_are_ordered_whatever_happens_when(
    form: str, queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS))
    wrong = {
        each: found for each in seeds if (found := verdict(each, queues, None, form))
    }
    assert wrong == {}


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_SEEDS if full else SEEDS))
    form = "by dimension"
    assert [each for each in seeds if not verdict(each, queues, bug, form)] == []


# --- captures and limits ---


def test_neighbors_and_halos_are_captured_and_launched() -> None:
    def main(rank: Rank) -> None:
        cart = rank.comm.cart((2,), (True,))
        x, out = rank.array(np.zeros(3, "f4")), rank.array(np.zeros((2, 3), "f4"))
        field = rank.array(np.zeros(5, "f4"))
        rank.device.begin_capture(rank.stream.handle, 2)
        with pytest.raises(CaptureError, match="communicator is not made yet"):
            cart.neighbor_allgather(x, out=out)
        rank.device.graph_destroy(rank.device.end_capture(rank.stream.handle))
        halo = cart.plan.halo_exchange(field, 1)
        rank.stream.synchronize()
        rank.device.begin_capture(rank.stream.handle)
        halo()
        cart.neighbor_allgather(x, out=out)
        graph = rank.device.end_capture(rank.stream.handle)
        for turn in range(3):
            value = 10.0 * turn + rank.rank
            rank.fill(x, value)
            rank.fill(field, value)
            rank.device.graph_launch(graph, rank.stream.handle)
            found = [rank.fetch(each) for each in (out, field)]
            rank.stream.synchronize()
            there = 10.0 * turn + 1 - rank.rank
            assert found[0]().tolist() == [[there] * 3] * 2
            assert found[1]().tolist() == [there, value, value, value, there]
        rank.device.graph_destroy(graph)
        cart.free()

    with nccl_here():
        on_nccl_threads(2, main)


def test_a_neighbor_that_does_not_come_is_named_and_streams_go_on() -> None:
    def main(rank: Rank) -> None:
        cart = rank.comm.cart((2,), (True,))
        x, out = rank.array(np.ones(3, "f4")), rank.array(np.zeros((2, 3), "f4"))
        cart.neighbor_allgather(x, out=out)
        if rank.rank == 0:
            request = cart.neighbor_allgather(
                x, out=out, nonblocking=True, timeout_s=0.2
            )
            with pytest.raises(TimeoutError_, match="rank 1 on this node has not"):
                request.synchronize()
            with pytest.raises(RevokedError):
                cart.neighbor_allgather(x, out=out)
        core_of(rank.comm).world.bootstrap.exchange([0, 1], "late", b"", 20)
        rank.stream.synchronize()

    with nccl_here(is_clean=False):
        on_nccl_threads(2, main)


def test_the_case_has_phases() -> None:
    """Or what depends on them would not be tried."""
    assert CASE.corners
    assert not CASE.direct
