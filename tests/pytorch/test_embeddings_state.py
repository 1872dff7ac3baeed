# SPDX-License-Identifier: Apache-2.0
"""States of sharded embedding bags are those of serial tables; misuse is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from embedding_cases import (
    FORMS,
    MIXED,
    PLAIN,
    batches_of,
    cut_as,
    layer_of,
    serial_of,
)
from recorded import logs_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import commrt.trace
from commrt.errors import UsageError
from commrt.layers.embeddings import (
    Bags,
    EmbeddingTable,
    Placement,
    RowwiseAdagrad,
    Shard,
    ShardedEmbeddingBags,
    load_state_dict,
    place,
    sharded,
    state_dict,
    sync_gradients,
)
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d import TrainingState
from commrt.local import run


class Model(nn.Module):
    """Tables beside a layer that is whole on all ranks."""

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.last = nn.Linear(4, 2, dtype=torch.float64)


@pytest.mark.full(sample=6)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", FORMS)
def test_states_of_tables_are_serial(kind: str, ranks: int) -> None:
    serial = Model(serial_of(FORMS[kind]))
    right = serial.state_dict()

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            torch.manual_seed(comm.rank)
            made = ShardedEmbeddingBags(FORMS[kind], grid=grid, dtype=torch.float64)
            model = Model(made)
            load_state_dict(model, right)
            whole = state_dict(model)
            assert whole is not None
            assert {*whole} == {*right}
            assert all(torch.equal(whole[name], right[name]) for name in right)
            first = state_dict(model, on_first_only=True)
            assert (first is not None) == (comm.rank == 0)
            # torch's own states have this rank's shards, and load them again.
            own = {name: each.clone() for name, each in model.state_dict().items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(own)
            again = state_dict(model)
            assert again is not None
            assert all(torch.equal(again[name], right[name]) for name in right)

    run(ranks, main)


def test_new_tables_are_the_same_on_every_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = (
        EmbeddingTable("long", 2500, 3, padding_idx=7, init_std=0.5, sharding="row"),
        *MIXED,
    )

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"data": 0}) as grid:
            return ShardedEmbeddingBags(tables, grid=grid).gathered()

    # Ranks that are threads share torch's generator, so each draws another seed.
    monkeypatch.setattr(sharded, "agreed_seed", lambda comm: 5)
    alone, *others = (run(ranks, main)[-1] for ranks in (1, 2, 3))
    for other in others:
        assert all(torch.equal(other[name], alone[name]) for name in alone)
    long = alone["long.weight"]
    assert not long[7].any()
    assert 0.45 < float(long.std()) < 0.55
    assert len(long.unique()) > 7000


def test_copies_of_tables_work_on_the_same_ranks() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(MIXED, grid)
            made = copy.deepcopy(layer)
            bags = batches_of(MIXED, [3, 2])[comm.rank]
            for each in (layer, made):
                optimizer = RowwiseAdagrad(each.parameters())
                sum(rows.sum() for rows in each(bags)).backward()
                optimizer.step()
            for one, other in zip(layer.parameters(), made.parameters(), strict=True):
                assert one is not other
                assert torch.equal(one, other)

    run(2, main)


def test_tables_that_do_not_fit_a_state_are_told() -> None:
    right = serial_of(PLAIN).state_dict()

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(PLAIN, grid)
            missing = {name: each for name, each in right.items() if name[0] != "a"}
            owner = layer.placement.of_table(0)[0].rank
            if comm.rank == owner:
                with pytest.raises(UsageError, match=r"a\.weight is missing"):
                    load_state_dict(layer, missing)
                wrong = {**right, "a.weight": torch.ones(3, 3)}
                with pytest.raises(UsageError, match=r"a\.weight has the shape"):
                    load_state_dict(layer, wrong)
                with pytest.raises(RuntimeError, match="the whole table's"):
                    layer.load_state_dict(wrong)
            with pytest.raises(UsageError, match=r"the model has no z\.weight"):
                load_state_dict(layer, {**right, "z.weight": torch.ones(1)})

    run(2, main)


def test_checkpoints_of_parts_of_tables_are_refused() -> None:
    """A rank without a table has no part of it, and refuses as the others do."""

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            model = Model(layer_of(cut_as(PLAIN, "row"), grid))
            with pytest.raises(UsageError, match="bags has parts of tables"):
                TrainingState(model)

    run(2, main)


def test_torch_refuses_to_change_rows_in_place() -> None:
    """They lie in one buffer, and no change goes unseen."""

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            first, *_ = layer_of(PLAIN, grid)(batches_of(PLAIN, [3, 2])[comm.rank])
            with pytest.raises(RuntimeError, match="inplace"):
                first.relu_()

    run(2, main)


# -- gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("is_sparse", [True, False])
def test_means_over_ranks_scale_gradients_of_rows(is_sparse: bool) -> None:
    """``sync_gradients`` sums those of no table, and means them as it does others."""

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            model = Model(layer_of(PLAIN, grid, is_sparse=is_sparse))
            bags = batches_of(PLAIN, [3, 2])[comm.rank]

            def step() -> list[Any]:
                model.zero_grad()
                rows = model.bags(bags)
                loss = model.last(rows[0]).square().sum() + rows[1].square().sum()
                loss.backward()
                return [each.grad.to_dense().clone() for each in model.parameters()]

            before = step()
            sync_gradients(model, grid, average=False)
            summed = [each.grad.to_dense() for each in model.parameters()]
            assert torch.equal(summed[0], before[0])
            total = before[1].clone()
            comm.allreduce(total)
            assert torch.allclose(summed[1], total, rtol=1e-14, atol=0)
            step()
            sync_gradients(model, grid)
            for mean, whole in zip(model.parameters(), summed, strict=True):
                assert torch.equal(mean.grad.to_dense(), whole / 2)

    run(2, main)


def test_frozen_tables_and_unused_rows_keep_no_rank_waiting() -> None:
    def main(comm: Any) -> list[bool]:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(MIXED, grid)
            layer.requires_grad_(comm.rank == 0)
            bags = batches_of(MIXED, [3, 2])[comm.rank]
            first, *_ = layer(bags)
            (first.sum() if comm.rank else first.sum() * 0).backward()
            return [each.grad is not None for each in layer.parameters()]

    trained, frozen = run(2, main)
    assert all(trained)
    assert not any(frozen)


def test_two_calls_before_one_backward_pass_add_their_gradients() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(MIXED, grid)
            bags = batches_of(MIXED, [3, 2])[comm.rank]

            def loss() -> Any:
                return sum(rows.square().sum() for rows in layer(bags))

            loss().backward()
            once = [each.grad.to_dense().clone() for each in layer.parameters()]
            layer.zero_grad()
            (loss() + loss()).backward()
            for each, right in zip(layer.parameters(), once, strict=True):
                assert torch.allclose(each.grad.to_dense(), 2 * right, rtol=1e-14)

    run(2, main)


def test_checkpoints_of_rows_change_nothing() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(PLAIN, grid)
            bags = batches_of(PLAIN, [3, 2])[comm.rank]
            found = []
            for wrapped in (False, True):
                layer.zero_grad()
                if wrapped:
                    rows = checkpoint(layer, bags, use_reentrant=False)
                else:
                    rows = layer(bags)
                sum(each.square().sum() for each in rows).backward()
                found.append([each.grad.to_dense() for each in layer.parameters()])
            assert all(map(torch.equal, *found))

    run(2, main)


def test_whole_tables_have_the_bits_of_torch() -> None:
    """Also in float32, where torch adds with another kernel."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        plain = nn.EmbeddingBag(50, 16, mode="sum", dtype=dtype)
        bags = Bags(torch.arange(40) % 23, torch.tensor([0, 3, 3, 17, 39]))
        right = plain(*bags)

        def main(
            comm: Any, plain: Any = plain, bags: Any = bags, right: Any = right
        ) -> None:
            table = EmbeddingTable("t", 50, 16, sharding="table")
            dtype = plain.weight.dtype
            with ProcessGrid(comm, {"data": 0}) as grid:
                layer = ShardedEmbeddingBags([table], grid=grid, dtype=dtype)
                layer.load_state_dict({"t.weight": plain.weight}, strict=comm.rank == 0)
                (rows,) = layer([bags])
                assert torch.equal(rows, right)
                rows.float().square().sum().backward()

        run(2, main)


