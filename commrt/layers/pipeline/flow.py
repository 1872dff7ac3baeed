# SPDX-License-Identifier: Apache-2.0
"""One step of one rank: it does what has come, gradients first.

No schedule says what comes next. Messages of a kind stay in order between two
neighbours, so on each rank micro-batches go forward in their order, and back in their
order, too; only how the two interleave depends on when messages come. So gradients are
added in the order of micro-batches, and have the same bits in each run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from commrt.errors import UsageError
from commrt.layers.pipeline.agreement import Numbers
from commrt.layers.pipeline.boundary import MOST_NUMBERS, Signature, as_tensors
from commrt.layers.pipeline.lanes import Alarm, Links
from commrt.request import Request, wait_any

__all__ = ["Flow", "Judge", "Signatures", "ToldError"]

Tensor: TypeAlias = torch.Tensor


class ToldError(Exception):
    """Another rank has an error, so this one stops; no caller of a step sees it."""


class Signatures(NamedTuple):
    """The messages of a step, as an earlier step with alike inputs had them."""

    coming: list[Signature]
    leaving: list[Signature]


class Judge(NamedTuple):
    """The loss of the last stage's outputs, or that they are kept."""

    loss_fn: Callable[[Any, Any], Tensor] | None
    """None: outputs are kept."""
    targets: Sequence[Any]
    weights: Sequence[float]
    """Factors of the micro-batches' losses."""


class _Pending(NamedTuple):
    """A micro-batch that has gone forward and has to go back."""

    number: int
    entry: _Entry | None
    """It gathers gradients of this stage's inputs; None: nobody wants them."""
    outputs: tuple[Tensor, ...]
    """Tensors whose gradients come, or the loss on the last stage."""
    request: Request | None
    """The receive of gradients; None: nothing comes."""
    wire: Tensor | None
    signature: Signature


class _Coming(NamedTuple):
    """A micro-batch on its way to this rank."""

    signature: Signature
    request: Request
    wire: Tensor


