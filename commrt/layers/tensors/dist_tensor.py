# SPDX-License-Identifier: Apache-2.0
"""A tensor whose elements lie on the ranks of a grid of processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from commrt.errors import UsageError, shown, suggest
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors.moves import moved
from commrt.layers.tensors.placement import Placement
from commrt.layers.tensors.rules import FUNCTIONS, METHODS
from commrt.layers.tensors.within import within

__all__ = ["DistTensor"]


class DistTensor:
    """A tensor of which each rank of a grid holds a part.

        grid = ProcessGrid(commrt.init(), {"data": 2, "row": 2})
        x = DistTensor.from_whole(batch, grid, Placement("data", None))
        total = x.relu().sum()              # parts of a sum, along "data"
        total.redistribute().local          # the sum, on every rank

    torch's functions of elements, reductions, permutations, reshapes and products take
    it and return such tensors (docs/reference/layers.md lists them). They compute with
    this rank's part, and autograd with it. What would need other ranks' elements raises
    UsageError and says which ``redistribute`` is needed: nothing is gathered unasked.

    The gradient of ``local`` is this rank's part of the whole tensor's gradient. Ranks
    with copies have equal gradients.

    Args:
        local: this rank's part.
        shape: shape of the whole tensor.
        grid: the ranks.
        placement: where its elements lie.

    Raises UsageError where ``local`` is not of the shape that the placement says.
    """

    __slots__ = ("_grid", "_local", "_placement", "_shape")

    def __init__(
        self,
        local: torch.Tensor,
        shape: Sequence[int],
        grid: ProcessGrid,
        placement: Placement,
    ) -> None:
        shape = torch.Size(shape)
        placement.check("DistTensor", grid, shape)
        expected = placement.local_shape(grid, shape)
        if tuple(local.shape) != expected:
            raise UsageError(
                f"DistTensor: local has shape {tuple(local.shape)}; expected "
                f"{expected}, the part of {tuple(shape)} under {placement} at "
                f"{grid.coords}"
            )
        self._local, self._shape = local, shape
        self._grid, self._placement = grid, placement

    @classmethod
    def unchecked(
        cls,
        local: torch.Tensor,
        shape: torch.Size,
        grid: ProcessGrid,
        placement: Placement,
    ) -> DistTensor:
        """Return a tensor of facts that are known to fit; a few microseconds faster."""
        made = cls.__new__(cls)
        made._local, made._shape = local, shape
        made._grid, made._placement = grid, placement
        return made

    @classmethod
    def from_whole(
        cls, whole: torch.Tensor, grid: ProcessGrid, placement: Placement
    ) -> DistTensor:
        """Return this rank's part of a tensor that every rank has whole; local.

        Only gradients of this rank's part reach ``whole``.
        """
        placement.check("DistTensor.from_whole", grid, whole.shape)
        everywhere = Placement.replicated(whole.dim())
        local = moved(whole, grid, tuple(whole.shape), everywhere, placement)
        return cls(local, whole.shape, grid, placement)

    # -- what it is ----------------------------------------------------------------

    @property
    def local(self) -> torch.Tensor:
        """This rank's part."""
        return self._local

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self._shape

    @property
    def grid(self) -> ProcessGrid:
        """The ranks."""
        return self._grid

    @property
    def placement(self) -> Placement:
        """Where its elements lie."""
        return self._placement

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self._local.dtype

    @property
    def device(self) -> torch.device:
        """Device of this rank's part."""
        return self._local.device

    @property
    def requires_grad(self) -> bool:
        """True if autograd records what is made of it."""
        return bool(self._local.requires_grad)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the whole tensor's shape, or its extent in one dimension."""
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        """Return the elements of the whole tensor."""
        return math.prod(self._shape)

    @property
    def grad(self) -> DistTensor | None:
        """The gradient of a leaf; None where there is none so far."""
        gradient = self._local.grad
        if gradient is None:
            return None
        return DistTensor(
            gradient, self._shape, self._grid, Placement(*self._placement.dims)
        )

    # -- moving it -----------------------------------------------------------------

    def redistribute(
        self, *dims: Any, partial: Any = (), placement: Placement | None = None
    ) -> DistTensor:
        """Return the tensor under another placement; differentiable.

            x.redistribute("data", None, "height")
            x.redistribute(placement=other.placement)
            total.redistribute()               # no sum is left open

        Args:
            dims: as for ``Placement``; without any, the cuts stay as they are.
            partial: as for ``Placement``.
            placement: all of it at once.

        Collective over the grid, unless each rank has all that it needs.
        """
        if placement is None and not dims and partial == ():
            target = self._placement.without_partial()
        else:
            target = placement or Placement(
                *(dims or self._placement.dims), partial=partial
            )
        if target == self._placement:
            return self
        target.check("redistribute", self._grid, self._shape)
        local = moved(
            self._local, self._grid, tuple(self._shape), self._placement, target
        )
        return DistTensor.unchecked(local, self._shape, self._grid, target)

    def whole(self) -> torch.Tensor:
        """Return the whole tensor on every rank; differentiable. Collective."""
        target = Placement.replicated(self.dim())
        return self.redistribute(placement=target).local

    def backward(self, gradient: DistTensor | None = None) -> None:
        """Compute gradients; collective. The default is for a tensor of one element."""
        if gradient is None and self.numel() != 1:
            raise UsageError(
                f"backward: {self} has {self.numel()} elements: pass a gradient, or "
                f"reduce it to one"
            )
        if gradient is None:
            here = self._local
            here.backward(None if here.numel() == 1 else torch.ones_like(here))
            return
        target = Placement(*self._placement.dims)
        self._local.backward(gradient.redistribute(placement=target).local)

    # -- as torch's ----------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = FUNCTIONS.get(function)
        if rule is None:
            return _called(_unknown, function)
        return _called(rule, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        rule = METHODS.get(name)
        if rule is None:
            raise AttributeError(f"DistTensor has no {name!r}{suggest(name, METHODS)}")
        return partial(_called, rule, self)

    def __add__(self, other: Any) -> Any:
        return _called(METHODS["add"], self, other)

    def __radd__(self, other: Any) -> Any:
        return _called(METHODS["add"], self, other)

    def __sub__(self, other: Any) -> Any:
        return _called(METHODS["sub"], self, other)

    def __rsub__(self, other: Any) -> Any:
        return _called(METHODS["add"], METHODS["neg"](self), other)

    def __mul__(self, other: Any) -> Any:
        return _called(METHODS["mul"], self, other)

    def __rmul__(self, other: Any) -> Any:
        return _called(METHODS["mul"], self, other)

    def __truediv__(self, other: Any) -> Any:
        return _called(METHODS["div"], self, other)

    def __pow__(self, other: Any) -> Any:
        return _called(METHODS["pow"], self, other)

    def __neg__(self) -> Any:
        return METHODS["neg"](self)

    def __matmul__(self, other: Any) -> Any:
        return _called(METHODS["matmul"], self, other)

    def __repr__(self) -> str:
        sizes = tuple(self._local.shape)
        return (
            f"<DistTensor {tuple(self._shape)} {self.dtype}, {self._placement} of "
            f"{self._grid.shape}, here {sizes}>"
        )


def _unknown(function: Any) -> None:
    """Raise UsageError for a function that takes no distributed tensors."""
    name = getattr(function, "__name__", shown(function))
    raise UsageError(
        f"DistTensor: torch's {name} is none of the functions that take it: "
        f"redistribute() so that no rank needs others' elements, and call it "
        f"on .local; or use whole()"
    )


def _called(rule: Any, *args: Any, **more: Any) -> Any:
    """Call a rule; an error names the module of a parallel model that called it."""
    try:
        return rule(*args, **more)
    except UsageError as error:
        module = within()
        if module is None:
            raise
        raise UsageError(f"in {module.path or 'the model'}: {error}") from error
