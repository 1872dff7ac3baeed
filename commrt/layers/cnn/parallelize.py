# SPDX-License-Identifier: Apache-2.0
"""``parallelize_cnn``: an unmodified network on tensors that are cut over ranks.

    grid = ProcessGrid(commrt.init(), {"data": 2, "height": 2})
    net = parallelize_cnn(resnet50(), grid, outputs="whole")
    loss = cross_entropy(net(images), labels)  # images are whole on every rank here
    loss.backward()                            # gradients are whole on every rank

The network is cut as Distconv and LBANN cut theirs (Dryden et al., "Improving
Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism", IPDPS'19, and
"Channel and Filter Parallelism for Large-Scale CNN Training", SC'19): each layer has a
strategy, and a layer's input is moved where the layer before it lies in another way.

Hooks of torch's modules do it. So the model keeps its class, its parameters and the
names in its state_dict.

Pattern: what the functions send (``commrt.layers.tensors.convolution``,
``commrt.layers.spatial``), and at each module whose strategy differs from where its
input lies one redistribution: a rank receives what its new part has and its old one
lacks, forward and backward. Gradients of weights are summed over all axes that cut a
layer's input, the batch's among them: one allreduce of each layer's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from commrt.errors import UsageError, shown
from commrt.layers.cnn.choice import choose_strategies
from commrt.layers.cnn.cut_weights import TileForm, cut_module, tile_form
from commrt.layers.cnn.known_modules import check_modules, takes_channels
from commrt.layers.cnn.strategy import ParallelStrategy, Strategies, strategies_of
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors import DistTensor, Placement, Sharded
from commrt.layers.tensors.within import Tile, Within, enter, leave

__all__ = ["parallelize_cnn"]

M = TypeVar("M", bound=torch.nn.Module)
INPUTS, OUTPUTS = ("whole", "piece"), ("dist", "whole", "piece")
_PARALLEL = "_commrt_parallel"


def parallelize_cnn(
    model: M,
    grid: ProcessGrid,
    strategy: ParallelStrategy | Mapping[str, ParallelStrategy] | str | None = None,
    *,
    example: Sequence[int] | None = None,
    memory_nbytes: float | None = None,
    inputs: str = "whole",
    outputs: str = "dist",
    allow_gather: bool = False,
    cut_weights: bool = False,
) -> M:
    """Return the model, which computes on tensors that are cut over ranks from now on.

    Args:
        model: any modules of torch, and own ones that call torch's functions. It is
            changed in place, and keeps its class, parameters and state_dict. All ranks
            must have equal weights, and equal modes of training.
        grid: the ranks.
        strategy: for all layers; or a dict of them by patterns of module paths, such as
            ``{"": a, "layer4.*": b}``: the last pattern that matches a module counts,
            and a module without one has that of the module around it. None: as the
            grid's axes are named: data or batch, depth, height, width, channel, filter.
            "auto": those of ``choose_strategies``, which is collective.
        example: with "auto", the shape of the whole input.
        memory_nbytes: with "auto", bytes that a rank may keep for a step.
        inputs: what a plain tensor is that the model is given: "whole", the same on
            every rank, or this rank's "piece". DistTensors are taken as they are.
        outputs: "dist": DistTensors. "whole": tensors that every rank has, gathered.
            "piece": this rank's parts.
        allow_gather: whether a function may give each rank whole samples where its
            operand cannot be cut in another way.
        cut_weights: True: a rank keeps only its tiles of the weights that axes for
            channels and filters cut, and so does an optimizer. Parameters stay the same
            objects. False: parameters are whole on every rank.

    Gradients lie as their parameters do, equal on all ranks that have them, summed once
    over the whole batch: wrap the model in nothing else for that. Where a piece of data
    is on each of several grids, sum over those, for example with DDP over their
    communicator.

    A layer with fewer channels, filters, rows or samples than places leaves these
    whole. On a grid of one rank the model computes with plain tensors, bit for bit as
    before.

    Each call of the model is collective over the grid, and so is the backward pass.
    Raises UsageError, with the path in the model: for modules that cannot be cut,
    patterns that match nothing, and a model that is parallel already.
    """
    for name, value, known in (
        ("inputs", inputs, INPUTS),
        ("outputs", outputs, OUTPUTS),
    ):
        if value not in known:
            raise UsageError(
                f"parallelize_cnn: {name}={shown(value)} must be one of "
                f"{', '.join(known)}"
            )
    if any(hasattr(module, _PARALLEL) for module in model.modules()):
        raise UsageError(
            "parallelize_cnn: the model, or a part of it, is parallel already: make a "
            "new one, or load its state_dict into one"
        )
    check_modules(model, grid.num_ranks)
    if strategy == "auto":
        if example is None:
            raise UsageError(
                "parallelize_cnn: strategy='auto' needs example, the whole input's "
                "shape, such as (8, 3, 224, 224)"
            )
        chosen = choose_strategies(
            *(model, grid, example),
            memory_nbytes=memory_nbytes,
            cut_weights=cut_weights,
        )
        strategy = chosen.by_path
    strategies = strategies_of(model, grid, strategy)
    forms = _tile_forms(model, grid, strategies) if cut_weights else {}
    object.__setattr__(model, _PARALLEL, strategies)
    if grid.num_ranks == 1:
        model.register_forward_pre_hook(_plain_arguments, with_kwargs=True)
        if outputs == "dist":
            model.register_forward_hook(_dist_results(grid, strategies.of("")))
        return model
    # Hooks that come first run first: the model makes tensors before it moves them.
    first = strategies.of("")
    model.register_forward_pre_hook(_entrance(grid, first, inputs), with_kwargs=True)
    for path, module in model.named_modules():
        own = strategies.of(path)
        form = forms.get(path)
        tiles = {} if form is None else cut_module(module, grid, form)
        stationary = own.stationary if form is None else form.stationary
        state = Within(path, own.filter, stationary, allow_gather)
        # A linear layer takes features as they come, unless its tile needs others.
        least = 2 if tiles else 3
        is_product = takes_channels(module)
        _hook(module, _moving(grid, own, state, tiles, is_product, least), _leaving)
    model.register_forward_hook(_results(outputs))
    return model


def _tile_forms(
    model: torch.nn.Module, grid: ProcessGrid, strategies: Strategies
) -> dict[str, TileForm]:
    """Return how the weights of modules are cut, by path; whole ones are missing."""
    found: dict[str, TileForm] = {}
    for path, module in model.named_modules():
        try:
            form = tile_form(module, grid, strategies.of(path))
        except UsageError as error:
            raise UsageError(f"parallelize_cnn: {path}: {error}") from error
        if form is not None:
            found[path] = form
    return found


def _hook(module: torch.nn.Module, before: Any, behind: Any) -> None:
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(behind, always_call=True)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments or results with their tensors changed."""
    if isinstance(value, torch.Tensor | DistTensor):
        return change(value)
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_mapped(each, change) for each in value)
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    return value


