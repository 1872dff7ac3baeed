# SPDX-License-Identifier: Apache-2.0
"""Shifted halving-doubling: halving-doubling that spreads load over parallel links.

P = k S ranks sit on S switches with k ranks each; rank s k + j is the j-th of switch s.
1. In each switch the ranks reduce-scatter the vector directly: rank j gets block j.
2. For each j, the j-th ranks of all switches allreduce block j by halving-doubling, and
here is the shift: rank j visits the bits of the switch number in the order j, j+1, ...
(modulo their number). In plain halving-doubling all k ranks of a switch would use the
same link in a step; shifted, they use k different ones.
3. In each switch the ranks allgather the blocks directly.

Partners have the same j, hence the same order, hence hold the same range of blocks: for
one j this is ordinary halving-doubling with permuted bits. S that is no power of two
folds over neighbouring switches.

Cost for S a power of two: 2(log2 S + 1) alpha + 2(P-1)/P N beta + (P-1)/P N gamma, as
halving-doubling; the gain is in the load of the links between switches.

Nguyen and Wahib, "An Allreduce Algorithm and Network Co-design for Large-Scale Training
of Distributed Deep Learning" (CCGRID 2021), in a form valid for every k and S.
"""

from __future__ import annotations

from commrt.algorithms._fold import Fold
from commrt.algorithms._registry import algorithm
from commrt.algorithms.direct import gather_all_blocks, reduce_own_block
from commrt.algorithms.halving_doubling import double, halve
from commrt.schedule.builder import Builder


def ranks_per_switch(size: int) -> dict[str, tuple[int, ...]]:
    """Return the possible k; the default is the largest that is not above sqrt(P)."""
    divisors = [k for k in range(1, size + 1) if size % k == 0]
    default = max(k for k in divisors if k * k <= size)
    return {"k": (default, *(k for k in divisors if k != default))}


@algorithm(
    "allreduce",
    "shifted_halving_doubling",
    complexity=150,
    params=ranks_per_switch,
    bandwidth=True,
)
def allreduce(b: Builder) -> None:
    """Reduce-scatter in the switch, shifted halving-doubling across, allgather."""
    k = b.params["k"]
    s, j = divmod(b.rank, k)
    switch = b.sub(range(s * k, s * k + k))
    across = b.sub(range(j, b.size, k))
    fold = Fold(across)
    b.blocks(k * fold.num)
    blocks = b.out.grouped(k)
    b.copy(b.out[:], b.inp[:])
    reduce_own_block(switch, blocks, blocks[j])
    mine = blocks.part(j)
    if fold.folded:
        across.send(mine[:], s - 1)
        across.recv(mine[:], s - 1)
    else:
        if fold.folds:
            across.rred(mine[:], s + 1)
        group = fold.group()
        shifted = [(j + u) % fold.steps for u in range(fold.steps)]
        double(group, halve(group, mine, shifted))
        if fold.folds:
            across.send(mine[:], s + 1)
    gather_all_blocks(switch, blocks)
