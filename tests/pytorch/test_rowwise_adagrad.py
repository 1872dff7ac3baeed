# SPDX-License-Identifier: Apache-2.0
"""Optimizers of sharded tables change rows as they do in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dist_tensor_cases import off_by
from embedding_cases import (
    FORMS,
    MIXED,
    PLAIN,
    PlainBags,
    Tables,
    batches_of,
    cut_as,
    layer_of,
    loss_of,
    serial_of,
    together,
)
from tensor3d_cases import NEAR, drawn_in

from commrt.errors import UsageError
from commrt.layers.embeddings import RowwiseAdagrad, state_dict
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

STEPS = 4
COUNTS = {1: [5], 2: [3, 2], 3: [4, 0, 2], 4: [1, 2, 0, 4]}
SETTINGS = {"lr": 0.3, "lr_decay": 0.1, "eps": 1e-6, "initial_accumulator_value": 0.2}


def by_formula(tables: Tables, ranks: int) -> tuple[PlainBags, dict[str, Any]]:
    """Train serial tables row by row; return them and their accumulators."""
    serial = serial_of(tables)
    first = SETTINGS["initial_accumulator_value"]
    sums = {
        t.name: torch.full((t.num_embeddings,), first, dtype=torch.float64)
        for t in tables
    }
    for step in range(STEPS):
        serial.zero_grad()
        loss_of(serial(together(batches_of(tables, COUNTS[ranks], step)))).backward()
        rate = SETTINGS["lr"] / (1 + step * SETTINGS["lr_decay"])
        with torch.no_grad():
            for name, sum_ in sums.items():
                for row, gradient in enumerate(serial[name].weight.grad):
                    if not gradient.any():
                        continue
                    sum_[row] += (gradient * gradient).mean()
                    root = sum_[row].sqrt() + SETTINGS["eps"]
                    serial[name].weight[row] -= rate * gradient / root
    return serial, sums


def trained(
    layer: Any, optimizer: Any, tables: Tables, rank: int, ranks: int, steps: range
) -> None:
    for step in steps:
        layer.zero_grad()
        loss_of(layer(batches_of(tables, COUNTS[ranks], step)[rank])).backward()
        optimizer.step()


@pytest.mark.full(sample=8)
@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("ranks", COUNTS)
@pytest.mark.parametrize("kind", FORMS)
def test_rowwise_adagrad_is_its_formula(kind: str, ranks: int, is_sparse: bool) -> None:
    tables = FORMS[kind]
    serial, sums = by_formula(tables, ranks)

    def main(comm: Any) -> float:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(tables, grid, is_sparse=is_sparse)
            optimizer = RowwiseAdagrad(layer.parameters(), **SETTINGS)
            trained(layer, optimizer, tables, comm.rank, ranks, range(STEPS))
            whole, state = state_dict(layer), optimizer.table_state(layer)
            assert whole is not None
            assert state["step"] == STEPS
            off = [off_by(state["sum"][name], sums[name]) for name in sums]
            for name, right in serial.state_dict().items():
                off.append(off_by(whole[name], right))
            return max(off)

    assert max(run(ranks, main)) < NEAR


def test_it_is_the_same_on_tables_of_torch() -> None:
    serial, _ = by_formula(PLAIN, 1)
    plain = serial_of(PLAIN, sparse=True)
    optimizer = RowwiseAdagrad(plain.parameters(), **SETTINGS)
    trained(plain, optimizer, PLAIN, 0, 1, range(STEPS))
    for name, right in serial.state_dict().items():
        assert off_by(plain.state_dict()[name], right) < NEAR


def test_columns_keep_equal_accumulators() -> None:
    """Bit by bit, or rows would come apart."""
    tables = cut_as(PLAIN[:1], "column")

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(tables, grid)
            optimizer = RowwiseAdagrad(layer.parameters())
            trained(layer, optimizer, tables, comm.rank, 3, range(STEPS))
            return [optimizer.accumulator(each) for each in layer.parameters()]

    widths = run(3, main)
    sums = [torch.cat(each) for each in widths]
    assert len(sums[0]) == 11
    assert all(torch.equal(each, sums[0]) for each in sums)


def test_training_goes_on_with_another_number_of_ranks() -> None:
    serial, sums = by_formula(MIXED, 2)

    def begin(comm: Any) -> Any:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(MIXED, grid)
            optimizer = RowwiseAdagrad(layer.parameters(), **SETTINGS)
            trained(layer, optimizer, MIXED, comm.rank, 2, range(2))
            return state_dict(layer), optimizer.table_state(layer)

    whole, state = run(2, begin)[0]
    assert state["step"] == 2

    def end(comm: Any) -> float:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(MIXED, grid)
            layer.load_state_dict(whole)
            optimizer = RowwiseAdagrad(layer.parameters(), **SETTINGS)
            optimizer.load_table_state(layer, state)
            every = [together(batches_of(MIXED, COUNTS[2], step)) for step in (2, 3)]
            for bags in every:
                layer.zero_grad()
                # The first rank has all samples, the other ones have none.
                empty = batches_of(MIXED, [0])[0]
                loss_of(layer(empty if comm.rank else bags)).backward()
                optimizer.step()
            again = optimizer.table_state(layer)["sum"]
            off = [off_by(again[name], sums[name]) for name in sums]
            found = state_dict(layer)
            assert found is not None
            for name, right in serial.state_dict().items():
                off.append(off_by(found[name], right))
            return max(off)

    for ranks in (1, 3):
        assert max(run(ranks, end)) < NEAR


def test_rows_that_no_index_names_do_not_change() -> None:
    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(PLAIN, grid)
            before = layer.gathered()
            optimizer = RowwiseAdagrad(layer.parameters())
            bags = [torch.tensor([[3]]), torch.tensor([[4]]), torch.tensor([[0]])]
            loss_of(layer(bags)).backward()
            for parameter in layer.parameters():
                # Each touched row is there once, though both ranks have named it.
                touched = parameter.grad.coalesce().indices()[0]
                assert parameter.grad._nnz() == len(touched) <= 3
            optimizer.step()
            after = layer.gathered()
            changed = {
                name: (after[name] != before[name]).any(1).nonzero().view(-1).tolist()
                for name in after
            }
            assert changed == {"a.weight": [3], "b.weight": [4], "c.weight": [0]}

    run(2, main)


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam([*parameters], lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_take_sparse_gradients(name: str, ranks: int) -> None:
    tables = tuple(t for t in MIXED if t.num_embeddings and not t.is_weighted)
    serial = serial_of(tables, sparse=True)
    optimizer = OPTIMIZERS[name](serial.parameters())
    for step in range(STEPS):
        serial.zero_grad()
        loss_of(serial(together(batches_of(tables, COUNTS[ranks], step)))).backward()
        optimizer.step()

    def main(comm: Any) -> float:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(tables, grid)
            own = OPTIMIZERS[name](layer.parameters())
            trained(layer, own, tables, comm.rank, ranks, range(STEPS))
            whole = state_dict(layer)
            assert whole is not None
            return max(
                off_by(whole[key], right) for key, right in serial.state_dict().items()
            )

    # SparseAdam divides by roots of small sums of squares.
    assert max(run(ranks, main)) < (1e-10 if name == "SparseAdam" else NEAR)


def test_closures_are_called_with_gradients() -> None:
    table = torch.nn.Parameter(drawn_in(1, 3, 2))
    optimizer = RowwiseAdagrad([table], lr=0.5, eps=0.0)
    before = table.detach().clone()

    def closure() -> Any:
        loss = table[1].sum()
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure), before[1].sum())
    # The mean square is 1. Other rows have a root of 0, and do not change.
    before[1] -= 0.5
    assert torch.equal(table, before)


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_rows_have_accumulators_of_float32(
    dtype: torch.dtype, is_sparse: bool
) -> None:
    """Also where squares, and eps, are too small for float16."""
    tables = cut_as(PLAIN[:1], "column")
    rows = torch.tensor([[1], [7]])

    def main(comm: Any) -> None:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(tables, grid, is_sparse=is_sparse).to(dtype)
            before = layer.gathered()["a.weight"].double()
            optimizer = RowwiseAdagrad(layer.parameters(), lr=0.5)
            for factor in (1e-4, 3e-4):
                layer.zero_grad()
                (found,) = layer([rows])
                (found * found.new_tensor(factor)).sum().backward()
                optimizer.step()
            after = layer.gathered()["a.weight"].double()
            right, near = before.clone(), torch.finfo(dtype).eps
            # Both ranks name the rows.
            steps = (2e-4, 6e-4)
            for number, gradient in enumerate(steps):
                root = sum(each**2 for each in steps[: number + 1]) ** 0.5
                right[rows[:, 0]] -= 0.5 * gradient / root
            assert torch.allclose(after, right, rtol=2 * near, atol=2 * near)
            others = [row for row in range(11) if row not in (1, 7)]
            assert torch.equal(after[others], before[others])
            sums = optimizer.table_state(layer)["sum"]["a"]
            assert sums.dtype == torch.float32
            total = torch.tensor([4e-8 + 36e-8] * 2)
            assert torch.allclose(sums[[1, 7]], total, rtol=2 * near)
            # A state that was saved and loaded has the same accumulators.
            other = RowwiseAdagrad(layer.parameters(), lr=0.1)
            other.load_state_dict(optimizer.state_dict())
            assert torch.equal(other.table_state(layer)["sum"]["a"], sums)
            own = [
                each.accumulator(next(layer.parameters()))
                for each in (other, optimizer)
            ]
            assert own[0].data_ptr() != own[1].data_ptr()

    run(2, main)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, r"lr=-1\.0 must be a number"),
        ({"eps": True}, "eps=True must be a number"),
        ({"lr_decay": float("nan")}, "lr_decay=nan must be a number"),
        ({"initial_accumulator_value": "1"}, "initial_accumulator_value='1' must be"),
        (
            {"params": [torch.nn.Parameter(torch.ones(3))]},
            r"shape \(3,\); expected two",
        ),
        (
            {"params": [torch.nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))]},
            "type torch.complex64; expected a type for floating-point",
        ),
    ],
)
def test_bad_groups_of_parameters_are_refused(
    group: dict[str, Any], message: str
) -> None:
    """The optimizer stays as it was."""
    first, second = (torch.nn.Parameter(drawn_in(n, 3, 2)) for n in (1, 2))
    optimizer = RowwiseAdagrad([first])
    with pytest.raises(UsageError, match=message):
        optimizer.add_param_group({"params": [second], **group})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(UsageError, match=message):
        RowwiseAdagrad([{"params": [second], **group}])
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    assert [each["lr"] for each in optimizer.param_groups] == [1e-2, 0.2]