def test_without_gradients_rows_need_none() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid, torch.no_grad():
            layer = layer_of(MIXED, grid)
            bags = batches_of(MIXED, [0, 5])[comm.rank]
            named = dict(zip((t.name for t in MIXED), bags, strict=True))
            for rows, again in zip(layer(bags), layer(named), strict=True):
                assert not rows.requires_grad
                assert torch.equal(rows, again)

    run(2, main)


# -- misuse ----------------------------------------------------------------------------

T = EmbeddingTable("t", 4, 3)
W = EmbeddingTable("w", 4, 3, is_weighted=True)
OTHER = place([T, EmbeddingTable("v", 4, 3, is_weighted=True)], 1)
TWO = torch.tensor([[0], [1]])
Call = Callable[[ProcessGrid], Any]


def layer(grid: ProcessGrid, *tables: EmbeddingTable) -> ShardedEmbeddingBags:
    return ShardedEmbeddingBags(tables or (T,), grid=grid)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda grid: layer(None), "grid=None must be a ProcessGrid"),
        (lambda grid: ShardedEmbeddingBags([], grid=grid), "with one at least"),
        (lambda grid: ShardedEmbeddingBags(T, grid=grid), "must be a list"),
        (lambda grid: layer(grid, T, T), "two tables have the name 't'"),
        (
            lambda grid: ShardedEmbeddingBags([T], grid=grid, dtype=torch.int64),
            "floating-point",
        ),
        (
            lambda grid: ShardedEmbeddingBags([T], grid=grid, limit_nbytes=40),
            "the tables do not fit: they have 48 bytes",
        ),
        (
            lambda grid: ShardedEmbeddingBags(
                [T], grid=grid, placement=place([T], 1), limit_nbytes=400
            ),
            "one of the two",
        ),
        (
            lambda grid: ShardedEmbeddingBags([T], grid=grid, placement=[0]),
            "must be a Placement",
        ),
        (
            lambda grid: ShardedEmbeddingBags([T], grid=grid, placement=place([T], 2)),
            "on 2 ranks; expected the same 1 tables as given, on 1 ranks",
        ),
        (
            lambda grid: ShardedEmbeddingBags([T, W], grid=grid, placement=OTHER),
            "table 1 of the placement is EmbeddingTable.*name='v'.*expected the given "
            "one, EmbeddingTable.*name='w'",
        ),
        (lambda grid: layer(grid)(TWO), "must be a list with one entry"),
        (lambda grid: layer(grid)([TWO, TWO]), "one entry for each of 1 tables"),
        (lambda grid: layer(grid)({"u": TWO}), "expected those of the tables"),
        (lambda grid: layer(grid)([[0, 1]]), "must be a tensor of int64 or int32"),
        (lambda grid: layer(grid)([TWO.float()]), "must be a tensor of int64"),
        (lambda grid: layer(grid)([TWO[:, 0]]), "without offsets; expected"),
        (lambda grid: layer(grid)([Bags(TWO, TWO[:, 0])]), "with offsets; expected"),
        (lambda grid: layer(grid)([Bags(TWO[0], TWO)]), "must have one dimension"),
        (lambda grid: layer(grid)([Bags(TWO[:, 0], TWO[1])]), "begin with 0"),
        (
            lambda grid: layer(grid)(
                [Bags(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 1]))]
            ),
            "begin with 0, not fall",
        ),
        (
            lambda grid: layer(grid)([Bags(TWO[:, 0], torch.tensor([0, 3]))]),
            "not exceed the 2 indices",
        ),
        (lambda grid: layer(grid)([Bags(TWO[:1, 0], TWO[:0, 0])]), "begin with 0"),
        (lambda grid: layer(grid)([TWO + 3]), "indices 3 to 4 must lie in 0 to 3"),
        (lambda grid: layer(grid)([TWO - 1]), "indices -1 to 0 must lie in 0 to 3"),
        (
            lambda grid: layer(grid, T, EmbeddingTable("u", 9, 3))([TWO + 3, TWO]),
            "table 't': the indices 3 to 4",
        ),
        (
            lambda grid: layer(grid, T, EmbeddingTable("u", 4, 3))([TWO, TWO[:1]]),
            "table 'u' has 1 bags, and table 't' has 2",
        ),
        (lambda grid: layer(grid, W)([TWO]), "weights are missing"),
        (lambda grid: layer(grid)([Bags(TWO, None, TWO.float())]), "weights are given"),
        (lambda grid: layer(grid, W)([Bags(TWO, None, TWO)]), "type torch.int64"),
        (
            lambda grid: layer(grid, W)([Bags(TWO, None, TWO[0])]),
            "shape of the indices",
        ),
        (lambda grid: RowwiseAdagrad(layer(grid).parameters(), lr=-1), "lr=-1 must be"),
        (lambda grid: RowwiseAdagrad([nn.Parameter(torch.ones(3))]), "two dimensions"),
        (
            lambda grid: RowwiseAdagrad(layer(grid).parameters()).table_state(
                layer(grid)
            ),
            "none of this optimizer",
        ),
        (
            lambda grid: _loads_wrong_sums(layer(grid)),
            r"shape \(3,\) for table 't'; expected its 4 accumulators",
        ),
    ],
)
def test_bad_input_of_embedding_bags_is_refused(call: Call, message: str) -> None:
    def main(comm: Any) -> None:
        with (
            ProcessGrid(comm, {"data": 1}) as grid,
            pytest.raises(UsageError, match=message),
        ):
            call(grid)

    run(1, main)


