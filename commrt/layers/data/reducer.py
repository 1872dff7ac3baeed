# SPDX-License-Identifier: Apache-2.0
"""The gradient reducer: sums over all ranks while gradients are still computed.

Gradients are cut into buckets as they are expected: first by the order of the
parameters, from the second step on as rank 0 saw them come in the first. Each rank
starts the same buckets in the same order, a bucket once its gradients are there and
all buckets before it have been started. So it does not matter in which order a rank's
own gradients come.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from commrt.arrays.tensors import is_tensor
from commrt.errors import MismatchError, UsageError
from commrt.layers.data.bucket_size import (
    allreduce_times_us,
    best_bucket_nbytes,
    interpolated_us,
)
from commrt.layers.data.buckets import cut, start_order
from commrt.layers.data.gradients import Parameter
from commrt.layers.data.options import Options
from commrt.layers.data.own_pieces import advice, place_of
from commrt.layers.data.sparse_rows import as_sparse, summed
from commrt.layers.data.transfers import Bucket, Transfer, start

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["GradientReducer"]

_UNDER_WAY = 2
"""Number of buckets under way at once, with priority. With one, the ranks would idle
between the calls in which the next is started."""


class GradientReducer:
    """Sums or averages gradients over the ranks of a communicator.

        reducer = GradientReducer(comm, parameters)      # numpy's, torch's, cupy's ...
        for batch in batches:
            for index, gradient in backward(batch):      # in any order
                reducer.ready(index, gradient)
            for index, gradient in enumerate(reducer.finish()):
                ...

    Sums are in the gradients' own arrays, and the same bits on all ranks. Collective:
    every rank makes one with equal arguments, and takes equally many steps; which
    gradients a rank has in a step, and in which order they come, is its own affair.
    A reducer has a communicator of its own, so that several of them, and any other
    operations, may be under way at once. Not for use by several threads at a time.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[Any],
        *,
        op: str = "avg",
        bucket_nbytes: int | None = None,
        compress: str | None = None,
        density: float | None = None,
        error_feedback: bool = True,
        sparse: Collection[int] = (),
        priority: bool = False,
    ) -> None:
        """Agree with the other ranks on buckets; collective.

        Args:
            comm: whose ranks sum.
            parameters: arrays of the gradients' shapes and types, in the order in which
                the forward pass uses them; they are not changed.
            op: ``avg`` or ``sum``.
            bucket_nbytes: what a bucket holds; by itself ``best_bucket_nbytes(comm)``.
            compress: send ``bfloat16``, ``float16`` or ``int8`` (``allreduce``'s
                argument of this name); for float32 and float64 in host memory.
            density: send only so large a part of the elements, the largest sums by
                magnitude (``topk_allreduce``); for host memory.
            error_feedback: keep what compression and density leave out, and send it
                with a later step.
            sparse: parameters whose gradients are a few rows: SparseVector, ``(rows,
                values)``, or torch's COO tensors. Each goes by ``sparse_allreduce``,
                and its sum is a SparseVector (``dense_rows``).
            priority: from the second step on, start buckets in the order of a queue in
                which what the forward pass needs first goes first. Worth it only to
                those who take sums by ``wait`` or ``arrivals``.

        Raises MismatchError on all ranks for different arguments, and UsageError for
        parameters of which the ranks have different pieces, such as experts.
        """
        parameters = list(parameters)  # read twice
        given = [Parameter.of(index, each) for index, each in enumerate(parameters)]
        self._options = Options(
            op, compress, density, error_feedback, frozenset(sparse), priority
        )
        self._options.check(given, bucket_nbytes)
        self._parameters = given
        self._comm = comm.dup(name=f"{comm.name}.gradients")
        self._check_equal(parameters, bucket_nbytes)
        where = "cuda" if given and given[0].on_device else "host"
        self._bucket_nbytes = bucket_nbytes or best_bucket_nbytes(
            self._comm, device=where
        )
        self._times = allreduce_times_us(self._comm) if priority else {}
        self._step = 0
        self._syncs = True
        self._is_flushed = False
        self._accumulated: dict[int, Any] = {}
        self._seen: dict[int, float] = {}
        self._begin(self._cut(range(len(given) - 1, -1, -1), {}))

    # -- a step ------------------------------------------------------------------

    def ready(self, index: int, gradient: Any) -> None:
        """Give a parameter's gradient, once in each step; starts what can be started.

        The array belongs to the reducer until it is returned.
        """
        what = f"gradient {index}"
        if not 0 <= index < len(self._parameters):
            raise UsageError(
                f"{what}: there is no such parameter: expected 0 to "
                f"{len(self._parameters) - 1}"
            )
        if self._is_flushed:
            raise UsageError(
                f"{what}: step {self._step} has not ended: take all sums of it by "
                f"finish() or arrivals() before gradients of the next are given"
            )
        parameter = self._parameters[index]
        if index in self._options.sparse:
            gradient = as_sparse(gradient, parameter.shape, what)
        else:
            if isinstance(gradient, np.generic):
                gradient = np.array(gradient)
            parameter.check(gradient, what)
        if not self._syncs:
            self._accumulate(index, gradient)
            return
        if self._is_given[index]:
            raise UsageError(
                f"{what}: given twice in step {self._step}; add gradients up in "
                f"no_sync(), or give one"
            )
        if index in self._accumulated:
            gradient = _added(gradient, self._accumulated.pop(index))
        self._take(index, gradient)
        self._advance()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, gradients are only added up, for those that are given afterwards."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def flush(self) -> None:
        """Say that this rank has no more gradients in this step; starts the rest.

        A gradient that a rank does not have counts as zero. Returns at once.
        """
        if self._is_flushed:
            return
        for index in sorted(self._accumulated):
            if not self._is_given[index]:
                self._take(index, self._accumulated[index])
        self._accumulated.clear()
        self._is_flushed = True
        self._advance()

    def poll(self) -> None:
        """Make a little progress, and start what can be started."""
        self._advance()

    def wait(self, index: int) -> Any:
        """Return a parameter's sum of this step, None where no rank has a gradient.

        For those who go on with the first layers while others are still under way.
        Where gradients are missing, after ``flush``.
        """
        place = self._place_of[index]
        while len(self._transfers) <= place:
            if not self._advance():
                raise UsageError(
                    f"wait({index}): gradients of its bucket, or of one before it, "
                    f"have not been given in step {self._step}: give them, or call "
                    f"flush() where there are no more"
                )
            if len(self._transfers) <= place and self._under_way:
                self._under_way[0].wait()  # its end makes room for the next
        bucket = self._buckets[place]
        sums = self._transfers[place].wait()
        self._advance()
        return sums[bucket.members.index(index)]

    def arrivals(self) -> Iterator[tuple[int, Any]]:
        """End the step: yield (index, sum), in the order of the parameters.

        To be followed to its end. With ``priority`` sums come in about this order.
        """
        self.flush()
        for index in range(len(self._parameters)):
            yield index, self.wait(index)
        self._end_step()

    def finish(self) -> list[Any]:
        """End the step: return all sums, None of what no rank has a gradient of."""
        return [each for _, each in self.arrivals()]

    def __call__(self, gradients: Sequence[Any]) -> list[Any]:
        """Do a whole step: return the sums of these gradients, of which None is none.

        With one entry for each parameter.
        """
        if len(gradients) != len(self._parameters):
            raise UsageError(
                f"{len(gradients)} gradients for {len(self._parameters)} parameters; "
                f"pass None where there is none"
            )
        for index in reversed(range(len(gradients))):
            if gradients[index] is not None:
                self.ready(index, gradients[index])
        return self.finish()

    # -- what it is --------------------------------------------------------------

    @property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """The parameters of each bucket, in the order in which they are started."""
        return tuple(bucket.members for bucket in self._buckets)

    @property
    def bucket_nbytes(self) -> int:
        """Most bytes of a bucket."""
        return self._bucket_nbytes

    def close(self) -> None:
        """Free what the reducer holds; local, idempotent. After the end of a step."""
        self._comm.free()

    def __enter__(self) -> GradientReducer:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self.close()

    def __repr__(self) -> str:
        return (
            f"<GradientReducer of {len(self._parameters)} parameters in "
            f"{len(self._buckets)} buckets on {self._comm.name}>"
        )

    # -- parts of a step ---------------------------------------------------------

    def _begin(self, buckets: Sequence[Bucket]) -> None:
        """Begin the next step with these buckets, in their order."""
        self._buckets = list(buckets)
        self._place_of = {
            index: place
            for place, bucket in enumerate(self._buckets)
            for index in bucket.members
        }
        self._given: list[Any] = [None] * len(self._parameters)
        self._is_given = [False] * len(self._parameters)
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._transfers: list[Transfer] = []
        self._under_way: list[Transfer] = []
        self._is_flushed = False

    def _accumulate(self, index: int, gradient: Any) -> None:
        if index in self._accumulated:
            self._accumulated[index] = _added(self._accumulated[index], gradient)
        else:
            self._accumulated[index] = _copied(gradient)

    def _take(self, index: int, gradient: Any) -> None:
        self._given[index] = gradient
        self._is_given[index] = True
        self._missing[self._place_of[index]] -= 1
        if self._step == 0:
            self._seen[index] = time.perf_counter()

    def _advance(self) -> bool:
        """Start what may be started; return whether anything was, or may be soon."""
        self._under_way = [each for each in self._under_way if not each.test()]
        began = False
        while (place := len(self._transfers)) < len(self._buckets):
            if self._missing[place] and not self._is_flushed:
                break
            if self._options.priority and len(self._under_way) >= _UNDER_WAY:
                return True
            bucket = self._buckets[place]
            given = [self._given[index] for index in bucket.members]
            transfer = start(bucket, given, self._comm)
            self._transfers.append(transfer)
            self._under_way.append(transfer)
            began = True
        return began

    def _end_step(self) -> None:
        buckets: Sequence[Bucket] = self._buckets
        if self._step == 0 and len(self._parameters) > 1:
            buckets = self._agreed_buckets()
        self._step += 1
        self._begin(buckets)

    # -- agreement ---------------------------------------------------------------

    def _check_equal(
        self, parameters: Sequence[Any], bucket_nbytes: int | None
    ) -> None:
        """Raise an error on all ranks unless they have made the same reducer.

        UsageError for parameters of which they have different pieces, else
        MismatchError.
        """
        size = self._comm.size
        places = [place_of(each) for each in parameters]
        pieces = [number for number, place in enumerate(places) if place]
        held = zlib.crc32(json.dumps([places[number] for number in pieces]).encode())
        facts = [
            [[list(each.shape), each.dtype] for each in self._parameters],
            [*self._options.facts(), bucket_nbytes],
        ]
        digest = hashlib.sha256(json.dumps(facts).encode()).digest()
        number = int.from_bytes(digest[:7], "little")
        nbytes = sum(each.nbytes for each in self._parameters)
        first = pieces[0] if pieces else -1
        mine = np.array([len(self._parameters), nbytes, number, first, held], np.int64)
        *said, firsts, helds = self._comm.allgather(mine).reshape(size, -1).T
        if (helds != helds[0]).any():
            self._comm.free()
            raise self._refused_pieces(parameters, firsts.tolist())
        said = np.stack(said, 1)
        if any((row != said[0]).any() for row in said):
            self._comm.free()
            lines = [
                f"  rank {rank}: {row[0]} parameters of {row[1]} bytes"
                for rank, row in enumerate(said)
            ]
            raise MismatchError(
                "GradientReducer: the ranks have different parameters (their shapes "
                "and types, in order) or other arguments; pass equal ones:\n"
                + "\n".join(lines)
            )

    def _refused_pieces(
        self, parameters: Sequence[Any], firsts: Sequence[int]
    ) -> UsageError:
        """Return the error for the first such parameter, of this rank if it has one."""
        own = firsts[self._comm.rank]
        rank = self._comm.rank if own >= 0 else [n >= 0 for n in firsts].index(True)
        what = f"GradientReducer: parameter {firsts[rank]} of rank {rank}"
        if own < 0:
            return UsageError(
                f"{what} is a piece that other ranks have not; leave it out, and call "
                f"sync_gradients of its layer's package"
            )
        shape = self._parameters[own].shape
        return UsageError(f"{what}, of shape {shape}: {advice(parameters[own])}")

    def _agreed_buckets(self) -> list[Bucket]:
        """Return buckets in the order in which rank 0 saw gradients come."""
        numbers = range(len(self._parameters))
        never = [index for index in reversed(numbers) if index not in self._seen]
        mine = [*sorted(self._seen, key=self._seen.__getitem__), *never]
        told = self._comm.bcast(np.array(mine, np.int64))
        owed: dict[int, Any] = {}
        for bucket in self._buckets:
            owed |= bucket.owed()
        buckets = self._cut([int(index) for index in told], owed)
        if self._options.priority:
            order = self._comm.bcast(np.array(self._prioritised(buckets), np.int64))
            buckets = [buckets[place] for place in order]
        return buckets

    def _prioritised(self, buckets: Sequence[Bucket]) -> list[int]:
        """Return rank 0's order of the buckets, from its times of this step."""
        first = min(self._seen.values(), default=0.0)
        last = max(self._seen.values(), default=0.0)
        ready = [
            max(self._seen.get(index, last) for index in bucket.members) - first
            for bucket in buckets
        ]
        seconds = [
            interpolated_us(self._times, bucket.nbytes) / 1e6 for bucket in buckets
        ]
        return start_order(ready, seconds, [min(each.members) for each in buckets])

    def _cut(self, order: Sequence[int], owed: dict[int, Any]) -> list[Bucket]:
        """Return buckets of the parameters in an order, with what each still owes."""
        options = self._options
        sizes = [each.nbytes for each in self._parameters]
        made = []
        for types in cut(order, sizes, self._bucket_nbytes, options.sparse):
            for members in self._of_one_type(types):
                parameters = [self._parameters[index] for index in members]
                bucket = options.bucket(parameters)
                if bucket.residual is not None and owed:
                    parts = [owed[index] for index in members]
                    bucket.residual = np.concatenate(parts)
                made.append(bucket)
        return made

    def _of_one_type(self, members: Sequence[int]) -> list[list[int]]:
        """Return a bucket's parameters, apart by type where they are packed."""
        if not self._options.packs:
            return [list(members)]
        found: dict[str, list[int]] = {}
        for index in members:
            found.setdefault(self._parameters[index].dtype, []).append(index)
        return list(found.values())


def _copied(gradient: Any) -> Any:
    if is_tensor(gradient):
        return gradient.detach().clone()
    copy = getattr(gradient, "copy", None)
    return gradient if copy is None else copy()


def _added(one: Any, other: Any) -> Any:
    """Return the sum of two gradients, in the first one's memory where that can be."""
    if hasattr(one, "nnz") and not is_tensor(one):
        return summed(one, other)
    if is_tensor(one):
        one.detach().add_(other.detach())
        return one
    if isinstance(one, np.ndarray) and not one.flags.writeable:
        return one + other
    one += other
    return one
