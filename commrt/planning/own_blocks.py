# SPDX-License-Identifier: Apache-2.0
"""Schedules of gathers that leave this rank's own block of the output as it is.

The input of a gather may be this rank's block of the output: then the result is there
already. A schedule that writes that block only by copying the input there finds the
input whole at any time, though both are the same memory. The engine leaves out the
copy. A schedule that stores other values there for a while, or receives the block from
another rank, needs an input apart.
"""

from __future__ import annotations

from functools import lru_cache

from commrt.planning.footprint import Own
from commrt.planning.host_plans import lowered_program, node_numbers, split_params
from commrt.planning.spec import PlanSpec, Ranks
from commrt.schedule.lower import LOCAL, Lowered
from commrt.schedule.nodes import Nodes

__all__ = ["keeps_own_block", "leaves_own_block"]

_IN, _OUT = 0, 1
"""Numbers of the spaces of the user's arrays."""


def keeps_own_block(comm: Ranks, spec: PlanSpec) -> bool:
    """Return whether this rank's program of a gather leaves its own block as it is.

    The answer holds for all lengths.
    """
    own, _ = split_params(spec.candidate.params)
    return _keeps(
        spec.op.name,
        spec.candidate.algorithm,
        spec.root,
        tuple(sorted(own.items())),
        node_numbers(comm),
        comm.rank,
    )


@lru_cache(maxsize=1024)
def _keeps(
    coll: str, algorithm: str, root: int, params: Own, nodes: Nodes, rank: int
) -> bool:
    return leaves_own_block(lowered_program(coll, algorithm, root, params, nodes, rank))


def leaves_own_block(lowered: Lowered) -> bool:
    """Return whether a rank's program of a gather copies its input into its block.

    And writes nothing else there. A block of the output may be several of the
    program's, as many as the input has.
    """
    share = lowered.spaces[_IN].nblk
    first = lowered.rank * share
    for index in range(len(lowered)):
        inputs = lowered.inputs_of(index)
        for kind, space, lo, hi in lowered.outputs_of(index):
            is_elsewhere = hi <= first or first + share <= lo
            if kind != LOCAL or space != _OUT or is_elsewhere:
                continue
            if inputs != [(LOCAL, _IN, lo - first, hi - first)]:
                return False
    return True
