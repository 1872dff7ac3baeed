# SPDX-License-Identifier: Apache-2.0
"""Calls of commrt made of torch's tensors, and their results as torch wants them.

If torch waits for a call (``asyncOp`` is False), it runs to its end on the caller's
thread and returns None: no Work, no thread in between. Every other call returns a Work.
While torch coalesces calls, all start at once and join the one Work at the end.

Most calls are plain: they take one dense tensor, the caller waits, and an equal call
came before. They may have a limit of their own, and ask for nothing else. commrt's
dispatcher knows these at a glance, and they are tried first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import GeneratorType
from typing import TYPE_CHECKING, Any, cast

import torch

from commrt.calls.methods import if_cached
from commrt.errors import CommError, TimeoutError_
from commrt.torch.completer import Completer
from commrt.torch.errors import as_torch_error, wrong_call
from commrt.torch.monitored_barrier import MonitoredBarrier
from commrt.torch.operands import CopyBack
from commrt.torch.per_call import ASKED
from commrt.torch.profiling import profiled, profiler
from commrt.torch.reductions import PLAIN
from commrt.torch.time_estimate import ESTIMATED, Estimating
from commrt.torch.work import CommrtWork, JoinedWork, seconds
from commrt.vocabulary.operations import operation

if TYPE_CHECKING:
    from commrt.core import Core
    from commrt.torch.reductions import Reduction

__all__ = ["Calls", "RangedCalls"]

_ALLREDUCE = if_cached("allreduce")
_UNSET = timedelta(milliseconds=-1)
"""Torch's value for "the group's default"."""
_asked, _plain_reduction = ASKED.get, PLAIN.get
"""Looked up once: each lookup shows where a call's data has emptied the caches."""


