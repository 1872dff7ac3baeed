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
from commrt.science.rows import Floats, RowCut, agreed_rows, as_rows
from commrt.vocabulary.checks import as_integer

__all__ = ["Factorization", "GraphNMF"]


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
        power: of the kernels' weights, above 1. Near 1 one kernel takes all; a large
            one makes them equal.
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
        self.kernels = tuple(kernels)
        if not all(isinstance(kernel, GraphKernel) for kernel in self.kernels):
            raise UsageError(f"{what}: kernels={shown(kernels)} must be GraphKernels")
        self.graph_weight = _number("graph_weight", graph_weight)
        self.power = _number("power", power)
        if self.graph_weight < 0:
            raise UsageError(f"{what}: graph_weight={graph_weight!r} must not be < 0")
        if self.power <= 1:
            raise UsageError(f"{what}: power={power!r} must be above 1")

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

        Raises UsageError on all ranks where an argument is wrong on any.

        Bytes of a step, for f features, k components, p kernels and s rows of W that
        others need: an alltoallv of 8 s k, and an allreduce of 8 (k f + k^2 + p). With
        a tolerance, a bcast of 8. With a start, bcasts of 8 k f and 8 p, once.
        """
        what = "GraphNMF.fit"

        def check() -> tuple[Floats, ...]:
            rows = as_rows(what, x)
            if (rows < 0).any():
                raise UsageError(f"{what}: x has negative numbers; expected none")
            number = as_integer(num_steps)
            if number is None or number < 0:
                raise UsageError(
                    f"{what}: num_steps={shown(num_steps)} must be an integer from 0 on"
                )
            if not _is_number(tolerance) or tolerance < 0:
                raise UsageError(
                    f"{what}: tolerance={shown(tolerance)} must be a number from 0 on"
                )
            if start is None:
                return (rows,)
            return rows, *self._checked_start(what, start, rows)

        facts = (
            *(what, self.num_components, self.kernels, self.graph_weight, self.power),
            *(self.seed, num_steps, tolerance, start is None),
        )
        arrays, cut = agreed_rows(what, self.comm, check, facts)
        if cut.total == 0 or cut.num_features == 0:
            raise UsageError(
                f"{what}: {cut.total} rows of {cut.num_features} features; expected at "
                f"least one of each"
            )
        return self._fitted(arrays, cut, int(num_steps), float(tolerance))

    # -- inside --------------------------------------------------------------------

    def _checked_start(
        self, what: str, start: Any, rows: Floats
    ) -> tuple[Floats, Floats, Floats]:
        if not isinstance(start, Factorization):
            raise UsageError(f"{what}: start={shown(start)} must be a Factorization")
        found = start.coefficients, start.components, start.kernel_weights
        shapes = (
            (len(rows), self.num_components),
            (self.num_components, rows.shape[1]),
            (len(self.kernels),),
        )
        for array, shape, name in zip(
            found, shapes, ("coefficients", "components", "kernel_weights"), strict=True
        ):
            given = np.asarray(array)
            is_right = given.shape == shape and given.dtype == np.float64
            if not is_right or not (given >= 0).all() or not np.isfinite(given).all():
                raise UsageError(
                    f"{what}: start.{name} of shape {given.shape} must be finite "
                    f"numbers from 0 on, of float64 and shape {shape}"
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
        objectives = [self._objective(state, h, weights, tolerance)]
        for _ in range(num_steps):
            h = multiplied(h, state.crossed, state.gram @ h)
            if graph is not None:
                weights = simplex_step(state.roughness, self.power)
            self._step(state, h, weights)
            objectives.append(self._objective(state, h, weights, tolerance))
            before, after = objectives[-2:]
            if tolerance and before - after < tolerance * before:
                break
        return Factorization(
            coefficients=state.w,
            components=h,
            kernel_weights=weights,
            objectives=tuple(objectives),
            num_halo=0 if graph is None else graph.num_halo,
            num_served=0 if graph is None else graph.num_served,
        )

    def _step(self, state: _State, h: Floats, weights: Floats) -> None:
        """Change W, and bring what depends on it."""
        up, down = state.x @ h.T, state.w @ (h @ h.T)
        if state.graph is not None:
            effective = effective_weights(weights, self.power)
            sums, degrees = state.graph.smoothed(state.table, effective)
            up += self.graph_weight * sums
            down += self.graph_weight * degrees[:, None] * state.w
        state.change(multiplied(state.w, up, down))

    def _objective(
        self, state: _State, h: Floats, weights: Floats, tolerance: float
    ) -> float:
        """Return the objective; with a tolerance, that of rank 0 on all ranks."""
        fit = (
            state.square
            - 2.0 * float((state.crossed * h).sum())
            + float(((h @ h.T) * state.gram).sum())
        )
        if state.graph is not None:
            effective = effective_weights(weights, self.power)
            fit += self.graph_weight * float(effective @ state.roughness)
        if not tolerance or self.comm.size == 1:
            return fit
        # Ranks end together, also where their processors round differently.
        value = np.array([fit])
        self.comm.bcast(value, 0)
        return float(value[0])


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


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False


def _number(name: str, value: Any) -> float:
    if not _is_number(value):
        raise UsageError(f"GraphNMF: {name}={shown(value)} must be a finite number")
    return float(value)
