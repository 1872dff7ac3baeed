# SPDX-License-Identifier: Apache-2.0
"""Schedules by the names that the shell is given: algorithms, and files of MSCCL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from commrt import algorithms
from commrt.commands.verify import load
from commrt.errors import UsageError
from commrt.msccl.document import read_msccl
from commrt.msccl.schedules import forms_of, from_msccl, verify_msccl
from commrt.schedule.ir import ParamValue, Schedule
from commrt.schedule.nodes import Nodes
from commrt.schedule.verify import verify
from commrt.vocabulary.operations import operation

__all__ = ["imported", "is_file", "named_schedule"]


def is_file(name: str) -> bool:
    """Return whether a name is that of a file of MSCCL."""
    return name.endswith(".xml")


def imported(name: str) -> str:
    """Import ``path.py:name`` or ``module:name``; return the name to ask for."""
    return name if is_file(name) else load(name)


def named_schedule(
    name: str,
    coll: str,
    size: int,
    root: int,
    params: Mapping[str, ParamValue],
    nodes: Nodes,
) -> tuple[Schedule, Callable[[], object]]:
    """Return a schedule, and the call that proves it right.

    Args:
        name: an algorithm, or a file of MSCCL that is for this operation and so many
            ranks. Of a file for calls in place and out of place, take the first.
        coll: the operation.
        size: number of ranks.
        root: of a rooted operation.
        params: the algorithm's parameters.
        nodes: the node of each rank, for algorithms that ask.

    Raises:
        UsageError: the file is for something else.
        ScheduleError: the file is wrong, found without a proof.
    """
    root = root if operation(coll).has_root else 0
    if is_file(name):
        algorithm = read_msccl(Path(name))
        if (algorithm.coll, len(algorithm.gpus)) != (coll, size):
            raise UsageError(
                f"{name} is an {algorithm.coll} of {len(algorithm.gpus)} ranks; asked "
                f"for is {coll} of {size}. Give --coll {algorithm.coll} --ranks "
                f"{len(algorithm.gpus)}"
            )
        made = from_msccl(algorithm, in_place=forms_of(algorithm)[0], root=root)
        return made.schedule, partial(verify_msccl, made)
    where = nodes if algorithms.get(coll, name).spans_nodes else None
    schedule = algorithms.schedule(coll, name, size, root, params, where)
    return schedule, partial(verify, schedule)
