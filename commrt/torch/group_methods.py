# SPDX-License-Identifier: Apache-2.0
"""torch's collectives, by the names and in the forms that torch calls them.

Names changed in torch 2.13 (``all_gather_single`` was ``_allgather_base``); both are
here, as C++ and Python of one version may use either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from commrt.calls.methods import if_cached
from commrt.torch.calls import Calls
from commrt.torch.errors import wrong_call
from commrt.torch.monitored_barrier import limit_of
from commrt.torch.operands import (
    CopyBack,
    all_given,
    apart,
    given,
    movable,
    plain,
    split_back,
    target,
    together,
)
from commrt.torch.options import one, options, tensor_list
from commrt.torch.per_call import ASKED
from commrt.torch.reductions import PLAIN, reduction_of
from commrt.torch.refused_calls import refuse, tells_of_errors
from commrt.torch.sparse_sums import sparse_allreduce
from commrt.torch.splits import checked_counts, in_elements
from commrt.torch.time_estimate import ESTIMATED
from commrt.torch.work import CommrtWork

__all__ = ["Collectives"]

Tensors = Sequence[torch.Tensor]
Answer = CommrtWork | None
_Allreduce, _AllreduceCoalesced = c10d.AllreduceOptions, c10d.AllreduceCoalescedOptions
_REDUCE, _BCAST = if_cached("reduce"), if_cached("bcast")
_SCATTER, _ALLGATHER = if_cached("reduce_scatter"), if_cached("allgather")
_ALLTOALL, _ALLTOALLV = if_cached("alltoall"), if_cached("alltoallv")


class Collectives:
    """The collectives of a process group."""

    calls: Calls

    # -- reductions --------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Answer:
        """Reduce a tensor over all ranks, in place; dense or sparse COO."""
        calls = self.calls
        try:  # by hand: it is the one that is called most
            if type(opts) is not _Allreduce:
                opts = options(_Allreduce, opts, reduceOp=None, timeout=timeout)
            is_list = type(tensors) is list and len(tensors) == 1
            x = tensors[0] if is_list else one("allreduce", tensors)
            if calls.is_allreduced(x, opts):
                return None
            return self._allreduced(x, opts)
        except Exception as error:
            refuse(calls, "allreduce", error)
            raise

    def _allreduced(self, x: torch.Tensor, opts: Any) -> Answer:
        calls = self.calls
        if (x := given(x, "all_reduce: tensor")).layout is not torch.strided:
            return sparse_allreduce(calls, x, opts)
        buffer, back = target(x, moved=False)
        return calls.run(
            "allreduce",
            buffer,
            opts,
            [x],
            back=back,
            reduction=reduction_of(opts.reduceOp),
        )

    @tells_of_errors
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Answer:
        """Reduce several tensors over all ranks, in place; short ones go together."""
        opts = options(_AllreduceCoalesced, opts, reduceOp=None)
        tensors = all_given(tensors, "all_reduce_coalesced: tensors")
        calls, op = self.calls, reduction_of(opts.reduceOp)
        apart = op.factor is not None or calls.comm.size == 1 or ASKED.get() is not None
        if apart or not _on_host(tensors):
            plain_opts = options(
                _Allreduce,
                None,
                reduceOp=opts.reduceOp,
                timeout=opts.timeout,
                asyncOp=opts.asyncOp,
            )
            return self._each(
                [lambda x=x: self.allreduce([x], plain_opts) for x in tensors], opts
            )
        buffers = [target(x, moved=False) for x in tensors]
        limit = calls.limit(opts)
        arguments: dict[str, Any] = {"op": op.name, "nonblocking": True}
        if limit is not None:
            arguments["timeout_s"] = limit
        calls.settle()
        with calls.raising(), calls.comm.fused():
            requests = [calls.comm.allreduce(x, **arguments) for x, _ in buffers]
        works = [
            CommrtWork(None, [x], None, calls.completer)
            if request is ESTIMATED
            else CommrtWork(request, [x], back, calls.completer)
            for request, x, (_, back) in zip(requests, tensors, buffers, strict=True)
        ]
        return calls.join(works, opts)

    @tells_of_errors
    def reduce(
        self, tensors: Any, root: Any = None, op: Any = None, timeout: Any = None
    ) -> Answer:
        """Reduce a tensor over all ranks, in place on the root."""
        opts = options(
            c10d.ReduceOptions, root, rootRank=None, reduceOp=op, timeout=timeout
        )
        x, calls = one("reduce", tensors), self.calls
        known, root = PLAIN.get(hash(opts.reduceOp)), opts.rootRank
        if known is not None and calls.ends(opts, _REDUCE, x, op=known, root=root):
            return None
        x = given(x, "reduce: tensor")
        buffer, back = target(x, moved=False)
        return self.calls.run(
            "reduce",
            buffer,
            opts,
            [x],
            back=back,
            reduction=reduction_of(opts.reduceOp),
            root=opts.rootRank,
        )

    @tells_of_errors
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Answer:
        """Reduce a list of tensors, one per rank, and give each rank its own."""
        opts = options(c10d.ReduceScatterOptions, opts, reduceOp=None, timeout=timeout)
        out, parts = one("reduce_scatter", outputs), tensor_list(inputs)
        self._check_list("reduce_scatter", "inputs", parts)
        out = given(out, "reduce_scatter: output")
        parts = all_given(parts, "reduce_scatter: input_list")
        counts = [part.numel() for part in parts]
        if len({*counts}) == 1:
            return self.reduce_scatter_single(out, together(parts, False), opts)
        buffer, back = target(out, moved=False)
        x = apart(together(parts, False), buffer)
        op = reduction_of(opts.reduceOp)
        return self.calls.call(
            *("reduce_scatterv", [x], opts, [out], back),
            counts=counts,
            out=buffer,
            **op.arguments,
        )

    @tells_of_errors
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Answer:
        """Reduce a tensor over all ranks, and give each rank its block."""
        if type(opts) is not c10d.ReduceScatterOptions:
            opts = options(c10d.ReduceScatterOptions, opts, reduceOp=None)
        calls = self.calls
        op = PLAIN.get(hash(opts.reduceOp))
        if op is not None and calls.ends(opts, _SCATTER, input, out=output, op=op):
            return None
        output = given(output, "reduce_scatter_tensor: output")
        buffer, back = target(output, moved=False)
        x = plain(given(input, "reduce_scatter_tensor: input"))
        fits = x.numel() == buffer.numel() * calls.comm.size
        if fits and not _separate(x, buffer):
            x = _unless_own_block(buffer, x, calls.comm.rank)
        return self.calls.run(
            "reduce_scatter",
            x,
            opts,
            [output],
            out=buffer,
            back=back,
            reduction=reduction_of(opts.reduceOp),
        )

    _reduce_scatter_base = reduce_scatter_single

    @tells_of_errors
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Answer:
        """Do several at once."""
        opts = options(c10d.ReduceScatterOptions, opts, reduceOp=None)
        pairs = list(zip(outputs, inputs, strict=True))
        return self._each(
            [lambda a=a, b=b: self.reduce_scatter_single(a, b, opts) for a, b in pairs],
            opts,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- moving ------------------------------------------------------------------

    @tells_of_errors
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Answer:
        """Copy the root's tensor to every rank."""
        opts = options(c10d.BroadcastOptions, opts, rootRank=None, timeout=timeout)
        x, calls = one("broadcast", tensors), self.calls
        if calls.ends(opts, _BCAST, x, root=opts.rootRank):
            return None
        x = given(x, "broadcast: tensor")
        buffer, back = target(x)
        return self.calls.run(
            "bcast",
            buffer,
            opts,
            [x],
            back=back,
            root=opts.rootRank,
        )

    @tells_of_errors
    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Answer:
        """Give every rank a list of all ranks' tensors, which may differ in length."""
        opts = options(c10d.AllgatherOptions, opts, timeout=timeout)
        into, x = tensor_list(outputs), one("allgather", inputs)
        self._check_list("allgather", "outputs", into)
        into = all_given(into, "all_gather: tensor_list")
        x = movable(given(x, "all_gather: tensor"))
        out, back = split_back(into)
        counts = _counts(into, out)
        if len({*counts}) > 1:
            x = apart(x, out)
            return self.calls.call(
                *("allgatherv", [x], opts, into, back), counts=counts, out=out
            )
        return self._gather_all(out, x, opts, into, back)

    @tells_of_errors
    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Answer:
        """Do several at once; ``outputs[r][i]`` is rank r's i-th tensor."""
        opts = options(c10d.AllgatherOptions, opts)
        self._check_list("allgather_coalesced", "outputs", outputs)
        return self._each(
            [
                lambda x=x, i=i: self.allgather([[of[i] for of in outputs]], [x], opts)
                for i, x in enumerate(inputs)
            ],
            opts,
        )

    @tells_of_errors
    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Answer:
        """Put all ranks' tensors into one, in rank order."""
        if type(opts) is not c10d.AllgatherOptions:
            opts = options(c10d.AllgatherOptions, opts)
        calls = self.calls
        if calls.ends(opts, _ALLGATHER, input, out=output):
            return None
        output = given(output, "all_gather_into_tensor: output_tensor")
        x = movable(given(input, "all_gather_into_tensor: input_tensor"))
        out, back = target(output)
        return self._gather_all(out, x, opts, [output], back)

    _allgather_base = all_gather_single

    @tells_of_errors
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Answer:
        """Do several at once."""
        opts = options(c10d.AllgatherOptions, opts)
        pairs = list(zip(outputs, inputs, strict=True))
        return self._each(
            [lambda a=a, b=b: self.all_gather_single(a, b, opts) for a, b in pairs],
            opts,
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @tells_of_errors
    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Answer:
        """Give the root a list of all ranks' tensors."""
        opts = options(c10d.GatherOptions, opts, rootRank=None, timeout=timeout)
        x = movable(given(one("gather", inputs), "gather: tensor"))
        if self.calls.comm.rank != opts.rootRank:
            return self.calls.call("gather", [x], opts, [], root=opts.rootRank)
        into = tensor_list(outputs)
        self._check_list("gather", "outputs", into)
        into = all_given(into, "gather: gather_list")
        out, back = split_back(into)
        return self.calls.call(
            *("gather", [x], opts, into, back), root=opts.rootRank, out=out
        )

    @tells_of_errors
    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Answer:
        """Give the root one tensor of all ranks' tensors, in rank order."""
        opts = options(c10d.GatherOptions, opts, rootRank=None)
        x, root = movable(given(input, "gather_single: tensor")), opts.rootRank
        if self.calls.comm.rank != root:
            return self.calls.call("gather", [x], opts, [], root=root)
        output = given(output, "gather_single: gather_tensor")
        out, back = target(output)
        return self.calls.call(
            *("gather", [apart(x, out)], opts, [output], back), root=root, out=out
        )

    gather_into_tensor = gather_single

    @tells_of_errors
    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Answer:
        """Give each rank its tensor of the root's list."""
        opts = options(c10d.ScatterOptions, opts, rootRank=None, timeout=timeout)
        output = given(one("scatter", outputs), "scatter: tensor")
        out, back = target(output)
        x = None
        if self.calls.comm.rank == opts.rootRank:
            parts = tensor_list(inputs)
            self._check_list("scatter", "inputs", parts)
            parts = all_given(parts, "scatter: scatter_list")
            x = apart(together(parts), out)
        return self.calls.call(
            *("scatter", [x], opts, [output], back), root=opts.rootRank, out=out
        )

    @tells_of_errors
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Any = None,
        input_splits: Any = None,
        opts: Any = None,
    ) -> Answer:
        """Send each rank a part of a tensor, in rows; without splits equal parts."""
        if type(opts) is not c10d.AllToAllOptions:
            opts = options(c10d.AllToAllOptions, opts, timeout=None)
        calls = self.calls
        # Lists mostly; Megatron-core passes arrays of numpy, which have no truth.
        even = (output_splits is None or not len(output_splits)) and (
            input_splits is None or not len(input_splits)
        )
        if even:
            if calls.ends(opts, _ALLTOALL, input, out=output):
                return None
        elif self._is_split(output, input, output_splits, input_splits, opts):
            return None
        output = given(output, "all_to_all_single: output")
        input = given(input, "all_to_all_single: input")
        out, back = target(output)
        x = movable(input)
        size = calls.comm.size
        if even:
            if not _separate(x, out) and x.data_ptr() != out.data_ptr():
                x = apart(x, out)
            return self.calls.run(
                "alltoall",
                x,
                opts,
                [output],
                out=out,
                back=back,
            )
        return self.calls.call(
            *("alltoallv", [apart(x, out)], opts, [output], back),
            send_counts=checked_counts("input", input_splits, input, x, size),
            recv_counts=checked_counts("output", output_splits, output, out, size),
            out=out,
        )

    def _is_split(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Any,
        input_splits: Any,
        opts: Any,
    ) -> bool:
        """Run a plain call with splits to its end; False where it is none.

        Splits are new in every step where tokens are routed. So the dispatcher gets
        them as they are, and compares their sums with the tensors.
        """
        sent = in_elements(input, input_splits)
        received = in_elements(output, output_splits)
        if sent is None or received is None:
            return False
        return self.calls.ends(
            *(opts, _ALLTOALLV, input),
            out=output,
            send_counts=sent,
            recv_counts=received,
        )

    alltoall_base = all_to_all_single

    @tells_of_errors
    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None
    ) -> Answer:
        """Send each rank its tensor of a list; lengths may differ."""
        opts = options(c10d.AllToAllOptions, opts, timeout=timeout)
        self._check_list("alltoall", "outputs", outputs)
        self._check_list("alltoall", "inputs", inputs)
        outputs = all_given(outputs, "all_to_all: output_tensor_list")
        inputs = all_given(inputs, "all_to_all: input_tensor_list")
        out, back = split_back(outputs)
        x = apart(together(inputs), out)
        return self.calls.call(
            *("alltoallv", [x], opts, outputs, back),
            send_counts=_counts(inputs, x),
            recv_counts=_counts(outputs, out),
            out=out,
        )

    @tells_of_errors
    def barrier(self, opts: Any = None, timeout: Any = None) -> Answer:
        """Return once every rank is here, and its device has done what it was given."""
        opts = options(c10d.BarrierOptions, opts, timeout=timeout)
        device = getattr(opts, "device", None)
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self.calls.call("barrier", [], opts, [])

    def monitored_barrier(
        self, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        """Return once every rank is here; else rank 0 finds out who is not.

        ``dist.monitored_barrier`` does not come here: it asks for gloo by name.
        """
        calls = self.calls
        calls.refuse_estimate("monitored_barrier")
        with calls.raising():
            limit_s = limit_of(timeout, calls.comm.timeout_s)
            calls.monitored.run(limit_s, bool(wait_all_ranks))

    # -- several calls as one ----------------------------------------------------

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Begin to join the works of the calls that follow."""
        self.calls.start_batch()

    def _end_coalescing(self, device: torch.device | None = None) -> CommrtWork:
        """Return the one work of the calls since."""
        return self.calls.end_batch()

    def start_coalescing(self, device: torch.device | None = None) -> None:
        """Start or end coalescing, called by torch's C++."""
        self._start_coalescing(device)

    def end_coalescing(self, device: torch.device | None = None) -> CommrtWork:
        """Start or end coalescing, called by torch's C++."""
        return self._end_coalescing(device)

    def _each(self, starts: Sequence[Any], opts: Any) -> Answer:
        """Start several calls; return one Work of all."""
        calls, outer = self.calls, self.calls.batch
        calls.start_batch()
        try:
            for start in starts:
                start()
        finally:
            works, calls.batch = calls.batch or [], outer
        return calls.join(works, opts)

    # -- parts -------------------------------------------------------------------

    def _gather_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        opts: Any,
        outputs: Tensors,
        back: CopyBack | None,
    ) -> Answer:
        comm = self.calls.comm
        fits = out.numel() == x.numel() * comm.size
        if fits and not _separate(x, out):
            x = _unless_own_block(x, out, comm.rank, copied=x)
        return self.calls.run("allgather", x, opts, outputs, out=out, back=back)

    def _check_list(self, what: str, argument: str, tensors: Sequence[Any]) -> None:
        size = self.calls.comm.size
        if len(tensors) != size:
            raise wrong_call(
                f"{what}: {argument} has {len(tensors)} tensors; expected one for each "
                f"of the {size} ranks of the group"
            )


def _on_host(tensors: Tensors) -> bool:
    return all(x.is_cpu and x.layout is torch.strided for x in tensors)


def _separate(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether two tensors share no memory."""
    first, second = x.data_ptr(), out.data_ptr()
    return bool(first + x.nbytes <= second or second + out.nbytes <= first)


def _unless_own_block(
    small: torch.Tensor,
    large: torch.Tensor,
    rank: int,
    *,
    copied: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what is sent of two tensors that share memory.

    Where one is this rank's block of the other, commrt sees to it. Else a copy
    is sent: of ``copied``, by itself of ``large``.
    """
    sent = large if copied is None else copied
    own = small.data_ptr() == large.data_ptr() + rank * small.nbytes
    return sent if own else sent.detach().clone()


def _counts(tensors: Tensors, flat: torch.Tensor) -> list[int]:
    """Return the elements of each tensor, as ``flat`` counts them."""
    unit = flat.element_size()
    return [tensor.nbytes // unit for tensor in tensors]
