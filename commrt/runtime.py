# SPDX-License-Identifier: Apache-2.0
"""The process's runtime: ``init`` and what hangs on it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from commrt import _native, env
from commrt.backends.catalog import catalog, check_wishes
from commrt.bootstrap import Bootstrap, connect
from commrt.bootstrap.mpi_newcomers import end_where_mpi_cannot, guest_here
from commrt.comm import Communicator
from commrt.core import Core
from commrt.errors import ClosedError, UsageError, shown
from commrt.gloo import relay as gloo_relay
from commrt.growing import join
from commrt.job.abort import install_excepthook, limit_finalize
from commrt.job.chaos import wanted_chaos
from commrt.job.inquiries import close_inquiries
from commrt.job.last_messages import take_last_messages
from commrt.job.world import World, connect_world, end_of_process, start_progress
from commrt.launch.detect import LaunchInfo, detect
from commrt.launch.rank_process import mark_rank
from commrt.tcp import relay as tcp_relay
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.limits import deadline_after

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["init", "join_world", "open_world", "synchronize"]

_GRACE_S = 5.0
"""Seconds that a process at its end waits for operations in flight."""
_LAST_S = 2.0
"""Seconds that it waits for the last messages of ranks of other nodes."""


class _Runtime:
    """The runtime of this process: its engine and the communicator of all ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Any = None
        self.pid = 0
        self.comm: Communicator | None = None
        self.core: Core | None = None
        """The core of that."""
        self.mpi_comm: MPI.Intracomm | None = None
        self.world: World | None = None
        self.leaves = False
        """True once the end of this process is taken care of."""

    def take(self, world: World) -> World:
        """Use a world in the place of the one before, for ``init`` and at the end."""
        world.holders.begin()
        before, self.world = self.world, world
        if before is not None:
            before.holders.end()
        return world


_RUNTIME = _Runtime()


def init(
    mpi_comm: MPI.Intracomm | None = None, *, deterministic: bool | None = None
) -> Communicator:
    """Return the communicator of all ranks; idempotent.

    Once ``shrink()`` or ``grow()`` has replaced it, this returns the newer one.

    Ranks are found in this order: MPI's launcher variables with a size above 1, then
    those of ``python -m commrt.run``, then torchrun's, then Slurm's; otherwise this
    process is a world of one. COMMRT_LAUNCH overrides it. The first call is collective
    over all ranks.

    A process that a rank started, such as a worker of a data loader, is no rank: it is
    a world of one, with a RuntimeWarning, unless a launcher started it there.

    Args:
        mpi_comm: an mpi4py communicator to use instead of MPI's world.
        deterministic: whether results are bitwise the same, at a given number of
            ranks, whatever algorithm runs; None: as COMMRT_DETERMINISTIC says.

    Raises:
        UsageError: a COMMRT_ variable is unknown, wrong or differs across ranks, or
            the launcher belongs to another MPI than mpi4py.
        MismatchError: the ranks disagree about ``deterministic``.
        BackendError: a library that is needed is missing.
    """
    if mpi_comm is not None and not _is_of_mpi(mpi_comm):
        raise UsageError(
            f"commrt.init: mpi_comm={shown(mpi_comm)} is not a communicator of mpi4py, "
            "such as MPI.COMM_WORLD"
        )
    if deterministic is not None:
        deterministic = check_flag("commrt.init", "deterministic", deterministic)
    with _RUNTIME.lock:
        core, comm = _RUNTIME.core, _RUNTIME.comm
        if core is not None and comm is not None and core.closed is None:
            if mpi_comm is not None and mpi_comm is not _RUNTIME.mpi_comm:
                raise UsageError(
                    "commrt.init() was called before with other ranks; make further "
                    "groups with split() or create_group()"
                )
            if deterministic not in (None, core.deterministic):
                raise UsageError(
                    f"commrt.init() was called before with deterministic="
                    f"{core.deterministic}; make another communicator with "
                    f"comm.dup(deterministic={deterministic})"
                )
            return comm
        env.check_names()
        if _RUNTIME.world is None:
            launch = _launch_of_newcomer()
            if launch is not None:
                return _joined(launch, deterministic)
        if _RUNTIME.world is None:
            _RUNTIME.take(_start(mpi_comm))
            _RUNTIME.mpi_comm = mpi_comm
        world = _RUNTIME.world
        assert world is not None
        if deterministic is None:
            deterministic = env.read_bool("COMMRT_DETERMINISTIC")
        same = f"deterministic={deterministic}"
        identity = world.agree_id(range(world.size), "world", same)
        # Nothing else runs collectives on the private duplicate: that will do.
        _RUNTIME.core = Core(
            world,
            range(world.size),
            "world",
            identity,
            native_comm=world.mpi_of_all,
            deterministic=deterministic,
        )
        _RUNTIME.core.when_replaced = _go_on_with
        _RUNTIME.comm = Communicator(_RUNTIME.core)
        start_progress(world)
        return _RUNTIME.comm


def _launch_of_newcomer() -> LaunchInfo | None:
    """Return who started this process to join a running job; None: it does not."""
    guest = guest_here()
    if guest is not None:
        return guest.launch
    if not env.read_bool("COMMRT_JOIN"):
        return None
    launch = detect()
    return None if launch.is_child else launch


