# SPDX-License-Identifier: Apache-2.0
"""Comparisons with torch's EmbeddingBag turn red where the layer has a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from embedding_cases import (
    MIXED,
    Tables,
    batches_of,
    compare,
    cut_as,
    layer_of,
    loss_of,
)
from tensor3d_cases import NEAR

from commrt.layers.embeddings import RowwiseAdagrad, exchange, layout, route
from commrt.layers.embeddings.column_sums import ColumnSums
from commrt.layers.process_grid import ProcessGrid
from commrt.local import run

Patch = Callable[[pytest.MonkeyPatch], None]
FORM: Tables = tuple(table for table in MIXED if table.num_embeddings)


def patched_addresses(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    right = layout.Addresses.of.__func__

    def of(cls: Any, *args: Any) -> Any:
        return change(right(cls, *args))

    patch.setattr(layout.Addresses, "of", classmethod(of))


def padding_counts(patch: pytest.MonkeyPatch) -> None:
    patched_addresses(patch, lambda each: each._replace(padding=None))


def cut_rows_are_those_of_the_next_rank(patch: pytest.MonkeyPatch) -> None:
    patched_addresses(patch, lambda each: each._replace(starts=each.starts + 1))


def slots_are_swapped(patch: pytest.MonkeyPatch) -> None:
    patched_addresses(patch, lambda each: each._replace(slots=each.slots.flip(0)))


def means_divide_by_one_more(patch: pytest.MonkeyPatch) -> None:
    right = route.Route.divisor
    patch.setattr(route.Route, "divisor", lambda *args: right(*args) + 1)


def gradients_of_a_row_replace_each_other(patch: pytest.MonkeyPatch) -> None:
    def last(
        num_rows: int, rows: Any, lengths: Any, factors: Any, grads: Any, **_: Any
    ):
        if lengths is not None:
            grads = grads.repeat_interleave(lengths, 0)
        if factors is not None:
            grads = grads * factors.detach()[:, None]
        whole = grads.new_zeros((num_rows, grads.shape[1]))
        whole[rows.long()] = grads
        return whole.to_sparse(1)

    patch.setattr(exchange, "gradient_of_rows", last)


def gradients_forget_weights(patch: pytest.MonkeyPatch) -> None:
    right = exchange.gradient_of_rows

    def unweighted(
        num_rows: int, rows: Any, lengths: Any, _: Any, *args: Any, **more: Any
    ):
        return right(num_rows, rows, lengths, None, *args, **more)

    patch.setattr(exchange, "gradient_of_rows", unweighted)


def lengths_of_pieces_are_lost(patch: pytest.MonkeyPatch) -> None:
    right = exchange.sums_of_rows

    def moved(table: Any, rows: Any, lengths: Any, factors: Any) -> Any:
        return right(table, rows, None if lengths is None else lengths.flip(0), factors)

    patch.setattr(exchange, "sums_of_rows", moved)


def columns_are_joined_backwards(patch: pytest.MonkeyPatch) -> None:
    right = layout.Layout.units_of_table.func  # type: ignore[attr-defined]

    def units(self: Any) -> Any:
        return tuple(own[::-1] for own in right(self))

    patch.setattr(layout.Layout, "units_of_table", property(units))


MISTAKES: dict[str, Patch] = {
    each.__name__: each
    for each in (
        padding_counts,
        cut_rows_are_those_of_the_next_rank,
        slots_are_swapped,
        means_divide_by_one_more,
        gradients_of_a_row_replace_each_other,
        gradients_forget_weights,
        lengths_of_pieces_are_lost,
        columns_are_joined_backwards,
    )
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_sharded_bags_are_seen(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    MISTAKES[name](monkeypatch)
    try:
        off = compare(FORM, [4, 3], seed=2)
    except Exception:  # noqa: BLE001  a mistake may also end in an error
        return
    assert max(off.values()) > 1e6 * NEAR


def test_the_same_comparison_without_a_mistake_is_exact() -> None:
    assert max(compare(FORM, [4, 3], seed=2).values()) < NEAR


@pytest.mark.parametrize("is_wrong", [False, True])
def test_means_over_a_ranks_own_columns_are_seen(
    monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """As a row-wise optimizer does that does not know of columns."""
    tables = cut_as(FORM[:1], "column")
    right = ColumnSums.__init__

    def unneeded(self: Any, *args: Any) -> None:
        right(self, *args)
        if is_wrong:
            self._is_needed = False

    monkeypatch.setattr(ColumnSums, "__init__", unneeded)

    def main(comm: Any) -> Any:
        with ProcessGrid(comm, {"data": 0}) as grid:
            layer = layer_of(tables, grid)
            optimizer = RowwiseAdagrad(layer.parameters())
            bags = batches_of(tables, [4, 3][: comm.size])[comm.rank]
            loss_of(layer(bags)).backward()
            optimizer.step()
            own = [optimizer.accumulator(each) for each in layer.parameters()]
            return torch.cat(own)[:9]

    one, other = run(2, main)
    assert torch.equal(one, other) != is_wrong