def _loads_wrong_sums(bags: ShardedEmbeddingBags) -> None:
    optimizer = RowwiseAdagrad(bags.parameters())
    optimizer.load_table_state(bags, {"step": 1, "sum": {"t": torch.ones(3)}})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"name": "a.b"}, "a word without dots"),
        ({"name": 3}, "a word without dots"),
        ({"num_embeddings": -1}, "num_embeddings=-1 must be an integer"),
        ({"embedding_dim": 0}, "embedding_dim=0 must be an integer of at least 1"),
        ({"mode": "max"}, "mode='max' must be one of sum, mean"),
        ({"sharding": "data"}, "sharding='data' must be None or one of"),
        ({"padding_idx": 4}, "padding_idx=4 must be None or a row of 0 to 3"),
        ({"mode": "mean", "is_weighted": True}, 'weights go with mode="sum" only'),
        ({"lookups": float("inf")}, "lookups=inf must be a number"),
        ({"init_std": True}, "init_std=True must be a number"),
    ],
)
def test_tables_that_cannot_be_are_refused(more: Any, message: str) -> None:
    given = {"name": "t", "num_embeddings": 4, "embedding_dim": 3, **more}
    with pytest.raises(UsageError, match=message):
        EmbeddingTable(**given)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ((), "do not tile its 4 rows"),
        ((Shard(0, 0, (0, 3), (0, 3)),), "do not tile"),
        ((Shard(0, 0, (0, 2), (0, 3)), Shard(0, 1, (3, 4), (0, 3))), "do not tile"),
        ((Shard(0, 0, (0, 4), (0, 2)), Shard(0, 1, (0, 4), (1, 3))), "do not tile"),
        ((Shard(0, 0, (0, 2), (0, 2)), Shard(0, 1, (2, 4), (2, 3))), "do not tile"),
        ((Shard(0, 0, (0, 2), (0, 3)), Shard(0, 0, (2, 4), (0, 3))), "two shards"),
        ((Shard(0, 2, (0, 4), (0, 3)),), "lies on rank 2; expected 0 to 1"),
        ((Shard(1, 0, (0, 4), (0, 3)),), "is of no table"),
        (((0, 0, (0, 4), (0, 3)),), "must be a Shard"),
        (Shard(0, 0, (0, 4), (0, 3)), "must be a Shard"),
        (None, "shards=None must be a list"),
    ],
)
def test_placements_that_do_not_tile_are_refused(shards: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Placement((T,), 2, shards)


# -- faults of one rank ----------------------------------------------------------------


def test_bags_of_one_rank_that_do_not_fit_are_told_on_all() -> None:
    """Nothing but counts was sent, and the next call works."""

    def main(comm: Any) -> str:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(PLAIN, grid)
            good = batches_of(PLAIN, [2, 2, 2])[comm.rank]
            wrong = [*good]
            if comm.rank == 1:
                wrong[2] = Bags(torch.tensor([1]), torch.tensor([0, 1]))
            comm.barrier()
            with pytest.raises(UsageError) as caught:
                layer(wrong)
            comm.barrier()
            sum(rows.sum() for rows in layer(good)).backward()
            return str(caught.value)

    with commrt.trace.record() as recording:
        first, second, third = run(3, main)
    assert "table 'c': the indices 1 to 1 must lie in 0 to 0" in second
    assert first == third
    assert "the bags of rank 1 do not fit its tables" in first
    for log in logs_of(recording):
        names = [call.op for call in log.operations if call.nbytes or call.op]
        start = names.index("barrier")
        assert names[start : start + 3] == ["barrier", "alltoall", "barrier"]


def test_gradients_on_some_ranks_only_are_told_on_all() -> None:
    def main(comm: Any) -> str:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(PLAIN, grid)
            with (
                torch.set_grad_enabled(comm.rank == 0),
                pytest.raises(
                    UsageError,
                    match="rank 0 calls the layer with gradients, and rank 1",
                ) as caught,
            ):
                layer(batches_of(PLAIN, [2, 2])[comm.rank])
            return str(caught.value)

    first, second = run(2, main)
    assert first == second