class Flow:
    """The run of a step's micro-batches through this rank's stage.

    Args:
        stage: the module; None stands for no rank.
        links: to the neighbours.
        alarm: of other ranks' errors.
        inputs: the micro-batches on the first rank.
        count: micro-batches.
        judge: on the last rank; None elsewhere.
        in_flight: micro-batches that this rank may have begun and not ended.
        is_training: True where gradients go back.
        known: the messages of an earlier step that was alike; None: ranks tell each
            other before each message.
    """

    def __init__(
        self,
        stage: nn.Module,
        links: Links,
        alarm: Alarm,
        *,
        inputs: Sequence[tuple[Tensor, ...]],
        count: int,
        judge: Judge | None,
        in_flight: int,
        is_training: bool,
        known: Signatures | None,
    ) -> None:
        self._stage, self._links, self._alarm = stage, links, alarm
        self._inputs, self._count, self._judge = inputs, count, judge
        self._in_flight, self._is_training = in_flight, is_training
        self._known = known
        self.signatures = Signatures([], [])
        self.losses: list[float] = []
        self.outputs: list[Any] = []
        self.seconds = 0.0
        self.most_in_flight = 0
        self._num_forward = 0
        self._shapes: deque[tuple[Request, Numbers]] = deque()
        self._coming: deque[_Coming] = deque()
        self._pending: deque[_Pending] = deque()
        self._leaving: deque[Request] = deque()

    def run(self) -> None:
        """Run all micro-batches; ToldError where another rank raises an alarm."""
        while self._num_forward < self._count or self._pending:
            # One look at what has left serves the whole turn. A message that leaves in
            # between would else be neither waited for, nor room for the next one.
            room = self._room()
            self._ask_for_inputs(room)
            if self._can_go_back():
                self._backward(self._pending.popleft())
            elif self._can_go_forward(room):
                self._forward()
            else:
                self._wait(self._awaited(room))
        while unsent := self._links.unsent():
            self._wait(unsent)

    # -- what can be done --------------------------------------------------------------

    def _room(self) -> int:
        """Return how many more micro-batches this rank may begin, or ask for.

        Those that have gone back, or need not, count until their message has left.
        """
        while self._leaving and self._leaving[0].done:
            self._leaving.popleft()
        held = max(len(self._pending), len(self._leaving))
        self.most_in_flight = max(self.most_in_flight, held)
        return self._in_flight - held

    def _can_go_back(self) -> bool:
        if not self._pending:
            return False
        request = self._pending[0].request
        return request is None or request.test()

    def _can_go_forward(self, room: int) -> bool:
        if self._num_forward == self._count or room <= 0:
            return False
        if self._links.is_first:
            return True
        return bool(self._coming) and self._coming[0].request.test()

    def _awaited(self, room: int) -> list[Request]:
        found: list[Request] = []
        if self._pending and (request := self._pending[0].request) is not None:
            found.append(request)
        if room <= 0:
            found += [*self._leaving][:1]
        elif self._coming:
            found.append(self._coming[0].request)
        if self._shapes:
            found.append(self._shapes[0][0])
        return found

    def _wait(self, requests: Sequence[Request]) -> None:
        wait_any([*requests, *self._alarm.requests])
        if self._alarm.has_come:
            raise ToldError("another rank has raised an error")

    # -- forward -----------------------------------------------------------------------

    def _ask_for_inputs(self, room: int) -> None:
        """Post receives for as many micro-batches as there is room for."""
        if self._links.is_first:
            return
        links, known = self._links, self._known
        while self._shapes and self._shapes[0][0].test():
            request, numbers = self._shapes.popleft()
            request.wait()
            self._post(Signature.from_numbers(numbers))
        asked = len(self._coming) + len(self._shapes)
        left = self._count - self._num_forward - asked
        for _ in range(min(left, room - asked)):
            if known is not None:
                self._post(known.coming[len(self.signatures.coming)])
            else:
                numbers = np.empty(MOST_NUMBERS, np.int64)
                request = links.shapes_in.post(numbers.view(np.uint8))
                self._shapes.append((request, numbers))

    def _post(self, signature: Signature) -> None:
        device = self._links.device
        wire = torch.empty(signature.nbytes, dtype=torch.uint8, device=device)
        request = self._links.values_in.post(wire)
        self.signatures.coming.append(signature)
        self._coming.append(_Coming(signature, request, wire))

    def _forward(self) -> None:
        number = self._num_forward
        entry = None
        start = time.perf_counter()
        if self._links.is_first:
            inputs = self._inputs[number]
        else:
            coming = self._coming.popleft()
            coming.request.wait()
            inputs = tuple(coming.signature.unpacked(coming.wire))
            if coming.signature.back:
                entry = _Entry(coming.signature)
                inputs = entry.entered(inputs)
        with torch.set_grad_enabled(self._is_training):
            output = self._stage(*inputs)
            del inputs  # the graph keeps what it needs
            self._num_forward += 1
            if self._judge is not None:
                self._judged(number, entry, output, self._judge)
            else:
                self._sent(number, entry, output)
        self._room()  # counts it
        self.seconds += time.perf_counter() - start

    def _sent(self, number: int, entry: _Entry | None, output: Any) -> None:
        """Send a stage's outputs, and get ready for their gradients."""
        links = self._links
        tensors = as_tensors("a stage returned", output, links.device)
        signature = Signature.of(tensors, self._is_training)
        self.signatures.leaving.append(signature)
        if self._known is None:
            links.shapes_out.send(signature.numbers().view(np.uint8))
        elif (expected := self._known.leaving[number]) != signature:
            raise UsageError(
                f"MessageDrivenPipeline: for micro-batch {number} a stage returned "
                f"{_shown(signature)}, and {_shown(expected)} in an earlier step with "
                f"inputs of the same shapes; pass fixed_shapes=False"
            )
        self._leaving.append(links.values_out.send(signature.packed(tensors)))
        wanted = tuple(
            each
            for each, spec in zip(tensors, signature.specs, strict=True)
            if spec.needs_gradient
        )
        if not wanted and entry is None:
            return
        request = wire = None
        if wanted:
            nbytes = signature.back_nbytes
            wire = torch.empty(nbytes, dtype=torch.uint8, device=links.device)
            request = links.gradients_in.post(wire)
        self._pending.append(_Pending(number, entry, wanted, request, wire, signature))

    def _judged(
        self, number: int, entry: _Entry | None, output: Any, judge: Judge
    ) -> None:
        """Keep an output, or its loss, on the last stage."""
        none = Signature(())
        if judge.loss_fn is None:
            self.outputs.append(output)
            return
        weight = judge.weights[number]
        wanted: tuple[Tensor, ...] = ()
        if weight:
            loss = judge.loss_fn(output, judge.targets[number])
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise UsageError(
                    f"MessageDrivenPipeline: loss_fn returned a "
                    f"{_kind_of(loss)}; expected a tensor with one number"
                )
            loss = loss.reshape(()) * weight
            self.losses.append(float(loss.detach()))
            wanted = (loss,) if self._is_training else ()
        if wanted or entry is not None:
            self._pending.append(_Pending(number, entry, wanted, None, None, none))

    # -- back --------------------------------------------------------------------------

    def _backward(self, pending: _Pending) -> None:
        gradients: list[Tensor | None] = [None] * len(pending.outputs)
        if pending.request is not None:
            pending.request.wait()
            assert pending.wire is not None
            nbytes = _received(pending.request)
            gradients = pending.signature.back_unpacked(pending.wire, nbytes)
        start = time.perf_counter()
        if pending.request is None:
            if pending.outputs:  # the loss
                torch.autograd.backward(pending.outputs)
        else:
            there = [
                (output, gradient)
                for output, gradient in zip(pending.outputs, gradients, strict=True)
                if gradient is not None
            ]
            if there:
                torch.autograd.backward(*zip(*there, strict=True))
        self.seconds += time.perf_counter() - start
        if pending.entry is not None:
            entry = pending.entry
            wire = entry.signature.back_packed(entry.gradients)
            self._links.gradients_out.send(wire)