# -- at each module --------------------------------------------------------------------


def _moving(
    grid: ProcessGrid,
    own: ParallelStrategy,
    state: Within,
    tiles: Mapping[str, Tile],
    is_product: bool,
    least_dims: int,
) -> Callable[..., Any]:
    """Return the hook that enters a module and moves its input to its strategy.

    A product takes channels as its strategy says where its input has ``least_dims``.
    """
    known: dict[Any, Placement] = {}

    def move(x: Any) -> Any:
        if not isinstance(x, DistTensor) or x.dim() < 2:
            return x
        key = x.placement, x.shape
        target = known.get(key)
        if target is None:
            target = own.placement(
                grid,
                x.shape,
                x.placement,
                takes_channels=is_product and x.dim() >= least_dims,
            )
            target.check(f"parallelize_cnn: {state.path}", grid, x.shape)
            known[key] = target
        return x if target == x.placement else x.redistribute(placement=target)

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        if tiles:  # looked up by name: others may have put tensors in their place
            mine = {id(getattr(module, name)): tile for name, tile in tiles.items()}
            enter(replace(state, tiles=mine))
        else:
            enter(state)
        if getattr(module, "inplace", False):  # others see what it writes
            return args, kwargs
        return _mapped(args, move), _mapped(kwargs, move)

    return before


