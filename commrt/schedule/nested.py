# SPDX-License-Identifier: Apache-2.0
"""An operation within another one: any algorithm, among some ranks, on their blocks.

The author of the inner algorithm sees a builder like any other: ranks from 0, blocks of
``inp`` and ``out``, scratch. They are blocks of the outer program: ``blocks(n)`` cuts
what the inner operation works on, which may be more or fewer blocks than n, so some of
the n may be longer than others, and some empty. All ranks cut alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commrt.errors import ScheduleError
from commrt.schedule.builder import Buffer, Builder
from commrt.schedule.ir import Slice
from commrt.vocabulary.operations import operation

__all__ = ["Nested"]

Piece = tuple[int, int]


class _View:
    """The blocks that the inner operation works on.

    Args:
        coll: the inner operation.
        inp: the blocks of the send buffer; one piece per block of the operation.
        out: the same of the receive buffer; each is empty where a rank has none.
    """

    def __init__(self, coll: str, inp: Sequence[Slice], out: Sequence[Slice]) -> None:
        spec = operation(coll)
        self.per_rank = spec.is_blocked
        self.inp, self.out = tuple(inp), tuple(out)
        full = inp if spec.out_count == "div_size" or not out else out
        self.full = tuple((one.lo, one.hi) for one in full)
        self.cuts = 1
        """Into how many each piece is cut."""
        self.num = len(self.full)


class Nested(Builder):
    """Records an operation among ``ranks`` of the outer builder into its program."""

    def __init__(
        self, outer: Builder, ranks: Sequence[int], root: int, params: Mapping[str, Any]
    ) -> None:
        super().__init__(outer.recorder, outer.group_of(ranks), params, root)
        self._view: _View
        self._buffers: dict[int, Buffer] = {}

    @classmethod
    def of(
        cls,
        outer: Builder,
        coll: str,
        ranks: Sequence[int],
        *,
        inp: Sequence[Slice],
        out: Sequence[Slice],
        root: int,
        params: Mapping[str, Any],
    ) -> Nested:
        """Return the builder of operation ``coll`` among ``ranks`` of ``outer``.

        Args:
            outer: the operation that this one is a part of.
            coll: the operation.
            ranks: who takes part; this rank must.
            inp: its send buffer: one slice, or one per rank where the operation has a
                block per rank. None of them where this rank has no such buffer.
            out: its receive buffer, likewise.
            root: place of the root among ``ranks``.
            params: of the algorithm that will be recorded.
        """
        made = cls(outer, ranks, root, params)
        made._view = _View(coll, inp, out)
        if not made._view.per_rank:
            made.blocks(made.size)
        return made

    @property
    def nblk(self) -> int:
        """Blocks that the inner operation's full vector is cut into."""
        return self._view.num * self._view.cuts

    def blocks(self, nblk: int) -> None:
        """Cut what the inner operation works on into ``nblk`` blocks."""
        if nblk % self._view.num:
            raise ScheduleError(
                f"blocks({nblk}) within another operation: its {self._view.num} "
                f"pieces are not {nblk} blocks; expected a multiple of "
                f"{self._view.num}"
            )
        self._view.cuts = nblk // self._view.num
        self._buffers.clear()

    def _user(self, space: int) -> Buffer:
        if space not in self._buffers:
            self._buffers[space] = self._made_user(space)
        return self._buffers[space]

    def _made_user(self, space: int) -> Buffer:
        name, slices = (("in", self._view.inp), ("out", self._view.out))[space]
        if not slices:
            return Buffer(space, 0, 0, 1, name)
        pieces = self._cut([(one.lo, one.hi) for one in slices])
        return Buffer(slices[0].space, 0, len(pieces), 1, name, pieces)

    def _cut(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        cuts = self._view.cuts
        if cuts == 1:
            return tuple(pieces)
        return tuple(
            (lo + i * (hi - lo) // cuts, lo + (i + 1) * (hi - lo) // cuts)
            for lo, hi in pieces
            for i in range(cuts)
        )

    def tmp(self, nblk: int, scale: tuple[int, int] | None = None) -> Buffer:
        """Return new scratch of ``nblk`` blocks, as long as those of the operation."""
        if scale is not None:
            raise ScheduleError(
                f"tmp({nblk}, scale={scale}): scratch within another operation has no "
                f"scale; leave it out"
            )
        pieces = self._cut(self._view.full)
        widths = {hi - lo for lo, hi in pieces}
        if self._view.per_rank and len(widths) == 1:
            width = widths.pop()
            space = super().tmp(max(1, nblk * width)).space
            same = tuple((i * width, (i + 1) * width) for i in range(nblk))
            return Buffer(space, 0, nblk, 1, "scratch", same)
        if nblk % len(pieces):
            raise ScheduleError(
                f"scratch of {nblk} blocks for {len(pieces)} of different lengths; "
                f"expected a multiple of {len(pieces)}"
            )
        # At the place of the operation's own blocks: another one may be longer.
        whole = self.recorder.nblk
        if self._view.per_rank:
            whole = max(1, *(hi for _, hi in pieces))
        copies = nblk // len(pieces)
        space = super().tmp(copies * whole).space
        spread = tuple(
            (copy * whole + lo, copy * whole + hi)
            for copy in range(copies)
            for lo, hi in pieces
        )
        return Buffer(space, 0, nblk, 1, "scratch", spread)

    def copy(self, dst: Slice, src: Slice) -> int:
        """Copy locally, unless the operation works in place."""
        return -1 if dst == src else super().copy(dst, src)

    def _among(self, ranks: tuple[int, ...], root: int) -> Builder:
        made = Nested.__new__(Nested)
        Builder.__init__(made, self.recorder, ranks, self.params, root)
        made._view, made._buffers = self._view, self._buffers
        return made
