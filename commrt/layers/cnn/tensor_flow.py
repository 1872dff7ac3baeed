# SPDX-License-Identifier: Apache-2.0
"""Tensors that go from one part of a network to another, skip connections included.

A tensor *lies* as the strategy of the part that made it. A part's input is moved to its
strategy. Of a function outside of the parts, such as the sum of a residual network or
the ``cat`` of a U-Net, the first operand stays, the others are moved to where it lies,
and so lies the result. ``parallelize_cnn`` moves the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from commrt.layers.cnn.layer_facts import run_without_memory

__all__ = ["Flow", "flows_of"]


class Flow(NamedTuple):
    """One tensor that is moved where two parts have different strategies."""

    source: str
    """The part as whose strategy it lies."""
    target: str
    """The part to whose strategy it is moved."""
    shape: tuple[int, ...]


def flows_of(
    model: nn.Module, shape: Sequence[int], parts: Sequence[str]
) -> list[Flow]:
    """Return the tensors that go between parts of a model, in the order of calls.

    Args:
        model: runs on tensors without memory.
        shape: of the whole input. It lies as the first part's strategy says.
        parts: paths of modules, none inside of another, in the order of calls.
    """
    flows = _Flows(parts[0])
    hooks = []
    for path in parts:
        module = model.get_submodule(path)
        before = flows.into(path, module)
        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
    try:
        with flows:
            run_without_memory(model, shape, flows.begin)
    finally:
        for hook in hooks:
            hook.remove()
    return flows.found


class _Flows(TorchFunctionMode):  # type: ignore[misc]
    """Notes where tensors lie while a model runs.

    Args:
        first: the part as whose strategy the model's input lies.
    """

    def __init__(self, first: str) -> None:
        super().__init__()
        self.found: list[Flow] = []
        self._first = first
        self._lies: dict[int, tuple[Any, str]] = {}
        """By the ``id`` of a tensor: itself, so that it stays its own; and its part."""

    def begin(self, x: Any) -> None:
        """Note that the model is given a tensor."""
        self._lies[id(x)] = x, self._first

    def into(self, path: str, module: Any) -> Callable[..., Any]:
        """Return the hook of a part that runs before its forward pass."""
        # It computes where its input lies: others see what it writes.
        is_in_place = bool(getattr(module, "inplace", False))

        def taken(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or id(x) not in self._lies:
                return x
            self._note(x, path)
            mine = x.detach()
            self._lies[id(mine)] = mine, path
            return mine

        def before(m: Any, args: Any, kwargs: Any) -> Any:
            if not is_in_place:
                args = tuple(map(taken, args))
                kwargs = {name: taken(value) for name, value in kwargs.items()}
            return args, kwargs

        return before

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        operands = [x for x in _tensors([args, kwargs or {}]) if id(x) in self._lies]
        if operands:
            _, place = self._lies[id(operands[0])]
            for other in operands[1:]:
                self._note(other, place)
            for made in _tensors(result):
                self._lies[id(made)] = made, place
        return result

    def _note(self, x: Any, target: str) -> None:
        source = self._lies[id(x)][1]
        if source != target:
            self.found.append(Flow(source, target, tuple(x.shape)))


def _tensors(value: Any) -> list[Any]:
    """Return the tensors of a value, inside of sequences and mappings, too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return [x for each in value for x in _tensors(each)]
    return []
