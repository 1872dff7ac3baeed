# SPDX-License-Identifier: Apache-2.0
"""Non-negative matrix factorisation with graphs, of rows on different ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.science.exact_sums import exact_sum
from commrt.science.nmf.graph import Graph, join_nearest
from commrt.science.nmf.kernels import GraphKernel
from commrt.science.nmf.start import random_components, random_rows
from commrt.science.nmf.updates import (
    effective_weights,
    inner_products,
    multiplied,
    simplex_step,
)
from commrt.science.numbers import as_finite
from commrt.science.rows import Floats, RowCut, agreed_rows, as_array, as_rows
from commrt.vocabulary.checks import as_integer, as_items

__all__ = ["Factorization", "GraphNMF"]

_MOST_POWER = 1000.0
"""Beyond it rounding of a weight, to this power, would count."""
_OFF_SIMPLEX = 1e-9
"""By so much the weights of a start may miss 1."""


@dataclass(frozen=True, eq=False)
class Factorization:
    """The factors of a matrix X, about W H, of which a rank has its rows of W."""

    coefficients: Floats
    """W, (rows, components), not negative: of this rank's rows."""
    components: Floats
    """H, (components, features), not negative: the same on all ranks."""
    kernel_weights: Floats
    """t, (kernels,): on the simplex, the same on all ranks."""
    objectives: tuple[float, ...] = ()
    """The objective at the start and after each step, the same on all ranks."""
    num_halo: int = 0
    """Rows of W that this rank gets in each step."""
    num_served: int = 0
    """Rows of W that this rank sends in each step."""


