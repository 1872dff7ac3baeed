# SPDX-License-Identifier: Apache-2.0
"""How the layers of a network are cut: a strategy for each, by patterns of paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from commrt.errors import UsageError, shown, suggest
from commrt.layers.process_grid import ProcessGrid
from commrt.layers.tensors.channels import FORMS
from commrt.layers.tensors.placement import Placement, Sharded
from commrt.vocabulary.checks import as_items

__all__ = ["ParallelStrategy", "Strategies", "strategies_of"]

SPACE = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
"""The roles of spatial dimensions, for tensors of one to three of them."""


@dataclass(frozen=True)
class ParallelStrategy:
    """Which axes of a grid cut which dimensions of a layer.

        ParallelStrategy(sample="data", height="row", width="col")
        ParallelStrategy(channel="model", filter="model")
        ParallelStrategy(height=("row", "col"))

    Each field has the name of an axis, several, or none. An axis cuts one dimension;
    only ``channel`` and ``filter`` may share theirs.
    """

    sample: tuple[str, ...] = ()
    """Axes that cut the batch."""
    depth: tuple[str, ...] = ()
    """Axes that cut the first of three spatial dimensions."""
    height: tuple[str, ...] = ()
    """Axes that cut the last spatial dimension but one."""
    width: tuple[str, ...] = ()
    """Axes that cut the last spatial dimension."""
    channel: tuple[str, ...] = ()
    """Axes that cut the input channels of convolutions and linear layers."""
    filter: tuple[str, ...] = ()
    """Axes that cut their output channels."""
    stationary: str = "auto"
    """The form of products over channels, where ``channel`` and ``filter`` share axes:
    "x" keeps inputs where they are, "y" outputs, "w" weights; "auto" takes the fewest
    bytes."""

    def __init__(
        self,
        sample: str | Sequence[str] | None = None,
        depth: str | Sequence[str] | None = None,
        height: str | Sequence[str] | None = None,
        width: str | Sequence[str] | None = None,
        channel: str | Sequence[str] | None = None,
        filter: str | Sequence[str] | None = None,
        stationary: str = "auto",
    ) -> None:
        given = (sample, depth, height, width, channel, filter)
        for field, value in zip(fields(self), given, strict=False):
            object.__setattr__(self, field.name, _axes(field.name, value))
        if stationary not in FORMS:
            raise UsageError(
                f"ParallelStrategy: stationary={shown(stationary)} must be one of "
                f"{', '.join(FORMS)}"
            )
        object.__setattr__(self, "stationary", stationary)
        alone = [*self.sample, *self.depth, *self.height, *self.width]
        for axis in {*alone, *self.channel, *self.filter}:
            if alone.count(axis) + (axis in (*self.channel, *self.filter)) > 1:
                raise UsageError(
                    f"ParallelStrategy: the axis {axis!r} cuts two dimensions; only "
                    f"channel and filter may share one"
                )

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that it names."""
        named = (self.sample, self.depth, self.height, self.width)
        return tuple(dict.fromkeys(sum((*named, self.channel, self.filter), start=())))

    def placement(
        self,
        grid: ProcessGrid,
        shape: Sequence[int],
        now: Placement,
        *,
        takes_channels: bool = False,
    ) -> Placement:
        """Return where a tensor of this layer lies.

        Args:
            grid: the ranks.
            shape: of the tensor: batch, channels, and space if it has any.
            now: where it lies; a dimension that these axes cut already stays so.
            takes_channels: whether the layer is a product over channels; others take
                channels as they come.

        A dimension with fewer elements than places stays as it is where it is cut so,
        and whole else.
        """
        roles = [self.sample, None, *(getattr(self, n) for n in _space(len(shape)))]
        used = {axis for role in roles if role for axis in role}
        dims: list[Sharded | None] = []
        for number, (extent, cut) in enumerate(zip(shape, now.dims, strict=True)):
            role = roles[number]
            if role is None:
                role = self.channel if takes_channels else cut.axes if cut else ()
                if used & {*role}:
                    role = ()
            if cut is not None and cut.axes == role and cut.block is None:
                dims.append(cut)
            elif role and extent >= grid.size(role):
                dims.append(Sharded(role))
            else:
                dims.append(None)
        return Placement(*dims)


def _space(num_dims: int) -> tuple[str, ...]:
    return SPACE.get(num_dims - 2, ())


def _axes(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else as_items(value)
    if items is None or not all(isinstance(axis, str) for axis in items):
        raise UsageError(
            f"ParallelStrategy: {name}={shown(value)} must be the name of an axis, "
            f"several, or None"
        )
    return tuple(items)


# -- of the modules of a model ---------------------------------------------------------


@dataclass(frozen=True)
class Strategies:
    """The strategy of each module of a model, by its path; ``""`` is the model."""

    by_path: Mapping[str, ParallelStrategy]

    def of(self, path: str) -> ParallelStrategy:
        """Return a module's strategy."""
        return self.by_path[path]


ROLES = ("sample", "depth", "height", "width", "channel", "filter")


def strategies_of(
    model: Any,
    grid: ProcessGrid,
    given: ParallelStrategy | Mapping[str, ParallelStrategy] | str | None,
) -> Strategies:
    """Return the strategy of each module; UsageError for what fits none.

    A module has the strategy of the last pattern that matches its path, else that of
    the module around it. ``""`` is the model itself.
    """
    if given is None:
        given = _by_names(grid)
    if isinstance(given, ParallelStrategy):
        given = {"": given}
    if not isinstance(given, Mapping) or not all(
        isinstance(k, str) and isinstance(v, ParallelStrategy) for k, v in given.items()
    ):
        raise UsageError(
            f"parallelize_cnn: strategy={shown(given)} must be a ParallelStrategy, a "
            f"dict of them by patterns of module paths, 'auto', or None"
        )
    for pattern, strategy in given.items():
        for axis in strategy.axes:
            if axis not in grid.axes:
                raise UsageError(
                    f"parallelize_cnn: strategy of {pattern!r}: no axis {axis!r} in "
                    f"{grid}{suggest(axis, grid.axes)}"
                )
    by_path: dict[str, ParallelStrategy] = {}
    used: set[str] = set()
    for path, _ in model.named_modules():
        matching = [pattern for pattern in given if fnmatchcase(path, pattern)]
        used.update(matching)
        around = by_path.get(path.rpartition(".")[0], ParallelStrategy())
        by_path[path] = given[matching[-1]] if matching else around
    unused = [pattern for pattern in given if pattern not in used and pattern]
    if unused:
        raise UsageError(
            f"parallelize_cnn: no module of the model matches {unused[0]!r}"
            f"{suggest(unused[0], [*by_path])}"
        )
    return Strategies(by_path)


def _by_names(grid: ProcessGrid) -> ParallelStrategy:
    """Return the strategy that the names of the grid's axes say."""
    names = {"data": "sample", "batch": "sample", **{role: role for role in ROLES}}
    unknown = [axis for axis in grid.axes if axis not in names and grid.size(axis) > 1]
    if unknown:
        raise UsageError(
            f"parallelize_cnn: no strategy was given, and the axis {unknown[0]!r} of "
            f"{grid} is none of {', '.join(names)}: pass a ParallelStrategy"
        )
    roles: dict[str, list[str]] = {}
    for axis in grid.axes:
        if axis in names:
            roles.setdefault(names[axis], []).append(axis)
    if "channel" in roles and "filter" not in roles:
        roles["filter"] = roles["channel"]
    chosen: dict[str, Any] = {role: tuple(axes) for role, axes in roles.items()}
    return ParallelStrategy(**chosen)
