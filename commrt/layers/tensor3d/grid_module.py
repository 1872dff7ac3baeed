# SPDX-License-Identifier: Apache-2.0
"""The base of layers on a grid: parameters that are cut, and state of whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.errors import UsageError
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.overlap import Overlap
from commrt.layers.tensor3d.parameter_cut import ParameterCut, cut_of
from commrt.layers.tensor3d.roles import Roles

__all__ = ["GridModule", "cuts_of", "equal_on_all_ranks", "wrong_shape"]

Tensor: TypeAlias = torch.Tensor


class GridModule(nn.Module):  # type: ignore[misc]
    """A layer whose parameters are cut over a grid.

    ``state_dict`` has this rank's shards. ``load_state_dict`` takes shards, or whole
    parameters of the serial layer, which it cuts.

    Args:
        roles: the axes.
    """

    def __init__(self, roles: Roles) -> None:
        super().__init__()
        self.roles = roles
        self.cuts: dict[str, ParameterCut] = {}
        """How each parameter is cut, by name."""
        self.overlap = Overlap()

    @property
    def grid(self) -> ProcessGrid:
        """The ranks."""
        return self.roles.grid

    def set_overlap(self, overlap: Overlap) -> None:
        """Take the switches of a model, which its layers share."""
        self.overlap = overlap

    def take_parameter(
        self, name: str, whole: Tensor | None, cut: ParameterCut
    ) -> None:
        """Keep this rank's shard of a whole parameter; None: the layer has none."""
        if whole is None:
            self.register_parameter(name, None)
            return
        self.cuts[name] = cut
        shard = nn.Parameter(cut.cut(whole), requires_grad=whole.requires_grad)
        shard.grid_cut = cut
        self.register_parameter(name, shard)

    def register_parameter(self, name: str, param: Tensor | None) -> None:
        """Set a parameter; one of another layer must be cut as this one's is.

        Raises UsageError for one that is cut otherwise.
        """
        if param is not None and name in self.cuts:
            self._check_shared(name, param)
        super().register_parameter(name, param)

    def _check_shared(self, name: str, parameter: Tensor) -> None:
        cut, theirs = self.cuts[name], cut_of(parameter)
        if theirs is None:
            if tuple(parameter.shape) == cut.shard_shape:
                parameter.grid_cut = cut
                return
            raise UsageError(
                f"{type(self).__name__}: {name} of shape {tuple(parameter.shape)} is "
                f"a whole parameter, or one of another layer; this layer stores "
                f"{cut.shard_shape} of {cut.shape} on this rank. Layers that share a "
                f"parameter must all be layers of the grid"
            )
        if not theirs.is_as(cut) and not self.take_cut(name, theirs):
            raise UsageError(
                f"{type(self).__name__}: {name} is shared with a layer that cuts it "
                f"otherwise: its shape is {theirs.shape}, and its dimensions are cut "
                f"along {[each.along.name for each in theirs.dims]}; this layer has "
                f"{cut.shape} along {[each.along.name for each in cut.dims]}. Make "
                f"one of them with the other transpose"
            )

    def take_cut(self, name: str, cut: ParameterCut) -> bool:
        """Cut parameters as a shared one is, and return whether that can be."""
        return False

    # -- copies and state --------------------------------------------------------------

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take the state of another layer; torch's copies of parameters lose marks."""
        super().__setstate__(state)
        self.mark()

    def mark(self) -> None:
        """Note on each parameter how it is cut."""
        for name, cut in self.cuts.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter.grid_cut = cut

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Cut what is whole, then load as torch does."""
        given = state_dict
        state_dict = dict(given)
        for name, cut in self.cuts.items():
            tensor = given.get(prefix + name)
            shape = None if tensor is None else tuple(tensor.shape)
            if shape is None or shape == cut.shard_shape:
                continue
            if shape == cut.shape:
                state_dict[prefix + name] = cut.cut(tensor)
            else:
                error_msgs.append(wrong_shape(prefix + name, shape, cut))
                state_dict.pop(prefix + name)
        absent: list[str] = []
        super()._load_from_state_dict(
            *(state_dict, prefix, local_metadata, strict, absent),
            *(unexpected_keys, error_msgs),
        )
        missing_keys += [name for name in absent if name not in given]
        self.mark()


def cuts_of(module: nn.Module) -> Mapping[str, ParameterCut]:
    """Return how a module's own parameters are cut, by name; whole ones are missing.

    Layers of a grid have cuts of their own. A module of torch that ``parallelize_cnn``
    has cut keeps them in ``grid_cuts``.
    """
    if isinstance(module, GridModule):
        return module.cuts
    found: Mapping[str, ParameterCut] = getattr(module, "grid_cuts", {})
    return found


def wrong_shape(name: str, shape: tuple[int, ...], cut: ParameterCut) -> str:
    """Return the message about a tensor that is neither a parameter nor its shard."""
    return (
        f"{name} has the shape {shape}; expected {cut.shape}, the whole parameter's, "
        f"or {cut.shard_shape}, this rank's shard on the grid {cut.grid.shape}"
    )


def equal_on_all_ranks(
    module: nn.Module, grid: ProcessGrid, axes: tuple[str, ...] | None = None
) -> None:
    """Give all ranks the parameters and buffers that the grid's first rank has.

    Args:
        module: the same layers on all ranks.
        grid: the ranks.
        axes: the first rank along these gives to the others along them; None: all.

    Collective: one ``bcast`` for each. Bytes: those of the module.
    """
    axes = grid.axes if axes is None else axes
    if grid.size(axes) == 1:
        return
    comm = grid[axes]
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta and tensor.numel():
            given = tensor.detach()
            usable = given.contiguous()
            comm.bcast(usable, root=0)
            if usable.data_ptr() != given.data_ptr():
                given.copy_(usable)
