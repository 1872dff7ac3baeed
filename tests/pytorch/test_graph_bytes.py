# SPDX-License-Identifier: Apache-2.0
"""Graph layers send the bytes of their formulas, and the model orders grids by them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from graph_cases import axes_of, grids_of, karate, made_layers, outputs, random_graph
from recorded import logs_of

import commrt.trace
from commrt.errors import UsageError
from commrt.layers.graphs import (
    Machine,
    cross_entropy3d,
    double_permutation,
    rank_grids,
    shard_graph,
    spmm,
)
from commrt.layers.graphs.grid_model import calls_of_step
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

WIDTHS = (5, 7, 6, 3, 4, 2)
Totals = dict[tuple[tuple[int, ...], str], int]


def step(comm: Any, shape: tuple[int, int, int], trains: bool, kind: str) -> Any:
    """Run a step, of which only the calls between the marks are looked at."""
    draws = np.random.default_rng(0)
    case = random_graph(draws, 37, 0.1, WIDTHS[0], WIDTHS[-1])
    with ProcessGrid(comm, axes_of(shape)) as grid:
        layers = made_layers(kind, WIDTHS, grid)
        graph = shard_graph(case.graph, case.x, case.y, grid, layers=len(layers))
        graph.features.local.requires_grad_(trains)
        comm.barrier()
        y = outputs(layers, graph.features, graph.adjacency)
        cross_entropy3d(y, graph.target).backward()
        comm.barrier()
        coords = tuple(grid.coords.values())
    places = np.arange(math.prod(shape)).reshape(shape)
    along = []
    for axis in range(3):
        at: list[Any] = [*coords]
        at[axis] = slice(None)
        along.append(tuple(places[tuple(at)].tolist()))
    return coords, along


def totals_between_barriers(log: Any) -> Totals:
    """Return bytes by ranks and operation, of the calls between two barriers."""
    found: Counter[tuple[tuple[int, ...], str]] = Counter()
    marks = 0
    for call in log.operations:
        if call.op == "barrier":
            marks += 1
        elif marks == 1:
            found[call.group.ranks, call.op] += call.nbytes
    assert marks == 2
    return dict(found)


@pytest.mark.full(sample=3)
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("shape", grids_of(2, 3, 4, 6, 8))
def test_a_step_sends_the_bytes_of_the_formulas(
    shape: tuple[int, int, int], trains: bool
) -> None:
    with commrt.trace.record() as recording:
        places = run(math.prod(shape), lambda comm: step(comm, shape, trains, "gcn"))
    logs = recording.logs()
    assert len(logs) == len(places)
    for log, (coords, along) in zip(logs, places, strict=True):
        expected: Counter[tuple[tuple[int, ...], str]] = Counter()
        for call in calls_of_step(
            37, WIDTHS, shape, coords, itemsize=8, trains_features=trains
        ):
            expected[along[call.axis], call.op] += call.nbytes
        assert totals_between_barriers(log) == dict(expected)


def test_means_of_neighbours_send_as_much_more_as_they_say() -> None:
    shape, ranks = (2, 1, 2), 4
    with commrt.trace.record() as recording:
        places = run(ranks, lambda comm: step(comm, shape, True, "sage"))
    extents = dict(zip("xyz", shape, strict=True))
    for log, (coords, _) in zip(recording.logs(), places, strict=True):
        found: Counter[str] = Counter()
        for (_, op), nbytes in totals_between_barriers(log).items():
            found[op] += nbytes
        expected: Counter[str] = Counter()
        for call in calls_of_step(
            37, WIDTHS, shape, coords, itemsize=8, trains_features=True
        ):
            expected[call.op] += call.nbytes
        for layer, (width, out) in enumerate(pairwise(WIDTHS)):
            inner, features, rows = ("xyz"[(at - layer) % 3] for at in range(3))

            def piece(extent: int, axis: str, coords: Any = coords) -> int:
                at, p = coords["xyz".index(axis)], extents[axis]
                return (at + 1) * extent // p - at * extent // p

            weight = piece(width, features) * piece(out, inner) * 8
            summed = piece(37, rows) * piece(width, features) * 8
            if extents[rows] > 1:  # the second weight
                expected["allgatherv"] += 2 * weight
                expected["reduce_scatterv"] += weight
            if extents[inner] > 1:  # the gradient of a node's own features
                expected["allreduce"] += summed
        moved = found.pop("redistribute")
        assert found == expected
        assert moved > 0


def test_nothing_is_sent_on_one_rank() -> None:
    with commrt.trace.record() as recording:
        run(1, lambda comm: step(comm, (1, 1, 1), True, "gcn"))
    assert totals_between_barriers(recording.logs()[0]) == {}


# -- the model -------------------------------------------------------------------------


def test_grids_are_all_there_and_in_order() -> None:
    found = rank_grids(8, num_nodes=1797, num_entries=16_000, widths=(64, 32, 10))
    assert {each.shape for each in found} == {*grids_of(8)}
    for one, after in pairwise(found):
        assert one.seconds <= after.seconds
        assert one.communication_s <= one.seconds
    assert rank_grids(1, num_nodes=5, num_entries=5, widths=(1, 1))[0].nbytes == 0


def test_without_latency_and_products_the_fewest_bytes_win() -> None:
    machine = Machine(
        alpha_s=0.0, beta_s=1.0, sparse_per_s=math.inf, dense_per_s=math.inf
    )
    found = rank_grids(
        *(8,), num_nodes=1000, num_entries=9000, widths=(8, 8, 8), machine=machine
    )
    assert [each.wire_nbytes for each in found] == sorted(
        each.wire_nbytes for each in found
    )
    assert all(
        math.isclose(each.seconds, each.wire_nbytes, rel_tol=1e-9) for each in found
    )


def test_latency_alone_prefers_few_axes() -> None:
    machine = Machine(
        alpha_s=1.0, beta_s=0.0, sparse_per_s=math.inf, dense_per_s=math.inf
    )
    best = rank_grids(
        *(8,), num_nodes=1000, num_entries=9000, widths=(8, 8, 8), machine=machine
    )[0]
    assert sorted(best.shape) == [1, 1, 8]


def test_the_best_grid_sends_fewer_bytes_than_the_worst() -> None:
    """As logs count them, on ranks that compute."""
    machine = Machine(
        alpha_s=0.0, beta_s=1.0, sparse_per_s=math.inf, dense_per_s=math.inf
    )
    order = rank_grids(
        *(4,), num_nodes=37, num_entries=137, widths=WIDTHS, machine=machine, itemsize=8
    )
    sent = []
    for shape in (order[0].shape, order[-1].shape):
        with commrt.trace.record() as recording:
            run(4, lambda comm, shape=shape: step(comm, shape, False, "gcn"))
        wire = 0.0
        for log in logs_of(recording):
            marks = [n for n, call in enumerate(log.operations) if call.op == "barrier"]
            inside = log.operations[marks[0] + 1 : marks[1]]
            wire += sum(call.wire_nbytes for call in inside)
        sent.append(wire)
    assert sent[0] < sent[1]


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match="num_ranks=0"):
        rank_grids(0, num_nodes=1, num_entries=1, widths=(1, 1))
    with pytest.raises(UsageError, match="two widths"):
        rank_grids(2, num_nodes=1, num_entries=1, widths=(1,))


def test_a_double_permutation_sends_the_same_bytes() -> None:
    case = karate()

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"x": 2, "y": 1, "z": 2}) as grid:
            layers = made_layers("gcn", (5, 4, 2), grid)
            orders = double_permutation(case.graph, 0)
            graph = shard_graph(
                case.graph, case.x, case.y, grid, layers=2, permutation=orders
            )
            comm.barrier()
            y = outputs(layers, graph.features, graph.adjacency)
            cross_entropy3d(y, graph.target).backward()
            comm.barrier()
            return tuple(grid.coords.values())

    with commrt.trace.record() as recording:
        places = run(4, main)
    for log, coords in zip(recording.logs(), places, strict=True):
        calls = calls_of_step(34, (5, 4, 2), (2, 1, 2), coords, itemsize=8)
        found = sum(totals_between_barriers(log).values())
        assert found == sum(call.nbytes for call in calls)


def test_chunks_are_all_under_way_before_the_first_is_waited_for() -> None:
    case = karate()

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"x": 2, "y": 1, "z": 1}) as grid:
            graph = shard_graph(case.graph, case.x, case.y, grid, layers=1)
            comm.barrier()
            spmm(graph.adjacency, graph.features, chunks=4)
            comm.barrier()

    with commrt.trace.record() as recording:
        run(2, main)
    for log in logs_of(recording):
        marks = [n for n, call in enumerate(log.operations) if call.op == "barrier"]
        chunks = log.operations[marks[0] + 1 : marks[1]]
        assert [call.op for call in chunks] == ["allreduce"] * 4
        assert sum(call.nbytes for call in chunks) == 34 * 5 * 8
        # An end is seen where it is waited for.
        assert max(call.start_ns for call in chunks) < min(
            call.end_ns or 0 for call in chunks
        )
