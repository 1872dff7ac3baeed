# SPDX-License-Identifier: Apache-2.0
"""Calls that move boxes of device arrays without a plan at hand, and block no host.

What leaves, what comes and what is launched follows from a rank's own arguments. What
the others pass matters only as far as it has to fit, and that is compared on the way: a
word for each fact travels with the call (``StagedAgreement`` in
``native/device_calls/staged_plan.hpp``), and no message leaves before all ranks are
known to agree. So a rank whose arguments are new plans alone, beside ranks whose are
not. The first call of an operation is compared in full before anything is given, which
names the ranks that differ. By NCCL nothing waits for the host, and nothing is compared
behind the first call, as in all calls by NCCL. In check mode each call is compared
before anything is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt import _native
from commrt.boxes.device_plans import DeviceBoxes
from commrt.calls import arguments
from commrt.vocabulary.operations import operation

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["Facts", "agreement", "boxes_for"]

Facts = Mapping[str, Any]
"""What ranks are to agree on, by its name; None is what a rank knows nothing of. Names
and their order are equal on all ranks."""

_MOST_PLANS = 1024


def boxes_for(
    comm: Communicator,
    what: str,
    mine: tuple[Any, ...],
    facts: Callable[[], Facts],
    *,
    compare: Callable[[], DeviceBoxes],
    make: Callable[[], DeviceBoxes],
) -> tuple[DeviceBoxes, bool]:
    """Return the plan of a call, and whether the call itself has to compare.

    Args:
        comm: the communicator.
        what: the operation.
        mine: all that this rank's plan depends on.
        facts: returns what is to fit.
        compare: compares in full and plans; collective.
        make: plans, without the other ranks.
    """
    if comm.checker is not None:  # which names all ranks' arguments
        return compare(), False
    kept: dict[Any, DeviceBoxes] = comm._kept_boxes
    # Equal on all ranks, as they make the same calls.
    is_first = what not in comm._compared_boxes
    key = what, repr(mine)
    found = kept.get(key)
    if found is not None:
        return found, True
    boxes = compare() if is_first else make()
    comm._compared_boxes.add(what)
    boxes.agree_on(*agreement(comm, {"the operation": what, **facts()}))
    if len(kept) >= _MOST_PLANS:
        kept.clear()
    kept[key] = boxes
    return boxes, not is_first


def agreement(
    comm: Communicator, facts: Facts
) -> tuple[_native.Plan, list[int], list[str]]:
    """Return what the host runs, the words, and what they stand for."""
    words = [_word(fact) for fact in facts.values()]
    return _maximum(comm, 2 * len(words)), words, list(facts)


def _word(fact: Any) -> int:
    if fact is None:
        return 0
    digest = blake2b(repr(fact).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _maximum(comm: Communicator, length: int) -> _native.Plan:
    """Return the plan of a maximum of so many words, by a schedule.

    Ranks make it at different calls, so nothing that they would make together.
    """
    x = np.zeros(length, np.uint64)
    call = arguments.parse(operation("allreduce"), (x,), {"op": "max"})
    bound = arguments.bind(call, comm.rank, comm.size)
    if comm._choose(call, bound).algorithm == "native":
        call = replace(call, algorithm="recursive_doubling")
    plan: _native.Plan = comm._plan(call, bound)
    return plan
