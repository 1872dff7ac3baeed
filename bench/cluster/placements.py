# SPDX-License-Identifier: Apache-2.0
"""Placements of ranks on hosts, and how long their links need for an operation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from commrt.bench.bench_operations import THERE_AND_BACK, bench_operation
from commrt.errors import UsageError, shown

__all__ = ["Placement", "bound_us", "parse_placement"]

_EVEN = re.compile(r"([0-9]{1,3})x([0-9]{1,3})")
_UNEVEN = re.compile(r"[0-9]{1,3}(,[0-9]{1,3})+")
_MOST_HOSTS, _MOST_RANKS = 128, 1024


@dataclass(frozen=True)
class Placement:
    """Numbers of ranks on the hosts of a star."""

    name: str
    """As it is written: ``4x1`` or ``2,1,1``."""
    ranks: tuple[int, ...]
    """Of each host."""

    @property
    def size(self) -> int:
        """Ranks in all."""
        return sum(self.ranks)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of each rank's host."""
        return tuple(
            host for host, ranks in enumerate(self.ranks) for _ in range(ranks)
        )


def parse_placement(text: str) -> Placement:
    """Return the placement of a text: hosts x ranks of each, or ranks by host.

    Raises:
        UsageError: it is none, or has one host or too many.
    """
    even = _EVEN.fullmatch(text)
    counts: tuple[int, ...] = ()
    if even is not None:
        counts = (int(even[2]),) * int(even[1])
    elif _UNEVEN.fullmatch(text):
        counts = tuple(map(int, text.split(",")))
    if not 2 <= len(counts) <= _MOST_HOSTS or not all(counts):
        raise UsageError(
            f"placement {shown(text)}: expected hosts x ranks of each, as 4x1, or the "
            f"ranks of each host, as 2,1,1; from 2 to {_MOST_HOSTS} hosts"
        )
    if sum(counts) > _MOST_RANKS:
        raise UsageError(f"placement {text}: more than {_MOST_RANKS} ranks")
    return Placement(text, counts)


def bound_us(coll: str, nbytes: int, placement: Placement, rate: int) -> float | None:
    """Return the least time of an operation by the bytes that some link must carry.

    Args:
        coll: the operation.
        nbytes: as benchmarks count them; ``OpSpec.rule_bytes`` says of what.
        placement: the ranks of hosts with a link each.
        rate: bits a second of a link, in each direction.

    Returns:
        None for an operation that has no array, or combines those of some ranks.
    """
    spec = bench_operation(coll)
    if spec is THERE_AND_BACK:
        return 2 * nbytes * 8 / rate * 1e6
    size, hosts = placement.size, len(placement.ranks)
    smallest = min(placement.ranks)
    if spec.is_empty or spec.combines_some:
        return None
    if spec.rule_bytes in ("pair", "any"):  # blocks between all pairs
        carried = max(here * (size - here) for here in placement.ranks) * nbytes
    elif spec.rule_bytes == "block" and spec.has_root:
        carried = (size - placement.ranks[0]) * nbytes
    elif spec.rule_bytes == "block":
        carried = (size - smallest) * nbytes
    elif spec.has_root:
        carried = nbytes
    elif spec.out_count == "div_size":
        carried = (size - smallest) * nbytes // size
    else:
        # A host's own values are summed before they leave, and the sums come back.
        carried = 2 * (hosts - 1) * nbytes // hosts
    return carried * 8 / rate * 1e6
