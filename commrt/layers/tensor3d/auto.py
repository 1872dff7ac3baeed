# SPDX-License-Identifier: Apache-2.0
"""Makes the layers of a user's model layers of a grid."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils import parametrize

from commrt.errors import UsageError, shown
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.convolution import (
    TRANSPOSED,
    ChannelConv,
    ChannelConv1d,
    ChannelConv2d,
    ChannelConv3d,
)
from commrt.layers.tensor3d.embedding import Embedding3d, why_not_embedding
from commrt.layers.tensor3d.grid_module import GridModule, equal_on_all_ranks
from commrt.layers.tensor3d.linear import Form, Linear3d
from commrt.layers.tensor3d.roles import check_axes

__all__ = ["auto_parallelize", "parallelize"]

Tensor: TypeAlias = torch.Tensor

CONVOLUTIONS: dict[type[nn.Module], type[ChannelConv]] = {
    nn.Conv1d: ChannelConv1d,
    nn.Conv2d: ChannelConv2d,
    nn.Conv3d: ChannelConv3d,
    nn.ConvTranspose1d: ChannelConv,
    nn.ConvTranspose2d: ChannelConv,
    nn.ConvTranspose3d: ChannelConv,
}
READS_WEIGHTS = nn.TransformerEncoderLayer, nn.MultiheadAttention
"""Modules that compute with their parts' weights, and do not call these parts."""
KNOWN = (nn.Linear, nn.Embedding, *CONVOLUTIONS)
ELEMENTWISE = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.ELU),
    *(nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Hardtanh, nn.ReLU6),
)


def parallelize(
    model: nn.Module,
    grid: ProcessGrid,
    *,
    only: Sequence[str] | None = None,
    pairs: Mapping[str, str] | None = None,
    broadcast: bool = True,
) -> nn.Module:
    """Replace layers of a finished model by layers of a grid; return the model.

        model = parallelize(GPT(config), grid, pairs={"*.mlp.up": "*.mlp.down"})

    torch's Linear, Embedding and convolutions are replaced, subclasses of them are not.
    Each layer takes and returns whole tensors, so the code between layers stays as it
    is. Inside ``nn.Sequential``, and for ``pairs``, two linear layers with elementwise
    functions between them keep what lies between cut, as Megatron-LM does: the second
    one is transposed. The transposition of other layers is the one that sends fewer
    bytes; where both send as many, it alternates.

    Args:
        model: the same on all ranks.
        grid: axes are among data, x, y and z.
        only: patterns of paths, such as ``"blocks.*.mlp"``, of layers or of modules
            that have some; None: all layers that can be replaced are, but convolutions
            with groups: their weights are small, and cut groups need a gathering.
        pairs: patterns of paths of first layers, each with the pattern of the layer
            that takes its output, after elementwise functions at most. Only the
            program knows that; it is not checked.
        broadcast: True: all ranks take the parameters of the grid's first rank before.
            Collective then, one ``bcast`` for each.

    Layers that share a weight stay so: an Embedding and a Linear can. Raises
    UsageError, which names the path, for a pattern that matches nothing, or no layer
    that can be replaced.
    """
    check_axes("parallelize", grid)
    if not isinstance(model, nn.Module):
        raise UsageError(f"parallelize: model={shown(model)} must be a module of torch")
    chosen = _chosen(model, only)
    forms = _forms(model, chosen, grid, pairs or {})
    if broadcast:
        equal_on_all_ranks(model, grid)
    made: dict[int, nn.Module] = {}
    shared: dict[int, Tensor] = {}
    for path, module in chosen.items():
        if id(module) not in made:
            made[id(module)] = _replaced(module, grid, forms[path])
            _share(module, made[id(module)], shared)
    if id(model) in made:
        return made[id(model)]
    for module in [*model.modules()]:
        for name, child in module._modules.items():
            if id(child) in made and not isinstance(module, GridModule):
                setattr(module, name, made[id(child)])
    return model


@contextmanager
def auto_parallelize(grid: ProcessGrid) -> Iterator[None]:
    """Make layers of the grid out of those that a thread gives to modules meanwhile.

        with auto_parallelize(grid):
            model = Net()  # its nn.Linear, nn.Embedding and convolutions are cut

    A layer is replaced when it becomes part of a module. Each one takes and returns
    whole tensors. All ranks take the parameters of the grid's first rank: one ``bcast``
    for each replaced layer. Call ``broadcast_parameters(model)`` behind it, or seed all
    ranks alike, for the parameters of other layers.

    A layer that can not be replaced stays whole. Use ``parallelize`` to see which.
    """
    check_axes("auto_parallelize", grid)
    replacing = _watched_registrations()
    outer = getattr(replacing, "by", None)
    replacing.by = _Replacing(grid)
    try:
        yield
    finally:
        replacing.by = outer