class Calls:
    """Starts one group's operations on its communicator."""

    def __init__(
        self,
        comm: Core,
        completer: Completer,
        sparse_algorithm: str | None = None,
    ) -> None:
        self.comm = comm
        self.completer = completer
        self.faults = completer.faults
        self.monitored = MonitoredBarrier(comm)
        self._batch: list[CommrtWork] | None = None
        self._estimated: Core | None = None
        """The communicator, while a stand-in only says how long its calls take."""
        self.is_free = True
        """True if calls begin at once: torch does not coalesce them, and they wait for
        no future of a backward pass."""
        self._looks = threading.Lock()
        completer.tell = self._look
        self.sparse_algorithm = sparse_algorithm
        """Algorithm of the group's sparse sums; None: their fill decides."""

    @property
    def batch(self) -> list[CommrtWork] | None:
        """Works of calls that torch coalesces; None where it does not."""
        return self._batch

    @batch.setter
    def batch(self, works: list[CommrtWork] | None) -> None:
        self._batch = works
        self._look()

    def _look(self) -> None:
        with self._looks:  # the futures' thread does, too
            self.is_free = (
                self._batch is None
                and self._estimated is None
                and not self.completer.holding
            )

    def settle(self) -> None:
        """Within a backward pass, wait for futures that come before the next call."""
        if self.completer.holding and torch._C._current_autograd_node() is not None:
            self.completer.settle()

    def waits(self, opts: Any) -> bool:
        """Return whether the caller waits for the call, so that it needs no Work."""
        return self.batch is None and not opts.asyncOp

    def ends(self, opts: Any, known: Any, *x: torch.Tensor, **arguments: Any) -> bool:
        """Run a plain call to its end; False where it is none, or not known so far.

        It is waited for, and no algorithm is asked for. ``known`` is an operation of
        ``calls.methods.if_cached``.
        """
        if not (
            self.is_free
            and not opts.asyncOp
            and not profiler._is_profiler_enabled
            and _asked() is None
        ):
            return False
        if opts.timeout != _UNSET:
            arguments["timeout_s"] = seconds(opts.timeout)
        try:
            return known(self.comm, *x, **arguments) is not NotImplemented
        except CommError as error:
            raise self.failed(error) from error.__cause__

    def is_allreduced(self, x: torch.Tensor, opts: Any) -> bool:
        """Run a plain allreduce to its end; False where it is not known so far.

        It does the same as the method above, without arguments in between. Programs
        call nothing as often, and at 8 bytes these steps take longer than the
        operation.
        """
        if not (
            self.is_free
            and not opts.asyncOp
            and not profiler._is_profiler_enabled
            and _asked() is None
        ):
            return False
        op = _plain_reduction(hash(opts.reduceOp))
        if op is None:
            return False
        limit = None if opts.timeout == _UNSET else seconds(opts.timeout)
        try:
            if limit is None:
                return _ALLREDUCE(self.comm, x, op=op) is not NotImplemented
            return (
                _ALLREDUCE(self.comm, x, op=op, timeout_s=limit) is not NotImplemented
            )
        except CommError as error:
            raise self.failed(error) from error.__cause__

    def failed(self, error: CommError) -> CommError:
        """Return a call's error as torch's, too; the group's abort hooks hear of it."""
        self.faults.notice(error)
        return as_torch_error(error)

    def limit(self, opts: Any) -> float | None:
        """Return the call's own limit in seconds, None for the group's."""
        timeout = opts.timeout
        return None if timeout == _UNSET else seconds(timeout)

    def run(
        self,
        name: str,
        x: torch.Tensor,
        opts: Any,
        outputs: Sequence[torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        back: CopyBack | None = None,
        reduction: Reduction | None = None,
        root: int = 0,
    ) -> CommrtWork | None:
        """Run a collective with blocks of equal lengths.

        Args:
            name: commrt's.
            x: what this rank sends; without ``out`` also what it gets.
            opts: torch's options.
            outputs: what the Work gives back.
            out: separate memory for the result.
            back: copies results to where they belong, at the end.
            reduction: what combines.
            root: where the operation has one.
        """
        arguments: dict[str, Any] = {}
        if reduction is not None:
            arguments |= reduction.arguments
        if operation(name).has_root:
            arguments["root"] = root
        if out is not None:
            arguments["out"] = out
        return self.call(name, [x], opts, outputs, back, **arguments)

    def end(
        self,
        request: Any,
        waited: bool,
        outputs: Sequence[torch.Tensor],
        back: CopyBack | None,
    ) -> CommrtWork | None:
        """Return torch's result: None for a call that was waited for, else a Work."""
        if request is ESTIMATED:
            request = back = None  # nothing came
        if waited:
            if back is not None:
                back()
            return None
        return self.give(CommrtWork(request, outputs, back, self.completer))

    def give(self, work: CommrtWork) -> CommrtWork | None:
        """Return a Work; while torch coalesces, keep it for the end."""
        if self.faults.hooks:
            self.completer.watch(work)
        if self.batch is None:
            return work
        self.batch.append(work)
        return None

    def call(
        self,
        name: str,
        x: Any,
        opts: Any,
        outputs: Sequence[torch.Tensor],
        back: CopyBack | None = None,
        **arguments: Any,
    ) -> CommrtWork | None:
        """Run any collective of the communicator."""
        waits, limit = self.waits(opts), self.limit(opts)
        if limit is not None:
            arguments["timeout_s"] = limit
        asked = _asked()
        if asked is not None:
            arguments |= asked
        comm, how = self.comm, {"nonblocking": not waits, **arguments}
        self.settle()
        try:
            with profiled(name):
                if comm.ranges is not None:  # another profiler is to see it
                    request = getattr(comm, name)(*x, **how)
                else:  # a log has it already, as torch calls it
                    request = getattr(type(comm), name)(comm, *x, **how)
        except CommError as error:
            raise self.failed(error) from error.__cause__
        return self.end(request, waits, outputs, back)

    def join(self, works: Sequence[CommrtWork], opts: Any) -> CommrtWork | None:
        """Return torch's result for several operations that have been started."""
        work = JoinedWork(works, self.completer)
        if self.waits(opts):
            work.wait()
            return None
        return self.give(work)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Make commrt's errors torch's, too."""
        try:
            yield
        except TimeoutError_ as error:  # of a limit that is not the operation's
            raise as_torch_error(error) from error.__cause__
        except CommError as error:
            raise self.failed(error) from error.__cause__

    def start_estimate(self, block: GeneratorType[Any, Any, Any] | None) -> None:
        """Run nothing of this thread in a block: only say how long calls take."""
        stand_in = self.comm
        if isinstance(stand_in, Estimating):
            if block is None or stand_in.is_open:
                raise wrong_call("_time_estimator: another one of this group is open")
            self._step_aside(stand_in)
        self._estimated = comm = self.comm
        self.comm = cast("Core", Estimating(comm, block, self._step_aside))
        self._look()

    def end_estimate(self) -> float:
        """Run calls again; return the microseconds of those since, below 0: unknown."""
        stand_in = self.comm
        if not isinstance(stand_in, Estimating):
            raise wrong_call("_end_time_estimate: no estimate of this group is open")
        self._step_aside(stand_in)
        return stand_in.expected_us

    def _step_aside(self, stand_in: Estimating) -> None:
        """Put the communicator in the place of a stand-in, unless it is there."""
        there: object = self.comm
        if there is stand_in and self._estimated is not None:
            self.comm, self._estimated = self._estimated, None
            self._look()

    def refuse_estimate(self, what: str) -> None:
        """Raise UsageError where a call that cannot be estimated is to be."""
        if isinstance(self.comm, Estimating) and self.comm.estimates():
            raise wrong_call(
                f"{what}: _time_estimator estimates collectives of dense tensors alone"
            )

    def start_batch(self) -> None:
        """Begin to coalesce."""
        self.batch = []

    def end_batch(self) -> CommrtWork:
        """Return all that was started since as one Work."""
        works, self.batch = self.batch or [], None
        return JoinedWork(works, self.completer)


class RangedCalls(Calls):
    """Starts the operations of a group whose calls a profiler shows.

    Around each of the communicator's own methods there is a range. So no call is
    plain, as those go past them.
    """

    def ends(self, opts: Any, known: Any, *x: torch.Tensor, **arguments: Any) -> bool:
        """No call does."""
        return False

    def is_allreduced(self, x: torch.Tensor, opts: Any) -> bool:
        """No call is known."""
        return False
