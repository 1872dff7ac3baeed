# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over ranks, which start while earlier blocks come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from commrt.comm import Communicator
from commrt.errors import UsageError
from commrt.layers.data.reducer import GradientReducer

__all__ = ["GradientSums"]

Tensor: TypeAlias = torch.Tensor


class GradientSums:
    """The means of parameters' gradients over ranks, put in their places.

    Args:
        comm: the ranks.
        parameters: equal ones on all ranks, in the order of the forward pass.
        bucket_nbytes: of the reducer.
        told: is called with a parameter's number when its gradient is given.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[Tensor],
        bucket_nbytes: int | None,
        told: Callable[[int], None],
    ) -> None:
        self._parameters = list(parameters)
        self._reducer = GradientReducer(
            comm, self._parameters, bucket_nbytes=bucket_nbytes
        )
        self._given: set[int] = set()
        self._is_on = False
        self._told = told
        self._hooks: list[Any] = [
            each.register_post_accumulate_grad_hook(self._hook(number))
            for number, each in enumerate(self._parameters)
        ]

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Take gradients of the backward pass that follows.

        Args:
            parameters: that the model has now.

        Raises UsageError for one whose gradients nobody would sum.
        """
        self._given.clear()
        known = {id(each) for each in self._parameters}
        for each in parameters:
            if each.requires_grad and id(each) not in known:
                raise UsageError(
                    f"OutOfCore: a parameter of shape {tuple(each.shape)} needs a "
                    f"gradient, and did not when the OutOfCore was made, or came "
                    f"later; make another OutOfCore of these blocks"
                )
        self._is_on = True

    def end(self, error: Exception | None) -> Exception | None:
        """Put the means in place of the gradients; collective.

        A rank whose backward pass has failed calls it, too, so that none waits.
        Returns that error, or one of its own.
        """
        self._is_on = False
        for number, parameter in enumerate(self._parameters):
            if number not in self._given and parameter.grad is not None:
                try:
                    self._give(number)
                except UsageError as refused:  # the others wait for its sum
                    error = error or refused
        for number, mean in enumerate(self._reducer.finish()):
            if mean is not None and mean is not self._parameters[number].grad:
                self._parameters[number].grad = mean
        return error

    def close(self) -> None:
        """Free what it holds; parameters are left alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._reducer.close()

    def _give(self, number: int) -> None:
        """Give the reducer a gradient; UsageError for one that it cannot sum."""
        gradient = self._parameters[number].grad
        if gradient.layout != torch.strided:
            raise UsageError(
                f"OutOfCore: the gradient of parameter {number} is sparse; make its "
                f"layer with sparse=False"
            )
        self._reducer.ready(number, gradient)

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def given(_: Tensor) -> None:
            if self._is_on:
                self._given.add(number)
                self._told(number)
                self._give(number)

        return given
