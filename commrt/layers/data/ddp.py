# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel's gradients by commrt: a communication hook.

    state = HookState(compress="bfloat16")
    model = DistributedDataParallel(model, bucket_cap_mb=state.bucket_cap_mb)
    model.register_comm_hook(state, reduce_bucket)

DDP cuts the buckets and calls the hook for each, in the same order on all ranks. The
hook starts the bucket's operations and returns a future. The end of the backward pass
itself completes the futures. Waiting in the hook would hold each rank at every bucket
for the slowest, and a thread that waits would take a core from the computation. DDP
needs the sums no earlier.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import Variable

from commrt.comm import core_of
from commrt.errors import CommError, UsageError, shown
from commrt.layers.data.bucket_size import best_bucket_nbytes
from commrt.layers.data.sparse_rows import as_sparse, dense_rows, scaled
from commrt.torch.errors import as_torch_error
from commrt.torch.shared_storages import share_storage
from commrt.vocabulary.wire_formats import EXACT, check_compress

if TYPE_CHECKING:
    from commrt.comm import Communicator

__all__ = ["HookState", "reduce_bucket"]

_MIB = 1 << 20
_SHORT_NBYTES = 32 << 10
"""Shorter buckets gain nothing from symmetric memory."""
_SETTLED_STEPS = 2
"""DDP makes its buckets anew after the first step, in the order of the gradients."""


class HookState:
    """State of ``reduce_bucket`` for one group; making one is collective.

    Args:
        group: commrt's; None for the default group. The hook has a communicator of its
            own, so its buckets meet no other operation of the group.
        compress: what gradients are compressed to on their way: ``bfloat16``,
            ``float16`` or ``int8``.
        density: the part of a bucket's elements that is sent, the largest of the sums.
        error_feedback: keep what these two leave out, and send it with a later step.
        symmetric: move DDP's buckets of host memory, once they are settled, into
            memory that the ranks of the node share, which saves copies; not those that
            are compressed or sent in part, and not where ``gradient_as_bucket_view``
            makes the gradients parts of them, whose addresses programs may have.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        compress: str | None = None,
        density: float | None = None,
        error_feedback: bool = True,
        symmetric: bool = True,
    ) -> None:
        group = dist.group.WORLD if group is None else group
        comm = getattr(group, "communicator", None)
        if comm is None:
            raise UsageError(
                f"HookState: {shown(group)} is no process group of commrt; make one by "
                f'init_process_group("commrt") or new_group(backend="commrt")'
            )
        if compress is not None and check_compress(compress) == EXACT:
            raise UsageError(f"HookState: compress={EXACT!r}: leave it out")
        if density is not None and (compress is not None or not 0 < density <= 1):
            raise UsageError(
                f"HookState: density={shown(density)}: expected a part of the "
                "elements, above 0 and at most 1, and no compress beside it"
            )
        self.comm = comm.dup(name=f"{comm.name}.gradients")
        self.compress = compress
        self.density = density
        self.error_feedback = error_feedback
        self.symmetric = symmetric
        self._residuals: dict[tuple[int, int], Any] = {}
        self._seen: Counter[tuple[int, int]] = Counter()
        self._under_way: list[_Started] = []

    @property
    def bucket_cap_mb(self) -> float:
        """DDP's ``bucket_cap_mb`` for this group; collective when first asked."""
        return best_bucket_nbytes(self.comm) / _MIB

    def close(self) -> None:
        """Free what the hook holds, after the last step; local."""
        self.comm.free()

    def start(self, bucket: dist.GradBucket) -> Any:
        """Start a bucket's operations; return the future of its mean."""
        for earlier in self._under_way:
            earlier.request.test()  # a little progress, while the computation goes on
        started = self._started(bucket)
        self._under_way.append(started)
        if torch._C._current_autograd_node() is None:
            # After the backward pass, as DDP does in a static graph's first step: it
            # waits for the futures next.
            self._complete()
        else:
            # For each bucket: a backward pass within another one (checkpoints) has an
            # end of its own, and DDP may wait there for all of them.
            Variable._execution_engine.queue_callback(self._complete)
        return started.future

    def _started(self, bucket: dist.GradBucket) -> _Started:
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return _SparseStarted(self.comm, buffer)
        if self.density is not None:
            return _LargestStarted(self, bucket)
        arguments: dict[str, Any] = {}
        if self.compress is not None:
            arguments["compress"] = self.compress
            arguments["residual"] = self.residual_of(bucket)
        elif self.symmetric:
            self._share(bucket)
        request = self.comm.allreduce(buffer, op="avg", nonblocking=True, **arguments)
        return _Started(request, buffer)

    def _share(self, bucket: dist.GradBucket) -> None:
        """Move a bucket into symmetric memory; collective.

        In the third step that has a bucket of this place and length: a rule that needs
        nothing but what is the same on all ranks.
        """
        buffer = bucket.buffer()
        if not buffer.is_cpu or buffer.nbytes < _SHORT_NBYTES or self.comm.size == 1:
            return
        key = bucket.index(), buffer.numel()
        self._seen[key] += 1
        if self._seen[key] == _SETTLED_STEPS + 1:
            storage = buffer.untyped_storage()._cdata
            is_viewed = any(
                x.grad is not None and x.grad.untyped_storage()._cdata == storage
                for x in bucket.parameters()
            )
            share_storage(core_of(self.comm), buffer, may_move=not is_viewed)

    def residual_of(self, bucket: dist.GradBucket) -> Any:
        """Return the residual of a bucket, None if nothing is kept.

        DDP cuts its buckets anew after the first step; what the first owed is lost.
        """
        if not self.error_feedback:
            return None
        buffer = bucket.buffer()
        key = bucket.index(), buffer.numel()
        if key not in self._residuals:
            self._residuals[key] = torch.zeros_like(buffer)
        return self._residuals[key]

    def _complete(self) -> None:
        """Complete all futures; autograd calls it when all gradients are computed."""
        started, self._under_way = self._under_way, []
        try:
            for each in started:
                each.finish()
        except CommError as error:
            raise as_torch_error(error) from error.__cause__


