# SPDX-License-Identifier: Apache-2.0
"""Halo exchange, redistribution and collectives among neighbours on device arrays."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import halo_cases
import numpy as np
import pytest
from boxes_on_device import OnDevice
from layout_cases import move_drawn
from neighbor_cases import check_all, draw_graph, draw_grid, grid_edges
from staged_ranks import (
    Rank,
    SimRanks,
    forget_ranks,
    forget_work,
    kept_ranks,
    on_threads,
)

from commrt import Block, Layout
from commrt.boxes.device_plans import BoundBoxes, DeviceBoxes
from commrt.comm import core_of
from commrt.devices import DeviceArray
from commrt.errors import (
    CommError,
    DeviceError,
    KernelsMissingError,
    MismatchError,
    OrderingError,
    RevokedError,
    UsageError,
)


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left() -> Iterator[None]:
    yield
    forget_ranks()


def all_right(size: int, check: Callable[[OnDevice], int], **device: Any) -> None:
    """Run a check on ranks with devices of threads; it says how much it compared."""

    def main(rank: Rank) -> int:
        return check(OnDevice(rank.comm, rank))

    assert sum(on_threads(size, main, **device)) > 0


@pytest.mark.parametrize("flags", [True, False], ids=["flags", "events"])
@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_drawn_halos_agree_with_numpy(
    size: int, flags: bool, seed: int, full: bool
) -> None:
    rng = random.Random(f"staged halo {size} {flags} {seed}")
    cases = [halo_cases.draw(rng, size) for _ in range(40 if full else 3)]
    wanted = [halo_cases.expected(case) for case in cases]

    def check(comm: OnDevice) -> int:
        return sum(
            halo_cases.check(comm, case, results)
            for case, results in zip(cases, wanted, strict=True)
        )

    all_right(size, check, memory_flags=flags, seed=seed)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("op", [None, "sum"])
@pytest.mark.parametrize("ndim", [2, 3])
def test_every_form_of_halo(
    ndim: int, op: str | None, direct: bool, corners: bool, seed: int
) -> None:
    rng = random.Random(f"{ndim} {op} {direct} {corners} {seed}")
    size = rng.choice((2, 4, 6))
    while len((case := halo_cases.draw(rng, size)).dims) != ndim or case.op != op:
        pass
    case = halo_cases.Case(**{**vars(case), "corners": corners, "direct": direct})
    wanted = halo_cases.expected(case)
    all_right(size, lambda comm: halo_cases.check(comm, case, wanted))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_drawn_redistributions_agree_with_numpy(
    size: int, seed: int, full: bool
) -> None:
    def check(comm: OnDevice) -> int:
        rng = random.Random(f"staged layouts {size} {seed}")
        return sum(move_drawn(comm, rng) for _ in range(60 if full else 5))

    all_right(size, check, seed=seed)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_neighbors_on_grids_and_graphs_agree_with_numpy(size: int, seed: int) -> None:
    rng = random.Random(f"staged neighbors {size} {seed}")
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


# --- order, on simulated devices ---

SEEDS, FULL_SEEDS = 1, 60
GOOD_SEEDS, FULL_GOOD_SEEDS = 4, 150
TURNS = 3
ENOUGH = {"first_nbytes": 1 << 16}
CASE = halo_cases.Case(
    dims=(2, 1),
    periodic=(True, True),
    widths=((1, 1), (1, 1)),
    cuts=((3, 4), (5,)),
    axes=(0, 1),
    rest=(),
    dtypes=("float32", "float64"),
    corners=True,
    direct=False,
    op=None,
    seed=11,
)
"""Dimension by dimension: the second phase sends what the first has brought."""
BUGS = (
    "not_packed",
    "unpacked_early",
    "no_ready",
    "ungated",
    "no_go",
    "not_drained",
    "drained_early",
    "pack_aside",
    "unpack_aside",
    "end_early",
    "no_end_wait",
    "start_early",
    "go_early",
)


class WrongHaloError(AssertionError):
    """A halo is not what numpy says."""


class HaloRanks(SimRanks):
    """Ranks in a grid, with a plan of an exchange each, made before the simulation."""

    def __init__(self, case: halo_cases.Case, *args: Any, **kwargs: Any) -> None:
        self.bug = kwargs.pop("bug", None)
        super().__init__(2, *args, **kwargs)
        self.case = case
        # To allocate while others wait for their streams would wait for them.
        self.places: dict[int, list[list[int]]] = {}
        comms = [rank.comm for rank in self.ranks]
        carts = [getattr(comm, "kept_cart", None) for comm in comms]
        if carts[0] is None:
            made = kept_ranks(2).each(lambda comm: comm.cart(case.dims, case.periodic))
            for comm, cart in zip(comms, made, strict=True):
                comm.kept_cart = cart  # type: ignore[attr-defined]
            carts = made
        self.carts: list[Any] = carts
        for cart, rank in zip(carts, self.ranks, strict=True):
            forget_work(cart)
            core_of(cart).devices.first_nbytes = ENOUGH["first_nbytes"]
            core_of(cart).devices.slots = 3
            self.prepare(cart, rank)
            rank.fields = [
                DeviceArray(
                    rank.device, case.extents(cart.coords), np.dtype(dtype).name
                )
                for dtype in case.dtypes
            ]
            rank.arrays += rank.fields
            rank.device.load_kernels(b"", [])
            self.places[rank.rank] = [
                [rank.pin(field.nbytes) for field in rank.fields]
                for _ in range(1 + TURNS)
            ]
        make = "halo_exchange" if case.op is None else "halo_reduce"
        more = {} if case.op is None else {"op": case.op}
        self.calls: list[Any] = kept_ranks(2).each(
            lambda comm: getattr(self.carts[comm.rank].plan, make)(
                self.ranks[comm.rank].fields,
                case.widths,
                corners=case.corners,
                direct=case.direct,
                **more,
            )
        )
        self.wanted = halo_cases.expected(case)

    def prepare(self, cart: Any, rank: Rank) -> None:
        """Make what moves boxes, before the simulation begins."""
        stager = core_of(cart).devices.stager(rank.device)
        if self.bug is not None:
            stager.plant(self.bug)

    def exchange(self, rank: Rank) -> None:
        """Fill halos again and again, in the caller's stream."""
        case, call = self.case, self.calls[rank.rank]
        own = halo_cases.own_region(case, self.carts[rank.rank].coords)
        region = ... if case.op is None else own
        filled, *fetched = self.places[rank.rank]
        for number, place in enumerate(filled):
            values = halo_cases.start(case, rank.rank, number)
            rank.device.write(place, np.ascontiguousarray(values).tobytes())
        for turn in range(TURNS):
            rank.copy([field.address for field in rank.fields], filled)
            if turn % 2:
                request = call.start()
                request.be_quiet()
                request.wait()
            else:
                call()
            rank.copy(fetched[turn], [field.address for field in rank.fields])
        while core_of(self.carts[rank.rank]).devices.outstanding:
            if not core_of(rank.comm).world.engine.step():
                rank.device.pause()
        rank.stream.synchronize()
        for number, field in enumerate(rank.fields):
            right = self.wanted[rank.rank][number]
            for places in fetched:
                raw = rank.device.read(places[number], field.nbytes)
                value = np.frombuffer(raw, field.dtype).reshape(field.shape)
                if not np.array_equal(value[region], right[region]):
                    raise WrongHaloError(f"rank {rank.rank}: {value}, not {right}")

    def close(self) -> None:
        self.calls.clear()
        gc.collect()
        for cart in self.carts:
            core_of(cart).devices.close()
            forget_work(cart)
        super().close()


