# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding bags send the bytes of their formula, and compute meanwhile."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from embedding_cases import FORMS, Tables, batches_of, counts_of, layer_of
from recorded import logs_of

import commrt.trace
from commrt.layers.embeddings import (
    Bags,
    EmbeddingTable,
    Placement,
    RowwiseAdagrad,
    ShardedEmbeddingBags,
    place,
)
from commrt.layers.experts.trips import Trip
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

E = 8
"""Bytes of an element."""
Key = tuple[int, int, bool]
"""A rank, a width, and whether bags have weights."""


class Asked(NamedTuple):
    """What the bags of a rank ask others for, by plain loops."""

    pieces: Counter[Key]
    rows: Counter[Key]


def asked(tables: Tables, bags: Sequence[Bags], placement: Placement) -> Asked:
    found = Asked(Counter(), Counter())
    for shard in placement.shards:
        table, own = tables[shard.table], bags[shard.table]
        key = shard.rank, shard.width, table.is_weighted
        ends = [*own.offsets.tolist(), len(own.indices)]
        for low, high in itertools.pairwise(ends):
            here = [
                index
                for index in own.indices[low:high].tolist()
                if shard.rows[0] <= index < shard.rows[1] and index != table.padding_idx
            ]
            found.rows[key] += len(here)
            found.pieces[key] += bool(here)
    return found


def between_barriers(log: Any) -> Counter[str]:
    """Return the bytes of each operation."""
    found: Counter[str] = Counter()
    marks = 0
    for call in log.operations:
        if call.op == "barrier":
            marks += 1
        elif marks == 1 and call.nbytes:
            found[call.op] += call.nbytes
    assert marks == 2
    return found