class _Started:
    """A bucket under way."""

    def __init__(self, request: Any, buffer: torch.Tensor) -> None:
        self.request = request
        devices = [] if buffer.is_cpu else [buffer.device]
        self.future: Any = torch.futures.Future(devices=devices)
        self._buffer = buffer

    def finish(self) -> None:
        """Wait, and complete the future."""
        self.future.set_result(self._mean(self.request.wait()))

    def _mean(self, output: Any) -> torch.Tensor:
        return self._buffer


class _LargestStarted(_Started):
    """Only the largest elements of the sum."""

    def __init__(self, state: HookState, bucket: dist.GradBucket) -> None:
        buffer = bucket.buffer()
        assert state.density is not None
        most = max(1, round(state.density * buffer.numel()))
        self._size = state.comm.size
        request = state.comm.topk_allreduce(
            buffer, most, residual=state.residual_of(bucket), nonblocking=True
        )
        super().__init__(request, buffer)

    def _mean(self, output: Any) -> torch.Tensor:
        found = self._buffer.zero_()
        found[output.indices.long()] = output.values / self._size
        return found


class _SparseStarted(_Started):
    """The gradient of an embedding: a few of its rows."""

    def __init__(self, comm: Communicator, buffer: torch.Tensor) -> None:
        self._size = comm.size
        vector = as_sparse(buffer, tuple(buffer.shape), "a sparse bucket")
        request = comm.sparse_allreduce(vector, result="sparse", nonblocking=True)
        super().__init__(request, buffer)

    def _mean(self, output: Any) -> torch.Tensor:
        rows, values = dense_rows(scaled(output, self._size))
        return torch.sparse_coo_tensor(
            torch.from_numpy(rows.astype(np.int64))[None],
            torch.from_numpy(values),
            self._buffer.shape,
            is_coalesced=True,
            check_invariants=False,
        )


def reduce_bucket(state: HookState, bucket: dist.GradBucket) -> Any:
    """Average a bucket's gradients: the hook for ``register_comm_hook``."""
    try:
        return state.start(bucket)
    except CommError as error:
        raise as_torch_error(error) from error.__cause__


# DDP compares the annotations with the classes themselves, and here they are text.
reduce_bucket.__annotations__.update(
    {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
)
