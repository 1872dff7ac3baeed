# SPDX-License-Identifier: Apache-2.0
"""From a tensor to a call of commrt, and from there to what torch is given.

A call that torch waits for (``asyncOp`` is False) runs to its end on the caller's
thread and returns None: no Work, no thread in between. Every other one returns a Work.
While torch coalesces calls, all are started at once and join the one Work at the end.

commrt's dispatcher knows numpy's arrays at a glance, torch's tensors not. Their plans
are looked up here, by what would make the same plan there; whatever is not plain goes
through the communicator's methods, which check it and say what is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from commrt.dtypes import ReduceOp
from commrt.errors import CommError
from commrt.operations import operation
from commrt.torch.errors import as_torch_error
from commrt.torch.futures import Completer
from commrt.torch.operands import KNOWN, CopyBack
from commrt.torch.reductions import CODES
from commrt.torch.work import CommrtWork, JoinedWork, seconds

if TYPE_CHECKING:
    from commrt.comm import Communicator
    from commrt.torch.reductions import Reduction

__all__ = ["Calls"]

_SUM = 0
"""What the key of a plan holds for operations that reduce nothing."""
_PREMUL_SUM = int(ReduceOp.PREMUL_SUM)
_CODES = {
    name: operation(name).code
    for name in ("allreduce", "reduce", "bcast", "allgather", "reduce_scatter")
}
_CODES["alltoall"] = operation("alltoall").code
_ALLREDUCE = _CODES["allreduce"]
_UNSET = timedelta(milliseconds=-1)
"""What torch passes for "the group's default"."""


class Calls:
    """Starts one group's operations on its communicator."""

    def __init__(self, comm: Communicator, completer: Completer | None) -> None:
        self.comm = comm
        self.completer = completer
        self.batch: list[CommrtWork] | None = None
        """Works of calls that torch coalesces; None where it does not."""
        # Where a rule of the table may compress, each call has to be asked about.
        self._may_look_up = not comm._rules_may_compress

    def waits(self, opts: Any) -> bool:
        """Whether the caller waits for the call, so that it needs no Work."""
        return self.batch is None and not opts.asyncOp

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
        num_elements: int = -1,
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
            num_elements: of the operation's full vector; -1 where the lengths of ``x``
                and ``out`` do not fit, or the memory is one that needs a closer look.
        """
        waits, limit = self.waits(opts), self.limit(opts)
        try:
            request = self._at_a_glance(
                name, x, out, reduction, root, num_elements, waits, limit
            )
            if request is NotImplemented:
                request = self._looked_at(name, x, out, reduction, root, waits, limit)
        except CommError as error:
            raise as_torch_error(error) from error.__cause__
        return self.end(request, waits, outputs, back)

    def is_allreduced(self, x: torch.Tensor, opts: Any) -> bool:
        """Run an allreduce that is waited for, if it is of the plainest kind.

        What ``run`` does, without a step in between: at 8 bytes these take longer than
        the operation.
        """
        comm = self.comm
        if (
            opts.asyncOp
            or self.batch is not None
            or not self._may_look_up
            or not x.is_cpu
            or x.layout is not torch.strided
            or not x.is_contiguous()
            or x.is_neg()
            or x.is_conj()
        ):
            return False
        code = CODES.get(hash(opts.reduceOp))
        key = (
            _ALLREDUCE,
            x.numel(),
            KNOWN.get(x.dtype),
            None,
            code,
            0,
            None,
            None,
            (),
            (),
        )
        plan = comm._plans.get(key)
        if plan is None or comm._slow or comm._fused is not None or comm._failure:
            return False
        timeout = opts.timeout
        limit = None if timeout == _UNSET else seconds(timeout)
        at = x.data_ptr()
        try:
            comm._run_plan(
                *(plan, at, at, x, None, x, "allreduce", False),
                comm.timeout_s if limit is None else limit,
            )
        except CommError as error:
            raise as_torch_error(error) from error.__cause__
        return True

    def end(
        self,
        request: Any,
        waited: bool,
        outputs: Sequence[torch.Tensor],
        back: CopyBack | None,
    ) -> CommrtWork | None:
        """Return what torch gets: None for what was waited for, else a Work."""
        if waited:
            if back is not None:
                back()
            return None
        return self.give(CommrtWork(request, outputs, back, self.completer))

    def give(self, work: CommrtWork) -> CommrtWork | None:
        """Return a Work; while torch coalesces, keep it for the end."""
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
        """Run any method of the communicator."""
        waits, limit = self.waits(opts), self.limit(opts)
        if limit is not None:
            arguments["timeout_s"] = limit
        try:
            method = getattr(self.comm, name)
            request = method(*x, nonblocking=not waits, **arguments)
        except CommError as error:
            raise as_torch_error(error) from error.__cause__
        return self.end(request, waits, outputs, back)

    def join(self, works: Sequence[CommrtWork], opts: Any) -> CommrtWork | None:
        """Return what torch gets for several operations that have been started."""
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
        except CommError as error:
            raise as_torch_error(error) from error.__cause__

    def start_batch(self) -> None:
        """Begin to coalesce."""
        self.batch = []

    def end_batch(self) -> CommrtWork:
        """Return all that was started since as one Work."""
        works, self.batch = self.batch or [], None
        return JoinedWork(works, self.completer)

    def _at_a_glance(
        self,
        name: str,
        x: torch.Tensor,
        out: torch.Tensor | None,
        reduction: Reduction | None,
        root: int,
        num_elements: int,
        waits: bool,
        limit: float | None,
    ) -> Any:
        """Run a call whose plan is known; NotImplemented where it must be looked at."""
        comm = self.comm
        if num_elements < 0 or not self._may_look_up or not x.is_cpu:
            return NotImplemented
        how, what = _CODES[name], KNOWN.get(x.dtype)
        combines = _SUM if reduction is None else reduction.code
        if combines == _PREMUL_SUM:
            return NotImplemented
        plan = comm._plans.get(
            (how, num_elements, what, None, combines, root, None, None, (), ())
        )
        if plan is None or comm._slow or comm._fused is not None or comm._failure:
            return NotImplemented
        target = x if out is None else out
        return comm._run_plan(
            plan,
            x.data_ptr(),
            target.data_ptr(),
            x,
            out,
            target,
            name,
            not waits,
            comm.timeout_s if limit is None else limit,
        )

    def _looked_at(
        self,
        name: str,
        x: torch.Tensor,
        out: torch.Tensor | None,
        reduction: Reduction | None,
        root: int,
        waits: bool,
        limit: float | None,
    ) -> Any:
        arguments: dict[str, Any] = {"nonblocking": not waits}
        if reduction is not None:
            arguments |= reduction.arguments
        if operation(name).has_root:
            arguments["root"] = root
        if out is not None:
            arguments["out"] = out
        if limit is not None:
            arguments["timeout_s"] = limit
        return getattr(self.comm, name)(x, **arguments)
