# SPDX-License-Identifier: Apache-2.0
"""Get at the NCCL communicators of cupy, nccl4py and torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from commrt.errors import UsageError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["pointer_of"]

_KNOWN = (
    "an integer, cupy.cuda.nccl.NcclCommunicator, nccl.core.Communicator of nccl4py, "
    "or a torch process group with the nccl backend"
)


def pointer_of(source: Any) -> int:
    """Return the address of the ``ncclComm`` that ``source`` is or holds.

    Goes by the attributes that the objects have, so none of these packages is imported.
    """
    found = _look(source)
    if isinstance(found, bool) or not isinstance(found, int):
        raise UsageError(
            f"a communicator of NCCL cannot be taken from {type(source).__name__}: "
            f"expected {_KNOWN}"
        )
    if found == 0:
        raise UsageError(
            f"the {type(source).__name__} holds no communicator of NCCL: it was "
            f"destroyed, or torch makes it at the first collective; give "
            f"init_process_group device_id= to have it made at once"
        )
    return found


def _look(source: Any) -> Any:
    if isinstance(source, int):
        return source
    if hasattr(source, "_comm_ptr"):  # torch's ProcessGroupNCCL
        return source._comm_ptr()
    if hasattr(source, "_get_backend"):  # torch's ProcessGroup
        group: dist.ProcessGroup = source
        backend = group._get_backend(sys.modules["torch"].device("cuda"))
        return backend._comm_ptr() if hasattr(backend, "_comm_ptr") else None
    if hasattr(source, "ptr"):  # nccl4py
        return source.ptr
    return getattr(source, "comm", None)  # cupy