def halo_verdict(
    seed: int,
    queues: int,
    bug: str | None,
    case: halo_cases.Case = CASE,
    kind: type[HaloRanks] = HaloRanks,
) -> str:
    """What is found: "", or any of "race", "deadlock", "wrong" and "told"."""
    ranks = kind(case, seed, queues, bug=bug, staging=ENOUGH, preempt=0.1)
    found = set()
    try:
        ranks.run(ranks.exchange)
        if not ranks.world.violations:
            ranks.close()
    except WrongHaloError:
        found.add("wrong")
    except OrderingError as error:
        found.add(error.status)
    except (DeviceError, MismatchError, RevokedError):  # what is compared was lost
        found.add("told")
    if ranks.world.violations:
        found.add("race")
    if found:
        forget_ranks()
    return " and ".join(sorted(found))


FORMS = {
    "by dimension": CASE,
    "direct": replace(CASE, direct=True),
    "sums by dimension": replace(CASE, op="sum"),
    "sums direct": replace(CASE, op="sum", direct=True),
}


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
@pytest.mark.parametrize("form", list(FORMS))
def test_halos_are_ordered_whatever_happens_when(
    form: str, queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_GOOD_SEEDS if full else GOOD_SEEDS))
    wrong = {
        each: found
        for each in seeds
        if (found := halo_verdict(each, queues, None, FORMS[form]))
    }
    assert wrong == {}


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_by_every_seed(
    bug: str, queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_SEEDS if full else SEEDS))
    assert [each for each in seeds if not halo_verdict(each, queues, bug)] == []


class Unplanned:
    """A call that compares on the way, as one without a plan at hand does."""

    def __init__(self, call: BoundBoxes, rank: int) -> None:
        self._call = call
        facts = {"the call": "exchange", "cells of 0": None, "cells of 1": None}
        facts[f"cells of {rank}"] = "any"
        call._boxes.agree_on(*call._group.box_plans.agreement(facts))

    def _run(self, nonblocking: bool) -> Any:
        call = self._call
        how = call._result, call.operation, nonblocking, call._group.timeout_s
        return call._boxes.run(call._arrays, *how, agrees=True)

    def __call__(self) -> Any:
        return self._run(False)

    def start(self) -> Any:
        return self._run(True)


