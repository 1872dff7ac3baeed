# SPDX-License-Identifier: Apache-2.0
"""Distance of on-node ranks: measured for each pair, agreed as that of the worst.

The same machine shows different speeds in different launches, because its cores sit
nearer or farther from each other. The class of this distance is a key of the selection
table, so it must be equal on all ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from commrt import env
from commrt.bootstrap.base import check_alive
from commrt.errors import BackendError
from commrt.select.facts import CommFacts, LinkClass
from commrt.select.model import BetweenNodes
from commrt.vocabulary.limits import as_timedelta, deadline_after

if TYPE_CHECKING:
    from commrt._native import Group
    from commrt.job.world import World

__all__ = [
    "LONG_NBYTES",
    "agree_link_class",
    "link_class_now",
    "measure_between_nodes",
    "measure_links",
    "message_costs",
    "spins_for",
    "times_us",
    "worst_of",
]

NEAR_NS = 90.0
"""Flag latency below which ranks are near; measured: 40 to 60 near, 140 to 250 far."""
_BUDGET_S = 0.002
_ROUNDS = 200
_SHORT_TIMES, _LONG_TIMES = 9, 3
"""Messages between nodes that are timed."""
LONG_NBYTES = 1 << 20
"""Length of the long ones."""
_SLICE_S = 0.05
"""Time between two looks whether a rank has ended."""
_SPINS = 20000
_SPINS_OVERSUBSCRIBED = 2
_ORDER: tuple[LinkClass, ...] = ("single", "near", "far", "oversubscribed", "network")


def rounds_of(members: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield disjoint pairs until every pair has met (round-robin tournament)."""
    ranks = list(members)
    if len(ranks) % 2:
        ranks.append(-1)
    half = len(ranks) // 2
    for _ in range(len(ranks) - 1):
        pairs = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if -1 not in (a, b)]
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]


def measure_links(group: Group, world: World) -> dict[tuple[int, int], LinkClass]:
    """Return the link class of every on-node pair; collective over all ranks."""
    members = next(ranks for ranks in world.nodes if world.rank in ranks)
    mine: dict[tuple[int, int], float] = {}
    if len(members) > 1 and not _too_many(world, len(members)):
        world.bootstrap.exchange(members, "links/start", b"", world.timeout_s)
        for pairs in rounds_of(members):
            for a, b in pairs:
                if world.rank in (a, b):
                    peer = b if world.rank == a else a
                    mine[a, b] = group.probe_latency_ns(peer, _ROUNDS, _BUDGET_S)
    text = ";".join(f"{a},{b},{ns:.1f}" for (a, b), ns in mine.items())
    everybody = range(world.size)
    said = world.bootstrap.exchange(
        everybody, "links/measured", text.encode(), world.timeout_s
    )
    slowest: dict[tuple[int, int], float] = {}
    for blob in said:
        for part in filter(None, blob.decode().split(";")):
            one, other, ns = part.split(",")
            pair = int(one), int(other)
            # A pair that ran out of time was not on a core at once.
            measured = float(ns) if float(ns) >= 0 else float("inf")
            slowest[pair] = max(slowest.get(pair, 0.0), measured)
    return {pair: "near" if ns < NEAR_NS else "far" for pair, ns in slowest.items()}


SendRecv = Callable[..., Any]
"""Sends an array and receives another; as ``Communicator.sendrecv``."""


def measure_between_nodes(
    world: World, sendrecv: SendRecv, native: Any, *, is_staged: bool = True
) -> BetweenNodes:
    """Return the cost of messages to other nodes without MPI, the slowest there are.

    Collective over all ranks of the job. The first ranks of the nodes send in a ring,
    all at once: a few short messages and some of a mebibyte each; then all ranks run a
    short collective of gloo's. That takes some milliseconds in all. A rank counts the
    median of its short messages and the best of its long ones; the worst rank counts
    for all. ``is_staged``: whether the relay copies messages on both sides.
    """
    everybody = range(world.size)
    # A rank that is still on its way here would be measured, too.
    world.bootstrap.exchange(everybody, "between/start", b"", world.timeout_s)
    mine = {"native": _native_us(native, world)}
    mine |= message_costs(world, sendrecv, LONG_NBYTES)
    worst = worst_of(world, "between/us", mine)
    costs = worst["alpha"], worst["beta"], worst["native"]
    return BetweenNodes(*costs, is_staged=is_staged)


def message_costs(
    world: World,
    sendrecv: SendRecv,
    long_nbytes: int,
    *,
    typical: Callable[[list[float]], float] = median,
    times: int = _SHORT_TIMES,
    together: int = 1,
) -> dict[str, float]:
    """Return what messages between nodes cost this rank: ``alpha`` and ``beta``.

    The first ranks of the nodes send in a ring, all at once. Other ranks return
    nothing, at once. ``typical`` picks one of the ``times`` of short messages, and
    ``together`` of them are timed at once.
    """
    first = [ranks[0] for ranks in world.nodes]
    if world.rank not in first:
        return {}
    at = first.index(world.rank)
    there = first[(at + 1) % len(first)], first[at - 1]
    alpha_us = typical(_ring_us(sendrecv, *there, 8, times, together))
    long_us = min(_ring_us(sendrecv, *there, long_nbytes, _LONG_TIMES))
    beta_us = max(long_us - alpha_us, 0.1 * long_us) / long_nbytes
    return {"alpha": alpha_us, "beta": beta_us}