def elements(found: Counter[Key]) -> int:
    return sum(number * width for (_, width, _), number in found.items())


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("trains_weights", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("kind", FORMS)
def test_a_step_of_embedding_bags_sends_the_bytes_of_its_formula(
    kind: str, most: int, ranks: int, trains_weights: bool
) -> None:
    tables = FORMS[kind]
    batches = batches_of(tables, counts_of(ranks, 2), 3, most)
    placement = place(tables, ranks, itemsize=E)

    def step(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(tables, grid)
            assert layer.placement == placement
            bags = batches[comm.rank]
            for each in bags:
                if each.weights is not None:
                    # One rank that trains its weights is enough.
                    each.weights.requires_grad_(trains_weights and comm.rank == 0)
            comm.barrier()
            sum(each.sum() for each in layer(bags)).backward()
            comm.barrier()

    with commrt.trace.record() as recording:
        run(ranks, step)
    asks = [asked(tables, bags, placement) for bags in batches]
    classes = len({key[1:] for each in asks for key in each.rows})
    for rank, log in enumerate(logs_of(recording)):
        mine = asks[rank]
        to_me = Asked(Counter(), Counter())
        for other in asks:
            for whole, part in zip(to_me, other, strict=True):
                whole.update({k: v for k, v in part.items() if k[0] == rank})
        integers = sum(
            number + (mine.pieces[key] if mine.pieces[key] != number else 0)
            for key, number in mine.rows.items()
        )
        weights = sum(n for (*_, weighted), n in mine.rows.items() if weighted)
        back = sum(n for (*_, weighted), n in to_me.rows.items() if weighted)
        right: Counter[str] = Counter()
        if ranks > 1:
            right["alltoall"] = 8 * ranks * (1 + 2 * classes)
            right["alltoallv"] = 4 * integers + elements(to_me.pieces) * E
            right["alltoallv"] += elements(mine.pieces) * E + weights * E
            right["alltoallv"] += back * E * trains_weights
        assert between_barriers(log) == +right


def test_bags_of_one_index_send_no_lengths() -> None:
    """A table that is cut by rows sends then what a whole one does."""
    indices = torch.arange(12).reshape(12, 1)

    def step(comm: Any, sharding: str) -> None:
        table = EmbeddingTable("t", 12, 2, sharding=sharding)
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of((table,), grid)
            comm.barrier()
            layer([indices])
            comm.barrier()

    for sharding, asked_of in (("row", [12, 12, 12]), ("table", [36, 0, 0])):
        with commrt.trace.record() as recording:
            run(3, lambda comm, cut=sharding: step(comm, cut))
        sent = [between_barriers(log)["alltoallv"] for log in recording.logs()]
        assert sent == [4 * 12 + 2 * E * number for number in asked_of]


def test_one_row_comes_back_for_a_bag_of_many() -> None:
    """And for a bag of a table that is cut by rows one from each rank with any."""

    def step(comm: Any) -> None:
        tables = (
            EmbeddingTable("whole", 8, 2, sharding="table"),
            EmbeddingTable("cut", 8, 2, sharding="row"),
        )
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(tables, grid)
            comm.barrier()
            layer([torch.tensor([[0, 1, 2, 7]]), torch.tensor([[0, 1, 2, 3]])])
            comm.barrier()

    with commrt.trace.record() as recording:
        run(2, step)
    first, second = (between_barriers(log)["alltoallv"] for log in recording.logs())
    # Two ranks send 8 rows and 2 lengths each. Rank 0 has all that is asked for.
    assert (first, second) == (4 * 10 + 4 * 2 * E, 4 * 10)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rowwise_adagrad_sends_one_element_for_each_touched_row(ranks: int) -> None:
    tables = (
        EmbeddingTable("cut", 9, 3, sharding="column"),
        EmbeddingTable("whole", 5, 3, sharding="table"),
    )
    batches = batches_of(tables, [3] * ranks)
    touched = len({int(i) for bags in batches for i in bags[0].indices})
    owners = min(ranks, 3)

    def step(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(tables, grid)
            optimizer = RowwiseAdagrad(layer.parameters())
            sum(each.sum() for each in layer(batches[comm.rank])).backward()
            comm.barrier()
            optimizer.step()
            comm.barrier()

    with commrt.trace.record() as recording:
        run(ranks, step)
    found = [between_barriers(log) for log in recording.logs()]
    sent = [each["alltoallv"] for each in found]
    right = [touched * (owners - 1) * E] * owners + [0] * (ranks - owners)
    assert sorted(sent) == sorted(right)
    assert [each["allreduce"] for each in found] == [8 * owners] * ranks


def test_a_new_layer_compares_its_arguments_and_draws_a_seed() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            comm.barrier()
            ShardedEmbeddingBags(FORMS["mixed"], grid=grid)
            comm.barrier()

    with commrt.trace.record() as recording:
        run(3, main)
    for log in logs_of(recording):
        found = between_barriers(log)
        assert found["allgather"] == 40 * 3
        assert found["bcast"] == 8


def test_rows_travel_while_a_program_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and backward in the same order."""
    events: list[str] = []
    right = {"start": Trip.start, "wait": Trip.wait}

    def noted(name: str) -> Any:
        def call(trip: Trip, *args: Any, **more: Any) -> Any:
            if trip.comm is not None and trip.comm.rank == 0:
                events.append(name)
            return right[name](trip, *args, **more)

        return call

    for name in right:
        monkeypatch.setattr(Trip, name, noted(name))

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(FORMS["by table"], grid)
            bags = batches_of(FORMS["by table"], [4, 4])[comm.rank]
            weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
            pending = layer.start(bags)
            hidden = weight * 2
            if comm.rank == 0:
                events.append("computed")
                weight.register_hook(lambda _: events.append("computed"))
            rows = pending.wait()
            (rows[0] * hidden).sum().backward()

    run(2, main)
    assert events == ["start", "computed", "wait"] * 2


def test_rows_are_returned_once() -> None:
    from commrt.errors import UsageError

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer: ShardedEmbeddingBags = layer_of(FORMS["by table"], grid)
            pending = layer.start(batches_of(FORMS["by table"], [4, 4])[comm.rank])
            pending.wait()
            with pytest.raises(UsageError, match="returned before"):
                pending.wait()

    run(2, main)
