# SPDX-License-Identifier: Apache-2.0
"""Other ways for a schedule's messages to cross shared memory, for the tuner to try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from commrt import algorithms
from commrt.planning.footprint import LANE_NBYTES, footprint
from commrt.planning.host_plans import INLINE_NBYTES, TransportParams, split_params
from commrt.schedule.nodes import Nodes
from commrt.select.facts import Candidate, ParamValue
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import operation

__all__ = ["transport_variants"]

_CHUNKS = (65536, 131072, 262144, 524288)
_BY_FRAGMENT: tuple[dict[str, ParamValue], ...] = (
    {"depth": 4},
    {"reuse": 1},
    {"reuse": 2},
    {"reuse": 4},
)
_STREAMED_FROM_NBYTES = 384 << 10
"""First size at which stores are tried. Below it, caches keep the written data, and the
choice that ranks learn by themselves is right."""
_SPINS = (0, 4)
_YIELDS_SHOW_NBYTES = 1 << 19
"""Size beyond which the switch from one rank to the next is a small part of the
time."""


def transport_variants(
    coll: str,
    candidate: Candidate,
    size: int,
    full_nbytes: int,
    dtype: str,
    *,
    thorough: bool = True,
    crowded: bool = False,
    nodes: Nodes | None = None,
) -> list[Candidate]:
    """Return ``candidate`` with one parameter of the transport changed at a time.

    ``full_nbytes`` is the operation's full vector; ``crowded``: ranks outnumber cores.
    Unless ``thorough``, only what has been seen to matter: the chunk, stores of long
    vectors, and how soon a rank of a crowd yields. Left out is what would
    run the same: chunks that cut messages into as many fragments, or how fragments
    overlap where there is only one.
    """
    if not algorithms.exists(coll, candidate.algorithm):
        return []
    own, transport = split_params(candidate.params)
    if transport != TransportParams():
        return []
    itemsize = dtype_by_name(dtype).itemsize
    num_elements = full_nbytes // itemsize
    bound = footprint(
        coll, candidate.algorithm, size, 0, tuple(sorted(own.items())), nodes
    )

    def fragments(chunk: int) -> int:
        return bound.fragments(num_elements, itemsize, chunk, LANE_NBYTES)

    least, most = INLINE_NBYTES

    def other_inlines() -> Iterator[int]:
        parts = fragments(bound.chunk_nbytes(transport.chunk))
        # An upper bound, rounded up to whole lines.
        longest = bound.largest_nbytes(num_elements, itemsize, parts) - least
        if longest < most:
            yield least
        if transport.most_inline(operation(coll).reduces) <= longest < most:
            yield most

    def changes() -> Iterator[Mapping[str, ParamValue]]:
        by_default = fragments(bound.chunk_nbytes(transport.chunk))
        seen = {by_default}
        yield from ({"chunk": c} for c in _CHUNKS if _is_new(fragments(c), seen))
        if thorough and by_default > 1:
            yield from _BY_FRAGMENT
        if thorough and full_nbytes > least:
            yield from ({"inline": nbytes} for nbytes in other_inlines())
        if full_nbytes >= _STREAMED_FROM_NBYTES:
            yield {"store": "stream"}
            yield {"store": "stream_both"}
        if crowded and full_nbytes <= _YIELDS_SHOW_NBYTES:
            yield from ({"spins": looks} for looks in _SPINS[: None if thorough else 1])

    return [
        Candidate(candidate.backend, candidate.algorithm, {**own, **change})
        for change in changes()
    ]


def _is_new(value: int, seen: set[int]) -> bool:
    if value in seen:
        return False
    seen.add(value)
    return True
