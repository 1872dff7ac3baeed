# SPDX-License-Identifier: Apache-2.0
"""Experts that are any modules; each rank has those of its place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.errors import UsageError, shown
from commrt.layers.experts.roles import ExpertRoles
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensor3d.grid_module import equal_on_all_ranks
from commrt.layers.tensor3d.parameter_cut import ParameterCut
from commrt.layers.tensor3d.roles import Along
from commrt.layers.tensor3d.whole_state import WholeState, load_own

__all__ = ["MakeExpert", "ModuleExperts"]

Tensor: TypeAlias = torch.Tensor
MakeExpert: TypeAlias = Callable[[int], nn.Module]


class ModuleExperts(nn.Module, WholeState):  # type: ignore[misc]
    """Experts of a program's own. Ranks along ``data`` and ``tensor`` have the same.

    Args:
        expert: returns the expert of a number, which takes and returns (n, d_model).
        numbers: of all experts, from first to last.
        roles: the axes.
        along: the axis that cuts the experts.

    The module of number i is the child ``str(i)``. Collective over ``data`` and
    ``tensor`` when it is made: ranks with the same expert take the parameters and
    buffers that the first of them has drawn. Bytes: those of each, by ``bcast``.
    """

    def __init__(
        self, expert: MakeExpert, numbers: range, roles: ExpertRoles, along: Along
    ) -> None:
        super().__init__()
        self.numbers, self._along, self._grid = numbers, along, roles.grid
        grid = roles.grid
        low, high = (
            place * len(numbers) // along.size
            for place in (along.place, along.place + 1)
        )
        sums = tuple(axis for axis in ("data", "expert") if axis not in along.axes)
        with_same = tuple(
            axis for axis in grid.axes if axis not in along.axes and grid.size(axis) > 1
        )
        for number in numbers[low:high]:
            made = expert(number)
            if not isinstance(made, nn.Module):
                raise UsageError(
                    f"MoE: expert({number}) returned {shown(made)}; expected a module "
                    f"of torch"
                )
            equal_on_all_ranks(made, grid, with_same)
            for module in made.modules():
                module.held_axes = along.axes
                module.grid_cuts = {
                    name: ParameterCut(
                        *(grid, tuple(parameter.shape), (), None, sums, along.axes)
                    )
                    for name, parameter in module.named_parameters(recurse=False)
                }
            self.add_module(str(number), made)
        self._mark()

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return len(self.numbers)

    @property
    def grid(self) -> ProcessGrid:
        """The ranks."""
        return self._grid

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleExperts:
        """Return a copy that works on the same ranks."""
        memo[id(self._grid)] = self._grid
        made: ModuleExperts = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made._mark()
        return made

    def _mark(self) -> None:
        """Note on each parameter where it lies: a copy of one has lost that."""
        for module in self.modules():
            for name, cut in getattr(module, "grid_cuts", {}).items():
                getattr(module, name).grid_cut = cut

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the experts' outputs (n, d_model).

        Args:
            x: (n, d_model), the tokens of the first expert of this rank, then of the
                second one, and so on.
            counts: the tokens of each expert of this rank. One without tokens is not
                called.

        Raises UsageError where an expert returns another shape.
        """
        outputs = []
        pieces = x.split([*counts]) if counts else ()
        for (name, expert), tokens in zip(self.named_children(), pieces, strict=True):
            output = expert(tokens) if len(tokens) else tokens
            if output.shape != tokens.shape:
                raise UsageError(
                    f"MoE: expert {name} returned the shape {tuple(output.shape)} for "
                    f"tokens of shape {tuple(tokens.shape)}; expected the same shape"
                )
            outputs.append(output)
        return torch.cat(outputs) if outputs else x

    # -- state of the serial layer -----------------------------------------------------

    def has_elsewhere(self, name: str) -> bool:
        """Return whether a name in the state is of an expert of another rank."""
        number = name.split(".")[0]
        return (
            number.isdecimal()
            and int(number) in self.numbers
            and number not in self._modules
        )

    def gathered(self) -> dict[str, Any]:
        """Return the state of all experts, whole; collective.

        Bytes: a ``bcast`` of each tensor from the rank that has it.
        """
        comm = self._along.comm
        own = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in self.state_dict(keep_vars=True).items()
        }
        if comm is None:
            return own
        found: dict[str, Any] = {}
        for rank in range(comm.size):
            facts = [
                (name, (tuple(value.shape), value.device.type, value.dtype))
                if isinstance(value, torch.Tensor)
                else (name, value)
                for name, value in own.items()
            ]
            for name, fact in comm.bcast_object(facts, root=rank):
                found[name] = fact
                if isinstance(fact, tuple) and isinstance(fact[-1], torch.dtype):
                    shape, device, dtype = fact
                    value = own.get(name) if rank == comm.rank else None
                    if value is None:
                        value = torch.empty(shape, dtype=dtype, device=device)
                    value = value.contiguous()
                    comm.bcast(value, root=rank)
                    found[name] = value
        return found

    def _load_from_state_dict(self, *given: Any) -> None:
        """Load as torch does; experts of other ranks may be in the state."""
        load_own(self, super()._load_from_state_dict, *given)
