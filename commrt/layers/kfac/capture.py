# SPDX-License-Identifier: Apache-2.0
"""Hooks that see inputs and gradients of layers while the program trains as usual."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.comm import Communicator
from commrt.errors import UsageError, shown
from commrt.layers.kfac.factor_sums import FactorSums, LayerSums
from commrt.layers.kfac.model_layers import Layer

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
        comm: for sums of factors alone.
        samples_of: returns the samples of a call from its arguments; None: the first
            dimension of the first tensor among them.
        loss: "mean", "sum" or "global_mean", as ``KFAC`` has it.
        scale_of: returns the factor by which the loss is multiplied.

    Hooks raise nothing but faults of communication: an error is kept for ``step``,
    where all ranks hear of it.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        comm: Communicator,
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
        self._current: _Pass | None = None
        self._begin(False)
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._enter), with_kwargs=True),
            model.register_forward_hook(_Hook(self._leave)),
        ]
        for number, layer in enumerate(layers):
            for module in layer.modules:
                hook = _Hook(partial(self._used, number))
                self._handles.append(
                    module.register_forward_hook(hook, with_kwargs=True)
                )

    def _begin(self, is_summing: bool) -> None:
        self._sums = FactorSums(self._comm, self._layers) if is_summing else None
        self._pending = [0] * len(self._layers)
        self._unseen: list[_Pass] = []
        self._seen: list[_Pass] = []
        self._num_sent: int | None = None
        self.error: Exception | None = None
        """What a hook has met in this step."""

    def begin(self, is_summing: bool) -> None:
        """Begin a step; in one with ``is_summing`` factors are summed."""
        self._step += 1
        self._begin(is_summing)

    @property
    def samples(self) -> int:
        """Samples of this rank whose gradients have come in this step."""
        return sum(each.samples for each in self._seen)

    def finish(self) -> list[LayerSums] | None:
        """Return the sums of factors; None in a step without. Collective."""
        if self._sums is None:
            return None
        self._send(are_all=True)
        return self._sums.wait()

    @property
    def is_summing(self) -> bool:
        """True in a step in which factors are summed."""
        return self._sums is not None

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
            return
        samples, factor = 0, 1.0
        try:
            samples = self._counted(args, kwargs)
            factor = 1.0 / self._scale_of()
        except Exception as error:  # noqa: BLE001  the other ranks must hear of it
            self.error = self.error or error
        self._current = _Pass(samples, factor)
        self._unseen.append(self._current)

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
        if not torch.is_grad_enabled():
            return
        current = self._current
        for each in _tensors((output,)):
            if each.requires_grad and current is not None:
                each.register_hook(partial(self._seen_now, current))

    def _used(
        self, number: int, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if not (torch.is_grad_enabled() and output.requires_grad):
            return
        if not self._layers[number].weight.requires_grad:
            return  # frozen since
        if self._current is None:
            self.error = self.error or UsageError(
                f"KFAC: the layer {self._layers[number].name} was used before the "
                f"model itself was called; give KFAC the module that is called"
            )
            return
        x = None
        if self._sums is not None:
            x = (args[0] if args else kwargs["input"]).detach()
        self._pending[number] += 1
        hook = partial(self._came, number, self._current, self._step, x)
        output.register_hook(hook)

    # -- backward ----------------------------------------------------------------------

    def _seen_now(self, which: _Pass, gradient: Tensor) -> None:
        if which.step == self._step:
            return
        which.step = self._step
        self._seen.append(which)
        self._unseen = [each for each in self._unseen if each is not which]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _came(
        self, number: int, which: _Pass, step: int, x: Tensor | None, gradient: Tensor
    ) -> None:
        """Take the gradient of a layer's output, and the input that was there."""
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
            part.add(x, gradient, which.factor)
        except Exception as error:  # noqa: BLE001  the other ranks must hear of it
            self.error = self.error or error
            return
        if step != self._step:
            return  # of an earlier step's graph
        self._pending[number] -= 1
        part.is_complete = not self._pending[number] and self.is_synchronising
        # A pass without a gradient so far may bring samples, which scale all products.
        if self.is_synchronising and not self._unseen:
            self._send()

    def _send(self, *, are_all: bool = False) -> None:
        """Start sums; products become those of gradients of each sample's loss."""
        assert self._sums is not None
        samples = self.samples
        factor = float(samples**2) if self._is_mean else 1.0
        if self._sums.advance(factor, are_all=are_all) and self._num_sent is None:
            self._num_sent = samples


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
