# SPDX-License-Identifier: Apache-2.0
"""Sums of sparse vectors over the ranks of a communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from commrt.arrays.host import (
    HostView,
    empty_like_array,
    overlap,
    view_anywhere,
    view_new,
)
from commrt.calls.channel import Channel
from commrt.device_calls.collectives import DeviceCollectives
from commrt.device_calls.host_thread import HostChannel, RefusedOnHost
from commrt.device_calls.host_work import (
    HostCall,
    holds_device_arrays,
    refuse_host_arrays,
    start_host_call,
)
from commrt.errors import BufferError_, MismatchError, UsageError, shown, suggest
from commrt.group.compare import Comparison, Refusing
from commrt.group.finite_values import check_finite_on_stream
from commrt.group.stepped import SteppedRequest, Steps
from commrt.sparse.agreement import Header
from commrt.sparse.allreduce import SparseReport, sparse_allreduce
from commrt.sparse.coordinates import LARGEST_NUMBERED, Keys
from commrt.sparse.cost import ALGORITHMS, Rule
from commrt.sparse.memory import Pool
from commrt.sparse.messages import Talk
from commrt.sparse.order import why_refused
from commrt.sparse.pieces import Elements
from commrt.sparse.result import FORMATS, Output
from commrt.sparse.ring import why_not_two_level
from commrt.sparse.shared import Room, make_room
from commrt.sparse.topk import Largest, check_largest, topk_allreduce
from commrt.sparse.vector import SparseArgument, SparseVector, parse, parts_on_device
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.operations import other_call

__all__ = ["SparseSums"]

_MAX_TAG = 2**31 - 1


@dataclass
class _Sparse:
    """Channel and state of a communicator's sparse operations."""

    channel: Channel
    """A channel of the same ranks, for sparse operations only."""
    room: Room | None
    """Memory in which its ranks read each other's entries."""
    pending: set[int] = field(default_factory=set)
    """Numbers of the operations that have not ended."""
    seq: int = 0
    """Number of the next one."""
    rules: dict[Any, tuple[Rule, ...]] = field(default_factory=dict)

    def refuse(self, error: Exception) -> None:
        """Take the place of a call that was refused, here and on the channel."""
        self.seq += 1
        self.channel.refuse(error)


