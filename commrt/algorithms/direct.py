# SPDX-License-Identifier: Apache-2.0
"""Direct: every rank sends straight to every other; one step, P-1 messages per rank.

*Allreduce, shots=1*: everyone sends its whole vector to everyone and adds the P vectors
in rank order. *shots=2*: everyone sends block j to rank j, which adds P blocks in rank
order and sends the sum to everyone. The other operations are what their definitions
say. In step t rank r talks to rank r+t, so that no rank is everybody's next peer.

Cost on one port: allreduce (P-1)(alpha + N beta + N gamma) with one shot, 2(P-1) alpha
+ 2(P-1)/P N beta + (P-1)/P N gamma with two; allgather, reduce_scatter and alltoall
(P-1) alpha + (P-1)/P N beta. In shared memory the P-1 messages go out at once: latency
of one message per shot, and no rank copies data for others, so it is also bandwidth-
optimal there (two shots).

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
    "allreduce", "direct", params={"shots": (1, 2)}, latency=True, bandwidth=True
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


@algorithm("reduce", "direct", latency=True)
def reduce(b: Builder) -> None:
    """Everyone sends its vector to the root, which adds them in rank order."""
    b.blocks(1)
    if b.rank != b.root:
        b.send(b.inp[:], b.root)
        return
    b.copy(b.out[:], b.inp[:])
    for peer in peers(b):
        b.rred(b.out[:], peer)


@algorithm("bcast", "direct", latency=True)
def bcast(b: Builder) -> None:
    """The root sends its vector to everyone."""
    b.blocks(1)
    if b.rank == b.root:
        b.copy(b.out[:], b.inp[:])
        send_to_all(b, b.inp[:])
    else:
        b.recv(b.out[:], b.root)


@algorithm("allgather", "direct", latency=True, bandwidth=True)
def allgather(b: Builder) -> None:
    """Everyone sends its block to everyone."""
    b.copy(b.out[b.rank], b.inp[0])
    gather_all_blocks(b, b.out)


@algorithm("reduce_scatter", "direct", latency=True, bandwidth=True)
def reduce_scatter(b: Builder) -> None:
    """Everyone sends block j to rank j, which adds the P blocks in rank order."""
    reduce_own_block(b, b.inp, b.out[0])


@algorithm("alltoall", "direct", latency=True, bandwidth=True)
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


@algorithm("gather", "direct", latency=True, bandwidth=True)
def gather(b: Builder) -> None:
    """Everyone sends its block to the root."""
    if b.rank != b.root:
        b.send(b.inp[0], b.root)
        return
    b.copy(b.out[b.rank], b.inp[0])
    for peer in peers(b):
        b.recv(b.out[peer], peer)


@algorithm("scatter", "direct", latency=True, bandwidth=True)
def scatter(b: Builder) -> None:
    """The root sends each rank its block."""
    if b.rank != b.root:
        b.recv(b.out[0], b.root)
        return
    for peer in peers(b):
        b.send(b.inp[peer], peer)
    b.copy(b.out[0], b.inp[b.rank])


@algorithm("barrier", "direct", latency=True, bandwidth=True)
def barrier(b: Builder) -> None:
    """Everyone tells everyone that it has arrived."""
    send_to_all(b, b.inp[0])
    b.copy(b.out[0], b.inp[0])
    for peer in peers(b):
        b.rred(b.out[0], peer)
