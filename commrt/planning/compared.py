# SPDX-License-Identifier: Apache-2.0
"""A call tells the other ranks these numbers; they find by them that calls differ."""

from __future__ import annotations

from hashlib import blake2b

from commrt.planning.facts import number_of_facts
from commrt.planning.host_plans import split_params
from commrt.planning.spec import PlanSpec

__all__ = ["common_length", "facts_of"]

_OF_COUNTS = 1 << 63
"""As the engine marks a hash of counts (``native/engine/call_trail.hpp``)."""


def facts_of(spec: PlanSpec) -> int:
    """Return a number of how the call runs, equal where ranks run it alike.

    Of an alltoallv no rank knows what the others choose by. Parameters of the transport
    change lengths, which are compared, or nothing that others would see.
    """
    if spec.op.by_pair and spec.op.count_arguments:
        return 0
    own, _ = split_params(spec.candidate.params)
    user = None if spec.user is None else spec.user.reduction.label
    return number_of_facts(spec.candidate.algorithm, sorted(own.items()), user)


def common_length(spec: PlanSpec) -> int:
    """Return a number of the call's lengths, equal on all ranks; 0 where there is none.

    Where all ranks give the same counts, it is a hash of them.
    """
    if not spec.op.count_arguments:
        return spec.num_elements
    if spec.op.by_pair or spec.op.has_root:
        return 0
    digest = blake2b(repr(spec.counts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | _OF_COUNTS
