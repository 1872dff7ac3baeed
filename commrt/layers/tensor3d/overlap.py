# SPDX-License-Identifier: Apache-2.0
"""Which collectives of layers run while ranks compute.

There are three (Singh and Bhatele, "A 4D hybrid algorithm", section 4.2):

- the ``allreduce`` of an input's gradient, while the weight's gradient is computed;
- the ``reduce_scatterv`` of a weight's gradient, until the end of the backward pass;
- the ``allgatherv`` of the next layer's weight, while this layer computes. In the
  backward pass the next layer is the one before.

The calls, their lengths and the order of sums are the same with and without it, so
results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.autograd import Variable

from commrt.layers.tensor3d.depth import DepthShards, Gathered

__all__ = ["Overlap", "in_backward", "is_accumulated"]

Tensor: TypeAlias = torch.Tensor


def in_backward() -> bool:
    """Return whether this thread is in a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_accumulated(leaf: Tensor) -> bool:
    """Return whether the backward pass that is running adds to a leaf's ``.grad``.

    ``torch.autograd.grad`` returns gradients, or needs them on the way to others, and
    ``backward(inputs=...)`` adds to those of its inputs alone.
    """
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it is returned: torch has no answer for such a leaf
        return False


class Overlap:
    """The switches of a model's layers, and what is under way.

    Args:
        all_reduce, reduce_scatter, all_gather: which collectives run meanwhile.
    """

    def __init__(
        self,
        all_reduce: bool = False,
        reduce_scatter: bool = False,
        all_gather: bool = False,
    ) -> None:
        self.all_reduce = all_reduce
        self.reduce_scatter = reduce_scatter
        self.all_gather = all_gather
        self.gradients = LateGradients()
        self._order = _Order()
        self.early: dict[DepthShards, Gathered] = {}
        """Blocks that layers will ask for next."""

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Overlap:
        """Return the same switches, with nothing under way."""
        return Overlap(self.all_reduce, self.reduce_scatter, self.all_gather)

    def begin(self) -> None:
        """Note that a forward pass of the model begins."""
        if not in_backward():
            self._order.begin()
            self.gradients.forget()
            self._drop_unused()

    def end(self) -> None:
        """Note that a forward pass of the model ends."""
        if not in_backward():
            self._drop_unused()

    def block(
        self,
        depth: DepthShards,
        shard: Tensor,
        dtype: torch.dtype,
        *,
        backward: bool,
        is_read_again: bool = True,
    ) -> Tensor:
        """Return a layer's block, and start to gather that of the layer after it.

        Args:
            depth: the layer's.
            shard: what this rank has of its weight.
            dtype: the type to gather it in.
            backward: True in the layer's backward function.
            is_read_again: whether the backward function needs the block, too.
        """
        if not self.all_gather or depth.comm is None:
            return depth.start(shard, dtype).wait()
        early = self.early.pop(depth, None)
        if early is not None and not early.is_of(shard, dtype):
            early.wait()  # The weight has changed since, or another type is wanted.
            early = None
        gathered = early if early is not None else depth.start(shard, dtype)
        self._order.note(depth, shard, dtype, is_read_again)
        after = self._order.before(depth) if backward else self._order.after(depth)
        if after is not None and after[0] not in self.early:
            self.early[after[0]] = after[0].start(*after[1:])
            if backward:
                Variable._execution_engine.queue_callback(self._drop_unused)
        return gathered.wait()

    def _drop_unused(self) -> None:
        """Wait for blocks that no layer has asked for by the end of a pass."""
        early, self.early = self.early, {}
        for each in early.values():
            each.wait()


Known: TypeAlias = tuple[DepthShards, Tensor, torch.dtype]
"""A layer, its shard, and the type that its block was gathered in."""


class _Order:
    """The order in which layers have run in the last forward pass."""

    def __init__(self) -> None:
        self._latest: DepthShards | None = None
        self._latest_read: DepthShards | None = None
        self._next: dict[DepthShards, DepthShards] = {}
        self._previous: dict[DepthShards, DepthShards | None] = {}
        self._weights: dict[DepthShards, tuple[Tensor, torch.dtype]] = {}

    def begin(self) -> None:
        self._latest = self._latest_read = None

    def note(
        self, depth: DepthShards, shard: Tensor, dtype: torch.dtype, is_read_again: bool
    ) -> None:
        """Note that a layer runs; ``is_read_again``: backward needs its block, too."""
        self._weights[depth] = shard, dtype
        if in_backward():
            return  # A checkpoint runs some layers again, which is no new order.
        if self._latest is not None and self._latest is not depth:
            self._next[self._latest] = depth
        self._latest = depth
        if is_read_again and self._latest_read is not depth:
            self._previous[depth] = self._latest_read
            self._latest_read = depth

    def after(self, depth: DepthShards) -> Known | None:
        """Return the layer that runs after one, if that is known."""
        return None if in_backward() else self._known(self._next.get(depth))

    def before(self, depth: DepthShards) -> Known | None:
        """Return the layer whose backward function runs after that of one."""
        return self._known(self._previous.get(depth))

    def _known(self, depth: DepthShards | None) -> Known | None:
        if depth is None:
            return None
        shard, dtype = self._weights[depth]
        # FSDP2 frees the memory of weights until their layer runs.
        is_there = shard.numel() == 0 or shard.untyped_storage().nbytes() > 0
        return (depth, shard, dtype) if is_there else None


class LateGradients:
    """Gradients that are put into ``.grad`` at the end of the backward pass."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def add(self, parameter: Tensor, wait: Callable[[], Tensor]) -> None:
        """Keep a gradient until the end of the backward pass that is running.

        Args:
            parameter: a leaf.
            wait: returns this rank's shard of the gradient.
        """
        self._waiting.append((parameter, wait))
        # Each time: a backward pass within another one has an end of its own.
        Variable._execution_engine.queue_callback(self._finish)

    def forget(self) -> None:
        """Drop what a backward pass has left that failed."""
        waiting, self._waiting = self._waiting, []
        for _, wait in waiting:
            wait()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        for parameter, wait in waiting:
            gradient = wait().to(parameter.dtype)
            if id(parameter) in sums:
                # As autograd does: uses in one pass are summed first.
                gradient = sums[id(parameter)][1] + gradient
            sums[id(parameter)] = parameter, gradient
        for parameter, gradient in sums.values():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