class _Replacing:
    """Replaces layers of one thread, as they become parts of modules."""

    def __init__(self, grid: ProcessGrid) -> None:
        self._grid = grid
        self._turn = _Turn(grid)
        self._made: dict[int, tuple[nn.Module, nn.Module]] = {}

    def replaced(self, parent: nn.Module, module: nn.Module) -> nn.Module | None:
        """Return the layer that takes a module's place in a parent; None: none does."""
        if isinstance(parent, (GridModule, *READS_WEIGHTS)):
            return None
        if type(module) not in KNOWN:
            return None
        if _why_not(module) is not None or _has_groups(module):
            return None
        if id(module) not in self._made:
            equal_on_all_ranks(module, self._grid)
            form = Form(transpose=self._turn.of(module))
            # Its module is kept, so that no other one gets its number.
            self._made[id(module)] = module, _replaced(module, self._grid, form)
        return self._made[id(module)][1]


_LOCK = threading.Lock()


def _watched_registrations() -> threading.local:
    """Return where a thread says by what its layers are replaced.

    torch calls a hook whenever a module gets a part. Its table of hooks must not change
    while another thread looks at it, so this hook stays once it is there.
    """
    with _LOCK:
        return _watch()


@cache
def _watch() -> threading.local:
    replacing = threading.local()

    def replace(parent: nn.Module, name: str, module: nn.Module) -> nn.Module | None:
        by: _Replacing | None = getattr(replacing, "by", None)
        return None if by is None else by.replaced(parent, module)

    register_module_module_registration_hook(replace)
    return replacing


# -- which layers ----------------------------------------------------------------------