def _leaving(module: Any, args: Any, result: Any) -> None:
    leave()


# -- at the model's ends ---------------------------------------------------------------


def _entrance(
    grid: ProcessGrid, strategy: ParallelStrategy, inputs: str
) -> Callable[..., Any]:
    """Return the hook that makes distributed tensors of a model's plain arguments."""

    def made(x: Any) -> Any:
        if isinstance(x, DistTensor) or x.dim() == 0:
            return x
        if inputs == "piece":
            return _from_piece(x, grid, strategy)
        everywhere = Placement.replicated(x.dim())
        placement = strategy.placement(grid, x.shape, everywhere)
        return DistTensor.from_whole(x, grid, placement)

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        return _mapped(args, made), _mapped(kwargs, made)

    return before


def _from_piece(x: Any, grid: ProcessGrid, strategy: ParallelStrategy) -> DistTensor:
    """Return a tensor of which ranks have pieces of any sizes; collective."""
    roles = [strategy.sample, (), *_spatial_roles(strategy, x.dim())][: x.dim()]
    dims: list[Sharded | None] = []
    shape = [*x.shape]
    for number, axes in enumerate(roles):
        axes = tuple(a for a in axes if grid.size(a) > 1)
        if not axes:
            dims.append(None)
            continue
        sizes = np.asarray(grid[axes].allgather(np.array([x.shape[number]], np.int64)))
        dims.append(Sharded(axes, sizes=tuple(map(int, sizes.reshape(-1)))))
        shape[number] = int(sizes.sum())
    return DistTensor(x, shape, grid, Placement(*dims))


def _spatial_roles(
    strategy: ParallelStrategy, num_dims: int
) -> Sequence[tuple[str, ...]]:
    every = (strategy.depth, strategy.height, strategy.width)
    return every[max(0, 5 - num_dims) :]


def _results(outputs: str) -> Callable[..., Any]:
    """Return the hook that gives a model's results in the form that was asked for."""

    def given(x: Any) -> Any:
        if not isinstance(x, DistTensor):
            return x
        if outputs == "whole":
            return x.whole()
        x = x.redistribute()
        return x.local if outputs == "piece" else x

    def behind(module: Any, args: Any, result: Any) -> Any:
        return _mapped(result, given)

    return behind


# -- on a grid of one rank, where the model computes with plain tensors ---------------


def _plain_arguments(module: Any, args: Any, kwargs: Any) -> Any:
    """Give the model plain tensors: a hook before it."""
    if not kwargs and all(type(x) is torch.Tensor for x in args):
        return None

    def plain(x: Any) -> Any:
        return x.local if isinstance(x, DistTensor) else x

    return _mapped(args, plain), _mapped(kwargs, plain)


def _dist_results(grid: ProcessGrid, strategy: ParallelStrategy) -> Callable[..., Any]:
    """Return the hook that makes distributed tensors of a model's results."""
    known: dict[torch.Size, Placement] = {}

    def made(x: Any) -> Any:
        placement = known.get(x.shape)
        if placement is None:
            everywhere = Placement.replicated(x.dim())
            placement = strategy.placement(grid, x.shape, everywhere)
            known[x.shape] = placement
        return DistTensor.unchecked(x, x.shape, grid, placement)

    def behind(module: Any, args: Any, result: Any) -> Any:
        return _mapped(result, made)

    return behind
