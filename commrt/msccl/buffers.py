# SPDX-License-Identifier: Apache-2.0
"""Buffers of MSCCL as spaces of a schedule: where chunk k of ``i``, ``o`` and ``s`` is.

A chunk is a block, so the blocks of all spaces have one length. Out of place, ``i`` is
``in`` and ``o`` is ``out``. In place the two share memory: the schedule first copies
the input there, and both names mean the copy. An allgather's input is its own share of
the output, and a reduce_scatter's output is its own share of the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from commrt.msccl.document import Algorithm, Buffer, Chunks
from commrt.schedule.ir import Slice, Space
from commrt.vocabulary.operations import operation

__all__ = ["Layout", "layout_of"]

_IN, _OUT = 0, 1


@dataclass(frozen=True)
class Layout:
    """The spaces of one rank, and where its buffers lie in them."""

    spaces: tuple[Space, ...]
    first: dict[Buffer, tuple[int, int]]
    """Space and block of the first chunk of each buffer."""
    before: tuple[tuple[Slice, Slice], ...]
    """Copies before the first step: source and destination."""
    behind: tuple[tuple[Slice, Slice], ...]
    """Copies behind the last step."""
    passing: int
    """The space of sums that are sent on and not kept."""

    def place(self, chunks: Chunks) -> Slice:
        """Return the blocks of some chunks."""
        space, block = self.first[chunks.buffer]
        return Slice(space, block + chunks.lo, block + chunks.lo + chunks.num)


def layout_of(
    algorithm: Algorithm, rank: int, root: int, in_place: bool, num_passing: int
) -> Layout:
    """Return the spaces of a rank.

    Args:
        algorithm: what the file says.
        rank: whose spaces.
        root: of a rooted operation.
        in_place: True for calls whose input and output share memory.
        num_passing: chunks of sums that are sent on and not kept.
    """
    whole, size = algorithm.num_chunks, len(algorithm.gpus)
    spec, share = operation(algorithm.coll), algorithm.num_chunks // size
    gathers, scatters = spec.out_count == "times_size", spec.out_count == "div_size"
    has_in = spec.input_on == "all" or rank == root
    has_out = spec.output_on == "all" or rank == root
    num_in = (share if gathers else whole) if has_in else 0
    num_out = (share if scatters else whole) if has_out else 0
    alias = "in" if in_place and spec.in_place and num_in and num_out else None
    spaces = [
        Space("in", "in", num_in, _part(num_in, whole)),
        Space("out", "out", num_out, _part(num_out, whole), alias=alias),
    ]
    for num in (algorithm.gpus[rank].scratch, num_passing):
        spaces.append(Space(f"tmp{len(spaces) - 2}", "tmp", num, _part(num, whole)))
    first: dict[Buffer, tuple[int, int]] = {"i": (_IN, 0), "o": (_OUT, 0), "s": (2, 0)}
    before, behind = [], []
    if in_place and scatters:
        full = len(spaces)
        spaces.append(Space(f"tmp{full - 2}", "tmp", whole, (1, 1)))
        own = Slice(full, rank * share, (rank + 1) * share)
        first["i"], first["o"] = (full, 0), (full, rank * share)
        before = [(Slice(_IN, 0, whole), Slice(full, 0, whole))]
        behind = [(own, Slice(_OUT, 0, share))]
    elif in_place and has_out:
        first["i"] = (_OUT, rank * share if gathers else 0)
        if has_in:
            begin = first["i"][1]
            before = [(Slice(_IN, 0, num_in), Slice(_OUT, begin, begin + num_in))]
    return Layout(tuple(spaces), first, tuple(before), tuple(behind), passing=3)


def _part(num: int, whole: int) -> tuple[int, int]:
    part = Fraction(num, whole)
    return part.numerator, part.denominator
