# SPDX-License-Identifier: Apache-2.0
"""Adagrad with one accumulator for each row of an embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Gradients of the rows, of the type of accumulators."""


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
        eps: is added to the root. A row whose root and eps are 0 does not change.
        initial_accumulator_value: the first value of s.

    Groups of parameters may have numbers of their own. Accumulators of float16 and
    bfloat16 rows are float32, and so is the arithmetic: 1e-8 is 0 in float16.

    ``step`` is collective where tables are cut by columns: then all ranks of the layer
    call it, also those without gradients. Bytes: an ``allreduce`` of 8 for each piece
    of such tables, and an ``alltoallv`` of one element for each touched row of them, to
    each other rank that has columns of it. ``step`` raises UsageError on all ranks, and
    changes no row, where only some ranks have a gradient of such a table.

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
        _check_numbers(numbers)
        super().__init__(params, numbers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which may have numbers of their own.

        Raises UsageError as the constructor does; then the optimizer has not changed.
        """
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            _check_numbers({name: added[name] for name in self.defaults})
            for parameter in added["params"]:
                _check_parameter(parameter)
        except UsageError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of an optimizer of the same parameters; local."""
        super().load_state_dict(state_dict)
        # torch has given accumulators the type of their parameters.
        held = [each for group in self.param_groups for each in group["params"]]
        saved = [
            number for group in state_dict["param_groups"] for number in group["params"]
        ]
        for parameter, number in zip(held, saved, strict=True):
            sums = state_dict["state"].get(number, {}).get("sum")
            if sums is not None:
                self.state[parameter]["sum"] = sums.detach().to(
                    device=parameter.device, dtype=_sum_type(parameter), copy=True
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
        every = [each for group in self.param_groups for each in group["params"]]
        means = _means(every, touched)
        for each, mean in zip(touched, means, strict=True):
            self._apply(each, mean)
        return loss

    def _apply(self, each: _Touched, mean: Tensor) -> None:
        parameter, group, rows, values = each
        state, sums = self.state[parameter], self.accumulator(parameter)
        state["step"] += 1
        sums.index_add_(0, rows, mean)
        root = sums[rows].sqrt_().add_(group["eps"])
        root.masked_fill_(root == 0, math.inf)  # such a row's gradient is 0
        rate = group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"])
        changes = values / root[:, None]
        if changes.dtype == parameter.dtype:
            parameter.index_add_(0, rows, changes, alpha=-rate)
        else:
            changed = parameter[rows].to(changes.dtype).sub_(changes, alpha=rate)
            parameter.index_copy_(0, rows, changed.to(parameter.dtype))

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
            state["sum"] = parameter.detach().new_full(
                (len(parameter),), first, dtype=_sum_type(parameter)
            )
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


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    """Raise UsageError for a number below 0, and for other things."""
    for name, number in numbers.items():
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or number < 0:
            raise UsageError(
                f"RowwiseAdagrad: {name}={shown(number)} must be a number of at least 0"
            )


def _check_parameter(parameter: Tensor) -> None:
    """Raise UsageError unless a parameter has rows and columns of real numbers."""
    if parameter.dim() != 2:
        raise UsageError(
            f"RowwiseAdagrad: a parameter of shape {tuple(parameter.shape)}; expected "
            f"two dimensions, rows and columns. Give other parameters to another "
            f"optimizer"
        )
    if not parameter.is_floating_point():
        raise UsageError(
            f"RowwiseAdagrad: a parameter of type {parameter.dtype}; expected a type "
            f"for floating-point numbers"
        )


def _sum_type(parameter: Tensor) -> torch.dtype:
    """Return the type of a parameter's accumulators: float32 at least."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _touched(parameter: Tensor, group: dict[str, Any]) -> _Touched:
    gradient, kind = parameter.grad, _sum_type(parameter)
    if gradient.is_sparse:
        # torch forgets that the layer's gradients are in order, and would sort again.
        rows = gradient._indices()[0]
        gradient._coalesced_(bool((rows[1:] > rows[:-1]).all()))
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        return _Touched(parameter, group, rows, values.to(kind))
    rows = torch.arange(len(parameter), device=parameter.device)
    return _Touched(parameter, group, rows, gradient.to(kind))


def _means(every: Sequence[Tensor], touched: Sequence[_Touched]) -> list[Tensor]:
    """Return the mean square of each touched row; collective where columns are cut.

    Args:
        every: all parameters of the optimizer. Each layer that has one of them is
            called, also without a gradient on this rank: others may have one.
        touched: those that have a gradient.
    """
    sums = [each.values.square().sum(1) for each in touched]
    means = [
        own / max(each.parameter.shape[1], 1)
        for own, each in zip(sums, touched, strict=True)
    ]
    places = {id(each.parameter): at for at, each in enumerate(touched)}
    layers: dict[ColumnSums, dict[int, Tensor]] = {}
    for parameter in every:
        note: ClassColumns | None = getattr(parameter, "column_sums", None)
        if note is not None:
            layers.setdefault(note.sums, {})[note.number] = parameter
    for layer, parameters in layers.items():
        at_of = {
            number: places[id(parameter)]
            for number, parameter in parameters.items()
            if id(parameter) in places
        }
        given = {number: (touched[at].rows, sums[at]) for number, at in at_of.items()}
        first = next(iter(parameters.values()))
        like = first.new_empty(0, dtype=_sum_type(first))
        for number, mean in layer.means(given, like).items():
            means[at_of[number]] = mean
    return means
