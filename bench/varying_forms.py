# SPDX-License-Identifier: Apache-2.0
"""The calls that the benchmark of new lengths makes, and the operation of each."""

from __future__ import annotations

from dataclasses import replace

from commrt.vocabulary.operations import OPERATIONS, OpSpec, operation

__all__ = ["FORMS", "HALO", "IN_PLACE", "MESSAGES", "SPARSE", "WITH_LISTS"]

HALO, SPARSE, MESSAGES = "halo_exchange", "sparse_allreduce", "multi_sendrecv"
_OF_TORCH = {
    "allgather of a list": "allgather",
    "alltoall of a list": "alltoallv",
    "reduce_scatter of a list": "reduce_scatter",
}
FORMS: dict[str, OpSpec] = {
    **{spec.name: spec for spec in OPERATIONS if not spec.is_empty},
    **{form: operation(name) for form, name in _OF_TORCH.items()},
    "allreduce at once": operation("allreduce"),
    "allgather at once": operation("allgather"),
    "reduce_scatter at once": operation("reduce_scatter"),
    MESSAGES: replace(operation("alltoallv"), name=MESSAGES),
    # What these two change lies in one array, as in allreduce.
    SPARSE: replace(operation("allreduce"), name=SPARSE),
    HALO: replace(operation("allreduce"), name=HALO, reduces=False),
}
"""By name. ``at once``: three calls, fused or coalesced."""
WITH_LISTS = ("gather", "scatter", "allgatherv", "reduce_scatterv", *_OF_TORCH)
"""Forms for which torch takes a list of tensors."""
IN_PLACE = ("allreduce", "reduce", "bcast", SPARSE, HALO)
"""Operations whose calls work in place."""
