# SPDX-License-Identifier: Apache-2.0
"""Times of pieces of torch's layers: of one rank's filters, channels or rows.

A piece of a layer often takes more than its part of the layer's time. Fewer filters
fill fewer lanes of vectors. Sums over channels get their bias by a pass of its own. A
piece of space is joined with its halo, in both passes where nobody keeps the joined
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.oracle.clocks import Stopwatch
from commrt.oracle.layer_table import Cut

__all__ = ["PieceSeconds", "seconds_of_pieces"]

PieceSeconds: TypeAlias = dict[tuple[Cut, int], float]
"""Seconds of both passes, by what is cut, and into how many pieces."""


@dataclass(frozen=True)
class _Piece:
    """One piece as it is run: a module, its input, and what is done besides."""

    module: Any
    x: Any
    forward: Callable[[Any], Any]
    beside: Callable[[Any], object] | None = None
    """Runs once in each backward pass, with the input."""


def seconds_of_pieces(
    watch: Stopwatch,
    module: Any,
    arguments: Sequence[Any],
    numbers: Sequence[int],
    has_gradient: bool,
) -> PieceSeconds:
    """Return seconds of a layer's pieces; none for layers that sum over no channels.

    Collective over the watch's ranks.

    Args:
        watch: times calls.
        module: the layer.
        arguments: those of its call.
        numbers: into how many pieces it is cut.
        has_gradient: True if the backward pass needs the input's gradient.
    """
    found: PieceSeconds = {}
    for ways in numbers:
        for cut, make in _CUTS.items():
            piece = make(module, arguments[0], ways) if arguments else None
            if piece is not None:
                found[cut, ways] = _seconds(watch, piece, has_gradient)
    return found


def _seconds(watch: Stopwatch, piece: _Piece, has_gradient: bool) -> float:
    x = piece.x.detach().clone().requires_grad_(has_gradient)
    wanted = [each for each in (x, *piece.module.parameters()) if each.requires_grad]
    gradient = torch.ones_like(piece.forward(x))

    def both() -> None:
        torch.autograd.grad(piece.forward(x), wanted, gradient)
        if piece.beside is not None:
            piece.beside(x.detach())

    return watch.mean_s(both)


def _of_filters(module: Any, x: Any, ways: int) -> _Piece | None:
    """Return a piece of the filters, which takes the whole input."""
    if isinstance(module, nn.Linear) and module.out_features >= ways:
        made = _linear(module, module.in_features, module.out_features // ways)
    elif _is_plain(module) and module.out_channels >= ways:
        made = _convolution(module, module.in_channels, module.out_channels // ways)
    else:
        return None
    return _Piece(made, x, made)


def _of_channels(module: Any, x: Any, ways: int) -> _Piece | None:
    """Return a piece of the channels, whose sums get the bias when they are whole."""
    if isinstance(module, nn.Linear) and module.in_features >= ways:
        some = x.narrow(-1, 0, module.in_features // ways)
        made = _linear(module, some.shape[-1], module.out_features, bias=False)
        shape = [-1]
    elif _is_plain(module) and module.in_channels >= ways:
        some = x.narrow(1, 0, module.in_channels // ways)
        made = _convolution(module, some.shape[1], module.out_channels, bias=False)
        shape = [-1, *[1] * (x.dim() - 2)]
    else:
        return None
    if module.bias is None:
        return _Piece(made, some, made)
    bias = nn.Parameter(module.bias.detach().clone())
    made.register_parameter("bias_of_sums", bias)
    return _Piece(made, some, lambda part: made(part) + bias.view(shape))


def _of_space(module: Any, x: Any, ways: int) -> _Piece | None:
    """Return a piece of the rows, which is joined with its halo in both passes."""
    if not _is_plain(module) or isinstance(module.padding, str):
        return None
    reach = (module.kernel_size[0] - 1) * module.dilation[0]
    rows = x.shape[2] // ways
    if rows < max(1, reach):
        return None
    made = _convolution(module, module.in_channels, module.out_channels)
    made.padding = (0, *module.padding[1:])
    if not reach:
        return _Piece(made, x.narrow(2, 0, rows), made)
    halo = x.detach().narrow(2, 0, reach)

    def joined(part: Any) -> Any:
        return torch.cat([part, halo], dim=2)

    def again(part: Any) -> object:
        return joined(part), part.clone()  # the input, and its gradient

    return _Piece(made, x.narrow(2, 0, rows), lambda part: made(joined(part)), again)


_CUTS: Mapping[Cut, Callable[[Any, Any, int], _Piece | None]] = {
    "filter": _of_filters,
    "channel": _of_channels,
    "space": _of_space,
}


def _is_plain(module: Any) -> bool:
    """Return whether a module is a convolution that is no transposed or grouped one."""
    kinds = nn.Conv1d, nn.Conv2d, nn.Conv3d
    return isinstance(module, kinds) and module.groups == 1


def _linear(module: Any, taken: int, made: int, *, bias: bool = True) -> Any:
    weight = module.weight
    own = bias and module.bias is not None
    return nn.Linear(taken, made, bias=own, device=weight.device, dtype=weight.dtype)


def _convolution(module: Any, taken: int, made: int, *, bias: bool = True) -> Any:
    return type(module)(
        *(taken, made, module.kernel_size, module.stride, module.padding),
        dilation=module.dilation,
        bias=bias and module.bias is not None,
        device=module.weight.device,
        dtype=module.weight.dtype,
    )
