# SPDX-License-Identifier: Apache-2.0
"""Gradients of a model on a grid: summed over the ranks that have other samples.

A cut parameter's gradient has been summed over the depth in the backward pass, and is
summed over ``data`` here. Parameters of other layers are whole on all ranks. Their
gradients are summed over ``data`` and ``z``, and along axes that cut a sequence. An
expert's gradient holds the tokens of all ranks along ``expert``, so it is not summed
along this axis: ``ParameterCut.sums`` has the axes of each cut parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.grid_module import GridModule, cuts_of
from commrt.layers.tensor3d.once import mark_summed, refuse_summed
from commrt.layers.tensor3d.parameter_cut import ParameterCut
from commrt.layers.tensor3d.roles import LAYER_AXES, SAMPLE_AXES, check_axes

__all__ = [
    "CutParameter",
    "broadcast_parameters",
    "cut_parameters",
    "grid_of",
    "sequence_parallel",
    "sync_gradients",
]

Tensor: TypeAlias = torch.Tensor
BUCKET_NBYTES = 25 << 20


class CutParameter(NamedTuple):
    """A parameter of a model, and how a layer has cut it; None: it is whole."""

    name: str
    parameter: Tensor
    cut: ParameterCut | None
    sequence_axes: tuple[str, ...] = ()
    """Axes along which it sees pieces of sequences."""


def cut_parameters(model: nn.Module) -> list[CutParameter]:
    """Return a model's parameters in its order, shared ones once."""
    cuts: dict[int, ParameterCut] = {}
    sequences: dict[int, tuple[str, ...]] = {}
    for module in model.modules():
        axes = getattr(module, "sequence_axes", None)
        if axes is not None:
            sequences |= {id(parameter): axes for parameter in module.parameters()}
        for name, cut in cuts_of(module).items():
            parameter = getattr(module, name, None)
            if parameter is not None:
                cuts[id(parameter)] = cut
    return [
        CutParameter(
            *(name, parameter, cuts.get(id(parameter))),
            sequences.get(id(parameter), ()),
        )
        for name, parameter in model.named_parameters()
    ]


def grid_of(what: str, model: nn.Module, grid: ProcessGrid | None) -> ProcessGrid:
    """Return the grid of a model's layers, or the one that is given.

    Raises UsageError where there is none, or where there are two.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"{what}: model={shown(model)} must be a module of torch")
    layers = [each for each in model.modules() if isinstance(each, GridModule)]
    grids = [*{id(each.grid): each.grid for each in layers}.values()]
    if grid is not None:
        check_axes(what, grid, LAYER_AXES)
        grids = [*{id(each): each for each in (grid, *grids)}.values()]
    if len(grids) != 1:
        found = "no layer of a grid: pass grid" if not grids else "layers of two grids"
        raise UsageError(f"{what}: the model {type(model).__name__} has {found}")
    return grids[0]


def sequence_parallel(module: nn.Module, *axes: str) -> None:
    """Note that a module's whole parameters see a piece of each sequence.

    For normalizations between layers with ``sequence_dim``, such as
    ``sequence_parallel(norm, "x")``: ``sync_gradients`` sums their gradients along
    these axes, too. Raises UsageError for names that no axis has.
    """
    unknown = [axis for axis in axes if axis not in LAYER_AXES]
    if unknown or not axes:
        raise UsageError(
            f"sequence_parallel: axes={shown(axes)} must be among "
            f"{', '.join(LAYER_AXES)}"
        )
    # On the module: a copy of it has other parameters, and this note.
    module.sequence_axes = axes


def broadcast_parameters(model: nn.Module, grid: ProcessGrid | None = None) -> None:
    """Give replicas the same parameters and buffers; collective.

    Whole parameters and buffers become those of the grid's first rank. Of cut ones
    those at place 0 along ``data`` go to the others, and a bias besides along the axes
    that do not cut it. Experts that are modules keep their own parameters and buffers,
    equal on the ranks that have the same ones. Bytes: those of each, by ``bcast``.
    """
    grid = grid_of("broadcast_parameters", model, grid)
    for _, parameter, cut, _ in cut_parameters(model):
        held = () if cut is None else cut.axes
        _broadcast(parameter.detach(), grid, held)
    seen: set[int] = set()
    for module in model.modules():
        held = getattr(module, "held_axes", ())
        for buffer in module.buffers(recurse=False):
            if id(buffer) not in seen:
                _broadcast(buffer.detach(), grid, held)
            seen.add(id(buffer))


def _broadcast(tensor: Tensor, grid: ProcessGrid, held: Sequence[str]) -> None:
    over = _longer(grid, [axis for axis in grid.axes if axis not in held])
    if over and tensor.numel():
        usable = tensor.contiguous()
        grid[over].bcast(usable, root=0)
        if usable.data_ptr() != tensor.data_ptr():
            tensor.copy_(usable)


def _longer(grid: ProcessGrid, axes: Sequence[str]) -> tuple[str, ...]:
    """Return those of some axes that have several ranks, in the grid's order."""
    return tuple(a for a in grid.axes if a in axes and grid.size(a) > 1)


