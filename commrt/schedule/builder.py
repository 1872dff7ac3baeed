# SPDX-License-Identifier: Apache-2.0
"""The authoring surface: what an algorithm's function is given as ``b``.

    def ring(b: Builder) -> None:
        b.copy(b.out[:], b.inp[:])
        for t in range(b.size - 1):
            b.send(b.out[b.rank - t - 1], b.rank + 1)
            b.rred(b.out[b.rank - t - 2], b.rank - 1)
        ...

Peers and block numbers wrap around. Steps may run in any order that their data allows:
the builder infers what must wait for what, and ``after`` adds what data does not say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from commrt import _native
from commrt.errors import ScheduleError
from commrt.schedule.dependencies import locations
from commrt.schedule.ir import (
    Op,
    ParamValue,
    RankProgram,
    Slice,
    Space,
    SpaceKind,
    StepTable,
    full_multiple,
)
from commrt.schedule.nodes import Nodes, members
from commrt.vocabulary.operations import operation

__all__ = ["Buffer", "Builder", "Recorder", "build_program"]

IN, OUT = 0, 1
_SEND, _RECV, _RRED, _RED, _COPY = Op
NO_STEP = -1
"""The value of a step on empty blocks."""
_new_slice: Callable[[type[Slice], tuple[int, int, int]], Slice] = tuple.__new__
"""Makes a Slice without the Python function that NamedTuple puts before it."""


@dataclass(frozen=True)
class Buffer:
    """Blocks of one space. ``buf[i]`` is block i (modulo their number), ``buf[lo:hi]``
    a range, ``buf[:]`` all of them."""

    space: int
    lo: int
    num: int
    """Number of blocks in this buffer."""
    group: int = 1
    """Number of blocks of the space in one block of this buffer."""
    name: str = ""
    pieces: tuple[tuple[int, int], ...] | None = None
    """Begin and end of unequal blocks, in blocks of the space; None: each is one block
    of the space. A block may be empty: then a step on it does nothing."""

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int | slice) -> Slice:
        # Most accesses name one block: they take the shortest way.
        if isinstance(index, slice):
            start, stop = self._range(index)
            group = self.group
            lo, hi = self.lo + start * group, self.lo + stop * group
        elif self.num:
            group = self.group
            lo = self.lo + index % self.num * group
            hi = lo + group
        else:
            raise ScheduleError(
                f"this rank has no {self.name!r} buffer: index it on the ranks that "
                f"have one, where len() is not 0"
            )
        if self.pieces is None:
            return _new_slice(Slice, (self.space, lo, hi))
        return self._joined(lo, hi)

    def _joined(self, lo: int, hi: int) -> Slice:
        """Return unequal blocks of the space that lie one behind the other."""
        assert self.pieces is not None
        if hi == lo + 1:
            lo, hi = self.pieces[lo]
        else:
            run = self.pieces[lo:hi]
            if any(one[1] != two[0] for one, two in pairwise(run)):
                raise ScheduleError(
                    f"blocks {lo} to {hi - 1} of {self.name} do not lie one "
                    f"behind the other: take them one by one"
                )
            lo, hi = run[0][0], run[-1][1]
        return Slice(self.space, lo, hi)

    def _range(self, index: slice) -> tuple[int, int]:
        start = 0 if index.start is None else index.start
        stop = self.num if index.stop is None else index.stop
        if index.step is not None or not 0 <= start < stop <= self.num:
            raise ScheduleError(
                f"{self.name}[{index.start}:{index.stop}] is not a range of its "
                f"{self.num} blocks; expected 0 <= start < stop <= {self.num}, and no "
                f"step"
            )
        return start, stop

    def grouped(self, num: int) -> Buffer:
        """Return the same blocks seen as ``num`` equal groups of blocks."""
        if num < 1 or self.num % num:
            raise ScheduleError(
                f"the {self.num} blocks of {self.name} do not make {num} equal groups; "
                f"expected a divisor of {self.num}"
            )
        return replace(self, num=num, group=self.group * self.num // num)

    def part(self, index: int) -> Buffer:
        """Return the blocks that make up group ``index``."""
        lo = self.lo + index % self.num * self.group
        return replace(self, lo=lo, num=self.group, group=1)


class Recorder:
    """The program under construction, shared by a builder and its groups."""

    def __init__(
        self, coll: str, rank: int, size: int, root: int, nodes: Nodes | None
    ) -> None:
        self.coll, self.rank, self.size, self.root = coll, rank, size, root
        self.all_ranks = _all_ranks(size)
        self.nodes = nodes
        self.nblk = 1 if operation(coll).x_count == "none" else size
        self.steps = StepTable()
        self.scratch: list[Space] = []
        self.record = self.steps.columns.record
        """Add a step: op, src, dst and peer; return its number."""
        self._use(self._made_user_spaces())

    def _use(self, user: tuple[Space, Space]) -> None:
        self._user = user
        self._buffers = tuple(
            Buffer(number, 0, space.nblk, 1, space.name)
            for number, space in enumerate(user)
        )
        self.steps.columns.place(locations(user))
        self._following = sum(space.nblk for space in user)

    def set_blocks(self, nblk: int) -> None:
        multiple = full_multiple(self.coll, self.size)
        if len(self.steps) or self.scratch:
            raise ScheduleError(
                f"blocks({nblk}) comes after a step or scratch: call blocks() before "
                f"the first step or scratch"
            )
        if nblk < 1 or nblk % multiple:
            raise ScheduleError(
                f"{self.coll} on {self.size} ranks: blocks({nblk}) is not a positive "
                f"multiple of {multiple}"
            )
        self.nblk = nblk
        self._use(self._made_user_spaces())

    def user_buffers(self) -> tuple[Buffer, ...]:
        """Return ``in`` and ``out`` as an author sees them."""
        return self._buffers

    def _made_user_spaces(self) -> tuple[Space, Space]:
        spec = operation(self.coll)
        if spec.is_empty:
            # A barrier is an allreduce of nothing: one block without elements.
            return Space("in", "in", self.nblk, (0, 1)), Space(
                "out", "out", self.nblk, (0, 1)
            )
        is_root = self.rank == self.root
        has_in = is_root or spec.input_on == "all"
        has_out = {
            "all": True,
            "root": is_root,
            "all but rank 0": self.rank != 0,
            "none": False,
        }[spec.output_on]
        share_in = spec.out_count == "times_size"
        share_out = spec.out_count == "div_size"
        inp = self._space("in", has_in, share_in, None)
        alias = "in" if spec.in_place and has_in and has_out else None
        return inp, self._space("out", has_out, share_out, alias)

    def _space(self, name: str, exists: bool, share: bool, alias: str | None) -> Space:
        kind: SpaceKind = "in" if name == "in" else "out"
        if not exists:
            return Space(name, kind, 0, (0, 1))
        if share:
            return Space(name, kind, self.nblk // self.size, (1, self.size))
        return Space(name, kind, self.nblk, (1, 1), alias=alias)

    def add_scratch(self, nblk: int, scale: tuple[int, int] | None) -> Space:
        number, whole = len(self.scratch), self.nblk
        space = _scratch_space(self.coll, self.size, number, nblk, whole, scale)
        self.scratch.append(space)
        # It gets numbers after all others: those known stay valid.
        self.steps.columns.place_next(self._following)
        self._following += nblk
        return space

    def spaces(self) -> tuple[Space, ...]:
        return (*self._user, *self.scratch)

    def after(self, steps: tuple[int, ...]) -> None:
        for step in steps:
            if not NO_STEP <= step < len(self.steps):
                raise ScheduleError(
                    f"after({step}): there are {len(self.steps)} steps; expected the "
                    f"number that an earlier step returned"
                )
        self.steps.columns.next_waits_for(tuple({*steps} - {NO_STEP}))

    def unequal(self, op: Op, fault: _native.ScheduleFaultError) -> ScheduleError:
        """Return what is wrong with a step whose ends differ in length."""
        _, (num_src, num_dst), _ = fault.args
        return ScheduleError(
            f"rank {self.rank} step {len(self.steps)} ({op.name.lower()}): "
            f"{num_src} blocks into {num_dst}; both sides need the same number"
        )


@lru_cache(maxsize=4096)
def _scratch_space(
    coll: str,
    size: int,
    number: int,
    nblk: int,
    whole: int,
    scale: tuple[int, int] | None,
) -> Space:
    """Return scratch of ``nblk`` blocks, where the full vector has ``whole``."""
    part = Fraction(nblk, whole) if scale is None else Fraction(*scale)
    if operation(coll).x_count == "none":
        part = Fraction(0)
    if (part * full_multiple(coll, size)).denominator != 1:
        raise ScheduleError(
            f"scratch of {nblk} blocks, {part} of the full vector, is not a whole "
            f"number of elements for every length: take b.tmp(b.nblk)"
        )
    return Space(f"tmp{number}", "tmp", nblk, (part.numerator, part.denominator))


@lru_cache(maxsize=8)
def _all_ranks(size: int) -> tuple[int, ...]:
    return tuple(range(size))


def _place_of(rank: int, ranks: tuple[int, ...]) -> int:
    """Return the place of ``rank`` among others: at once where they are sorted."""
    place = bisect_left(ranks, rank)
    if place < len(ranks) and ranks[place] == rank:
        return place
    if rank not in ranks:
        raise ScheduleError(
            f"rank {rank} is not in group {ranks}: let only the group's own ranks "
            f"build its part"
        )
    return ranks.index(rank)


class Builder:
    """Records the steps of one rank.

    Attributes:
        rank: this rank; size: number of ranks; root: the root of a rooted operation.
        nblk: blocks that the full vector is cut into: ``size`` unless changed.
        params: the algorithm's parameters.
    """

    def __init__(
        self,
        recorder: Recorder,
        ranks: tuple[int, ...],
        params: Mapping[str, Any],
        root: int,
    ) -> None:
        self.recorder = recorder
        self._record = recorder.record
        self.global_ranks = ranks
        self.params = params
        self.rank = _place_of(recorder.rank, ranks)
        self.size = len(ranks)
        self.root = root

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on each node; for algorithms registered with ``spans_nodes``."""
        return members(self.recorder.nodes or (0,) * self.recorder.size)

    @property
    def nblk(self) -> int:
        """Blocks that the operation's full vector is cut into."""
        return self.recorder.nblk

    @property
    def inp(self) -> Buffer:
        """The send buffer, never written."""
        return self._user(IN)

    @property
    def out(self) -> Buffer:
        """The receive buffer. It may be the same memory as ``inp``."""
        return self._user(OUT)

    def _user(self, space: int) -> Buffer:
        return self.recorder.user_buffers()[space]

    def blocks(self, nblk: int) -> None:
        """Cut the full vector into ``nblk`` blocks instead of ``size``."""
        self.recorder.set_blocks(nblk)

    def tmp(self, nblk: int, scale: tuple[int, int] | None = None) -> Buffer:
        """Return new scratch of ``nblk`` blocks, as wide as those of the full vector.

        Args:
            nblk: number of blocks.
            scale: total length as a fraction (num, den) of the full vector instead.
        """
        space = self.recorder.add_scratch(nblk, scale)
        return Buffer(1 + len(self.recorder.scratch), 0, nblk, 1, space.name)

    def send(self, src: Slice, peer: int) -> int:
        """Send ``src`` to ``peer``."""
        peer %= self.size
        if peer == self.rank:
            raise self._to_itself()
        return self._record(_SEND, src, None, self.global_ranks[peer])

    def recv(self, dst: Slice, peer: int) -> int:
        """Receive into ``dst`` from ``peer``."""
        peer %= self.size
        if peer == self.rank:
            raise self._to_itself()
        return self._record(_RECV, None, dst, self.global_ranks[peer])

    def rred(self, dst: Slice, peer: int, src: Slice | None = None) -> int:
        """Receive from ``peer`` and reduce: ``dst = (src or dst) ⊕ received``."""
        peer %= self.size
        if peer == self.rank:
            raise self._to_itself()
        try:
            return self._record(_RRED, src or dst, dst, self.global_ranks[peer])
        except _native.ScheduleFaultError as fault:
            raise self.recorder.unequal(_RRED, fault) from None

    def reduce(self, dst: Slice, src: Slice) -> int:
        """Reduce locally: ``dst = dst ⊕ src``."""
        try:
            return self._record(_RED, src, dst, -1)
        except _native.ScheduleFaultError as fault:
            raise self.recorder.unequal(_RED, fault) from None

    def copy(self, dst: Slice, src: Slice) -> int:
        """Copy locally: ``dst = src``. Copies that nobody needs cost nothing."""
        try:
            return self._record(_COPY, src, dst, -1)
        except _native.ScheduleFaultError as fault:
            raise self.recorder.unequal(_COPY, fault) from None

    def after(self, *steps: int) -> None:
        """Make the next step also wait for ``steps`` (what send, recv… returned)."""
        self.recorder.after(steps)

    def sub(self, ranks: Iterable[int], root: int = 0) -> Builder:
        """Return a builder in which ``ranks`` (of this one) are ranks 0, 1, …

        It records into the same program: use it to run an algorithm among a group.
        """
        return self._among(self.group_of(ranks), root)

    def group_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers that ``ranks`` of this builder have in the program."""
        if self.global_ranks is self.recorder.all_ranks:
            return tuple(ranks)
        return tuple(map(self.global_ranks.__getitem__, ranks))

    def _among(self, ranks: tuple[int, ...], root: int) -> Builder:
        return Builder(self.recorder, ranks, self.params, root)

    def _to_itself(self) -> ScheduleError:
        return ScheduleError(
            f"rank {self.recorder.rank} step {len(self.recorder.steps)}: a message to "
            f"itself; use copy"
        )


def build_program(
    author: Callable[[Builder], None],
    coll: str,
    rank: int,
    size: int,
    root: int = 0,
    params: Mapping[str, ParamValue] | None = None,
    nodes: Nodes | None = None,
) -> RankProgram:
    """Run an algorithm's function for one rank and return its program."""
    recorder = Recorder(coll, rank, size, root, nodes)
    author(Builder(recorder, recorder.all_ranks, dict(params or {}), root))
    return RankProgram(rank, recorder.spaces(), recorder.steps)
