# SPDX-License-Identifier: Apache-2.0
"""torch's default group, of the ranks of a communicator that the program has."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commrt.comm import Communicator, core_of
from commrt.core import Core
from commrt.errors import UsageError, shown
from commrt.torch import jobs
from commrt.torch.group_options import Options
from commrt.torch.names import BACKEND
from commrt.vocabulary.limits import as_timedelta

__all__ = ["init_process_group"]


def init_process_group(
    comm: Communicator,
    *,
    timeout: timedelta | None = None,
    pg_options: Options | None = None,
) -> None:
    """Make torch.distributed's default group of the ranks of a communicator.

        comm = comm.shrink()
        commrt.torch.init_process_group(comm)
        model = DistributedDataParallel(network)

    The ranks keep their numbers. ``new_group``, ``init_device_mesh`` and the like work
    as ever, and groups that they make end with ``comm``. A default group that this
    function made before is destroyed, and all groups with it: make what holds groups,
    such as DistributedDataParallel or FSDP, anew.

    Collective over all ranks of ``comm``.

    Args:
        comm: the communicator; it stays the program's.
        timeout: limit of the group's calls; None: that of ``comm``.
        pg_options: the group's own choices.

    Raises:
        UsageError: torch has a default group that was made otherwise.
        PeerFailedError, RevokedError: ``comm`` has failed.
    """
    if not isinstance(comm, Communicator):
        raise UsageError(
            f"commrt.torch.init_process_group: comm={shown(comm)} must be a "
            f"communicator, as commrt.init() returns it"
        )
    _end_last()
    core = core_of(comm).subgroups.dup(name=f"{comm.name}.torch")
    store = _store_of(comm, core)
    limit_s = core.timeout_s
    _LAST.hook = sys.excepthook
    with jobs.giving(core):
        dist.init_process_group(
            BACKEND,
            store=store,
            rank=comm.rank,
            world_size=comm.size,
            timeout=as_timedelta(limit_s) if timeout is None else timeout,
            pg_options=pg_options,
        )
    _LAST.default, _LAST.core = dist.group.WORLD, core


class _Last:
    """The default group that was made here last."""

    default: Any = None
    core: Core | None = None
    hook: Callable[..., Any] | None = None
    """The hook that reported errors before torch put its prefix before them."""


_LAST = _Last()


def _end_last() -> None:
    """Destroy the default group that was made here; UsageError if it is another."""
    if dist.is_initialized():
        if dist.group.WORLD is not _LAST.default:
            raise UsageError(
                "commrt.torch.init_process_group: torch.distributed has a default "
                "group already, which this function has not made: call "
                "dist.destroy_process_group() first"
            )
        dist.destroy_process_group()
        _forget_meshes()
    if _LAST.core is not None:
        sys.excepthook = _LAST.hook or sys.excepthook
        try:
            _LAST.core.free()
        except UsageError:  # calls are in flight: its memory stays until they end
            _LAST.core.let_go()
    _LAST.default = _LAST.core = _LAST.hook = None


_MESH_CACHES = (
    "_api.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear",
    "_redistribute.clear_redistribute_planner_cache",
    "_redistribute._gen_transform_infos.cache_clear",
    "_sharding_prop.ShardingPropagator._propagate_tensor_meta_cached.cache_clear",
    "_collective_utils.MeshTopoInfo.build_from_mesh.cache_clear",
)
"""Empty what DTensor keeps by meshes. torch has no public names for that, but some in
``torch.distributed.tensor.debug``, whose import takes 50 ms."""
_NATIVE_CACHE = "_clear_DTensor_sharding_propagator_cache"


def _forget_meshes() -> None:
    """Let DTensor forget meshes whose groups are destroyed.

    It takes meshes of the same ranks for one. So it would use an earlier one's groups
    after ranks have gone and others have come, and these would never end.
    """
    found = sys.modules.get("torch.distributed.tensor")
    if found is None:
        return
    clear_native = getattr(torch._C, _NATIVE_CACHE, None)
    if clear_native is not None:
        clear_native()
    for path in _MESH_CACHES:
        module, *names = path.split(".")
        clear: Any = importlib.import_module(f"{found.__name__}.{module}")
        for name in names:
            clear = getattr(clear, name, None)  # another torch may lack it
        if clear is not None:
            clear()


def _store_of(comm: Communicator, core: Core) -> Any:
    """Return a store of the ranks of ``comm``, for its copy ``core``; collective.

    It is a part of the one in which they meet. Where they meet by MPI, rank 0 hosts it.
    """
    if comm.size == 1:
        return dist.HashStore()
    private_store = getattr(core.world.bootstrap, "private_store", None)
    if private_store is not None:
        return private_store(f"torch/{core.identity}")
    limit = as_timedelta(comm.timeout_s)
    store = None
    where = None
    if comm.rank == 0:
        host = "localhost" if len(comm.nodes) == 1 else socket.gethostname()
        store = dist.TCPStore(host, 0, comm.size, True, limit, wait_for_workers=False)
        where = (host, store.port)
    host, port = comm.bcast_object(where, root=0)
    if store is None:
        store = dist.TCPStore(
            host, port, comm.size, False, limit, wait_for_workers=False
        )
    return store