def sync_gradients(
    model: nn.Module,
    grid: ProcessGrid | None = None,
    *,
    average: bool = True,
    bucket_nbytes: int = BUCKET_NBYTES,
) -> None:
    """Sum a model's gradients over all samples; call it once after ``backward()``.

    Args:
        model: with layers of one grid.
        grid: the ranks; None: those of the model's layers.
        average: True: gradients become those of the mean of the losses of all ranks
            along ``data``, ``z`` and ``expert``. False: of their sum.
        bucket_nbytes: about how many bytes travel together.

    Pattern: one ``allreduce`` for each bucket, over ``data`` for cut parameters, and
    over ``data``, ``z`` and ``expert`` for whole ones. Bytes: those of this rank's
    gradients, and one element for each. A parameter that no rank has a gradient of gets
    none.
    Gradients that FSDP2 has averaged over ``data`` are only summed over what is left.

    Raises UsageError for sparse gradients that it would have to sum, before anything is
    sent. Those of sharded embeddings are sums already, and may be sparse. In a model
    with experts it marks each gradient that it has summed, and raises UsageError where
    one is there that has been summed before.
    """
    grid = grid_of("sync_gradients", model, grid)
    replicas = grid.size(_longer(grid, SAMPLE_AXES))
    buckets: dict[tuple[Any, ...], _Bucket] = {}
    started = []
    trained = [each for each in cut_parameters(model) if each.parameter.requires_grad]
    for each in trained:
        parameter = each.parameter
        gradient = parameter.grad
        is_sparse = gradient is not None and gradient.layout != torch.strided
        if is_sparse and _summed_along(each, grid)[0]:
            raise UsageError(
                f"sync_gradients: the gradient of {each.name} is sparse; make its "
                f"layer with dense gradients"
            )
    is_marked = any(
        each.roles.are_sums_marked
        for each in model.modules()
        if isinstance(each, GridModule)
    )
    if is_marked:
        refuse_summed("sync_gradients", [each[:2] for each in trained])
    for each in trained:
        parameter = each.parameter
        axes, scale = _summed_along(each, grid)
        scale *= 1.0 / replicas if average else 1.0
        local = _local(parameter)
        key = axes, scale, local.dtype, local.device
        bucket = buckets.setdefault(key, _Bucket(grid, axes, scale))
        bucket.parameters.append(parameter)
        bucket.nbytes += local.numel() * local.element_size()
        if bucket.nbytes >= bucket_nbytes:
            started.append(buckets.pop(key))
            started[-1].start()
    for bucket in buckets.values():
        bucket.start()
    for bucket in [*started, *buckets.values()]:
        bucket.finish()
    if is_marked:
        mark_summed([each[:2] for each in trained])


def _summed_along(
    each: CutParameter, grid: ProcessGrid
) -> tuple[tuple[str, ...], float]:
    """Return the axes that a gradient is to be summed along, and a factor."""
    axes = [*(SAMPLE_AXES if each.cut is None else each.cut.sums)]
    factor = 1.0
    if _is_dtensor(each.parameter):
        # FSDP2 has taken the mean over data, and keeps a piece of it.
        axes = [axis for axis in axes if axis != "data"]
        factor = float(grid.shape.get("data", 1))
    if each.cut is None:  # pieces of a parameter are sums over the sequence already
        axes += each.sequence_axes
    return _longer(grid, axes), factor


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is."""
    detached = tensor.detach()
    part: Tensor = detached.to_local() if _is_dtensor(detached) else detached
    return part


@dataclass
class _Bucket:
    """Gradients that travel together."""

    grid: ProcessGrid
    axes: tuple[str, ...]
    scale: float
    parameters: list[Tensor] = field(default_factory=list)
    nbytes: int = 0

    def start(self) -> None:
        """Start their sum; behind them goes an element for each, 1 if it is there."""
        self._request: Any = None
        if not self.axes:
            return
        there = [each.grad is not None for each in self.parameters]
        parts = [
            (_local(each.grad) if is_there else torch.zeros_like(_local(each)))
            for each, is_there in zip(self.parameters, there, strict=True)
        ]
        flags = parts[0].new_tensor(there)
        self._flat = torch.cat([*(part.reshape(-1) for part in parts), flags])
        self._request = self.grid[self.axes].allreduce(self._flat, nonblocking=True)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def finish(self) -> None:
        """Put the sums into the gradients."""
        if self._request is None:
            self._scale()
            return
        self._request.wait()
        if self.scale != 1:
            self._flat *= self.scale
        for parameter, part in self._parts():
            like = _local(parameter)
            if parameter.grad is None:
                if _is_dtensor(parameter):
                    parameter.grad = torch.zeros_like(parameter)
                else:
                    parameter.grad = part.view(like.shape).clone()
                    continue
            _local(parameter.grad).copy_(part.view(like.shape))

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what some rank has a gradient of, and the sum."""
        sizes = [_local(each).numel() for each in self.parameters]
        *parts, flags = self._flat.split([*sizes, len(sizes)])
        for parameter, part, flag in zip(
            self.parameters, parts, flags.tolist(), strict=True
        ):
            if flag:
                yield parameter, part

    def _scale(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None and self.scale != 1:
                # A sparse gradient's multiple has new values: no alias sees them.
                is_dense = parameter.grad.layout == torch.strided
                own = _local(parameter.grad) if is_dense else parameter.grad
                own.mul_(self.scale)
