# SPDX-License-Identifier: Apache-2.0
"""Hooks that see inputs and gradients of layers while the program trains as usual."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.errors import UsageError, shown
from commrt.layers.autocast import without_autocast
from commrt.layers.kfac.factor_sums import FactorSums, LayerSums
from commrt.layers.kfac.model_layers import Layer
from commrt.layers.kfac.sums_comm import SumsComm

__all__ = ["Capture"]

Tensor: TypeAlias = torch.Tensor


class _Hook:
    """A hook of one model, which does nothing in copies of this model.

    Args:
        call: what it calls; None: nothing.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()  # of copies, and of models that are pickled


class _Pass:
    """One forward pass of the model.

    Args:
        samples: this rank's.
        factor: undoes the scale of the loss.
    """

    def __init__(self, samples: int, factor: float) -> None:
        self.samples, self.factor = samples, factor
        self.step = -1
        """In which a gradient of it has come."""


class Capture:
    """Products of inputs and gradients of the layers, and the number of samples.

    Args:
        model: the whole one; a call of it is a forward pass.
        layers: of the model.
        comm: for sums of factors alone; it stays the caller's.
        samples_of: returns the samples of a call from its arguments; None: the first
            dimension of the first tensor among them.
        loss: "mean", "sum" or "global_mean", as ``KFAC`` has it.
        scale_of: returns the factor by which the loss is multiplied.

    Hooks raise nothing: an error is kept for ``step``, where all ranks hear of it.

    Checkpoints run a layer again in the backward pass. Such a use belongs to the
    forward pass whose gradient came last. Nobody knows beforehand how many of them
    come, so the sums of layers that a reentrant checkpoint has start in ``step``.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        comm: SumsComm,
        samples_of: Callable[..., int] | None,
        loss: str,
        scale_of: Callable[[], float],
    ) -> None:
        self._layers, self._comm = layers, comm
        self._samples_of, self._is_mean = samples_of, loss == "mean"
        self._scale_of = scale_of
        self.is_synchronising = True
        """False: sums wait for a later backward pass."""
        self._step = 0
        self._passes: list[_Pass | None] = []
        """Calls of the model that have not ended; None: one without gradients."""
        self._begin(False)
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._enter), with_kwargs=True),
            model.register_forward_hook(_Hook(self._leave), always_call=True),
        ]
        for number, layer in enumerate(layers):
            for module in layer.modules:
                hook = _Hook(partial(self._used, number))
                self._handles.append(
                    module.register_forward_hook(hook, with_kwargs=True)
                )

    def _begin(self, is_summing: bool) -> None:
        self._sums = None
        if is_summing:
            self._sums = FactorSums(self._comm.comm, self._layers)
        self._pending = [0] * len(self._layers)
        self._run_again: set[int] = set()
        """Layers that a reentrant checkpoint runs again in the backward pass."""
        self._running: _Pass | None = None
        """The pass whose gradient came last."""
        self._unseen: list[_Pass] = []
        self._seen: list[_Pass] = []
        self._num_sent: int | None = None
        self.error: Exception | None = None
        """Facts that hooks have met in this step."""

    def begin(self, is_summing: bool) -> None:
        """Begin a step; in one with ``is_summing`` factors are summed."""
        self._step += 1
        self._begin(is_summing)

    @property
    def samples(self) -> int:
        """Samples of this rank whose gradients have come in this step."""
        return sum(each.samples for each in self._seen)

    def start(self) -> None:
        """Start all sums that have not started yet; local. Any rank may fail here."""
        if self._sums is not None:
            self._send(are_all=True)

    def wait(self) -> None:
        """Wait for all sums that have started; collective."""
        if self._sums is not None:
            self._sums.wait()

    def forget(self, started: Sequence[int]) -> None:
        """End all sums without their results; collective.

        Where ranks have started different ones, some would wait for ever. They give up
        the communicator of the sums and get another.

        Args:
            started: ``num_started`` of all ranks.
        """
        if len({*started}) == 1:
            self.wait()
        elif any(each > 0 for each in started):
            self._comm.renew([] if self._sums is None else self._sums.under_way())

    def sums(self) -> list[LayerSums]:
        """Return the sums, after ``wait``; in a step without sums there are none."""
        return [] if self._sums is None else self._sums.results()

    @property
    def num_started(self) -> int:
        """Layers whose sums have started; -1 in a step without sums."""
        return -1 if self._sums is None else self._sums.num_started

    @property
    def is_under_way(self) -> bool:
        """True if sums of factors have started in this step."""
        return self._num_sent is not None

    def check(self) -> None:
        """Raise what a hook has met; UsageError for gradients that came too late."""
        if self.error is not None:
            raise self.error
        if self._num_sent is not None and self._num_sent != self.samples:
            raise UsageError(
                "KFAC.step: a second backward pass came after sums of factors had "
                "started; run all passes of a step but the last within no_sync()"
            )

    def close(self) -> None:
        """Remove the hooks; local, idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._begin(False)

    # -- forward -----------------------------------------------------------------------

    def _enter(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            self._passes.append(None)
            return
        samples, factor = 0, 1.0
        try:
            samples = self._counted(args, kwargs)
            factor = 1.0 / self._scale_of()
        except Exception as error:  # noqa: BLE001  the other ranks must hear of it
            self.error = self.error or error
        entered = _Pass(samples, factor)
        self._passes.append(entered)
        if not _is_backward():  # a checkpoint of the whole model may need no gradient
            self._unseen.append(entered)
            self._running = None

    def _counted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        if self._samples_of is not None:
            found = self._samples_of(*args, **kwargs)
            if type(found) is not int or found < 0:
                raise UsageError(
                    f"KFAC: samples_of returned {shown(found)}; expected a number of "
                    f"samples from 0"
                )
            return found
        for each in _tensors((*args, *kwargs.values())):
            return len(each) if each.dim() else 1
        raise UsageError(
            "KFAC: the model was called without a tensor, so the number of samples is "
            "not known; pass samples_of=lambda *args, **kwargs: ..."
        )

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        current = self._passes.pop() if self._passes else None
        for each in _tensors((output,)):
            if each.requires_grad and current is not None:
                each.register_hook(partial(self._seen_now, current))

    def _used(
        self, number: int, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if not self._layers[number].weight.requires_grad:
            return  # frozen since
        which = self._passes[-1] if self._passes else None
        if not (torch.is_grad_enabled() and output.requires_grad):
            if which is not None:
                self._run_again.add(number)
            return
        step = self._step
        if _is_backward():
            # Not expected: a checkpoint that is not reentrant passes no gradient on.
            step = -1
            latest = self._unseen[-1] if self._unseen else None
            which = which or self._running or latest
        if which is None:
            output.register_hook(partial(self._came_alone, number))
            return
        x = None
        if self._sums is not None:
            x = (args[0] if args else kwargs["input"]).detach()
        if step >= 0:
            self._pending[number] += 1
        output.register_hook(partial(self._came, number, which, step, x))

    # -- backward ----------------------------------------------------------------------

    def _came_alone(self, number: int, gradient: Tensor) -> None:
        self.error = self.error or UsageError(
            f"KFAC: the layer {self._layers[number].name} was used outside a call of "
            f"the model; give KFAC the module that is called"
        )

    def _seen_now(self, which: _Pass, gradient: Tensor) -> None:
        self._running = which
        if which.step == self._step:
            return
        which.step = self._step
        self._seen.append(which)
        self._unseen = [each for each in self._unseen if each is not which]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _came(
        self, number: int, which: _Pass, step: int, x: Tensor | None, gradient: Tensor
    ) -> None:
        """Take the gradient of a layer's output, and the input that was there.

        Args:
            number: of the layer.
            which: the forward pass.
            step: the step whose sums expect it; -1: none does.
            x: the input; None: no factors were summed then.
            gradient: of the output.
        """
        self._seen_now(which, gradient)
        if self._sums is None or x is None:
            return
        part = self._sums.parts[number]
        try:
            if self._sums.has_started(number):
                raise UsageError(
                    f"KFAC.step: a gradient of {self._layers[number].name} came after "
                    f"the sum of its factors had started; run all backward passes of "
                    f"a step but the last within no_sync()"
                )
            with without_autocast({gradient.device.type}):
                part.add(x, gradient, which.factor)
            if step != self._step:
                return  # of an earlier step's graph, or of a checkpoint
            self._pending[number] -= 1
            is_last = not self._pending[number] and number not in self._run_again
            part.is_complete = is_last and self.is_synchronising
            # A pass without a gradient yet may bring samples, which scale products.
            if self.is_synchronising and not self._unseen and self.error is None:
                self._send()
        except Exception as error:  # noqa: BLE001  the other ranks must hear of it
            self.error = self.error or error

    def _send(self, *, are_all: bool = False) -> None:
        """Start sums; products become those of gradients of each sample's loss."""
        assert self._sums is not None
        samples = self.samples
        factor = float(samples**2) if self._is_mean else 1.0
        if self._sums.advance(factor, are_all=are_all) and self._num_sent is None:
            self._num_sent = samples


def _is_backward() -> bool:
    """Return whether this thread is in a backward pass."""
    return bool(torch._C._current_graph_task_id() >= 0)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples, mappings and objects of fields."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        yield from _tensors([getattr(value, name) for name in names])
