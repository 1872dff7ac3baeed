# SPDX-License-Identifier: Apache-2.0
"""Faults of one rank with sharded embeddings are told on all, and keep none waiting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from embedding_cases import MIXED, batches_of, layer_of, loss_of, serial_of
from recorded import logs_of
from torch import nn

import commrt.trace
from commrt.errors import UsageError
from commrt.layers.embeddings import (
    EmbeddingTable,
    Placement,
    RowwiseAdagrad,
    Shard,
    ShardedEmbeddingBags,
    load_state_dict,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

SEVEN = (EmbeddingTable("t", 9, 7, sharding="column"),)
"""On two ranks its pieces have the widths 4 and 3, and so are of two classes."""
SHORT_S = 30
"""Seconds of tests whose ranks could wait for each other."""


def told_on_all(ranks: int, main: Callable[[Any], Any]) -> str:
    """Return the message that ``main`` raises on all ranks alike."""

    def caught(comm: Any) -> str:
        with (
            ProcessGrid(comm, {"data": 0}) as grid,
            pytest.raises(UsageError) as found,
        ):
            main(grid)
        return str(found.value)

    first, *others = run(ranks, caught, timeout_s=SHORT_S)
    assert all(other == first for other in others)
    return first


# -- steps of the optimizer ------------------------------------------------------------


def test_columns_frozen_on_one_rank_are_told_on_all() -> None:
    """No row changes, and the next step works."""

    def main(comm: Any) -> str:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(SEVEN, grid)
            optimizer = RowwiseAdagrad(layer.parameters())
            before = layer.gathered()["t.weight"]
            for are_all in (False, True):
                layer.zero_grad()
                layer.requires_grad_(are_all or comm.rank != 1)
                loss_of(layer(batches_of(SEVEN, [3, 2])[comm.rank])).backward()
                if are_all:
                    optimizer.step()
                    continue
                with pytest.raises(UsageError) as caught:
                    optimizer.step()
                assert torch.equal(layer.gathered()["t.weight"], before)
            assert not torch.equal(layer.gathered()["t.weight"], before)
            return str(caught.value)

    first, second = run(2, main, timeout_s=SHORT_S)
    assert first == second
    assert "table 't' is cut by columns" in first
    assert "rank 1: no gradient" in first


def test_an_optimizer_of_one_piece_of_columns_is_told_on_all() -> None:
    def main(grid: ProcessGrid) -> None:
        layer = layer_of(SEVEN, grid)
        assert {name for name, _ in layer.named_parameters()} == {"width_3", "width_4"}
        optimizer = RowwiseAdagrad([layer.width_4])
        loss_of(layer(batches_of(SEVEN, [3, 2])[grid.rank])).backward()
        optimizer.step()

    assert "rank 1: no gradient" in told_on_all(2, main)


def test_gradients_of_other_rows_on_one_rank_are_told_on_all() -> None:
    def main(grid: ProcessGrid) -> None:
        layer = layer_of(SEVEN, grid)
        loss_of(layer([torch.tensor([[1], [4]])])).backward()
        if grid.rank == 1:
            for parameter in layer.parameters():
                parameter.grad = parameter.grad.to_dense()
        RowwiseAdagrad(layer.parameters()).step()

    assert "(rank 0: 2 rows, rank 1: 9 rows)" in told_on_all(2, main)


def test_a_frozen_rank_without_columns_keeps_none_waiting() -> None:
    """Its empty message has the type of the others'."""
    tables = (EmbeddingTable("t", 9, 2, sharding="column"),)

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(tables, grid)
            layer.requires_grad_(comm.rank != 2)
            loss_of(layer(batches_of(tables, [3, 2, 4])[comm.rank])).backward()
            RowwiseAdagrad(layer.parameters()).step()
            return layer.gathered()["t.weight"]

    first, *others = run(3, main, timeout_s=SHORT_S)
    assert not torch.equal(first, serial_of(tables)["t"].weight)
    assert all(torch.equal(each, first) for each in others)


def test_tables_that_all_ranks_froze_send_only_that() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(SEVEN, grid).requires_grad_(False)
            optimizer = RowwiseAdagrad(layer.parameters())
            comm.barrier()
            optimizer.step()
            comm.barrier()

    with commrt.trace.record() as recording:
        run(2, main, timeout_s=SHORT_S)
    for log in logs_of(recording):
        names = [(call.op, call.nbytes) for call in log.operations]
        start = [name for name, _ in names].index("barrier")
        assert names[start + 1] == ("allreduce", 16)
        assert names[start + 2][0] == "barrier"


def test_one_optimizer_takes_a_layer_and_its_copy() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(SEVEN, grid)
            other = copy.deepcopy(layer)
            both = RowwiseAdagrad([*layer.parameters(), *other.parameters()])
            for each in (layer, other):
                loss_of(each(batches_of(SEVEN, [3, 2])[comm.rank])).backward()
            both.step()
            wholes = [each.gathered()["t.weight"] for each in (layer, other)]
            assert torch.equal(*wholes)

    run(2, main, timeout_s=SHORT_S)


# -- arguments of the layer ------------------------------------------------------------


def equal_tables(first: float, second: float) -> tuple[EmbeddingTable, ...]:
    return (
        EmbeddingTable("a", 8, 4, lookups=first),
        EmbeddingTable("b", 8, 4, lookups=second),
    )


def on(rank: int) -> Placement:
    return Placement(SEVEN, 2, (Shard(0, rank, (0, 9), (0, 7)),))


