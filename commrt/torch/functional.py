# SPDX-License-Identifier: Apache-2.0
"""The one functional collective that torch 2.13 does not ask a group in Python about.

Functional collectives find their group by its name, and call it from C++. That reaches
methods of Python's where torch has a trampoline for them (``PyProcessGroup.hpp``).
``all_gather_into_tensor_out`` calls one that has none, ``_allgather_base``, and so
fails on every group that is no group of C++ backends. Inductor puts it into compiled
programs where it joins gathers.

Here the operation gets kernels for the devices that do what C++ does for all groups,
from Python, where a group's own methods are found. Other groups do with them what they
did before.

torch 2.14 asks groups in Python for that one, too, and needs none of this.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

__all__ = ["serve_compiled_gathers"]

_LOCK = threading.Lock()
_DEVICES = ("CPU", "CUDA")
_KEPT: list[Any] = []
"""The library that holds the kernels: they go with it."""


def serve_compiled_gathers() -> None:
    """Let gathers into a given tensor ask groups in Python; idempotent."""
    with _LOCK:
        if _KEPT:
            return
        library = torch.library.Library("_c10d_functional", "IMPL")
        for device in _DEVICES:
            library.impl("all_gather_into_tensor_out", _gather_into, device)
        _KEPT.append(library)


def _gather_into(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    """Gather into ``out``; ``wait_tensor`` of it waits."""
    group = group_name
    if isinstance(group_name, str):
        group = c10d._resolve_process_group(group_name)
    work = group.all_gather_single(out, input, c10d.AllgatherOptions())
    if work is not None:
        # C++ would keep the Work, but not the object of Python's that it is.
        kept = work if type(work) is c10d.Work else _owned(work)
        torch._C._distributed_c10d._register_work(out, kept)
    return out


def _owned(work: Any) -> Any:
    """Return a Work of C++ that keeps one of Python's alive, and waits for it."""
    return torch._C._distributed_c10d.PythonCallbackWork(
        lambda timeout: bool(work.wait(timeout))
    )
