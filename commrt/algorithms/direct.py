# SPDX-License-Identifier: Apache-2.0
"""Direct: every rank sends straight to every other; one step, P-1 messages per rank.

*Allreduce, shots=1*: everyone sends its whole vector to everyone and adds the P vectors
in rank order. *shots=2*: everyone sends block j to rank j, which adds P blocks in rank
order and sends the sum to everyone. The other operations are what their definitions
say. In step t rank r talks to rank r+t, so that no rank is everybody's next peer.
*Scan and exscan, shots=1*: everyone sends its whole vector to all ranks above it, and
adds what came from those below, in rank order. *shots=2*: everyone sends block j to
rank j, which adds them in rank order and sends each rank the sum so far.

Cost on one port: allreduce (P-1)(alpha + N beta + N gamma) with one shot, 2(P-1) alpha
+ 2(P-1)/P N beta + (P-1)/P N gamma with two, scan and exscan alike; allgather,
reduce_scatter and alltoall (P-1) alpha + (P-1)/P N beta. In shared memory the P-1
messages go out at once: latency of one message per shot, and no rank copies data for
others, so it is also bandwidth-optimal there (two shots).

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE TPDS 8 (1997), section 2 (the
multiport bounds); Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005), section 4.3.
"""

from __future__ import annotations

from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Buffer, Builder
from commrt.schedule.ir import Slice


def peers(b: Builder) -> list[int]:
    """Return the other ranks, the next one first."""
    return [(b.rank + t) % b.size for t in range(1, b.size)]


def send_to_all(b: Builder, src: Slice) -> None:
    """Send the same blocks to every other rank."""
    for peer in peers(b):
        b.send(src, peer)


def reduce_own_block(b: Builder, src: Buffer, dst: Slice) -> None:
    """Put the sum over all ranks of block r of ``src`` into ``dst`` on rank r."""
    for peer in peers(b):
        b.send(src[peer], peer)
    b.copy(dst, src[b.rank])
    for peer in peers(b):
        b.rred(dst, peer)


def gather_all_blocks(b: Builder, buf: Buffer) -> None:
    """Give every rank block r of ``buf`` from each rank r."""
    send_to_all(b, buf[b.rank])
    for peer in peers(b):
        b.recv(buf[peer], peer)


@algorithm(
    "allreduce",
    "direct",
    complexity=10,
    params={"shots": (1, 2)},
    latency=True,
    bandwidth=True,
)
def allreduce(b: Builder) -> None:
    """Everyone to everyone: whole vectors (1 shot), or blocks and then sums (2)."""
    if b.params["shots"] == 2:
        reduce_own_block(b, b.inp, b.out[b.rank])
        gather_all_blocks(b, b.out)
        return
    b.blocks(1)
    # In place, the sum must wait beside the input until all others have the input.
    total = b.tmp(1)
    send_to_all(b, b.inp[:])
    b.copy(total[:], b.inp[:])
    for peer in peers(b):
        b.rred(total[:], peer)
    b.copy(b.out[:], total[:])


@algorithm("reduce", "direct", complexity=10, latency=True)
def reduce(b: Builder) -> None:
    """Everyone sends its vector to the root, which adds them in rank order."""
    b.blocks(1)
    if b.rank != b.root:
        b.send(b.inp[:], b.root)
        return
    b.copy(b.out[:], b.inp[:])
    for peer in peers(b):
        b.rred(b.out[:], peer)


@algorithm("bcast", "direct", complexity=10, latency=True)
def bcast(b: Builder) -> None:
    """The root sends its vector to everyone."""
    b.blocks(1)
    if b.rank == b.root:
        b.copy(b.out[:], b.inp[:])
        send_to_all(b, b.inp[:])
    else:
        b.recv(b.out[:], b.root)


@algorithm("allgather", "direct", complexity=10, latency=True, bandwidth=True)
def allgather(b: Builder) -> None:
    """Everyone sends its block to everyone."""
    b.copy(b.out[b.rank], b.inp[0])
    gather_all_blocks(b, b.out)


@algorithm("reduce_scatter", "direct", complexity=10, latency=True, bandwidth=True)
def reduce_scatter(b: Builder) -> None:
    """Everyone sends block j to rank j, which adds the P blocks in rank order."""
    reduce_own_block(b, b.inp, b.out[0])


