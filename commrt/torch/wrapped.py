# SPDX-License-Identifier: Apache-2.0
"""The tensors inside of tensors: what subclasses without memory of their own stand for.

The result of a functional collective waits and then shows the tensor inside, a DTensor
shows nothing, others show one or several. How a class does that is its own affair: its
``__torch_dispatch__`` gets each operation, and hands it on with what is inside. torch
finds the tensors for a backend in C++ so, since its collectives are operations. Groups
that are written in Python are called past the dispatcher. So an operation that does
nothing is offered here, and the class calls it with the tensors that it would hand to a
collective.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch

from commrt.errors import BufferError_, CommError
from commrt.torch.errors import as_torch_error

__all__ = ["held_by"]

_SHOWN = threading.local()


def held_by(wrapper: torch.Tensor, what: str) -> torch.Tensor:
    """Return the one tensor that a wrapper's class hands to operations.

    Results that are put into it are the wrapper's. Waits where the class waits. Raises
    BufferError_, which names ``what``, where the class hands over none, or several.
    """
    operation, _ = _operation()
    outer, _SHOWN.tensors = getattr(_SHOWN, "tensors", None), []
    try:
        operation(wrapper)
        found = _SHOWN.tensors
    except CommError:  # of a collective that the class waited for
        raise
    except Exception as error:
        raise _refused(
            wrapper, what, f"hands no tensor to a collective ({_first_line(error)})"
        ) from error
    finally:
        _SHOWN.tensors = outer
    if len(found) != 1 or found[0] is wrapper:
        number = "none" if not found or found[0] is wrapper else len(found)
        raise _refused(
            wrapper, what, f"stands for {number} tensors, expected one with memory"
        )
    inner: torch.Tensor = found[0]
    return inner


@cache
def _operation() -> tuple[Any, torch.library.Library]:
    """Return the operation that is offered, and the library that keeps it."""
    library = torch.library.Library("commrt", "FRAGMENT")
    library.define("show(Tensor(a!) x) -> ()")
    library.impl("show", _take, "CompositeExplicitAutograd")
    return torch.ops.commrt.show.default, library


def _take(x: torch.Tensor) -> None:
    _SHOWN.tensors.append(x)


def _refused(wrapper: torch.Tensor, what: str, why: str) -> CommError:
    return as_torch_error(
        BufferError_(
            f"{what} is a {type(wrapper).__name__}, which {why}: pass the tensor that "
            f"holds this rank's values, as x.to_local() is for a DTensor"
        )
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