class SparseSums:
    """Sums sparse vectors over the ranks of one group.

    Args:
        group: the ranks.
        devices: brings arrays on devices to the host and back.
        comparison: compares the calls of all ranks in check mode.
        make_channel: returns a channel of the same ranks, given its purpose; local.
    """

    report: SparseReport | None = None
    """Report of this rank's latest operation; None before the first."""

    def __init__(
        self,
        group: Channel,
        devices: DeviceCollectives,
        comparison: Comparison,
        make_channel: Callable[[str], Channel],
    ) -> None:
        self._group, self._devices = group, devices
        self._comparison, self._make_channel = comparison, make_channel
        self._state: _Sparse | None = None
        self._lock = threading.RLock()
        self.made_for: Callable[[], SparseSums | None] = lambda: None
        """Returns the sums whose calls on device arrays run here, on the host."""

    def sparse_allreduce(
        self,
        x: Any,
        *,
        result: str = "auto",
        out: Any = None,
        algorithm: str | None = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Return the exact sum over all ranks of sparse vectors.

            total = comm.sparse_allreduce((indices, values, shape))

        Ranks may have different numbers of entries, none included. An index that no
        rank has is zero. Sums of a vector that has become dense on its way lose the
        entries that are zero. Ranks must agree on shape, types and arguments.

        Args:
            x: SparseVector, (indices, values, shape), a scipy or torch COO array. The
                indices are sorted, each there once; int32 or int64.
            result: "sparse" for a SparseVector, "dense" for an array of the shape;
                "auto" for what takes fewer bytes, the same on all ranks.
            out: an array to fill with the dense result.
            algorithm: one of recursive_doubling, split, split_dense, ring,
                two_level_ring; chosen by the estimated fill unless given. Where the
                communicator is ``deterministic``, only those that add from the left.
            nonblocking: return a request. Its steps run in ``test()`` and ``wait()``;
                those of device arrays in a thread, and ``wait()`` blocks only where
                the result's length is not known before (docs/how-to/use-gpus.md).
            timeout_s: limit of the wait.

        Raises:
            UsageError: an argument is wrong; nothing was sent.
            MismatchError: the ranks called different things; on all of them.
        """
        what = "sparse_allreduce"
        here = f"{what}, rank {self._group.rank}"
        self._group.check_usable()
        with self._refusing(what, self.open()):
            parts = parts_on_device(what, x)
            given = tuple(x) if isinstance(x, tuple | list) else x
            is_on_device = parts is not None or holds_device_arrays(
                what, x=given, out=out
            )
        carrier = self._carrier(is_on_device)
        limit = self._comparison.limit(what, timeout_s, carrier, here=here)
        if is_on_device:
            with self._refusing(what, carrier):
                refuse_host_arrays(f"{what}: x", x if parts is None else parts[:2])
                refuse_host_arrays(f"{what}: out", out)
                _, output = self.check_sparse(
                    x if parts is None else parts,
                    *(result, out, algorithm, nonblocking, limit, carrier),
                )
            with self._refusing(what, carrier, meets=True):  # compared by now
                host_call = _sum_on_host(output, algorithm, limit)
            return start_host_call(
                self._group, self._devices, host_call, nonblocking=nonblocking
            )
        header, output = self.check_sparse(
            x, result, out, algorithm, nonblocking, limit
        )

        def steps(talk: Talk, title: str, report: SparseReport) -> Steps[Any]:
            return sparse_allreduce(talk, title, header, output, report)

        return self._start(what, output.elements, steps, nonblocking, limit)

    def topk_allreduce(
        self,
        x: Any,
        k: int,
        *,
        residual: Any = None,
        nonblocking: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Return the ``k`` largest elements, by magnitude, of a sum of largest
        elements.

            update = comm.topk_allreduce(gradient, 1000, residual=residual)

        Lossy: each rank contributes the ``k`` largest of its ``x`` plus ``residual``,
        and of their sum the ``k`` largest are the result, a SparseVector, the same on
        all ranks. Elements of a rank that are not in the result go into its
        ``residual``, so that they are sent later. The result and all residuals together
        are the sum of the ranks' inputs.

        Args:
            x: this rank's array; not changed.
            k: how many, at most its elements.
            residual: an array like ``x``, zeros before the first call. Without it,
                what is not sent is lost.
            nonblocking: return a request. ``x`` is read before it is returned;
                ``residual`` is read then, and written when the request ends.
            timeout_s: limit of the wait.
        """
        what = "topk_allreduce"
        here = f"{what}, rank {self._group.rank}"
        self._group.check_usable()
        with self._refusing(what, self.open()):
            is_on_device = holds_device_arrays(what, x=x, residual=residual)
        carrier = self._carrier(is_on_device)
        limit = self._comparison.limit(what, timeout_s, carrier, here=here)
        if is_on_device:
            with self._refusing(what, carrier):
                refuse_host_arrays(f"{what}: x", x)
                refuse_host_arrays(f"{what}: residual", residual)
                host_call = self._largest_on_host(
                    x, k, residual, nonblocking, limit, carrier
                )
            return start_host_call(
                self._group, self._devices, host_call, nonblocking=nonblocking
            )

        header, mine = self.check_topk(x, k, residual, nonblocking, limit)

        def steps(talk: Talk, title: str, report: SparseReport) -> Steps[Any]:
            return topk_allreduce(talk, title, header, mine, report)

        elements = mine.output.elements
        return self._start(what, elements, steps, nonblocking, limit)

    def _note(self, report: SparseReport) -> None:
        """Keep the report, here and for the sums that this call was made for."""
        self.report = report
        outer = self.made_for()
        if outer is not None:
            outer.report = report

    # -- checking ----------------------------------------------------------------

    @cached_property
    def _pool(self) -> Pool:
        return Pool()

    def check_sparse(
        self,
        x: Any,
        result: Any,
        out: Any,
        algorithm: Any,
        nonblocking: Any,
        limit: float,
        carrier: Refusing | None = None,
    ) -> tuple[Header, Output]:
        """Return a sparse_allreduce's arguments; an error says what is wrong.

        ``carrier``: runs such calls; None: that of calls on the host.
        """
        what = "sparse_allreduce"
        here = f"{what}, rank {self._group.rank}"

        def check() -> tuple[Header, Output]:
            check_flag(here, "nonblocking", nonblocking)
            self._check_algorithm(here, algorithm)
            pool, in_order = self._pool, self._group.deterministic
            output = _output(here, x, result, out, pool, in_order)
            check_finite_on_stream(
                self._group, what, output.argument.values, None, "values"
            )
            if algorithm == "split_dense" and output.format == "sparse":
                raise UsageError(
                    f"{here}: algorithm='split_dense' has a dense sum; leave out "
                    f"result='sparse', or take algorithm='split'"
                )
            if algorithm is not None:
                dtype = output.elements.dtype
                why = why_refused(algorithm, in_order, dtype, output.format)
                if why is not None:
                    raise UsageError(
                        f"{here}: algorithm={shown(algorithm)} must not run: {why}"
                    )
            return self._header(what, output.argument, output.format, algorithm), output

        return self._comparison.together(
            what,
            check,
            timeout_s=limit,
            describe=_described,
            carrier=carrier or self.open(),
        )

    def check_topk(
        self, x: Any, k: Any, residual: Any, nonblocking: Any, limit: float
    ) -> tuple[Header, Largest]:
        """Return a topk_allreduce's arguments; an error says what is wrong."""
        what = "topk_allreduce"
        here = f"{what}, rank {self._group.rank}"

        def check() -> tuple[Header, Largest]:
            check_flag(here, "nonblocking", nonblocking)
            pool, in_order = self._pool, self._group.deterministic
            check_finite_on_stream(
                self._group, what, check_largest(here, x, k, None)[0]
            )
            mine = Largest.of(here, x, k, residual, pool, in_order)
            header = self._header(what, mine.output.argument, "sparse", None)
            return replace(header, k=mine.k), mine

        return self._comparison.together(
            what,
            check,
            timeout_s=limit,
            describe=_described,
            carrier=self.open(),
        )

    def _largest_on_host(
        self,
        x: Any,
        k: Any,
        residual: Any,
        nonblocking: Any,
        limit: float,
        carrier: Refusing | None,
    ) -> HostCall:
        """Return a topk_allreduce of device arrays; an error says what is wrong."""
        what = "topk_allreduce"
        here = f"{what}, rank {self._group.rank}"

        def check() -> tuple[HostView, HostView | None, int]:
            check_flag(here, "nonblocking", nonblocking)
            found = check_largest(here, x, k, residual)
            check_finite_on_stream(self._group, what, found[0])
            return found

        def say(found: tuple[HostView, HostView | None, int]) -> dict[str, Any]:
            array, _, number = found
            return _facts(array.dtype.name, "sparse", None, number)

        array, owed, number = self._comparison.together(
            what,
            check,
            timeout_s=limit,
            describe=say,
            carrier=carrier,
        )

        def start(
            channel: HostChannel, copy_of: Callable[[HostView], Any]
        ) -> SteppedRequest:
            found: SteppedRequest = channel.topk_allreduce(
                copy_of(array),
                number,
                residual=None if owed is None else copy_of(owed),
                nonblocking=True,
                timeout_s=limit,
            )
            return found

        kept = [] if owed is None else [owed]
        reads = [*kept, array]
        return HostCall(what, "sparse", reads, kept, start, limit, rebuild=_on_device)

    # -- refusing ----------------------------------------------------------------

    def _carrier(self, is_on_device: bool) -> Refusing:
        """Return what runs calls of the host's arrays, or of a device's."""
        if is_on_device:
            return RefusedOnHost(self._devices.host_jobs, "sparse")
        return self.open()

    @contextmanager
    def _refusing(
        self, what: str, carrier: Refusing, *, meets: bool = False
    ) -> Iterator[None]:
        """Let the other ranks know of an error in here; ``Comparison.refuse``."""
        try:
            yield
        except Exception as error:
            self._comparison.refuse(what, error, None, carrier, meets=meets)
            raise

    # -- starting ----------------------------------------------------------------

    def open(self) -> _Sparse:
        """Return the state of sparse operations; the first call makes it."""
        if self._state is not None:
            return self._state
        with self._lock:
            if self._state is None:
                channel = self._make_channel("sparse")
                self._state = _Sparse(channel, make_room(channel))
            return self._state

    def _start(
        self,
        what: str,
        elements: Elements,
        steps: Callable[[Talk, str, SparseReport], Steps[Any]],
        nonblocking: bool,
        limit: float,
    ) -> Any:
        state = self.open()
        state.channel.check_usable()
        seq = state.seq
        state.seq += 1
        state.pending.add(seq)
        talk = Talk(
            state.channel,
            seq % _MAX_TAG,
            elements,
            limit,
            seq,
            min(state.pending),
            state.room,
            state.rules,
        )
        report = SparseReport(what)
        title = f"{what} #{seq} on {self._group.name}"

        def ended(error: BaseException | None) -> None:
            state.pending.discard(seq)
            self._note(report)
            if error is not None and not isinstance(error, MismatchError):
                # The others must not wait for messages that never come.
                state.channel.set_failure(f"{title}: {error}")

        request = SteppedRequest(
            steps(talk, title, report),
            f"{title}, rank {self._group.rank}",
            what,
            limit,
            ended,
        )
        return self._group.keep(request) if nonblocking else request.wait()

    def _header(
        self, what: str, argument: SparseArgument, form: str, algorithm: str | None
    ) -> Header:
        return Header(
            what,
            argument.dtype.name,
            argument.index_nbytes,
            form,
            algorithm,
            0,
            argument.shape,
            argument.count,
            self.open().seq,
        )

    def _check_algorithm(self, what: str, algorithm: Any) -> None:
        if algorithm is None:
            return
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise UsageError(
                f"{what}: unknown algorithm={shown(algorithm)}"
                f"{suggest(algorithm, ALGORITHMS)}"
            )
        if algorithm == "two_level_ring" and (
            why := why_not_two_level(self._group.nodes)
        ):
            raise UsageError(f"{what}: algorithm='two_level_ring' cannot run: {why}")

    # -- ending ------------------------------------------------------------------

    def free(self) -> None:
        """Free what sparse operations use; UsageError while one has not ended."""
        state = self._state
        if state is None:
            return
        if state.pending and not state.channel.failure:
            raise UsageError(
                f"{self._group.name} cannot be freed: {len(state.pending)} sparse "
                f"operations have not ended; wait() for their requests first"
            )
        state.channel.free()
        if state.room is not None and not state.channel.failure:
            state.room.close()

    def give_up(self, why: str) -> None:
        """End the waits of other ranks for this one, which may have come first."""
        self.open().channel.set_failure(why)

    def end_on_all_ranks(self, why: str) -> None:
        """End its calls in flight and all later ones, on all ranks.

        Ranks that wait in a channel that this rank has not made end, too: that ends
        with its communicator.
        """
        if self._state is not None:
            self._state.channel.end_on_all_ranks(why)


def _on_device(found: Any, put: Callable[[Any], Any]) -> Any:
    """Return a result with its arrays on a device."""
    if isinstance(found, SparseVector):
        return SparseVector(put(found.indices), put(found.values), found.shape)
    return put(found)


def _sum_on_host(output: Output, algorithm: Any, limit: float) -> HostCall:
    """Return a sparse_allreduce of device arrays, whose arguments are checked."""
    argument, out = output.argument, output.out
    indices = argument.indices
    assert not isinstance(indices, Keys), "coordinates are on the host"
    result: Any = None
    if out is not None:
        result = out.array
    elif output.format == "dense":
        dtype = argument.dtype.name
        result = empty_like_array(argument.values, argument.shape, dtype)
        out = view_new(
            result,
            argument.values,
            argument.shape,
            "sparse_allreduce: out",
            dtype=dtype,
        )

    def start(
        channel: HostChannel, copy_of: Callable[[HostView], Any]
    ) -> SteppedRequest:
        found: SteppedRequest = channel.sparse_allreduce(
            (copy_of(indices), copy_of(argument.values), argument.shape),
            result=output.format,
            out=None if out is None else copy_of(out),
            algorithm=algorithm,
            nonblocking=True,
            timeout_s=limit,
        )
        return found

    what, reads = "sparse_allreduce", [indices, argument.values]
    if out is None:
        return HostCall(what, "sparse", reads, [], start, limit, rebuild=_on_device)
    return HostCall(what, "sparse", reads, [out], start, limit, result)


def _described(found: tuple[Header, Any]) -> dict[str, Any]:
    """Return the facts of a call that check mode compares, before its first header."""
    header = found[0]
    k = header.k if other_call(header.operation).takes_number else None
    return _facts(header.dtype, header.format, header.algorithm, k)


def _facts(
    dtype: str, form: str, algorithm: str | None, k: int | None
) -> dict[str, Any]:
    return {"dtype": dtype, "result": form, "algorithm": algorithm, "k": k}


def _output(
    what: str, x: Any, result: Any, out: Any, pool: Pool, in_order: bool
) -> Output:
    argument = parse(what, x)
    elements = Elements.of(what, argument, pool, in_order)
    if not isinstance(result, str) or result not in FORMATS:
        raise UsageError(
            f"{what}: unknown result={shown(result)}{suggest(result, FORMATS)}"
        )
    if argument.length * argument.dtype.itemsize > LARGEST_NUMBERED:
        if result == "dense" or out is not None:
            raise UsageError(
                f"{what}: shape={argument.shape} has {argument.length} elements, more "
                f"than any array can hold: the sum is sparse; leave out "
                f"{'out' if out is not None else 'result'}"
            )
        result = "sparse"
    if out is None:
        return Output(argument, elements, result, None)
    if result == "sparse":
        raise UsageError(
            f"{what}: out is for a dense result; leave out result='sparse'"
        )
    return Output(argument, elements, "dense", _dense_out(what, argument, out))


def _dense_out(what: str, argument: SparseArgument, out: Any) -> HostView:
    target = view_anywhere(out, f"{what}: out")
    if not target.writable:
        raise BufferError_(f"{what}: out is read-only: pass a writable array")
    if target.dtype is not argument.dtype:
        raise BufferError_(
            f"{what}: out has dtype {target.dtype.name}, the values have "
            f"{argument.dtype.name}; they must be equal"
        )
    if target.count != argument.length:
        raise UsageError(
            f"{what}: out has {target.count} elements (shape {target.shape}), expected "
            f"{argument.length} for shape={argument.shape}"
        )
    assert not isinstance(argument.indices, Keys), "no array has so many elements"
    if overlap(target, argument.indices) or overlap(target, argument.values):
        raise UsageError(f"{what}: out overlaps indices or values; pass a separate one")
    return target