class GraphNMF:
    """Factors of a non-negative matrix, alike for rows that are near each other.

        model = GraphNMF(comm, 10, kernels=[GraphKernel(5)], graph_weight=100.0)
        factors = model.fit(x)
        clusters = factors.coefficients.argmax(axis=1)

    It minimises |X - W H|^2 + graph_weight * sum_k a_k tr(W^T L_k W) over W, H >= 0 and
    the kernels' weights. L_k is the Laplacian of a kernel on the graph of nearest
    neighbours of X's rows. Ranks have rows of X and W, any number, also none, and all
    have H. Everything is computed in float64 on the host.

    Args:
        comm: the ranks; it stays the caller's.
        num_components: columns of W.
        kernels: on the graph; none: factors without a graph.
        graph_weight: of the graph's part of the objective, from 0 on.
        power: of the kernels' weights, above 1 and at most 1000. Near 1 the smoothest
            kernel takes all weight. With a large one all weights are about equal, and
            all kernels have about the same part of the objective.
        seed: draws the first factors, which do not depend on the number of ranks.

    The objective grows smaller with W where H grows, so the graph's part alone does not
    tell how smooth W is: compare factors after equal numbers of steps.

    Raises UsageError for wrong arguments, before anything is sent.

    Source: "Adaptive graph via multiple kernel learning for nonnegative matrix
    factorization" (arXiv 1208.3845). Its author has withdrawn it; the objective and
    the steps here are a reconstruction, and ``commrt.science.nmf.updates`` proves that
    no step raises the objective.
    """

    def __init__(
        self,
        comm: Communicator,
        num_components: int,
        *,
        kernels: Sequence[GraphKernel] = (GraphKernel(),),
        graph_weight: float = 100.0,
        power: float = 2.0,
        seed: int = 0,
    ) -> None:
        what = "GraphNMF"
        if not isinstance(comm, Communicator):
            raise UsageError(
                f"{what}: comm={shown(comm)} must be a communicator, as commrt.init() "
                f"returns it"
            )
        self.comm = comm
        self.num_components = _integer("num_components", num_components, 1)
        self.seed = _integer("seed", seed, 0)
        items = as_items(kernels)
        if items is None or not all(isinstance(each, GraphKernel) for each in items):
            raise UsageError(f"{what}: kernels={shown(kernels)} must be GraphKernels")
        self.kernels = tuple(items)
        self.graph_weight = _number("graph_weight", graph_weight)
        self.power = _number("power", power)
        if self.graph_weight < 0:
            raise UsageError(f"{what}: graph_weight={graph_weight!r} must not be < 0")
        if not 1 < self.power <= _MOST_POWER:
            raise UsageError(
                f"{what}: power={power!r} must be above 1 and at most {_MOST_POWER:g}; "
                f"larger ones would change nothing"
            )

    def fit(
        self,
        x: Any,
        *,
        num_steps: int = 200,
        tolerance: float = 0.0,
        start: Factorization | None = None,
    ) -> Factorization:
        """Return the factors of the rows of all ranks; collective.

        Args:
            x: (rows, features), this rank's rows, not negative.
            num_steps: steps at most; each changes H, then the kernels' weights, then W.
            tolerance: the fit ends where a step lowers the objective by less than this
                part of it; 0: after all steps.
            start: factors to go on from, with this rank's rows of W, and with H and the
                kernels' weights of rank 0; None: random ones.

        Raises UsageError on all ranks where an argument is wrong on any, and for a
        kernel whose weights vanish on all edges.

        Bytes at the start and of each step, for f features, k components, p kernels and
        s rows of W that others need: an alltoallv of 8 s k, an allreduce of
        8 (k f + k^2 + p), and a bcast of 8 (k f + p + 1). With a start, bcasts of 8 k f
        and 8 p, once.
        """
        what = "GraphNMF.fit"
        own = (self.num_components, self.kernels, self.graph_weight, self.power)

        def check() -> tuple[tuple[Floats, ...], tuple[Any, int, float]]:
            rows = as_rows(what, x)
            if (rows < 0).any():
                raise UsageError(f"{what}: x has negative numbers; expected none")
            number = as_integer(num_steps)
            if number is None or number < 0:
                raise UsageError(
                    f"{what}: num_steps={shown(num_steps)} must be an integer from 0 on"
                )
            part = as_finite(tolerance)
            if part is None or part < 0:
                raise UsageError(
                    f"{what}: tolerance={shown(tolerance)} must be a number from 0 on"
                )
            facts = (what, own, self.seed, start is None), number, part
            if start is None:
                return (rows,), facts
            return (rows, *self._checked_start(what, start, rows)), facts

        arrays, (_, number, part), cut = agreed_rows(what, self.comm, check)
        if cut.total == 0 or cut.num_features == 0:
            raise UsageError(
                f"{what}: {cut.total} rows of {cut.num_features} features; expected at "
                f"least one of each"
            )
        return self._fitted(arrays, cut, number, part)

    # -- inside --------------------------------------------------------------------

    def _checked_start(self, what: str, start: Any, rows: Floats) -> list[Floats]:
        """Return W, H and the kernels' weights of a start, as arrays."""
        if not isinstance(start, Factorization):
            raise UsageError(f"{what}: start={shown(start)} must be a Factorization")
        shapes = {
            "coefficients": (len(rows), self.num_components),
            "components": (self.num_components, rows.shape[1]),
            "kernel_weights": (len(self.kernels),),
        }
        found: list[Floats] = []
        for name, shape in shapes.items():
            given = as_array(what, f"start.{name}", getattr(start, name), str(shape))
            is_right = given.shape == shape and given.dtype == np.float64
            if not is_right or not (given >= 0).all() or not np.isfinite(given).all():
                raise UsageError(
                    f"{what}: start.{name} of shape {given.shape} must be finite "
                    f"numbers from 0 on, of float64 and shape {shape}"
                )
            found.append(given)
        total = float(found[-1].sum())
        if self.kernels and abs(total - 1.0) > _OFF_SIMPLEX:
            raise UsageError(
                f"{what}: start.kernel_weights add up to {total!r}; expected 1"
            )
        return found

    def _fitted(
        self, arrays: tuple[Floats, ...], cut: RowCut, num_steps: int, tolerance: float
    ) -> Factorization:
        x = arrays[0]
        sums = np.column_stack([x.sum(axis=1), (x * x).sum(axis=1)])
        total, square = exact_sum(sums, self.comm).tolist()
        graph = None
        if self.kernels:
            graph = join_nearest(x, cut, self.kernels, self.comm)
        if len(arrays) > 1:
            w, h, weights = arrays[1].copy(), arrays[2].copy(), arrays[3].copy()
            if self.comm.size > 1:  # what all ranks have is rank 0's
                self.comm.bcast(h, 0)
                self.comm.bcast(weights, 0)
        else:
            k = self.num_components
            # The product of the factors has the mean of X.
            scale = 2.0 * math.sqrt(total / cut.total / cut.num_features / k)
            w = scale * random_rows(cut, k, self.seed)
            h = scale * random_components(k, cut.num_features, self.seed)
            weights = np.full(len(self.kernels), 1.0 / max(1, len(self.kernels)))
        state = _State(x, w, square, graph, self.comm)
        objectives: list[float] = []
        while True:
            value, next_h, next_weights = self._improved(state, h, weights)
            objectives.append(value)
            before = objectives[-2] if len(objectives) > 1 else math.inf
            is_enough = tolerance > 0 and before - value < tolerance * before
            if len(objectives) > num_steps or is_enough:
                break
            h, weights = next_h, next_weights
            self._step(state, h, weights)
        return Factorization(
            coefficients=state.w,
            components=h,
            kernel_weights=weights,
            objectives=tuple(objectives),
            num_halo=0 if graph is None else graph.num_halo,
            num_served=0 if graph is None else graph.num_served,
        )

    def _improved(
        self, state: _State, h: Floats, weights: Floats
    ) -> tuple[float, Floats, Floats]:
        """Return the objective, and H and the kernels' weights after it; collective.

        They are those of rank 0, so all ranks have the same and end together, also
        where their processors round differently.
        """
        value = self._objective(state, h, weights)
        h = multiplied(h, state.crossed, state.gram @ h)
        if state.graph is not None:
            weights = simplex_step(state.roughness, self.power)
        if self.comm.size == 1:
            return value, h, weights
        told = np.concatenate([[value], h.reshape(-1), weights])
        self.comm.bcast(told, 0)
        end = 1 + h.size
        return float(told[0]), told[1:end].reshape(h.shape), told[end:]

    def _step(self, state: _State, h: Floats, weights: Floats) -> None:
        """Change W, and bring what depends on it."""
        up, down = state.x @ h.T, state.w @ (h @ h.T)
        if state.graph is not None:
            effective = effective_weights(weights, self.power)
            sums, degrees = state.graph.smoothed(state.table, effective)
            up += self.graph_weight * sums
            down += self.graph_weight * degrees[:, None] * state.w
        state.change(multiplied(state.w, up, down))

    def _objective(self, state: _State, h: Floats, weights: Floats) -> float:
        fit = (
            state.square
            - 2.0 * float((state.crossed * h).sum())
            + float(((h @ h.T) * state.gram).sum())
        )
        if state.graph is not None:
            effective = effective_weights(weights, self.power)
            fit += self.graph_weight * float(effective @ state.roughness)
        return fit


