# SPDX-License-Identifier: Apache-2.0
"""Neighbor exchange: ranks swap with the two neighbours in turn; half a ring's steps.

First the ranks 2i and 2i+1 swap blocks, so each has the pair i. Then every rank swaps
with its other neighbour, then with the first again, and so on: each time it sends the
pair that it received last and gets another one. After P/2 swaps all have all pairs.

For an even number of ranks only. On an odd number the ranks cannot pair up: there the
algorithm does not exist (a call that names it raises UsageError; `bidirectional_ring`
has as many steps and takes any number).

Cost: P/2 alpha + (P-1)/P N beta.

Chen, Zhang, Zhang and Yuan, "Performance evaluation of allgather algorithms on
terascale Linux cluster with fast Ethernet", HPC Asia 2005.
"""

from __future__ import annotations

from commrt.algorithms._registry import algorithm
from commrt.schedule.builder import Builder


@algorithm(
    "allgather",
    "neighbor_exchange",
    complexity=80,
    supports=lambda size: size % 2 == 0,
    bandwidth=True,
)
def allgather(b: Builder) -> None:
    """Swap what came last with the neighbours in turn."""
    towards = 1 if b.rank % 2 == 0 else -1
    pairs = b.out.grouped(b.size // 2)
    own = b.rank // 2
    b.copy(b.out[b.rank], b.inp[0])
    b.send(b.out[b.rank], b.rank + towards)
    b.recv(b.out[b.rank + towards], b.rank + towards)
    latest = own
    for step in range(1, b.size // 2):
        peer = b.rank + (towards if step % 2 == 0 else -towards)
        # Pairs come from farther and farther away, from the two sides in turn.
        away = (step + 1) // 2
        arriving = own + (away if step % 2 == 0 else -away) * towards
        b.send(pairs[latest], peer)
        b.recv(pairs[arriving], peer)
        latest = arriving
