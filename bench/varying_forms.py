# SPDX-License-Identifier: Apache-2.0
"""The calls that the benchmark of new lengths makes, and the operation of each."""

from __future__ import annotations

from dataclasses import replace

from commrt.vocabulary.operations import OPERATIONS, OpSpec, operation

__all__ = [
    "AT_ONCE",
    "FORMS",
    "HALO",
    "MESSAGES",
    "NEIGHBORS",
    "REDISTRIBUTED",
    "SPARSE",
    "WITH_LISTS",
    "fills_its_input",
    "works_in_place",
]

HALO, SPARSE, MESSAGES = "halo_exchange", "sparse_allreduce", "multi_sendrecv"
NEIGHBORS, REDISTRIBUTED = "neighbor_allgather", "redistribute"
_OF_TORCH = {
    "allgather of a list": "allgather",
    "alltoall of a list": "alltoallv",
    "reduce_scatter of a list": "reduce_scatter",
}
AT_ONCE = {
    f"{name} at once": name for name in ("allreduce", "allgather", "reduce_scatter")
}
"""Forms of three calls, which commrt fuses and torch coalesces."""
FORMS: dict[str, OpSpec] = {
    **{spec.name: spec for spec in OPERATIONS if not spec.is_empty},
    **{form: operation(name) for form, name in _OF_TORCH.items()},
    **{form: operation(name) for form, name in AT_ONCE.items()},
    MESSAGES: replace(operation("alltoallv"), name=MESSAGES),
    # These two change one array in place, as allreduce does.
    SPARSE: replace(operation("allreduce"), name=SPARSE),
    HALO: replace(operation("allreduce"), name=HALO, reduces=False),
    NEIGHBORS: replace(operation("allgather"), name=NEIGHBORS),
    # Rows become columns, of as many as there are ranks: as much as in an alltoall.
    REDISTRIBUTED: replace(operation("alltoall"), name=REDISTRIBUTED),
}
"""All of them, by name."""
WITH_LISTS = ("gather", "scatter", "allgatherv", "reduce_scatterv", *_OF_TORCH)
"""Forms for which torch takes a list of tensors."""


def works_in_place(spec: OpSpec) -> bool:
    """Return whether an operation's calls work in place here, as torch's do."""
    return spec.in_place and not spec.by_pair and not spec.combines_some


def fills_its_input(spec: OpSpec) -> bool:
    """Return whether ranks without an input give the array that the result is put into.

    A broadcast does.
    """
    return works_in_place(spec) and spec.input_on == "root"
