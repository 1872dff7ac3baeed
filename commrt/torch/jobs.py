# SPDX-License-Identifier: Apache-2.0
"""Communicators for torch's groups: the ranks meet in the store that torch gives.

The default group's ranks are a world, and a later group a communicator of some of them,
made by its members alone. A group whose default group is another backend's is a world
by itself. A program may also give the communicator whose ranks the default group gets,
and then all groups are communicators made from that one. All of them share the
process's engine, so that who waits in one serves the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from commrt.backends.catalog import catalog
from commrt.bootstrap import Bootstrap
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.bootstrap.single import SingleBootstrap
from commrt.bootstrap.store import StoreBootstrap
from commrt.calls.settings import Settings
from commrt.core import Core
from commrt.env import read_bool, value
from commrt.errors import UsageError
from commrt.job.world import World
from commrt.launch.detect import LaunchInfo
from commrt.runtime import join_world
from commrt.select.locate import LocatedTable, read_named
from commrt.select.schema import DEVICES
from commrt.select.wishes import Wishes
from commrt.torch.group_options import Options
from commrt.torch.launchers import take_mpi
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.operations import COLLECTIVES

__all__ = [
    "Member",
    "giving",
    "join",
    "join_anew",
    "lead",
    "leave",
    "progress",
    "torchs_wrapper_compares",
]

_DETAIL = "TORCH_DISTRIBUTED_DEBUG=DETAIL"


@dataclass(frozen=True)
class Member:
    """This process's place in a group of torch."""

    store: Any
    """Store of this group alone."""
    rank: int
    """Rank in the group."""
    size: int
    """Number of ranks in the group."""
    ranks: Sequence[int]
    """Its ranks in the default group, in order; empty for the default group itself."""
    name: str
    """torch's name of the group; the same on all of its ranks."""
    timeout_s: float
    """Limit of its calls, as torch has it."""
    options: Options = field(default_factory=Options)
    """Settings of the group."""
    is_wrapped: bool = False
    """True if torch puts a wrapper of its own around it in its own check mode."""

    @property
    def is_default(self) -> bool:
        """True if it is the group of all ranks."""
        return not self.ranks


class _Jobs:
    """The worlds of this process's groups."""

    def __init__(self) -> None:
        self.default: World | None = None
        self.alone: World | None = None
        self.in_use: list[World] = []
        """The world of each group; of some more than once."""
        self.given: Core | None = None
        """The communicator of the program's that the next default group gets."""
        self.parent: Core | None = None
        """Communicator from which the default group, and all others, are made."""
        self.of_parents: weakref.WeakSet[Core] = weakref.WeakSet()
        """Groups whose world is the program's own."""


_JOBS = _Jobs()


def join(member: Member) -> Core:
    """Return the communicator of a group; collective over its ranks."""
    if member.is_default and _JOBS.given is not None:
        _JOBS.parent, _JOBS.given = _JOBS.given, None
        return _of_parent(_JOBS.parent, range(member.size), member)
    if member.size > 1 and not member.is_default and _JOBS.parent is not None:
        return _of_parent(_JOBS.parent, member.ranks, member)
    if member.size == 1:
        comm = _alone(member)
    elif _JOBS.default is not None and not member.is_default:
        comm = _communicator(_JOBS.default, member.ranks, member)
    else:
        comm = _of_all(_world_of(member, _bootstrap(member)), member)
        if member.is_default:
            _JOBS.default = comm.world
    _use(comm.world)
    return comm


@contextmanager
def giving(comm: Core) -> Iterator[None]:
    """Make the default group that torch makes in the block of a communicator's ranks.

    Its other groups are made from that communicator, too, and end with it.
    """
    _JOBS.given = comm
    try:
        yield
    finally:
        _JOBS.given = None


def join_anew(member: Member, meeting: Bootstrap, limit_s: float) -> Core:
    """Return the communicator of a group's new world; collective over its ranks.

    The ranks meet by ``meeting``, within ``limit_s``.
    """
    hurried = replace(member, timeout_s=limit_s)
    if member.size == 1:
        comm = _alone(hurried)
    else:
        world = _world_of(hurried, meeting)
        world.timeout_s = member.timeout_s
        comm = _of_all(world, hurried)
    comm.timeout_s = member.options.timeout_s or member.timeout_s
    _use(comm.world)
    return comm


def progress() -> Callable[[], object] | None:
    """Return what makes progress in all groups of this process; None: it has none."""
    worlds = _JOBS.in_use
    return worlds[0].engine.step if worlds else None


def lead(comm: Core) -> None:
    """Let groups made from now on be of the ranks of this default group."""
    _JOBS.default = comm.world if comm.size > 1 else None


def leave(comm: Core, is_default: bool) -> None:
    """Forget a group's world, unless other groups use it: the next is another job."""
    world = comm.world
    if comm in _JOBS.of_parents:
        if is_default:
            _JOBS.parent = None
        return
    if is_default and _JOBS.default is world:
        _JOBS.default = None
    _forget(world)
    is_used = _JOBS.default is world or any(each is world for each in _JOBS.in_use)
    if not is_used and world.relay is not None:
        world.relay.close()