class _State:
    """W with what depends on it: its halo, W^T X, W^T W and the roughness."""

    def __init__(
        self,
        x: Floats,
        w: Floats,
        square: float,
        graph: Graph | None,
        comm: Communicator,
    ) -> None:
        self.x, self.square, self.graph, self._comm = x, square, graph, comm
        self.change(w)

    def change(self, w: Floats) -> None:
        """Take another W; collective. Products are computed while the halo travels."""
        self.w = self.table = w
        num_components, num_features = w.shape[1], self.x.shape[1]
        first = num_components * num_features
        last = first + num_components**2
        if self.graph is None:
            sums = inner_products(w, self.x)
        else:
            coming = self.graph.start_halo(w)
            products = inner_products(w, self.x)
            self.table = np.concatenate([w, coming.wait()])
            sums = np.concatenate([products, self.graph.differences(self.table)])
        if self._comm.size > 1:
            self._comm.allreduce(sums)
        self.crossed = sums[:first].reshape(num_components, num_features)
        self.gram = sums[first:last].reshape(num_components, num_components)
        self.roughness = sums[last:]


def _integer(name: str, value: Any, least: int) -> int:
    found = as_integer(value)
    if found is None or found < least:
        raise UsageError(
            f"GraphNMF: {name}={shown(value)} must be an integer from {least} on"
        )
    return found


def _number(name: str, value: Any) -> float:
    found = as_finite(value)
    if found is None:
        raise UsageError(f"GraphNMF: {name}={shown(value)} must be a finite number")
    return found