class UnplannedRanks(HaloRanks):
    """Ranks that compare in each call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = [Unplanned(call, rank) for rank, call in enumerate(self.calls)]


@pytest.mark.parametrize("queues", [0, 1, 2, 8])
@pytest.mark.parametrize("form", list(FORMS))
def test_calls_that_compare_on_the_way_are_ordered(
    form: str, queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_GOOD_SEEDS if full else SEEDS))
    kind = UnplannedRanks
    wrong = {
        each: found
        for each in seeds
        if (found := halo_verdict(each, queues, None, FORMS[form], kind))
    }
    assert wrong == {}


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("bug", [*BUGS, "words_in_place"])
def test_a_bug_planted_there_is_caught_by_every_seed(
    bug: str, queues: int, full: bool, seed: int
) -> None:
    seeds = range(seed, seed + (FULL_SEEDS if full else SEEDS))
    kind = UnplannedRanks
    assert [s for s in seeds if not halo_verdict(s, queues, bug, CASE, kind)] == []


def _filled_late(self: DeviceBoxes, tables: Any, nbytes: int) -> int:
    """Copy the tables in a stream that nobody waits for."""
    if not tables:
        return 0
    device, content = self._device, bytearray(nbytes)
    for table, at in tables:
        content[at : at + len(table.content)] = table.content
    address, pinned = self._alloc(nbytes), device.pinned_alloc(nbytes)
    device.write(pinned, bytes(content))
    device.memcpy_async(address, pinned, nbytes, device.stream_create(0))
    return address


@pytest.mark.parametrize("queues", [0, 1, 8])
def test_tables_that_are_not_waited_for_are_found_by_every_seed(
    queues: int, full: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a launch comes before its table, or behind it by luck."""
    monkeypatch.setattr(DeviceBoxes, "_filled", _filled_late)
    seeds = range(seed, seed + (FULL_SEEDS if full else 2 * SEEDS))
    assert [each for each in seeds if not halo_verdict(each, queues, None)] == []


# --- calls without a plan, and wrong ones ---


def test_calls_without_a_plan_keep_theirs(seed: int) -> None:
    case = replace(CASE, seed=seed)
    wanted = halo_cases.expected(case)

    def main(rank: Rank) -> None:
        cart = rank.comm.cart(case.dims, case.periodic)
        begin = [halo_cases.start(case, rank.rank, i) for i in range(2)]
        fields = [DeviceArray(rank.device, x.shape, x.dtype) for x in begin]
        rank.arrays += fields
        for nonblocking in (False, True):
            for field, values in zip(fields, begin, strict=True):
                field.put(values)
            done = cart.halo_exchange(
                fields, case.widths, nonblocking=nonblocking, stream=rank.stream
            )
            assert (done.synchronize() if nonblocking else done) is fields
            for field, right in zip(fields, wanted[rank.rank], strict=True):
                assert np.array_equal(field.get(), right)
        assert len(core_of(cart).box_plans.kept) == 1
        rows = Layout((8, 6), (2,), (Block(0), None))
        columns = Layout((8, 6), (2,), (None, Block(0)))
        whole = np.arange(48.0).reshape(8, 6)
        x = DeviceArray(rank.device, (4, 6), "f8").put(whole[4 * rank.rank :][:4])
        turned = rank.comm.redistribute(x, rows, columns)
        assert np.array_equal(turned.get(), whole[:, 3 * rank.rank :][:, :3])
        rank.arrays += [x, turned]
        gathered = cart.neighbor_allgather(x, nonblocking=True, stream=rank.stream)
        out = gathered.synchronize()
        assert np.array_equal(out.get()[0], whole[4 * (1 - rank.rank) :][:4])
        rank.arrays.append(out)
        rank.stream.synchronize()
        cart.free()

    on_threads(2, main)


def test_wrong_boxes_are_refused_before_anything_is_sent() -> None:
    def main(rank: Rank) -> None:
        with rank.comm.cart((2,), periodic=True) as cart:
            x, y = rank.array(np.zeros(6, "f4")), rank.array(np.zeros(6, "f4"))
            host = np.zeros(6, "f4")
            with pytest.raises(UsageError, match=r"in different places: device 0 and"):
                cart.halo_exchange([x, host], 1)
            with pytest.raises(UsageError, match=r"stream= is for arrays on devices"):
                cart.halo_exchange(host, 1, stream=rank.stream)
            with pytest.raises(UsageError, match=r"overlaps"):
                cart.halo_exchange([x, x], 1)
            with pytest.raises(UsageError, match=r"in different places"):
                cart.neighbor_alltoall(x, out=host)
            with pytest.raises(MismatchError, match=r"disagree on memory"):
                cart.plan.halo_exchange(x if rank.rank else host, 1)
            with pytest.raises(CommError, match=r"no NVRTC here"):
                _without_kernels(cart, rank, x)
            assert cart.halo_exchange([x, y], 1) == [x, y]
            rank.stream.synchronize()

    on_threads(2, main)


def _without_kernels(cart: Any, rank: Rank, x: DeviceArray) -> None:
    rank.device.why_no_kernels = "no NVRTC here"
    try:
        cart.plan.halo_exchange(x, 1)
    except KernelsMissingError:
        raise
    finally:
        del rank.device.why_no_kernels