@algorithm("alltoall", "direct", complexity=10, latency=True, bandwidth=True)
def alltoall(b: Builder) -> None:
    """Everyone sends block j to rank j."""
    # Received blocks wait in scratch until the input's block has left: in place, two
    # ranks would otherwise wait for each other.
    arrived = b.tmp(b.size)
    for peer in peers(b):
        b.send(b.inp[peer], peer)
    b.copy(b.out[b.rank], b.inp[b.rank])
    for peer in peers(b):
        b.recv(arrived[peer], peer)
        b.copy(b.out[peer], arrived[peer])


@algorithm("gather", "direct", complexity=10, latency=True, bandwidth=True)
def gather(b: Builder) -> None:
    """Everyone sends its block to the root."""
    if b.rank != b.root:
        b.send(b.inp[0], b.root)
        return
    b.copy(b.out[b.rank], b.inp[0])
    for peer in peers(b):
        b.recv(b.out[peer], peer)


@algorithm("scatter", "direct", complexity=10, latency=True, bandwidth=True)
def scatter(b: Builder) -> None:
    """The root sends each rank its block."""
    if b.rank != b.root:
        b.recv(b.out[0], b.root)
        return
    for peer in peers(b):
        b.send(b.inp[peer], peer)
    b.copy(b.out[0], b.inp[b.rank])


@algorithm("barrier", "direct", complexity=10, latency=True, bandwidth=True)
def barrier(b: Builder) -> None:
    """Everyone tells everyone that it has arrived."""
    send_to_all(b, b.inp[0])
    b.copy(b.out[0], b.inp[0])
    for peer in peers(b):
        b.rred(b.out[0], peer)


def _send_up(b: Builder) -> None:
    """Send the whole vector to every rank above this one."""
    for peer in range(b.rank + 1, b.size):
        b.send(b.inp[:], peer)


def _scan_blocks(b: Builder, *, inclusive: bool) -> None:
    """Add up block r of all ranks on rank r, which sends each rank its sum."""
    added = range(b.size if inclusive else b.size - 1)
    for peer in peers(b) if b.rank in added else ():
        b.send(b.inp[peer], peer)
    # The same place everywhere: another block could have another length. Two places for
    # sums, so that a rank's share is received whether or not it has taken the last sum.
    even, odd, arrived = (b.tmp(b.size)[b.rank] for _ in range(3))
    # In place, an exscan's result would overwrite this rank's share too early.
    own = b.out[b.rank] if inclusive else b.tmp(b.size)[b.rank]
    for rank in added:
        total, before = (odd, even) if rank % 2 else (even, odd)
        _add_share(b, total, before, arrived, rank)
        heir = rank if inclusive else rank + 1
        if heir == b.rank:
            b.copy(own, total)
        else:
            b.send(total, heir)
    if inclusive or b.rank:
        b.copy(b.out[b.rank], own)
        for peer in peers(b):
            b.recv(b.out[peer], peer)


def _add_share(
    b: Builder, total: Slice, before: Slice, arrived: Slice, rank: int
) -> None:
    """Put the sum ``before`` and what ``rank`` has of the same block into ``total``."""
    if rank > b.rank:
        b.rred(total, rank, src=before)
        return
    share = b.inp[rank]
    if rank < b.rank:
        # Reduced as it comes, a lower rank's share would go before the sum.
        share = arrived if rank else total
        b.recv(share, rank)
    if rank:
        b.copy(total, before)
        b.reduce(total, share)
    elif b.rank == 0:
        b.copy(total, share)


@algorithm(
    "scan",
    "direct",
    complexity=10,
    params={"shots": (1, 2)},
    latency=True,
    bandwidth=True,
    ordered=True,
)
def scan(b: Builder) -> None:
    """Whole vectors to all above (1 shot), or blocks and then their sums (2)."""
    if b.params["shots"] == 2:
        _scan_blocks(b, inclusive=True)
        return
    b.blocks(1)
    _send_up(b)
    total = b.tmp(1)
    b.copy(total[:], b.inp[:])
    for peer in reversed(range(b.rank)):
        b.rred(total[:], peer)
    b.copy(b.out[:], total[:])


@algorithm(
    "exscan",
    "direct",
    complexity=10,
    params={"shots": (1, 2)},
    latency=True,
    bandwidth=True,
    ordered=True,
)
def exscan(b: Builder) -> None:
    """Like scan, without this rank's own vector."""
    if b.params["shots"] == 2:
        _scan_blocks(b, inclusive=False)
        return
    b.blocks(1)
    _send_up(b)
    if b.rank:
        total = b.tmp(1)
        b.recv(total[:], b.rank - 1)
        for peer in reversed(range(b.rank - 1)):
            b.rred(total[:], peer)
        b.copy(b.out[:], total[:])
