# SPDX-License-Identifier: Apache-2.0
"""Parameters whose gradients and new values travel together, and their optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.sharded_update.buffers import Buffers
from commrt.layers.sharded_update.layout import Layout, Piece

__all__ = ["Bucket", "flat_view", "is_dense"]

Tensor: TypeAlias = torch.Tensor


def is_dense(x: Tensor) -> bool:
    """Return whether a tensor's elements fill a run of memory, in any order of axes."""
    expected = 1
    axes = [(step, n) for step, n in zip(x.stride(), x.shape, strict=True) if n != 1]
    for step, n in sorted(axes):
        if step != expected:
            return not x.numel()
        expected *= n
    return True


def flat_view(x: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order of its memory, which it shares."""
    return x.detach().as_strided((x.numel(),), (1,))


def _like(x: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient's elements in the order of its parameter's memory."""
    x = x.detach()
    if x.stride() != parameter.stride() or x.is_conj() or x.is_neg():
        made = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=x.dtype, device=x.device
        )
        x = made.copy_(x)
    return flat_view(x)


class Bucket:
    """Parameters of one group, type and device.

    Args:
        group: the number of the parameters' group.
        numbers: of the parameters among all.
        parameters: the parameters; dense.
        layout: the pieces of each rank.
        comm: the ranks; None: one rank.
        buffers: has memory for new values on their way.
        is_whole: True: this rank's pieces are whole parameters, and keep their shapes.
            False: they are flat, but for those without axes.

    ``pieces`` are this rank's, as views of the parameters' memory.
    """

    def __init__(
        self,
        group: int,
        numbers: Sequence[int],
        parameters: Sequence[Tensor],
        layout: Layout,
        comm: Communicator | None,
        buffers: Buffers,
        *,
        is_whole: bool,
    ) -> None:
        self.group, self.numbers, self.layout = group, tuple(numbers), layout
        self.parameters = tuple(parameters)
        self.optimizer: torch.optim.Optimizer | None = None
        """Over the pieces; None: this rank has none."""
        self._comm, self._buffers, self.is_whole = comm, buffers, is_whole
        self._forms = [(tuple(x.shape), x.stride()) for x in self.parameters]
        self._addresses = [each.data_ptr() for each in self.parameters]
        self._request: Any = None
        self._kept: Any = None
        self._sent: Tensor | None = None
        first = parameters[0]
        self._type = first.dtype, first.device
        is_trained = first.is_floating_point() or first.is_complex()
        self.pieces = [
            (piece, nn.Parameter(self._view(piece), requires_grad=is_trained))
            for piece in layout.pieces[self._rank]
        ]
        self._now = layout

    @property
    def has_buffer(self) -> bool:
        """True if new values are on their way by a buffer, not from place to place."""
        return self._kept is not None or self._sent is not None

    @property
    def is_on_host(self) -> bool:
        """True if its parameters lie in memory of the host."""
        return bool(self._type[1].type == "cpu")

    @property
    def _rank(self) -> int:
        return 0 if self._comm is None else self._comm.rank

    def _view(self, piece: Piece) -> Tensor:
        parameter = self.parameters[piece.index]
        if self.is_whole or not parameter.dim():
            return parameter.detach()
        return flat_view(parameter)[piece.low : piece.high]

    def follow(self) -> None:
        """Take the memory that parameters have now; local.

        Raises UsageError for a parameter that has another type, device or order.
        """
        for at, parameter in enumerate(self.parameters):
            form = tuple(parameter.shape), parameter.stride()
            if form != self._forms[at]:
                raise UsageError(
                    f"ShardedOptimizer: parameter {self.numbers[at]} has the shape and "
                    f"strides {form}, and had {self._forms[at]}; make the optimizer "
                    f"after the model has its final form"
                )
            if (parameter.dtype, parameter.device) != self._type:
                dtype, device = self._type
                raise UsageError(
                    f"ShardedOptimizer: parameter {self.numbers[at]} is of "
                    f"{parameter.dtype} on {parameter.device}, and was of {dtype} on "
                    f"{device}; make the optimizer after the model is converted"
                )
        # Only now, so that a parameter that is refused is refused again.
        addresses = [each.data_ptr() for each in self.parameters]
        if addresses != self._addresses:
            for piece, view in self.pieces:
                view.data = self._view(piece)
            self._addresses = addresses

    # -- gradients to the ranks that need them -----------------------------------------

    def start_sum(self, present: Sequence[bool], op: str | None) -> None:
        """Start to sum the gradients of all ranks; collective.

        Args:
            present: the parameters that any rank has a gradient of.
            op: "sum" or "avg"; None: gradients are equal on all ranks already.
        """
        self._now = self.layout if all(present) else self.layout.of(present)
        self._request = self._kept = None
        if self._comm is None or op is None:
            return
        counts = self._now.counts
        if not sum(counts):
            return
        flat = self._packed()
        part = flat.new_empty(counts[self._rank])
        request = self._comm.reduce_scatterv(
            flat, op, counts=counts, out=part, nonblocking=True
        )
        self._request, self._kept = request, part

    def _order(self) -> list[int]:
        """Return the parameters as they lie in the flat buffer: each is in one run."""
        pieces = [piece.index for own in self._now.pieces for piece in own]
        return [*dict.fromkeys(pieces)]

    def _packed(self) -> Tensor:
        """Return this rank's gradients, one behind another; zeros where it has none."""
        order = [at for at in self._order() if self.parameters[at].numel()]
        grads = [(self.parameters[at], self.parameters[at].grad) for at in order]
        if len(grads) == 1 and grads[0][1] is not None:
            return _like(grads[0][1], grads[0][0])
        return torch.cat(
            [
                parameter.new_zeros(parameter.numel()) if grad is None
                else _like(grad, parameter)
                for parameter, grad in grads
            ]
        )  # fmt: skip

    def finish_sum(self, *, may_share: bool = False) -> None:
        """Wait for the sums, and give them to this rank's pieces.

        Args:
            may_share: True: pieces may have the memory of gradients that are equal on
                all ranks, and nobody changes them.
        """
        if self._request is not None:
            self._request.wait()
        own = {piece.index for piece in self._now.pieces[self._rank]}
        at = 0
        for piece, view in self.pieces:
            if piece.index not in own:
                view.grad = None
            elif self._request is None:
                view.grad = self._own_gradient(piece, view, may_share)
            else:
                view.grad = self._kept[at : at + piece.count].as_strided(
                    view.shape, view.stride(), at
                )
                at += piece.count
        self._request = self._kept = None

    def _own_gradient(self, piece: Piece, view: Tensor, may_share: bool) -> Tensor:
        """Return a piece of what this rank has, where nothing is to be summed."""
        parameter = self.parameters[piece.index]
        if parameter.grad is None:  # others have one, and this one's counts as zeros
            return torch.zeros_like(view)
        flat = _like(parameter.grad, parameter)[piece.low : piece.high]
        if self._comm is not None and not may_share:
            flat = flat.clone()  # what is clipped is this rank's piece alone
        return flat.as_strided(view.shape, view.stride(), flat.storage_offset())

    def drop(self) -> None:
        """Forget the sums."""
        for _, view in self.pieces:
            view.grad = None

    # -- the optimizer, and parameters to all ranks ------------------------------------

    def update(self, options: dict[str, Any]) -> dict[str, Any]:
        """Run the optimizer on this rank's pieces; return the settings after it; local.

        Args:
            options: the group's settings.

        A rank without pieces returns none.
        """
        if self.optimizer is None:
            return {}
        (group,) = self.optimizer.param_groups
        group.update(options)
        self.optimizer.step()
        return {name: group[name] for name in options}

    def start_gather(self) -> None:
        """Start to bring the new values of all pieces to all ranks; collective."""
        counts = self._now.counts
        self._request = self._kept = None
        if self._comm is None or not sum(counts):
            return
        order = [at for at in self._order() if self.parameters[at].numel()]
        low = sum(counts[: self._rank])
        high = low + counts[self._rank]
        if len(order) == 1:
            flat = flat_view(self.parameters[order[0]])
        else:
            self._kept = self._buffers.take(sum(counts), self.parameters[0])
            flat = self._kept[: sum(counts)]
        own = flat[low:high]
        if len(order) > 1 or flat.device.type == "cpu":
            # The engine would copy a block of the result itself, to fresh memory.
            self._sent = self._buffers.take(high - low, flat)
            own = self._sent[: high - low]
            at = 0
            for piece in self._now.pieces[self._rank]:
                values = flat_view(self.parameters[piece.index])
                own[at : at + piece.count] = values[piece.low : piece.high]
                at += piece.count
        self._request = self._comm.allgatherv(
            own, counts=counts, out=flat, nonblocking=True
        )

    def finish_gather(self) -> None:
        """Wait for the values, and put them into the parameters."""
        if self._request is not None:
            self._request.wait()
        if self._kept is not None:
            at = 0
            for index in self._order():
                target = flat_view(self.parameters[index])
                target.copy_(self._kept[at : at + target.numel()])
                at += target.numel()
        for buffer in (self._kept, self._sent):
            if buffer is not None:
                self._buffers.give(buffer)
        self._request = self._kept = self._sent = None
        # No operation of torch has written them all; autograd must know on each rank.
        changed = [self.parameters[index] for index in self._order()]
        torch.autograd.graph.increment_version(changed)
