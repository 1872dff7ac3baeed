# SPDX-License-Identifier: Apache-2.0
"""All operations of commrt on one NCCL communicator.

``run`` takes any collective of the operations table; messages have ``send``, ``recv``
and ``exchange``. Counts are NCCL's: of a rank's block for allgather, gather, scatter,
alltoall and reduce_scatter, of the whole array otherwise. Operations that NCCL lacks
are composed of grouped messages, in an order that is the same on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from commrt import _native, env
from commrt.errors import BackendError, ClosedError, UsageError
from commrt.nccl.abilities import (
    NCCL_REDUCTIONS,
    NCCL_TYPES,
    Support,
    nccl_count,
    scalar_bytes,
    support,
)
from commrt.nccl.config import GroupShape
from commrt.nccl.outcomes import SUCCESS, error_for
from commrt.vocabulary.dtypes import DType, ReduceOp
from commrt.vocabulary.limits import check_timeout
from commrt.vocabulary.operations import operation

__all__ = ["Message", "NcclOperations"]

Message = tuple[int, int, int]
"""Address, number of elements, peer."""

_UINT8 = NCCL_TYPES["uint8"]
_SUM = NCCL_REDUCTIONS[ReduceOp.SUM]


class NcclOperations:
    """The calls of a communicator; ``NcclComm`` adds its life."""

    def __init__(self, native: _native.NcclComm, version: int, name: str) -> None:
        self._native = native
        self.version = version
        self.name = name
        self.timeout_s = env.read_float("COMMRT_TIMEOUT_S")
        self._pid = os.getpid()
        self._known: dict[tuple[str, str, ReduceOp | None], Support] = {}

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._native.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._native.size

    def shape_groups(self, shape: GroupShape, most_reductions: int = 1024) -> None:
        """Set how large groups may be; equal on all ranks. For tests."""
        self._native.most_distances = shape.distances
        self._native.most_messages = shape.messages
        self._native.most_reductions = most_reductions

    def run(
        self,
        coll: str,
        *,
        x: int,
        out: int,
        count: int,
        dtype: DType,
        stream: int,
        op: ReduceOp | None = None,
        factor: int | float | None = None,
        root: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Put a collective with equal blocks into ``stream``.

        ``x`` and ``out`` are addresses on the device; ``out`` may be ``x``, or the own
        block of the other, but for alltoall. Returns once NCCL has taken it up.
        """
        spec = operation(coll)
        if spec.count_arguments:
            raise UsageError(f"{coll} has a count per rank: call run_counted")
        if spec.is_empty:
            self.barrier(scratch=out, stream=stream, timeout_s=timeout_s)
            return
        root = self._check_call(coll, count, root)
        limit = self._limit(timeout_s)
        if spec.by_pair and x == out and self.size > 1 and count:
            raise UsageError(
                f"{coll} on {self.name}: NCCL does not work in place; give an out"
            )
        if spec.reduces:
            code = self._reduce(
                spec.code, coll, x, out, count, dtype, op, factor, root, stream, limit
            )
        elif spec.nccl == "pairs" and self._is_composed(coll, dtype):
            counts = [count] * self.size
            code = self._native.counted(
                spec.code,
                x,
                out,
                counts,
                counts,
                dtype.itemsize,
                _UINT8,
                _SUM,
                b"",
                root,
                stream,
                limit,
            )
        else:
            nbytes = count * dtype.itemsize
            found = self._support(coll, dtype, None)
            if not found.runs:
                raise BackendError(f"{coll} on {self.name}: {found.reason}")
            code = self._native.collective(
                spec.code, x, out, nbytes, _UINT8, 0, root, stream, limit
            )
        self.check_code(code, coll, limit)

    def run_counted(
        self,
        coll: str,
        *,
        x: int,
        out: int,
        counts: Sequence[int],
        dtype: DType,
        stream: int,
        recv_counts: Sequence[int] | None = None,
        op: ReduceOp | None = None,
        factor: int | float | None = None,
        root: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Put a collective with a count per rank into ``stream``.

        ``counts`` are the send counts of an alltoallv, whose others are
        ``recv_counts``. Blocks lie one behind the other. Both ranks of a pair must say
        the same count, and where it is 0 nothing is sent.
        """
        spec = operation(coll)
        if not spec.count_arguments:
            raise UsageError(f"{coll} has no count per rank: call run")
        sent = self._counts(coll, counts)
        received = sent
        if spec.by_pair:
            received = self._counts(
                coll, counts if recv_counts is None else recv_counts
            )
        root = self._check_call(coll, 0, root)
        limit = self._limit(timeout_s)
        itemsize, nccl_type, nccl_op, scalar = dtype.itemsize, _UINT8, _SUM, b""
        if spec.reduces:
            nccl_type, nccl_op = self._reduction(coll, dtype, op)
            if nccl_op < 0:
                scalar = scalar_bytes(coll, factor, dtype)
            sent = [nccl_count(dtype, each) for each in sent]
            received = sent
            itemsize //= nccl_count(dtype, 1)
        code = self._native.counted(
            spec.code,
            x,
            out,
            sent,
            received,
            itemsize,
            nccl_type,
            nccl_op,
            scalar,
            root,
            stream,
            limit,
        )
        self.check_code(code, coll, limit)

    def barrier(
        self, *, scratch: int, stream: int, timeout_s: float | None = None
    ) -> None:
        """Put into ``stream`` what ends once every rank has come: an allreduce.

        ``scratch``: a byte on the device that nobody else uses.
        """
        limit = self._limit(timeout_s)
        code = self._native.collective(
            0, scratch, scratch, 1, _UINT8, _SUM, 0, stream, limit
        )
        self.check_code(code, "barrier", limit)

    def send(
        self,
        x: int,
        *,
        count: int,
        dtype: DType,
        dest: int,
        stream: int,
        timeout_s: float | None = None,
    ) -> None:
        """Put a message to ``dest`` into ``stream``; both ends say the same count."""
        self.exchange(
            [(x, count, dest)], [], dtype=dtype, stream=stream, timeout_s=timeout_s
        )

    def recv(
        self,
        out: int,
        *,
        count: int,
        dtype: DType,
        source: int,
        stream: int,
        timeout_s: float | None = None,
    ) -> None:
        """Put the receive of a message from ``source`` into ``stream``."""
        self.exchange(
            [], [(out, count, source)], dtype=dtype, stream=stream, timeout_s=timeout_s
        )

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        dtype: DType,
        stream: int,
        timeout_s: float | None = None,
    ) -> None:
        """Put any number of messages into ``stream``, to and from any ranks, as one.

        The k-th message from one rank to another meets the k-th receive there; messages
        of no elements count at neither end. Halo and neighbour exchange and
        multi_sendrecv are this.
        """
        limit = self._limit(timeout_s)
        lists = []
        for messages in (sends, recvs):
            for _, count, peer in messages:
                self._check_call("exchange", count, peer)
            lists.append([(at, n * dtype.itemsize, peer) for at, n, peer in messages])
        code = self._native.exchange(lists[0], lists[1], stream, limit)
        self.check_code(code, "exchange", limit)

    def _reduce(
        self,
        coll_code: int,
        coll: str,
        x: int,
        out: int,
        count: int,
        dtype: DType,
        op: ReduceOp | None,
        factor: int | float | None,
        root: int,
        stream: int,
        limit: float,
    ) -> int:
        nccl_type, nccl_op = self._reduction(coll, dtype, op)
        count = nccl_count(dtype, count)
        if nccl_op >= 0:
            return self._native.collective(
                coll_code, x, out, count, nccl_type, nccl_op, root, stream, limit
            )
        scalar = scalar_bytes(coll, factor, dtype)
        return self._native.premul(
            coll_code, x, out, count, nccl_type, scalar, root, stream, limit
        )

    def _reduction(
        self, coll: str, dtype: DType, op: ReduceOp | None
    ) -> tuple[int, int]:
        """Return NCCL's type and reduction, or raise BackendError with the reason."""
        if op is None:
            raise UsageError(f"{coll} needs op=")
        found = self._support(coll, dtype, op)
        if not found.runs:
            raise BackendError(
                f"{coll} of {dtype.name} with op={op.name.lower()!r} on {self.name}: "
                f"{found.reason}; use the staged backend"
            )
        return NCCL_TYPES[dtype.name], NCCL_REDUCTIONS[op]

    def _is_composed(self, coll: str, dtype: DType) -> bool:
        return self._support(coll, dtype, None).how == "composed"

    def _support(self, coll: str, dtype: DType, op: ReduceOp | None) -> Support:
        key = coll, dtype.name, op
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = support(coll, dtype, op, self.version)
        return found

    def _counts(self, coll: str, counts: Sequence[int]) -> list[int]:
        found = [int(count) for count in counts]
        if len(found) != self.size or min(found) < 0:
            raise UsageError(
                f"{coll} on {self.name}: counts {found} must be one per rank "
                f"({self.size}), 0 or more"
            )
        return found

    def _check_call(self, coll: str, count: int, peer: int) -> int:
        if not 0 <= peer < self.size:
            raise UsageError(
                f"{coll} on {self.name}: rank {peer} must lie in 0..{self.size - 1}"
            )
        if count < 0:
            raise UsageError(f"{coll} on {self.name}: count={count} must be 0 or more")
        return peer

    def _limit(self, timeout_s: float | None) -> float:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self.name}: NCCL does not survive fork: make a communicator in the "
                f"child, or start it by spawn"
            )
        if timeout_s is None:
            return self.timeout_s
        return check_timeout(self.name, timeout_s)

    def check_code(self, code: int, what: str, limit: float) -> None:
        """Raise the error that a code of NCCL stands for."""
        if code != SUCCESS:
            raise error_for(self._native, code, what, self.name, limit)
