# SPDX-License-Identifier: Apache-2.0
"""The cheapest labels of the vertices of a graph, where labels of neighbours cost.

A vertex is a part of a network, a label is its strategy, and an edge costs the move of
a tensor from one part's strategy to another's. Vertices are taken out one by one, that
with the fewest neighbours first: a table says which label is its best for each choice
of its neighbours' labels. This is dynamic programming over the graph: on a chain, a
residual network or a U-Net a vertex has two neighbours at most when it is taken out,
and the result is exact (Dechter, "Bucket elimination", 1999).

Where tables would be larger than ``MOST_ENTRIES``, labels are changed one at a time
while that is cheaper. The result is no more than that of the best single label for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["cheapest_labels", "price_of"]

Table: TypeAlias = NDArray[np.float64]
Pairs: TypeAlias = Mapping[tuple[int, int], Table]

MOST_ENTRIES = 1 << 21
"""Numbers in a table; 20 labels and four neighbours make more."""


def price_of(labels: Sequence[int], own: Sequence[Table], pairs: Pairs) -> float:
    """Return what labels cost: those of vertices, and of pairs of them."""
    alone = sum(float(table[label]) for table, label in zip(own, labels, strict=True))
    between = (table[labels[a], labels[b]] for (a, b), table in pairs.items())
    return alone + sum(map(float, between))


def cheapest_labels(own: Sequence[Table], pairs: Pairs) -> list[int]:
    """Return the label of each vertex so that all costs together are the least.

    Args:
        own: for each vertex the cost of each label; all have the same labels.
        pairs: for pairs of different vertices the costs of their labels.
    """
    found = _by_elimination(own, pairs)
    return _by_descent(own, pairs) if found is None else found


def _by_elimination(own: Sequence[Table], pairs: Pairs) -> list[int] | None:
    """Return the cheapest labels; None where a table would be too large."""
    factors: list[tuple[tuple[int, ...], Table]] = [
        *(((vertex,), table) for vertex, table in enumerate(own)),
        *pairs.items(),
    ]
    left = {*range(len(own))}
    taken: list[tuple[int, tuple[int, ...], Any]] = []
    while left:
        around = {v: _neighbours(v, factors) for v in left}
        vertex = min(left, key=lambda v: (len(around[v]), v))
        names = (*sorted(around[vertex]), vertex)
        if len(own[vertex]) ** len(names) > MOST_ENTRIES:
            return None
        mine = [each for each in factors if vertex in each[0]]
        factors = [each for each in factors if vertex not in each[0]]
        total = sum(_aligned(scope, table, names) for scope, table in mine)
        shape = [len(own[v]) for v in names]
        table = np.broadcast_to(np.asarray(total), shape)
        taken.append((vertex, names[:-1], table.argmin(axis=-1)))
        factors.append((names[:-1], table.min(axis=-1)))
        left.remove(vertex)
    labels: dict[int, int] = {}
    for vertex, others, best in reversed(taken):
        labels[vertex] = int(best[tuple(labels[each] for each in others)])
    return [labels[vertex] for vertex in range(len(own))]


def _neighbours(
    vertex: int, factors: Sequence[tuple[tuple[int, ...], Any]]
) -> set[int]:
    return {v for scope, _ in factors if vertex in scope for v in scope} - {vertex}


def _aligned(scope: Sequence[int], table: Table, names: Sequence[int]) -> Table:
    """Return a table with an axis for each name, those of length 1 that it lacks."""
    order = sorted(range(len(scope)), key=lambda at: names.index(scope[at]))
    shape = [table.shape[scope.index(name)] if name in scope else 1 for name in names]
    aligned: Table = table.transpose(order).reshape(shape)
    return aligned


def _by_descent(own: Sequence[Table], pairs: Pairs) -> list[int]:
    """Return labels of which no single one can be changed for a cheaper one."""
    uniform = [[label] * len(own) for label in range(len(own[0]))]
    labels = min(uniform, key=lambda each: price_of(each, own, pairs))
    touching: list[list[tuple[int, Table]]] = [[] for _ in own]
    for (a, b), table in pairs.items():
        touching[a].append((b, table.T))
        touching[b].append((a, table))
    changed = True
    while changed:
        changed = False
        for vertex, table in enumerate(own):
            costs = table + sum(each[labels[other]] for other, each in touching[vertex])
            best = int(costs.argmin())
            if costs[best] < costs[labels[vertex]]:
                labels[vertex], changed = best, True
    return labels
