# SPDX-License-Identifier: Apache-2.0
"""A group's methods are run by compiled programs, and are not compiled themselves.

Where ``torch.compile`` has to cut a program, it compiles the functions that are called
in between, too. For torch's own backends these are in C++. For commrt's they are
Python. ``DDP`` asks for a broadcast there when it cuts its buckets anew, and ``send``
and ``recv`` always end there. Dynamo may know ProcessGroup as a class whose attributes
it must not read, and then fails; else it would compile every one of them. So they are
marked to be left alone, with all that they call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

__all__ = ["stay_uncompiled"]

_PACKAGE = __name__.rpartition(".")[0]


@cache
def stay_uncompiled() -> None:
    """Keep dynamo from all functions of this package that have been imported.

    Once: whoever makes groups has imported what they are made of.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    left_alone = dynamo._FrameExecStrategy(skip, skip)
    for name, module in list(sys.modules.items()):
        if name == _PACKAGE or name.startswith(f"{_PACKAGE}."):
            for code in _codes_of(vars(module), name):
                dynamo.set_code_exec_strategy(code, left_alone)


def _codes_of(names: Any, module: str) -> Iterator[types.CodeType]:
    """Yield the code of functions and methods that are written in a module."""
    for value in list(names.values()):
        if getattr(value, "__module__", module) != module:
            continue
        if isinstance(value, type):
            yield from _codes_of(vars(value), module)
        for part in (
            value,
            *(getattr(value, name, None) for name in ("__func__", "__wrapped__")),
            *(getattr(value, name, None) for name in ("fget", "fset")),
        ):
            if isinstance(part, types.FunctionType):
                yield from _with_inner(part.__code__)


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)
