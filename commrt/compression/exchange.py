# SPDX-License-Identifier: Apache-2.0
"""The steps of one compressed operation.

An allreduce is a reduce-scatter and an allgather, so that each element is compressed
twice, however many ranks there are:

1. The vector is cut into a share per rank. Each rank compresses the shares of the
   others, and an alltoall brings every share to its owner.
2. The owner adds up all ranks' parts of its share, in rank order and in float32, its
   own part as it is; divides for avg; compresses the sum, and an allgather brings it to
   all.
3. All ranks, the owner too, take what came: the same bits everywhere.

An alltoall compresses each block once, but copies a rank's own.

Outputs and residuals are written in the last step: where messages fail, both are as
they were.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt import _native
from commrt.arrays.host import HostView
from commrt.calls.arguments import Bound, Call
from commrt.compression.parts import (
    HEADER_NBYTES,
    Header,
    check_headers,
    part_nbytes,
    take_aligned,
)
from commrt.compression.turns import Place, Turn
from commrt.errors import MismatchError
from commrt.group.stepped import Steps
from commrt.sparse.memory import Pool
from commrt.vocabulary.dtypes import ReduceOp
from commrt.vocabulary.wire_formats import WireFormat

if TYPE_CHECKING:
    from commrt.calls.channel import Channel

__all__ = ["Exchange", "share_length"]

_kernels = _native.wire


def share_length(wire: WireFormat, num_elements: int, size: int) -> int:
    """Return the elements of a rank's share: whole blocks, the last may be shorter."""
    num_blocks = -(-num_elements // wire.block)
    return -(-num_blocks // size) * wire.block


@dataclass(frozen=True)
class Exchange:
    """One call on one rank, and how it talks to the others."""

    call: Call
    bound: Bound
    wire: WireFormat
    residual: HostView | None
    title: str
    """The call in messages."""
    seq: int
    pool: Pool
    shares: Channel
    """Channel of the first exchanges."""
    sums: Channel
    """Channel of the second exchanges."""
    turn: Turn
    place: Place

    def steps(self) -> Steps[Any]:
        """Run the call; on one rank nothing is sent, so nothing is lost."""
        if self.shares.size == 1:
            own = self._exact(0, self._x.count)
            ctypes.memmove(self._out.address, own.ctypes.data, own.nbytes)
            return self.bound.result
        both = self._allreduce if self.call.spec.reduces else self._alltoall
        result = yield from both()
        return result

    # -- allreduce ---------------------------------------------------------------

    def _allreduce(self) -> Steps[Any]:
        size, me = self.shares.size, self.shares.rank
        full = self._x.count
        share = share_length(self.wire, full, size)
        starts = [min(full, rank * share) for rank in range(size + 1)]
        counts = [starts[rank + 1] - starts[rank] for rank in range(size)]
        header = self._header(full)
        nbytes = part_nbytes(self.wire, share)
        sent, came = self._take(size * nbytes), self._take(size * nbytes)
        for rank, part in enumerate(_cut(sent, size)):
            header.write(part)
            if rank != me:
                self._encode(starts[rank], counts[rank], part)
        yield [self.shares.alltoall(sent, out=came, nonblocking=True)]
        parts = _cut(came, size)
        try:
            check_headers(self.title, me, [header] * size, parts)
        except MismatchError:
            yield [self.turn]
            raise  # on all ranks: who comes after this one may go on
        summed = self._take(nbytes)
        header.write(summed)
        item = self._x.dtype.itemsize
        keeps = self.residual is not None
        lost = self._take(counts[me] * item if keeps else 0)
        _kernels.sum(
            self.wire.code,
            self._x.dtype.code,
            [_wire_of(part) for part in parts],
            me,
            self._x.address + starts[me] * item,
            self._residual_at(starts[me]),
            counts[me],
            float(size if self.call.reduction is ReduceOp.AVG else 1),
            _wire_of(summed),
            lost.ctypes.data if keeps else 0,
        )
        yield [self.turn]
        all_sums = came  # read to its end
        gathering = self.sums.allgather(summed, out=all_sums, nonblocking=True)
        self.place.passed = True
        yield [gathering]
        parts = _cut(all_sums, size)
        check_headers(self.title, me, [header] * size, parts)
        for rank, part in enumerate(_cut(sent, size)):
            if rank != me:
                self._settle(starts[rank], counts[rank], part)
            elif keeps:
                to = self._residual_at(starts[me])
                ctypes.memmove(to, lost.ctypes.data, lost.nbytes)
        for rank, part in enumerate(parts):
            self._decode(part, starts[rank], counts[rank])
        return self.bound.result

    # -- alltoall ----------------------------------------------------------------

    def _alltoall(self) -> Steps[Any]:
        size, me = self.shares.size, self.shares.rank
        if self.bound.counts:
            gives, gets = self.bound.counts
        else:
            gives = gets = (self._x.count // size,) * size
        give_nbytes = [part_nbytes(self.wire, count) for count in gives]
        get_nbytes = [part_nbytes(self.wire, count) for count in gets]
        sent, came = self._take(sum(give_nbytes)), self._take(sum(get_nbytes))
        sent_parts, parts = _cut_at(sent, give_nbytes), _cut_at(came, get_nbytes)
        starts = np.cumsum([0, *gives]).tolist()
        for rank, part in enumerate(sent_parts):
            self._header(gives[rank]).write(part)
            if rank != me:
                self._encode(starts[rank], gives[rank], part)
        if self.bound.counts:
            yield [
                self.shares.alltoallv(
                    sent,
                    send_counts=give_nbytes,
                    recv_counts=get_nbytes,
                    out=came,
                    nonblocking=True,
                )
            ]
        else:
            yield [self.shares.alltoall(sent, out=came, nonblocking=True)]
        expected = [self._header(count) for count in gets]
        check_headers(self.title, me, expected, parts)
        landings = np.cumsum([0, *gets]).tolist()
        own = self._exact(starts[me], gives[me])
        for rank, part in enumerate(sent_parts):
            if rank != me:
                self._settle(starts[rank], gives[rank], part)
        item = self._x.dtype.itemsize
        to = self._out.address + landings[me] * item
        ctypes.memmove(to, own.ctypes.data, own.nbytes)
        for rank, part in enumerate(parts):
            if rank != me:
                self._decode(part, landings[rank], gets[rank])
        return self.bound.result

    def _exact(self, start: int, count: int) -> Any:
        """Return elements that stay on this rank; nothing of them is owed any more."""
        item = self._x.dtype.itemsize
        own = self._take(count * item)
        ctypes.memmove(own.ctypes.data, self._x.address + start * item, own.nbytes)
        if self.residual is not None and count:
            owed = np.ctypeslib.as_array(
                (ctypes.c_ubyte * own.nbytes).from_address(self._residual_at(start))
            ).view(self._x.dtype.name)
            own.view(self._x.dtype.name)[:] += owed
            owed[:] = 0
        return own

    # -- parts -------------------------------------------------------------------

    @property
    def _x(self) -> HostView:
        assert self.bound.x is not None
        return self.bound.x

    @property
    def _out(self) -> HostView:
        assert self.bound.out is not None
        return self.bound.out

    def _take(self, nbytes: int) -> Any:
        return take_aligned(self.pool, nbytes)

    def _header(self, num_elements: int) -> Header:
        call = self.call
        return Header(
            call.spec.code,
            self.wire.code,
            self._x.dtype.code,
            int(call.reduction),
            num_elements,
            self.seq,
        )

    def _residual_at(self, start: int) -> int:
        if self.residual is None:
            return 0
        return self.residual.address + start * self._x.dtype.itemsize

    def _encode(self, start: int, count: int, part: Any) -> None:
        _kernels.encode(
            self.wire.code,
            self._x.dtype.code,
            self._x.address + start * self._x.dtype.itemsize,
            self._residual_at(start),
            count,
            _wire_of(part),
        )

    def _decode(self, part: Any, start: int, count: int) -> None:
        to = self._out.address + start * self._x.dtype.itemsize
        _kernels.decode(self.wire.code, self._x.dtype.code, _wire_of(part), count, to)

    def _settle(self, start: int, count: int, part: Any) -> None:
        """Keep in the residual what the part of another rank did not say."""
        if self.residual is None:
            return
        _kernels.settle(
            self.wire.code,
            self._x.dtype.code,
            _wire_of(part),
            count,
            self._x.address + start * self._x.dtype.itemsize,
            self._residual_at(start),
        )


def _cut(parts: Any, size: int) -> list[Any]:
    return list(parts.reshape(size, -1))


def _cut_at(parts: Any, nbytes: list[int]) -> list[Any]:
    return np.split(parts, np.cumsum(nbytes)[:-1])


def _wire_of(part: Any) -> int:
    """Return the address of what follows the header."""
    address: int = part.ctypes.data
    return address + HEADER_NBYTES
