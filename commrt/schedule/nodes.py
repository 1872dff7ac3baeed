# SPDX-License-Identifier: Apache-2.0
"""Nodes of the ranks: a fact equal on all ranks, and part of a schedule's key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from commrt.errors import UsageError

__all__ = ["Nodes", "check_nodes", "members", "parse_nodes"]

Nodes = tuple[int, ...]
"""The number of the node of each rank, in the order in which ranks meet new nodes: one
partition of the ranks has one such tuple."""


def check_nodes(numbers: Iterable[int], size: int) -> Nodes:
    """Return the numbers counted anew from 0, or raise UsageError."""
    seen: dict[int, int] = {}
    found = tuple(seen.setdefault(number, len(seen)) for number in numbers)
    if len(found) != size:
        raise UsageError(
            f"nodes of {len(found)} ranks, but there are {size} ranks; expected a "
            f"node for each rank"
        )
    return found


@lru_cache(maxsize=64)
def members(nodes: Nodes) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node."""
    found: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
    for rank, node in enumerate(nodes):
        found[node].append(rank)
    return tuple(map(tuple, found))


def parse_nodes(counts: Sequence[int]) -> Nodes:
    """Return the nodes of ranks that lie one after the other, so many on each."""
    return tuple(node for node, count in enumerate(counts) for _ in range(count))
