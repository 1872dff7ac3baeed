# SPDX-License-Identifier: Apache-2.0
"""A group's calls in ``torch.profiler``, named as those of torch's own backends are.

``commrt:all_reduce`` stands beside the program's computation, as ``gloo:all_reduce``
and ``nccl:all_reduce`` do. For a call that is not waited for it lasts while the call is
started; ``commrt:wait`` is the later wait. If nobody profiles, a call asks torch one
flag.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

from commrt.vocabulary.operations import ROWS

__all__ = ["profiled", "profiler"]

_NAMES = {row.name: row.torch for row in ROWS if row.torch}
_NOTHING: AbstractContextManager[Any] = nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """Return a range for the profiler; ``name`` is commrt's of an operation."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    found: AbstractContextManager[Any] = torch.profiler.record_function(
        f"commrt:{_NAMES.get(name, name)}"
    )
    return found