def _chosen(model: nn.Module, only: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the layers to replace by path; UsageError for one that cannot be."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if only is None:
        ungrouped = {
            path: module for path, module in modules.items() if not _has_groups(module)
        }
        return _possible(model, ungrouped)[0]
    found: dict[str, nn.Module] = {}
    for pattern in only:
        matching = {
            path: module
            for path, module in modules.items()
            if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")
        }
        if not matching:
            raise UsageError(
                f"parallelize: only={shown(only)}: the model has no module "
                f"{pattern!r}; see model.named_modules()"
            )
        possible, reasons = _possible(model, matching)
        if not possible:
            path, reason = next(iter(reasons.items()))
            raise UsageError(
                f"parallelize: only={shown(only)}: {path}, a "
                f"{type(modules[path]).__name__}, cannot be a layer of a grid: "
                f"{reason}. Leave it out of only"
            )
        found |= possible
    return found


def _possible(
    model: nn.Module, wanted: Mapping[str, nn.Module]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return which modules can be replaced, and why the others cannot."""
    users = _users(model)
    found, reasons = {}, {}
    for path, module in wanted.items():
        reason = _why_not(module)
        parent = model.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, READS_WEIGHTS) and module is not parent:
            kind = type(parent).__name__
            reason = (
                f"its parent, a {kind}, computes with its weight without calling it"
            )
        if reason is None:
            others = _others(path, module, users, wanted)
            reason = f"it shares a parameter with {others}" if others else None
        if reason is None:
            found[path] = module
        else:
            reasons[path] = reason
    return found, reasons


def _why_not(module: nn.Module) -> str | None:
    """Return why a module cannot be replaced; None: it can."""
    if type(module) not in KNOWN:
        return f"only {', '.join(each.__name__ for each in KNOWN)} can"
    if parametrize.is_parametrized(module):
        return "its weight is computed from others (torch.nn.utils.parametrize)"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks; register them afterwards"
    if isinstance(module, nn.Embedding):
        return why_not_embedding(module)
    return None


def _has_groups(module: nn.Module) -> bool:
    """Return whether channels are in groups; these are replaced only if named."""
    return type(module) in CONVOLUTIONS and module.groups != 1


def _users(model: nn.Module) -> dict[int, list[tuple[str, str]]]:
    """Return the paths and names of each parameter's modules, by its number."""
    found: dict[int, list[tuple[str, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append((path, name))
    return found


def _others(
    path: str,
    module: nn.Module,
    users: Mapping[int, list[tuple[str, str]]],
    wanted: Mapping[str, nn.Module],
) -> str:
    """Return the modules that share a parameter with one, and cannot share it cut."""
    odd = []
    for parameter in module.parameters(recurse=False):
        for other, name in users.get(id(parameter), []):
            there = wanted.get(other)
            is_layer = isinstance(there, nn.Linear | nn.Embedding)
            can = name == "weight" and is_layer and _why_not(there) is None
            if other != path and there is not module and not can:
                odd.append(f"{other}.{name}")
    return ", ".join(odd)


# -- how each of them is cut -----------------------------------------------------------


def _forms(
    model: nn.Module,
    chosen: Mapping[str, nn.Module],
    grid: ProcessGrid,
    pairs: Mapping[str, str],
) -> dict[str, Form]:
    firsts, seconds = _pairs(model, chosen, pairs)
    tables = {
        id(module.weight) for module in chosen.values() if type(module) is nn.Embedding
    }
    turn, found = _Turn(grid), {}
    for path, module in chosen.items():
        if path in firsts:
            found[path] = Form(whole_output=False)
        elif path in seconds:
            found[path] = Form(transpose=True, whole_input=False)
        elif id(module.weight) in tables:
            found[path] = Form()
        else:
            found[path] = Form(transpose=turn.of(module))
    return found


def _pairs(
    model: nn.Module, chosen: Mapping[str, nn.Module], pairs: Mapping[str, str]
) -> tuple[set[str], set[str]]:
    """Return the paths of first and of second layers of pairs."""
    firsts, seconds = set(), set()
    for first, second in pairs.items():
        ones, others = (
            [p for p, m in chosen.items() if fnmatchcase(p, each) and _is_linear(m)]
            for each in (first, second)
        )
        if not ones or len(ones) != len(others):
            raise UsageError(
                f"parallelize: pairs: {first!r} is {len(ones)} linear layers that can "
                f"be replaced, and {second!r} is {len(others)}; there must be as many"
            )
        for one, other in zip(ones, others, strict=True):
            if chosen[one].out_features != chosen[other].in_features:
                raise UsageError(
                    f"parallelize: pairs: {one} has {chosen[one].out_features} "
                    f"outputs, and {other} has {chosen[other].in_features} inputs"
                )
        firsts |= {*ones}
        seconds |= {*others}
    for path, module in model.named_modules():
        if type(module) is nn.Sequential:
            for one, other in _in_sequence(path, module, chosen):
                if not {one, other} & (firsts | seconds):
                    firsts.add(one)
                    seconds.add(other)
    both = firsts & seconds
    if both:
        raise UsageError(
            f"parallelize: pairs: {sorted(both)[0]} is the first layer of one pair and "
            f"the second one of another"
        )
    return firsts, seconds


def _in_sequence(
    path: str, module: nn.Sequential, chosen: Mapping[str, nn.Module]
) -> Iterator[tuple[str, str]]:
    """Yield pairs of linear layers with elementwise functions between them."""
    first: str | None = None
    for name, child in module.named_children():
        here = f"{path}.{name}" if path else name
        if here in chosen and _is_linear(child):
            if first is not None and chosen[first] is not child:
                yield first, here
                first = None
            else:
                first = here
        elif type(child) not in ELEMENTWISE:
            first = None


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


class _Turn:
    """Chooses whether a layer with whole input and output is transposed."""

    def __init__(self, grid: ProcessGrid) -> None:
        self._x, self._y = grid.shape.get("x", 1), grid.shape.get("y", 1)
        self._last = True

    def of(self, module: nn.Module) -> bool:
        """Return True for the layer whose form with ``transpose`` sends fewer bytes."""
        if type(module) is nn.Embedding:
            return False
        outputs, inputs = module.weight.shape[:2]
        if isinstance(module, TRANSPOSED):
            outputs, inputs = inputs, outputs
        plain = self._sent(outputs, inputs, self._x, self._y)
        turned = self._sent(outputs, inputs, self._y, self._x)
        self._last = turned < plain if turned != plain else not self._last
        return self._last

    @staticmethod
    def _sent(n: int, k: int, r: int, c: int) -> float:
        """Return the elements that a rank sends for a sample."""
        sums = 2 * (c - 1) / c * n / r + 2 * (r - 1) / r * k / c
        wholes = (r - 1) / r * n + (c - 1) / c * k
        return sums + wholes


# -- replacing -------------------------------------------------------------------------


def _replaced(module: Any, grid: ProcessGrid, form: Form) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return Embedding3d.from_embedding(module, grid)
    if isinstance(module, nn.Linear):
        return Linear3d.from_linear(module, grid, form)
    conv = ChannelConv(module, grid, form)
    return conv


def _share(module: nn.Module, made: nn.Module, shared: dict[int, Tensor]) -> None:
    """Let a new layer share its weight with one that the old layer shared it with."""
    weight = shared.setdefault(id(module.weight), made.weight)
    if weight is not made.weight:
        made.weight = weight
