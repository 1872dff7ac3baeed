# SPDX-License-Identifier: Apache-2.0
"""Tensors that exist already, moved into memory that the ranks of a node share.

C++ makes DDP's buckets, and asks nobody in Python for memory. But a storage can be
moved together with all views of it. torch does so itself, in ``share_memory_``, and the
buckets' views of single gradients go with them. Here torch maps a file of its own for
the storage; pages of the communicator's symmetric memory are then mapped in its place,
at the same addresses, and torch's pages go. Torch unmaps them when the storage ends.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from commrt._native import has_memory
from commrt.errors import BackendError
from commrt.group.group import Group
from commrt.job.arena import Mirror

if TYPE_CHECKING:
    from commrt.core import Core

__all__ = ["share_storage"]

_FILES = "/dev/shm"
"""Folder of torch's files, which a container may keep small."""


def share_storage(comm: Core, x: torch.Tensor, *, may_move: bool = True) -> bool:
    """Move the storage of ``x`` into the communicator's symmetric memory.

    Collective over a communicator whose ranks share a node; all of them have a storage
    of the same length. Returns the same on all: whether it lies there now. It does not
    where one of them says ``may_move=False``, or has a storage that cannot be moved
    (torch shares it already, or there is no space for a copy in /dev/shm) or no memory.

    Addresses change: arrays of numpy that were made of such tensors before refer to
    memory that is gone, as after ``torch.Tensor.share_memory_``.
    """
    storage = x.untyped_storage()
    nbytes = storage.nbytes()
    may_move = may_move and has_memory(x)
    can_move = may_move and len(comm.nodes) == 1 and _can_move(storage)
    if not comm.allreduce(torch.tensor([int(can_move)]), op="min").item():
        return False
    try:
        memory = comm.empty(nbytes, torch.uint8)
    except BackendError:  # on all ranks
        return False
    try:
        mirror = Mirror(memory.data_ptr(), nbytes)
    except OSError:
        mirror = None  # ranks that are threads of a process share ordinary memory
    moved = mirror is not None
    if not comm.allreduce(torch.tensor([int(moved)]), op="min").item():
        if mirror is not None:
            mirror.close()
        return False
    assert mirror is not None
    memory.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    fd, _ = storage._share_fd_cpu_()
    address = storage.data_ptr()
    mirror.place_over(address)
    os.ftruncate(fd, 0)  # nothing maps it; its pages would stay as long as the storage
    _keep(storage, memory)
    comm.add_mirror(address, nbytes, memory.data_ptr())
    weakref.finalize(storage, _forget, weakref.ref(comm), address).atexit = False
    return True


def _can_move(storage: Any) -> bool:
    if storage.device.type != "cpu" or storage.is_shared() or storage.nbytes() == 0:
        return False
    try:
        files = os.statvfs(_FILES)
    except OSError:
        return False
    return bool(files.f_bavail * files.f_frsize >= storage.nbytes())


def _keep(storage: torch.UntypedStorage, memory: torch.Tensor) -> None:
    """Keep symmetric memory from being given out again as long as a storage is there.

    torch keeps the Python object of a storage, with what it has, as long as anything
    refers to the storage in C++.
    """
    storage._commrt_memory = memory


def _forget(comm: weakref.ref[Group], address: int) -> None:
    found = comm()
    if found is not None:
        found.remove_mirror(address)