class _Entry:
    """The place where a micro-batch enters this stage's graph, and gradients gather.

    Stages may change their inputs in place, which autograd forbids for leaves. So
    inputs are outputs of a function that has no inputs of its own.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self._gradients: Sequence[Tensor | None] = [None] * len(signature.specs)

    def entered(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors with a history."""
        root = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            found: tuple[Tensor, ...] = _Enter.apply(root, self, tensors)
        return found

    def gather(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of all inputs."""
        self._gradients = gradients

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients that go back."""
        return [
            gradient
            for gradient, spec in zip(
                self._gradients, self.signature.specs, strict=True
            )
            if spec.needs_gradient
        ]


class _Enter(torch.autograd.Function):  # type: ignore[misc]
    """Tensors that come from nowhere, whose gradients an entry gathers."""

    @staticmethod
    def forward(
        ctx: Any, root: Tensor, entry: _Entry, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        specs = entry.signature.specs
        ctx.mark_non_differentiable(
            *(
                each
                for each, spec in zip(tensors, specs, strict=True)
                if not spec.needs_gradient
            )
        )
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.entry.gather(gradients)
        return None, None, None


def _received(request: Request) -> int:
    found: int = request.received_nbytes
    return found


def _shown(signature: Signature) -> str:
    each = (
        f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"
        f"{'' if spec.needs_gradient else ' without gradient'}"
        for spec in signature.specs
    )
    return ", ".join(each)


def _kind_of(loss: Any) -> str:
    if isinstance(loss, torch.Tensor):
        return f"tensor of shape {tuple(loss.shape)}"
    return type(loss).__name__