def worst_of(world: World, key: str, mine: dict[str, float]) -> dict[str, float]:
    """Return the largest of what ranks have by each name; collective over the job."""
    said = json.dumps(mine).encode()
    everybody = range(world.size)
    heard = world.bootstrap.exchange(everybody, key, said, world.timeout_s)
    told = [json.loads(text) for text in heard]
    names = {name for one in told for name in one}
    return {name: max(one.get(name, 0.0) for one in told) for name in names}


def _ring_us(
    sendrecv: SendRecv,
    dest: int,
    source: int,
    nbytes: int,
    times: int,
    together: int = 1,
) -> list[float]:
    x, out = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

    def call() -> None:
        sendrecv(x, dest=dest, out=out, source=source)

    return times_us(call, times, together)


def _native_us(native: Any, world: World) -> float:
    """Return the time of each message of gloo's allreduce; its start is one more.

    ``native`` is torch's group of gloo, or None.
    """
    if native is None:
        return 0.0
    import torch

    x = torch.zeros(2)
    took_us = times_us(lambda: _wait(native.allreduce([x]), world), _SHORT_TIMES)
    return median(took_us) / (2 * (world.size - 1) + 1)


def _wait(work: Any, world: World) -> None:
    """Wait for a collective of gloo's, unless a rank has ended."""
    deadline = deadline_after(world.timeout_s)
    everybody = range(world.size)
    heed = check_alive(world.bootstrap.gone, "between/us", everybody, lambda _: False)
    while True:
        # It may end just after a slice has: then the next look tells how.
        was_over = work.is_completed()
        try:
            work.wait(as_timedelta(min(_SLICE_S, world.timeout_s)))
            return
        except RuntimeError as error:
            if heed is not None:
                heed()
            if was_over or time.monotonic() >= deadline:
                raise BackendError(
                    f"gloo failed a sum of all ranks: {error}"
                ) from error


def times_us(call: Callable[[], Any], times: int, together: int = 1) -> list[float]:
    """Return the times of a call, after one that is not timed.

    A call alone may take no time, where what it waits for was there before it. So
    ``together`` calls may count as one, by their mean.
    """
    call()  # wakes threads that have never run
    took = []
    for _ in range(times):
        start = time.perf_counter()
        for _ in range(together):
            call()
        took.append((time.perf_counter() - start) * 1e6 / together)
    return took


class Measured(Protocol):
    """A communicator whose links are measured again."""

    facts: CommFacts

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def probe_latency_ns(self, arg0: int, arg1: int, arg2: float, /) -> float:
        """Return the latency of a flag between this rank and another."""
        ...

    def allreduce(self, x: Any, *, op: str) -> Any:
        """Return the reduction of all ranks' ``x``."""
        ...


def link_class_now(comm: Measured) -> LinkClass:
    """Return the distance of the ranks at this moment; collective.

    The communicator's own facts were measured when it was made and stay as they are,
    since selection goes by them; measurements go by this. Where links are not measured
    (several nodes, ranks that outnumber cores) both are the same.
    """
    facts = comm.facts
    if facts.link_class not in ("near", "far"):
        return facts.link_class
    slowest_ns = 0.0
    for pairs in rounds_of(range(comm.size)):
        for pair in pairs:
            if comm.rank in pair:
                peer = sum(pair) - comm.rank
                ns = comm.probe_latency_ns(peer, _ROUNDS, _BUDGET_S)
                slowest_ns = max(slowest_ns, ns if ns >= 0 else float("inf"))
    worst_ns = comm.allreduce(np.array([slowest_ns]), op="max")
    return "near" if worst_ns[0] < NEAR_NS else "far"


def _too_many(world: World, ranks_here: int) -> bool:
    return ranks_here > world.cores


def agree_link_class(world: World, ranks: Sequence[int], ppn: int) -> LinkClass:
    """Return the class of a communicator; every rank computes the same."""
    if len(ranks) == 1:
        return "single"
    if len({world.node_of(rank) for rank in ranks}) > 1:
        return "network"
    forced = env.read_str("COMMRT_LINK_CLASS")
    if forced is not None:
        return cast(LinkClass, forced)
    if _too_many(world, max(len(there) for there in world.nodes)):
        return "oversubscribed"
    here = sorted(ranks)
    pairs = ((a, b) for i, a in enumerate(here) for b in here[i + 1 :])
    classes = (world.links.get(pair, "near") for pair in pairs)
    return max(classes, key=_ORDER.index)


def spins_for(facts: CommFacts, others_need_core: bool = False) -> int:
    """Return the number of polls of a wait before it yields its core to another rank.

    Where ranks outnumber cores, what a rank waits for is most likely still to be done
    by one that waits for this core. The few polls are for what a rank on another core
    is just finishing; docs/performance.md has what other numbers cost. The class tells
    of all ranks of the node; the communicator may have only some. A call, or a rule of
    a table, may say another number (the parameter ``spins``).

    ``others_need_core``: ranks of other nodes that pretend to have this machine alone,
    or threads of this process that carry messages. Where a rank can sleep until the
    kernel has something, it does so after 64 looks at most (engine/backoff.cpp).
    """
    crowded = facts.link_class == "oversubscribed" or facts.ppn > facts.cores
    return _SPINS_OVERSUBSCRIBED if crowded or others_need_core else _SPINS
