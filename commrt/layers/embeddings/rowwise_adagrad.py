# SPDX-License-Identifier: Apache-2.0
"""Adagrad with one accumulator for each row of an embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from commrt.errors import UsageError, shown
from commrt.layers.embeddings.column_sums import ClassColumns, ColumnSums
from commrt.layers.embeddings.sharded import ShardedEmbeddingBags
from commrt.layers.embeddings.whole_rows import cut_rows, gathered_rows

__all__ = ["RowwiseAdagrad"]

Tensor: TypeAlias = torch.Tensor


class _Touched(NamedTuple):
    """The touched rows of one parameter."""

    parameter: Tensor
    group: dict[str, Any]
    rows: Tensor
    values: Tensor


class RowwiseAdagrad(torch.optim.Optimizer):  # type: ignore[misc]
    """Adagrad whose accumulator of a row grows by the mean of its squared gradient.

    For a touched row w with the gradient g of D columns, s += sum(g^2) / D, then
    w -= lr g / (sqrt(s) + eps). It is DLRM's ``RWSAdagrad``, and FBGEMM's exact
    row-wise Adagrad (Khudia et al., "FBGEMM", 2021). Rows that no index has named do
    not change. It needs 1 / D of Adagrad's memory.

        optimizer = RowwiseAdagrad(bags.parameters(), lr=0.05)

    Args:
        params: of ``ShardedEmbeddingBags``, or any parameters of two dimensions.
        lr: the rate.
        lr_decay: in step t from 1 on the rate is lr / (1 + (t - 1) lr_decay).
        eps: is added to the root.
        initial_accumulator_value: what s begins with.

    ``step`` is collective where tables are cut by columns: then all ranks of the layer
    call it. Bytes: an ``alltoallv`` of one element for each touched row of such tables,
    to each other rank that has columns of it.

    Raises UsageError for numbers that do not fit, and for other parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        lr_decay: float = 0.0,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        numbers = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
        }
        for name, number in numbers.items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not math.isfinite(number) or number < 0:
                raise UsageError(
                    f"RowwiseAdagrad: {name}={shown(number)} must be a number of at "
                    f"least 0"
                )
        super().__init__(params, {**numbers})
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise UsageError(
                        f"RowwiseAdagrad: a parameter of shape "
                        f"{tuple(parameter.shape)}; expected two dimensions, rows and "
                        f"columns. Give other parameters to another optimizer"
                    )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the touched rows; return the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        touched = [
            _touched(parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        means = _means(touched)
        for each, mean in zip(touched, means, strict=True):
            self._apply(each, mean)
        return loss

    def _apply(self, each: _Touched, mean: Tensor) -> None:
        parameter, group, rows, values = each
        state, sums = self.state[parameter], self.accumulator(parameter)
        state["step"] += 1
        sums.index_add_(0, rows, mean)
        root = sums[rows].sqrt_().add_(group["eps"])
        rate = group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"])
        parameter.index_add_(0, rows, values / root[:, None], alpha=-rate)

    def accumulator(self, parameter: Tensor) -> Tensor:
        """Return a parameter's accumulators, (rows,)."""
        state = self.state[parameter]
        if "sum" not in state:
            first = next(
                group["initial_accumulator_value"]
                for group in self.param_groups
                if any(each is parameter for each in group["params"])
            )
            state["step"] = 0
            state["sum"] = parameter.detach().new_full((len(parameter),), first)
        found: Tensor = state["sum"]
        return found

    # -- accumulators of whole tables --------------------------------------------------

    def table_state(self, bags: ShardedEmbeddingBags) -> dict[str, Any]:
        """Return the accumulators of a layer's tables, whole; collective.

        The result has a "step", and for each table by its name its "sum" of (rows,). It
        is the same for each number of ranks.
        """
        held = self._held(bags)
        steps = [self.state[each]["step"] for each in bags.parameters()]
        return {
            "step": max(steps),
            "sum": gathered_rows(bags.layout, bags.along, held),
        }

    def load_table_state(
        self, bags: ShardedEmbeddingBags, state: Mapping[str, Any]
    ) -> None:
        """Take the accumulators of whole tables from ``table_state``; local.

        Raises UsageError where tables are missing, or have other numbers of rows.
        """
        sums = state["sum"]
        for table in bags.tables:
            given = sums.get(table.name)
            if given is None or tuple(given.shape) != (table.num_embeddings,):
                found = "nothing" if given is None else f"shape {tuple(given.shape)}"
                raise UsageError(
                    f"RowwiseAdagrad.load_table_state: {found} for table "
                    f"{table.name!r}; expected its {table.num_embeddings} accumulators"
                )
        cut_rows(bags.layout, bags.along.place, sums, self._held(bags))
        for parameter in bags.parameters():
            self.state[parameter]["step"] = int(state["step"])

    def _held(self, bags: ShardedEmbeddingBags) -> list[Tensor]:
        """Return the accumulators of each class of a layer."""
        own = {id(each) for group in self.param_groups for each in group["params"]}
        parameters = [*bags.parameters()]
        if not all(id(each) in own for each in parameters):
            raise UsageError(
                "RowwiseAdagrad: the layer has parameters that are none of this "
                "optimizer; make it with bags.parameters()"
            )
        return [self.accumulator(each) for each in parameters]


def _touched(parameter: Tensor, group: dict[str, Any]) -> _Touched:
    gradient = parameter.grad
    if gradient.is_sparse:
        # torch forgets that the layer's gradients are in order, and would sort again.
        rows = gradient._indices()[0]
        gradient._coalesced_(bool((rows[1:] > rows[:-1]).all()))
        gradient = gradient.coalesce()
        return _Touched(parameter, group, gradient.indices()[0], gradient.values())
    rows = torch.arange(len(parameter), device=parameter.device)
    return _Touched(parameter, group, rows, gradient)


def _means(touched: list[_Touched]) -> list[Tensor]:
    """Return the mean square of each touched row; collective where columns are cut."""
    sums = [each.values.square().sum(1) for each in touched]
    means = [
        own / max(each.parameter.shape[1], 1)
        for own, each in zip(sums, touched, strict=True)
    ]
    layers: dict[ColumnSums, dict[int, int]] = {}
    for at, each in enumerate(touched):
        note: ClassColumns | None = getattr(each.parameter, "column_sums", None)
        if note is not None:
            layers.setdefault(note.sums, {})[note.number] = at
    for layer, places in layers.items():
        given = {number: (touched[at].rows, sums[at]) for number, at in places.items()}
        for number, mean in layer.means(given).items():
            means[places[number]] = mean
    return means