Arguments = dict[str, Any]
UNLIKE: dict[str, tuple[Arguments, Arguments]] = {
    "tables": ({"tables": equal_tables(2, 1)}, {"tables": equal_tables(1, 2)}),
    "shards": ({"placement": on(0)}, {"placement": on(1)}),
    "types": ({"dtype": torch.float32}, {"dtype": torch.float64}),
    "types of gradients": ({"is_sparse": True}, {"is_sparse": False}),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_other_arguments_on_some_ranks_are_told_on_all(what: str) -> None:
    def main(grid: ProcessGrid) -> None:
        ShardedEmbeddingBags(**{"tables": SEVEN, **UNLIKE[what][grid.rank]}, grid=grid)

    message = told_on_all(2, main)
    assert f"rank 1 has other {what.split()[0]} than rank 0" in message


def test_equal_tables_that_are_written_otherwise_are_alike() -> None:
    def main(comm: Any) -> None:
        lookups, shards = ((1, 2), (1.0, 2.0))[comm.rank], [*on(0).shards]
        with ProcessGrid(comm, {"data": 0}) as grid:
            ShardedEmbeddingBags([*equal_tables(*lookups)], grid=grid)
            placed = Placement([*SEVEN], 2, shards if comm.rank else (*shards,))
            ShardedEmbeddingBags(SEVEN, grid=grid, placement=placed)

    run(2, main, timeout_s=SHORT_S)


def test_arguments_that_one_rank_refuses_are_told_on_all() -> None:
    """Its own error says why."""

    def main(comm: Any) -> str:
        limit_nbytes = 10 if comm.rank == 1 else None
        with (
            ProcessGrid(comm, {"data": 0}) as grid,
            pytest.raises(UsageError) as caught,
        ):
            ShardedEmbeddingBags(SEVEN, grid=grid, limit_nbytes=limit_nbytes)
        return str(caught.value)

    first, second, third = run(3, main, timeout_s=SHORT_S)
    assert "the tables do not fit" in second
    assert first == third
    assert "rank 1 refuses its arguments" in first


# -- gradients and devices -------------------------------------------------------------


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode])
def test_rows_have_gradients_as_they_were_started(outside: Any) -> None:
    """Also those that are means, or joined columns."""

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(MIXED, grid)
            bags = batches_of(MIXED, [3, 2])[comm.rank]
            loss_of(layer(bags)).backward()
            right = [each.grad.to_dense() for each in layer.parameters()]
            layer.zero_grad()
            pending = layer.start(bags)
            if comm.rank == 0:
                with outside():
                    rows = pending.wait()
            else:
                rows = pending.wait()
            assert all(each.requires_grad for each in rows)
            loss_of(rows).backward()
            for each, grad in zip(layer.parameters(), right, strict=True):
                assert torch.equal(each.grad.to_dense(), grad)
            with outside():
                pending = layer.start(bags)
            assert not any(each.requires_grad for each in pending.wait())

    run(2, main, timeout_s=SHORT_S)


PAIR = (EmbeddingTable("w", 8, 5, is_weighted=True), EmbeddingTable("plain", 6, 3))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trains_weights", [False, True])
def test_rows_may_change_unless_weights_need_them(
    ranks: int, trains_weights: bool
) -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(PAIR, grid)
            bags = batches_of(PAIR, [3] * ranks)[comm.rank]
            bags[0].weights.requires_grad_(trains_weights)

            def step(changed: list[str]) -> list[Any]:
                layer.zero_grad()
                loss = sum(rows.sum() for rows in layer(bags))
                with torch.no_grad():
                    for name in changed:
                        getattr(layer, name).mul_(2)
                loss.backward()
                return [each.grad.to_dense() for each in layer.parameters()]

            right = step([])
            free = ["width_3"] if trains_weights else ["width_3", "width_5_weighted"]
            assert all(map(torch.equal, step(free), right))
            if trains_weights:
                loss = sum(rows.sum() for rows in layer(bags))
                with torch.no_grad():
                    layer.width_5_weighted.mul_(2)
                with pytest.raises(RuntimeError, match="inplace operation"):
                    loss.backward()

    # Ranks that cannot finish a backward pass would keep others waiting.
    run(ranks, main, timeout_s=SHORT_S)


def test_tables_on_the_host_ignore_torchs_default_device() -> None:
    """With "meta" every tensor that names no device would lose its values."""

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            torch.manual_seed(3)
            made = ShardedEmbeddingBags(MIXED, grid=grid, dtype=torch.float64)
            bags = batches_of(MIXED, [3, 2])[comm.rank]
            with torch.device("meta"):
                layer = copy.deepcopy(made)
                new = ShardedEmbeddingBags(
                    *(MIXED,), grid=grid, device="cpu", dtype=torch.float64
                )
                optimizer = RowwiseAdagrad(layer.parameters())
                rows = layer(bags)
                sum(each.sum() for each in rows).backward()
                optimizer.step()
                sums = optimizer.table_state(layer)["sum"]
                wholes = [layer.gathered(), new.gathered(), sums]
            assert all(each.device.type == "cpu" for each in rows)
            for whole in wholes:
                assert all(each.device.type == "cpu" for each in whole.values())
            assert float(wholes[1]["both.weight"].std()) > 0.5

    run(2, main, timeout_s=SHORT_S)


def test_a_cut_tables_whole_shape_is_told() -> None:
    tables = (EmbeddingTable("t", 9, 7, sharding="column"),)
    wrong = {"bags.t.weight": torch.ones(3, 3)}

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            model = nn.ModuleDict({"bags": layer_of(tables, grid)})
            width = 7 // 2 + (comm.rank == 0)
            message = rf"expected \(9, 7\), the whole .*, or \(9, {width}\), this rank"
            with pytest.raises(UsageError, match=message):
                load_state_dict(model, wrong)

    run(2, main, timeout_s=SHORT_S)
