# SPDX-License-Identifier: Apache-2.0
"""The layers of a model that K-FAC preconditions, and its other parameters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from commrt.errors import UsageError, shown
from commrt.layers.kfac.layer_rows import ConvolutionRows, LayerRows, LinearRows
from commrt.layers.tensor3d.parameter_cut import cut_of

__all__ = ["Layer", "layers_of", "trained_parameters"]

Tensor: TypeAlias = torch.Tensor


@dataclass(eq=False)
class Layer:
    """A weight with its bias, and the modules that apply them."""

    name: str
    """Of the first module."""
    weight: Tensor
    bias: Tensor | None
    """None: there is none, or it is frozen."""
    rows: LayerRows
    modules: list[nn.Module] = field(default_factory=list)


def trained_parameters(model: Any) -> list[tuple[str, Tensor]]:
    """Return the names and parameters of a model that need a gradient, each once.

    Raises UsageError for what is no model, for parameters of kinds that K-FAC cannot
    train, and where none needs a gradient.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"KFAC: model={shown(model)} must be a module of torch")
    for name, parameter in model.named_parameters():
        kind = ""
        if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
            kind = "has no shape yet; call the model once before"
        elif hasattr(parameter, "to_local") or cut_of(parameter) is not None:
            kind = "is cut over ranks; K-FAC needs whole parameters on each rank"
        elif parameter.is_meta:
            kind = "is on the meta device and has no values; move it to a real one"
        elif parameter.requires_grad and not parameter.is_floating_point():
            kind = f"is of {parameter.dtype}; expected a type of real numbers"
        if kind:
            raise UsageError(f"KFAC: the parameter {name} {kind}")
    found = [each for each in model.named_parameters() if each[1].requires_grad]
    if not found:
        raise UsageError("KFAC: no parameter of the model needs a gradient")
    return found


def layers_of(model: nn.Module, skip: Collection[str]) -> list[Layer]:
    """Return the layers that K-FAC preconditions, in the model's order.

    Args:
        model: its ``nn.Linear`` and ``nn.Conv2d`` with trained weights count.
        skip: names of modules that do not, with all that is in them.

    Modules that share weight and bias are one layer. A weight that another kind of
    module has, too, or another bias goes with, is none, and neither is one that is
    computed from other parameters. Raises UsageError for names that no module has, and
    for convolutions in groups that are not skipped.
    """
    names = {name for name, _ in model.named_modules()}
    wrong = isinstance(skip, str) or not {*skip} <= names
    if wrong:
        raise UsageError(
            f"KFAC: skip={shown(skip)} must be a collection of names of modules, as "
            f"model.named_modules() has them"
        )
    uses: dict[int, set[tuple[object, ...]]] = {}
    for module in model.modules():
        pair = (getattr(module, name, None) for name in ("weight", "bias"))
        use = (type(module), *map(id, pair))
        for parameter in module.parameters(recurse=False):
            uses.setdefault(id(parameter), set()).add(use)
    found: dict[int, Layer] = {}
    for name, module in model.named_modules():
        is_linear = type(module) is nn.Linear
        if not is_linear and type(module) is not nn.Conv2d:
            continue
        assert isinstance(module, nn.Linear | nn.Conv2d)
        is_skipped = any(name == s or name.startswith(f"{s}.") or not s for s in skip)
        weight = module.weight
        # Pruning and the older norms of weights compute a weight from others.
        if is_skipped or not isinstance(weight, nn.Parameter):
            continue
        is_own = len(uses.get(id(weight), ())) == 1 and weight.numel() > 0
        if not weight.requires_grad or not is_own:
            continue
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            raise UsageError(
                f"KFAC: {name} is a convolution in {module.groups} groups, whose "
                f"inputs have no common factor; add {name!r} to skip to train it "
                f"without one"
            )
        if id(weight) not in found:
            bias: Tensor | None = module.bias
            is_shared = len(uses.get(id(bias), ())) > 1
            is_trained = isinstance(bias, nn.Parameter) and bias.requires_grad
            if is_shared or not is_trained:
                bias = None
            rows: LayerRows
            if isinstance(module, nn.Conv2d):
                rows = ConvolutionRows(module, bias is not None)
            else:
                rows = LinearRows(weight, bias is not None)
            found[id(weight)] = Layer(name, weight, bias, rows)
        elif isinstance(module, nn.Conv2d):
            other = found[id(weight)].modules[0]
            if module.extra_repr() != other.extra_repr():
                raise UsageError(
                    f"KFAC: {name} and {found[id(weight)].name} share a weight, and "
                    f"differ in stride, padding or dilation; add both to skip"
                )
        found[id(weight)].modules.append(module)
    return [*found.values()]