def _joined(launch: LaunchInfo, deterministic: bool | None) -> Communicator:
    """Return the communicator of a running job that takes this process in."""
    engine = _engine_of(launch)
    core = join(launch, engine, Core, deterministic)
    _leave_at_end(launch)
    core.when_replaced = _go_on_with
    install_excepthook(core.world)
    _RUNTIME.take(core.world)
    _RUNTIME.core, _RUNTIME.comm = core, Communicator(core)
    start_progress(core.world)
    return _RUNTIME.comm


def _go_on_with(core: Core) -> None:
    """Take the communicator that has replaced the one of all ranks."""
    with _RUNTIME.lock:
        _RUNTIME.core, _RUNTIME.comm = core, Communicator(core)
        _RUNTIME.take(core.world)


def _is_of_mpi(given: Any) -> bool:
    """Return whether an argument is what mpi4py calls an intracommunicator."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(given, mpi.Intracomm)


def _start(mpi_comm: MPI.Intracomm | None) -> World:
    launch = detect()
    if launch.is_child and mpi_comm is None:
        warnings.warn(_of_a_child(launch), RuntimeWarning, stacklevel=3)
    world = _join(connect(launch, mpi_comm), launch)
    install_excepthook(world)
    return world


def _of_a_child(launch: LaunchInfo) -> str:
    return (
        f"commrt.init: this process is a world of one, not a rank of the job: "
        f"{launch.source}. Let the ranks communicate for it, or start it by a "
        f"launcher of its own (mpiexec, torchrun, python -m commrt.run). "
        f"COMMRT_LAUNCH=single in its environment says that a world of one is meant, "
        f"and ends this warning."
    )


def join_world(bootstrap: Bootstrap, launch: LaunchInfo, timeout_s: float) -> World:
    """Return a world of other ranks than those of ``init``; collective over them.

    It shares this process's engine: a rank that waits in one world serves the others.
    ``timeout_s`` is the world's limit, of the meeting as of later calls.
    """
    with _RUNTIME.lock:
        world = _join(bootstrap, launch, timeout_s)
        start_progress(world)
        return world


def _join(
    bootstrap: Bootstrap, launch: LaunchInfo, timeout_s: float | None = None
) -> World:
    engine = _engine_of(launch)
    world = open_world(bootstrap, launch, engine=engine, timeout_s=timeout_s)
    _leave_at_end(launch)
    return world


def _engine_of(launch: LaunchInfo) -> Any:
    """Return the engine of this process, which serves all of its worlds."""
    if _RUNTIME.engine is None:
        _RUNTIME.engine, _RUNTIME.pid = _native.Engine(), os.getpid()
        if not launch.is_child:
            mark_rank()
    if _RUNTIME.pid != os.getpid():
        raise ClosedError(
            f"commrt was started in process {_RUNTIME.pid}, from which this one was "
            f"forked: start processes that communicate by 'spawn'"
        )
    return _RUNTIME.engine


def _leave_at_end(launch: LaunchInfo) -> None:
    """See that this process finishes its part of operations before it ends."""
    if not _RUNTIME.leaves:
        _RUNTIME.leaves = True
        atexit.register(_leave, _RUNTIME.engine, launch.rank, os.getpid())


def open_world(
    bootstrap: Bootstrap,
    launch: LaunchInfo,
    *,
    in_process: bool = False,
    engine: Any = None,
    timeout_s: float | None = None,
) -> World:
    """Return the world of these ranks, as ``connect_world`` makes it; collective.

    UsageError where COMMRT_ALGORITHM asks for what no backend has.
    """
    world = connect_world(
        bootstrap,
        launch,
        catalog(),
        in_process=in_process,
        engine=engine,
        timeout_s=timeout_s,
    )
    check_wishes(world.wishes)
    world.chaos = wanted_chaos(world.rank, world.size)
    return world


def synchronize() -> None:
    """Run progress until nothing that this rank started is in flight."""
    if _RUNTIME.core is not None:
        _RUNTIME.core.check_process()
    if _RUNTIME.engine is not None and _RUNTIME.pid == os.getpid():
        _drain(_RUNTIME.engine, float("inf"))


def _drain(engine: Any, limit_s: float) -> bool:
    """Run progress until nothing is in flight; return False if time ran out."""
    deadline = deadline_after(limit_s)
    backoff = _native.Backoff(engine)
    while not engine.idle:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        if not engine.step():
            backoff.pause(left_s)
    return True


def _leave(engine: Any, rank: int, owner: int) -> None:
    """Finish what other ranks wait for, for a moment; runs at exit.

    A forked process that ends in its own way must not touch what is its parent's.
    """
    if os.getpid() != owner:
        return
    world = _RUNTIME.world
    drained = _drain(engine, _GRACE_S)
    if not drained and world is not None and world.missed_deadline:
        limit_finalize(world)
    if not drained:
        sys.stderr.write(
            f"commrt: rank {rank} ends with operations in flight: other ranks may wait "
            f"for its part in them\n"
        )
    if drained and world is not None and world.relay is not None:
        take_last_messages(world, _LAST_S)
    gloo_relay.close_relays()
    tcp_relay.close_relays()
    close_inquiries()
    end_of_process(engine)
    if drained and world is not None and world.relay is None:
        take_last_messages(world, _LAST_S)
    end_where_mpi_cannot()
