# SPDX-License-Identifier: Apache-2.0
"""The forms in which torch's group methods may be called.

C++ and torch.distributed pass lists of tensors and an options object. Programs that
call a group's methods themselves also pass one tensor, a reduction or a root, and leave
the options out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commrt.torch.errors import wrong_call

__all__ = ["one", "options", "tensor_list"]


def options(kind: type[Any], opts: Any, **said: Any) -> Any:
    """Return options of a ``kind``; values that are None are left as they are.

    Where ``opts`` is something else, such as a reduction, it stands for the first of
    ``said``.
    """
    if isinstance(opts, kind):
        return opts
    made = kind()
    if opts is not None and said:
        said[next(iter(said))] = opts
    for name, value in said.items():
        if value is None:
            continue
        try:
            setattr(made, name, value)
        except TypeError as error:
            raise wrong_call(
                f"{kind.__name__}: {name}={value!r} is not what torch takes there: a "
                f"rank, a timedelta, or a reduction as ReduceOp.SUM, and with a factor "
                f"ReduceOp.PREMUL_SUM(0.5)"
            ) from error
    return made


def one(what: str, tensors: Any) -> torch.Tensor:
    """Return the tensor of a list of one, or the tensor itself."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise wrong_call(
            f"{what}: {len(tensors)} tensors in one call; expected one: a rank has "
            f"one device, not several as of old"
        )
    found: torch.Tensor = tensors[0]
    return found


def tensor_list(lists: Any) -> Sequence[torch.Tensor]:
    """Return the list of tensors of a list of one list, or the list itself."""
    if lists and not isinstance(lists[0], torch.Tensor):
        inner: Sequence[torch.Tensor] = lists[0]
        return inner
    whole: Sequence[torch.Tensor] = lists
    return whole
