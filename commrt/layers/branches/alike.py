# SPDX-License-Identifier: Apache-2.0
"""Checks of branches: which must be alike, which apart, and whose outputs join."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from commrt.errors import UsageError

__all__ = [
    "check_apart",
    "check_equal",
    "check_initialized",
    "check_join",
    "facts_of",
]

Tensor: TypeAlias = torch.Tensor


def facts_of(module: nn.Module) -> list[str]:
    """Return texts of a branch that must be equal on all of its ranks."""
    found = [
        f"{name}: {_form_of(each)}, trained: {each.requires_grad}"
        for name, each in module.named_parameters()
    ]
    return found + [
        f"buffer {name}: {_form_of(each)}" for name, each in module.named_buffers()
    ]


def _form_of(x: Tensor) -> str:
    return "no shape yet" if is_lazy(x) else f"{tuple(x.shape)}, {x.dtype}"


def check_initialized(name: str, module: nn.Module) -> None:
    """Raise UsageError for a lazy module, which ranks cannot make equal."""
    if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
        raise UsageError(
            f"Branches: branch {name!r} has lazy parameters, and several ranks; call "
            f"it once with samples before you give it to Branches"
        )


def check_equal(every: Sequence[Mapping[str, list[str]]]) -> None:
    """Raise UsageError where ranks have different modules for a branch.

    Args:
        every: of each rank, the facts of its branches.
    """
    first: dict[str, tuple[int, list[str]]] = {}
    for rank, branches in enumerate(every):
        for name, facts in branches.items():
            other, right = first.setdefault(name, (rank, facts))
            if facts != right:
                mine = [fact for fact in facts if fact not in right]
                theirs = [fact for fact in right if fact not in facts]
                raise UsageError(
                    f"Branches: in branch {name!r} rank {rank} has {mine[:3]} and rank "
                    f"{other} has {theirs[:3]}; its ranks must have equal modules, in "
                    f"the order of their parameters, too"
                )


def check_apart(branches: Mapping[str, Any]) -> None:
    """Raise UsageError where branches share a parameter or buffer.

    Their ranks would train copies of it, each with a part of its gradient.

    Args:
        branches: by name; those that are no modules are left out.
    """
    owner: dict[tuple[str, int], str] = {}
    for name, branch in branches.items():
        if not isinstance(branch, nn.Module):
            continue
        for each in [*branch.parameters(), *branch.buffers()]:
            has_memory = not is_lazy(each) and each.numel()
            memory = each.untyped_storage().data_ptr() if has_memory else 0
            for key in (("object", id(each)), ("memory", memory)):
                if key == ("memory", 0):
                    continue
                other = owner.setdefault(key, name)
                if other != name:
                    raise UsageError(
                        f"Branches: branches {other!r} and {name!r} share a tensor of "
                        f"shape {tuple(each.shape)}; branches lie on different ranks, "
                        f"so give each a copy of its own, as by copy.deepcopy"
                    )


def check_join(
    shapes: Mapping[str, tuple[int, ...]],
    join: str | Callable[..., Any],
    dim: int,
) -> None:
    """Raise UsageError where outputs cannot be joined sample by sample.

    Args:
        shapes: of the branches' outputs for one sample.
        join: "sum", "concat" or a function, which may take any.
        dim: of "concat", among the dimensions of outputs with that of samples.
    """
    if callable(join):
        return
    each = [*shapes.values()]
    fits = len({len(shape) for shape in each}) == 1
    if fits and join == "concat":
        num_dims = len(each[0]) + 1
        fits = -num_dims < dim < num_dims and dim % num_dims != 0
        at = dim % num_dims - 1
        fits = fits and len({(*s[:at], *s[at + 1 :]) for s in each}) == 1
    elif fits:
        fits = all(len({*sizes} - {1}) <= 1 for sizes in zip(*each, strict=True))
    if not fits:
        said = f"join={join!r}" + (f" along dim={dim}" if join == "concat" else "")
        raise UsageError(
            f"Branches: {said} does not fit outputs that are {dict(shapes)} for a "
            f"sample; make the branches' outputs alike, or join them by a function"
        )
