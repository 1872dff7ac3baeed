# SPDX-License-Identifier: Apache-2.0
"""Window of slots in a lane, which operations pass through one behind the other.

An operation with more fragments than the window has slots goes round in it.

A payload lies in a slot of shared memory. A small window keeps its slots in the cores'
own caches. That is best if a core takes lines over from another core as fast as it
reads them. If not, slots that have meanwhile left those caches are better: a window
beyond the size of a core's own cache. The probe measures both once
(engine/slot_probe.cpp).

Each rank decides for the messages that it sends. A message says where it lies, so ranks
need not agree. Between far cores payloads are written past the caches. There a window
makes no difference, or a small one for the better.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from commrt.select.facts import LinkClass

if TYPE_CHECKING:
    from commrt._native import Group
    from commrt.job.world import World

__all__ = ["measure_slot_window", "partner_of", "window_nbytes"]

_OWN_CACHES = 1.5
"""The window in sizes of a core's own cache. On Zen 4, with 1 MiB: a line written and
read takes 9.8 ns in one slot, 5.4 through 1 MiB, 3.8 through 1.5 and 3.5 through 2."""
_OWN_CACHE_NBYTES = 1 << 20
"""A core's own cache, where the kernel does not tell."""
_MOVING_SAVES = 0.1
"""Least part of the time that a window must save to be worth its place in the cache
that all cores share."""
_BUDGET_S = 0.02


def measure_slot_window(group: Group, world: World) -> int:
    """Return the bytes of this rank's window, 0 for none; collective on each node.

    Pairs measure at the same time. A rank that is left over has no window, nor have
    ranks that outnumber cores, whose links are not measured, and ranks that are
    threads.
    """
    partner = None if world.in_process else partner_of(group.rank, world.links)
    if partner is None:
        return 0
    nbytes = window_nbytes()
    same_ns, moving_ns = group.probe_slots_ns(partner, nbytes, _BUDGET_S)
    # A pair that ran out of time was not on a core at once, and knows nothing.
    if same_ns < 0 or moving_ns > (1 - _MOVING_SAVES) * same_ns:
        return 0
    return nbytes


def window_nbytes() -> int:
    """Return the bytes of a window, where there is one."""
    return int(_OWN_CACHES * own_cache_nbytes())


def partner_of(rank: int, links: dict[tuple[int, int], LinkClass]) -> int | None:
    """Return with whom ``rank`` measures: near ones first, each in one pair at most."""
    taken: set[int] = set()

    def remote(pair: tuple[int, int]) -> tuple[bool, int, int]:
        return links[pair] != "near", pair[1] - pair[0], pair[0]

    for pair in sorted(links, key=remote):
        if taken.isdisjoint(pair):
            if rank in pair:
                return sum(pair) - rank
            taken.update(pair)
    return None


@lru_cache(maxsize=1)
def own_cache_nbytes() -> int:
    """Return the size of a core's second-level cache."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (index / "level").read_text().strip() == "2":
                return int((index / "size").read_text().strip().removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return _OWN_CACHE_NBYTES