def _of_parent(parent: Core, ranks: Sequence[int], member: Member) -> Core:
    """Return the communicator of some ranks of the one that the program gave."""
    of_world = [parent.world_ranks[rank] for rank in ranks]
    with parent.making(ranks):
        comm = _communicator(parent.world, of_world, member, parent)
    parent.subgroups.adopt(comm)
    _JOBS.of_parents.add(comm)
    return comm


def _use(world: World) -> None:
    world.holders.begin()
    _JOBS.in_use.append(world)


def _forget(world: World) -> None:
    for i, each in enumerate(_JOBS.in_use):
        if each is world:
            del _JOBS.in_use[i]
            world.holders.end()
            break


def _of_all(world: World, member: Member) -> Core:
    """Return the communicator of all ranks of a group's own world; collective."""
    try:
        return _communicator(world, range(member.size), member)
    except BaseException:
        if world.relay is not None:
            world.relay.close()
        raise


def _alone(member: Member) -> Core:
    """Return a communicator of this rank only: nobody is asked, nothing is shared."""
    if _JOBS.alone is None:
        launch = LaunchInfo("torch", 0, 1, "a process group of torch")
        _JOBS.alone = join_world(SingleBootstrap(), launch, member.timeout_s)
    return _communicator(_JOBS.alone, [0], member)


def _world_of(member: Member, meeting: Bootstrap) -> World:
    source = f"the process group {member.name!r} of torch"
    launch = LaunchInfo("torch", member.rank, member.size, source)
    return join_world(meeting, launch, member.timeout_s)


def _bootstrap(member: Member) -> Bootstrap:
    """Return how the ranks of a new world meet.

    Where MPI's launcher started the default group's ranks, by MPI: then they also have
    the library's own collectives.
    """
    mpi = take_mpi(member.rank, member.size) if member.is_default else None
    if mpi is not None:
        return MpiBootstrap(mpi, member.timeout_s)
    return StoreBootstrap(member.store, member.rank, member.size)


def _communicator(
    world: World, ranks: Sequence[int], member: Member, parent: Core | None = None
) -> Core:
    limit, options = member.timeout_s, member.options
    name = f"torch group {member.name}"
    # Options are checked only once all ranks are known to have the same.
    same = f"pg_options={options!r}"
    if _torch_asks_for_checks(member):
        same = f"{same}, {_DETAIL}"
    # torch numbers its groups, unless it names them by their ranks.
    key, is_new = f"torch/{member.name}", member.name.isdecimal()
    is_exact = read_bool("COMMRT_DETERMINISTIC")
    if parent is not None:
        key, is_exact = f"comm{parent.identity}/{key}", parent.deterministic
    identity = world.agree_id(ranks, key, same, timeout_s=limit, once=is_new)
    settings = _settings(world, ranks, member, name, identity)
    wanted = options.deterministic
    comm = Core(
        world,
        ranks,
        name,
        identity,
        deterministic=is_exact if wanted is None else wanted,
        timeout_s=limit,
        settings=settings,
    )
    comm.timeout_s = options.timeout_s or limit
    if options.nan_check is not None:
        comm.nan_check = options.nan_check
    _check_serves(comm, settings.wishes)
    return comm


def _settings(
    world: World, ranks: Sequence[int], member: Member, name: str, identity: int
) -> Settings:
    """Return the settings in the options, checked; alike on all ranks."""
    options = member.options
    _ = options.timeout_s, options.sparse_algorithm  # wrong ones are errors
    wishes = options.wishes(f"{name} (pg_options)")
    for what in ("check", "deterministic", "nan_check"):
        value = getattr(options, what)
        if value is not None:
            check_flag("commrt.torch.Options", what, value)
    table = None
    if options.table is not None:
        blob = b""
        if world.rank == ranks[0]:
            why = "pg_options of a process group"
            blob = read_named(Path(options.table), why).encode()
        key = f"comm{identity}/table"
        said = world.bootstrap.exchange(ranks, key, blob, member.timeout_s)
        table = LocatedTable.decode(said[0]).parse(catalog())
    checks = options.check
    if checks is None and _torch_asks_for_checks(member):
        checks = True
    return Settings(wishes, table, checks)


def _torch_asks_for_checks(member: Member) -> bool:
    """Return whether only torch's own setting asks for check mode.

    Not where torch itself compares the calls then, over gloo.
    """
    compares = member.is_wrapped and torchs_wrapper_compares()
    return _is_detailed() and not compares and value("COMMRT_DEBUG") is None


def torchs_wrapper_compares() -> bool:
    """Return whether torch wraps backends to compare their calls over gloo."""
    return _is_detailed() and dist.is_gloo_available()


def _is_detailed() -> bool:
    is_detailed: bool = dist.get_debug_level() == dist.DebugLevel.DETAIL
    return is_detailed


def _check_serves(comm: Core, wishes: Wishes | None) -> None:
    """Raise UsageError where what all operations are to run can run none of them."""
    wish = None if wishes is None else wishes.others
    if wishes is None or wish is None or comm.size == 1:
        return
    for device in DEVICES:
        for coll in COLLECTIVES:
            try:
                found = comm.candidates(coll, 0, device=device)
            except UsageError:  # nothing runs it there
                continue
            if any(wish.fits(each) for each in found):
                return
    comm.free()
    raise UsageError(
        f"{wishes.who} asks for {wish}, which can run no operation of this group; "
        f"comm.candidates() of its communicator lists what can, and python -m commrt "
        f"info what each backend lacks"
    )
