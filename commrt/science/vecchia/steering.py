# SPDX-License-Identifier: Apache-2.0
"""A search that one rank steers, and whose function all ranks compute together.

Rank 0 alone runs the search and decodes its points, and tells the others the numbers.
So ranks on different processors, which round differently, never take different ways.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from commrt.comm import Communicator
from commrt.science.rows import Floats
from commrt.science.vecchia.quasi_newton import Minimum, Search

__all__ = ["steered"]

_GO_ON, _STOPPED, _CONVERGED = 0.0, 1.0, 2.0


def steered(
    search: Search,
    decode: Callable[[Floats], Floats],
    evaluate: Callable[[Floats], tuple[float, Floats]],
    num_numbers: int,
    comm: Communicator,
) -> Minimum:
    """Return the minimum that rank 0's search finds, decoded; collective.

    Args:
        search: used on rank 0 alone.
        decode: returns the numbers of a point of the search; used on rank 0 alone.
        evaluate: returns value and gradient, by the search's numbers, at a decoded
            point; collective, and the same on all ranks.
        num_numbers: of a point.
        comm: the ranks.

    Bytes: a bcast of 8 (numbers + 3) for each point, and one more at the end.
    """
    command = np.empty(num_numbers + 3)
    answer: tuple[float, Floats] | None = None
    while True:
        if comm.rank == 0:
            command[:] = _next(search, decode, answer)
        if comm.size > 1:
            comm.bcast(command, 0)
        state, value, num_steps = command[:3].tolist()
        point = command[3:].copy()
        if state != _GO_ON:
            return Minimum(point, value, int(num_steps), state == _CONVERGED)
        answer = evaluate(point)


def _next(
    search: Search,
    decode: Callable[[Floats], Floats],
    answer: tuple[float, Floats] | None,
) -> list[float]:
    """Return what rank 0 tells the others: state, value, steps and decoded point."""
    try:
        point = next(search) if answer is None else search.send(answer)
    except StopIteration as stop:
        found: Minimum = stop.value
        state = _CONVERGED if found.has_converged else _STOPPED
        return [state, found.value, found.num_steps, *decode(found.point)]
    return [_GO_ON, 0.0, 0.0, *decode(point)]
