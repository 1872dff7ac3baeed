# SPDX-License-Identifier: Apache-2.0
"""World: the peers, memory, MPI, engine and table that all communicators share."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from commrt import _native, env
from commrt.bootstrap.base import Bootstrap, Identities, first_word, with_heed
from commrt.bootstrap.store import StoreBootstrap
from commrt.errors import BackendError, MismatchError, UsageError
from commrt.gloo.groups import GlooGroups
from commrt.gloo.relay import GlooRelay
from commrt.job.arena import (
    Arena,
    discover_nodes,
    machine_identity,
    share,
)
from commrt.job.arrivals import Arrivals
from commrt.job.bells import NodeBells, hang_bells, own_bells
from commrt.job.between_nodes import Side, carrier_beside_mpi, connect_nodes
from commrt.job.heeds import Heeds
from commrt.job.holders import Holders
from commrt.job.inquiries import Inquiries, Place
from commrt.job.liveness import JobLiveness, own_process, watch_processes
from commrt.job.mpi_comms import NativeComms
from commrt.job.private_places import IDENTITIES
from commrt.job.stepping import Stepping
from commrt.job.thread_memory import share_by_threads
from commrt.launch.detect import LaunchInfo
from commrt.mpi import library, tags
from commrt.mpi.ulfm import failure_table, finalize_without_fence, survival
from commrt.select.facts import LinkClass
from commrt.select.fingerprint import available_cores
from commrt.select.locate import LocatedTable, locate
from commrt.select.model import BetweenNodes, MpiBetweenNodes
from commrt.select.network import Network
from commrt.select.schema import Catalog
from commrt.select.table import Table
from commrt.select.wishes import VARIABLE, Wishes, parse_wishes
from commrt.tcp.relay import TcpRelay

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["World", "connect_world"]

_LARGEST_TAG = 2**31 - 1
"""Tags are integers of 32 bits where no MPI carries messages."""


@dataclass
class World:
    """One job, as one rank sees it."""

    bootstrap: Bootstrap
    """Exchanges small blobs among ranks."""
    launch: LaunchInfo
    """The launcher of the ranks."""
    nodes: list[list[int]]
    """Ranks of each node; equal on all ranks."""
    engine: Any
    """The engine of this rank."""
    cores: float
    """Cores available on the poorest node: a whole number, or a part of one where
    nodes are containers of one machine, with fewer cores than ranks."""
    table: Table | None
    """Selection table, agreed by all ranks."""
    located: LocatedTable
    """Origin of the table."""
    wishes: Wishes
    """The wishes of COMMRT_ALGORITHM."""
    timeout_s: float
    """Default deadline of an operation."""
    mpi: MPI.Intracomm | None = None
    """commrt's own MPI communicator, which has all ranks; None without MPI."""
    mpi_ranks: Sequence[int] = ()
    """For each rank, its rank in that."""
    mpi_of_all: MPI.Intracomm | None = None
    """That communicator, if no other world has it: collectives may run there."""
    mpi_comm: MPI.Intracomm | None = None
    """The program's mpi4py communicator of exactly these ranks, if there is one."""
    mpi_tag_ub: int = 32767
    """Largest MPI tag."""
    in_process: bool = False
    """True if the ranks are threads of this process."""
    shares_cores: bool = False
    """True if some machine has fewer cores than ranks, also of several nodes."""
    relay: GlooRelay | TcpRelay | None = None
    """Carries messages between nodes; None where MPI does."""
    why_carried: str = ""
    """Reason why the relay, or MPI, carries them; empty on one node."""
    inquiries: Inquiries | None = None
    """Asks ranks of other nodes what they do, where MPI carries messages there."""
    gloo_groups: GlooGroups | None = None
    """Lends groups for gloo's own collectives; None where gloo connects no nodes."""
    native_comms: NativeComms | None = None
    """Lends MPI communicators for the library's own collectives; None without MPI."""
    links: dict[tuple[int, int], LinkClass] = field(default_factory=dict)
    """Link class of each on-node pair, by ascending rank; none where ranks outnumber
    cores."""
    has_measured: bool = False
    """True once a communicator of all ranks has measured the links."""
    between_nodes: BetweenNodes | None = None
    """Cost of messages by the relay; None if there is none."""
    mpi_between_nodes: MpiBetweenNodes | None = None
    """Cost of messages and collectives by MPI; None unless it was measured."""
    network: Network | None = None
    """The network between its nodes; None on one node, and before it was measured."""
    slot_window_nbytes: int = 0
    """Bytes of slots that this rank's payloads pass through (job/slot_window.py)."""
    bells: NodeBells | None = None
    """Wake ranks of this node that sleep; None where this rank is alone there."""
    liveness: JobLiveness | None = None
    """Which ranks are gone; None where this rank is alone, or ranks are threads."""
    heeds: Heeds = field(default_factory=Heeds)
    """Checks that end waits in exchanges."""
    holders: Holders = field(default_factory=Holders)
    """Groups and others that use this world; it ends after the last of them."""
    identities: Identities = field(default_factory=Identities)
    """Identities of communicators: they name their shared memory and MPI tags."""
    chaos: _native.Chaos | None = None
    """Injects faults into operations; None unless COMMRT_CHAOS asks for it."""
    missed_deadline: bool = False
    """True once a call has missed its deadline: ranks may be out of reach."""
    lingering: list[Any] = field(default_factory=list)
    """Communicators that were dropped with operations in flight, until these end."""
    deferred: list[Any] = field(default_factory=list)
    """Work on devices that failed (commrt/group/deferred_release.py)."""
    job: str = ""
    """Names this job in logs; the same on all ranks."""
    number: int = field(default_factory=itertools.count().__next__)
    """Tells the worlds of this process apart."""

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self.bootstrap.rank

    @property
    def size(self) -> int:
        """Ranks in the job."""
        return self.bootstrap.size

    def node_of(self, rank: int) -> int:
        """Return the index of the node that ``rank`` lies on."""
        return next(i for i, ranks in enumerate(self.nodes) if rank in ranks)

    def beside(self, rank: int) -> list[int]:
        """Return the ranks of the node that ``rank`` lies on."""
        return self.nodes[self.node_of(rank)]

    def drive(self, device: Any) -> bool:
        """See that calls on a device make progress; whether streams may wait for that.

        A stream that waits for the host needs no thread of the program to go on, so
        the progress thread runs. With COMMRT_PROGRESS=off none does: a program that
        synchronizes a stream, or frees memory, would wait for ever for what only a
        call of commrt lets go, so streams are given only what they need not wait for.
        A simulated device's threads are known to it: there the program makes progress.
        """
        if device.kind == "simulated" or self.engine.has_thread:
            return True
        if env.read_str("COMMRT_PROGRESS") == "off":
            asked = device.__dict__.setdefault("why_no_free", [])
            if self.why_no_free not in asked:
                asked.append(self.why_no_free)
            return False
        if not _threads_may_call_mpi(self):
            raise UsageError(
                "calls on arrays on devices need a progress thread, and that needs MPI "
                "initialised with THREAD_MULTIPLE: do not lower mpi4py.rc.thread_level"
            )
        self.engine.start_thread()
        return True

    @cached_property
    def stepping(self) -> Stepping:
        """Goes on with nonblocking operations of several steps."""
        return Stepping(
            self.engine,
            lambda: (
                env.read_str("COMMRT_PROGRESS") != "off" and _threads_may_call_mpi(self)
            ),
        )

    def why_no_free(self) -> str | None:
        """Return why memory of a device is not to be freed now, without a thread."""
        self.engine.step()
        if self.engine.idle:
            return None
        return (
            f"memory of a device cannot be freed while calls are under way, which may "
            f"use it: rank {self.rank} has no progress thread to end them "
            f"(COMMRT_PROGRESS=off): synchronize() their requests first"
        )

    def free_lingering(self) -> None:
        """Free what was dropped with operations in flight that have ended since."""
        dropped, self.lingering = self.lingering, []
        for comm in dropped:
            comm.let_go()

    def share_memory(
        self,
        ranks: Sequence[int],
        key: str,
        region_nbytes: int,
        timeout_s: float | None = None,
        parts: Sequence[int] = (),
    ) -> Arena:
        """Return memory that all ``ranks`` of this node map, a region for each.

        ``parts``: as of ``arena.share``. Raises BackendError on all of them where it
        cannot be had.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        how = share_by_threads if self.in_process else share
        return how(self.bootstrap, ranks, key, region_nbytes, timeout_s, parts)

    def attach_other_nodes(
        self, group: _native.Group, ranks: list[int], tag: int
    ) -> None:
        """Let messages of a group to other nodes go by MPI, or by the relay."""
        if self.relay is not None:
            group.attach_relay(self.relay.native, tag, ranks)
        elif self.mpi is not None:
            there = [self.mpi_ranks[rank] for rank in ranks]
            group.attach_mpi(library.handle(self.mpi), tag, there)
            if self.inquiries is not None:
                group.tell_afar(self.inquiries.told, tag)

    def meet(
        self, members: Sequence[int], key: str, timeout_s: float | None = None
    ) -> None:
        """Wait until all ``members`` are here, making progress meanwhile."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        self.bootstrap.exchange(members, key, b"", limit)

    def agree_id(
        self,
        members: Sequence[int],
        key: str,
        same: str = "",
        timeout_s: float | None = None,
        *,
        once: bool = False,
        heed: Callable[[], object] | None = None,
    ) -> int:
        """Return an identity that no communicator of any member uses.

        ``once``: these members have never used the key, and never will again.
        ``heed``: what it raises ends the wait, as in ``Bootstrap.exchange``. Raises
        MismatchError on all of them unless they say the ``same``.
        """
        chosen, wishes = self.meet_for_id(members, key, same, timeout_s, once, heed)
        check_alike(members, wishes)
        return chosen

    def meet_for_id(
        self,
        members: Sequence[int],
        key: str,
        mine: Any,
        timeout_s: float | None = None,
        once: bool = False,
        heed: Callable[[], object] | None = None,
    ) -> tuple[int, list[Any]]:
        """Return an identity as ``agree_id`` does, and every ``mine`` (JSON)."""
        key = f"{key}/id"
        blob = json.dumps([self.identities.next, mine]).encode()
        limit = self.timeout_s if timeout_s is None else timeout_s
        said = self.bootstrap.exchange(members, key, blob, limit, heed)
        if once:
            self.bootstrap.forget(key)
        numbers, theirs = zip(*map(json.loads, said), strict=True)
        chosen: int = max(numbers)
        self.identities.next = chosen + IDENTITIES
        limit = _LARGEST_TAG if self.mpi is None else self.mpi_tag_ub
        if tags.last(self.identities.next - 1) > limit:
            raise BackendError(
                f"communicator {chosen // IDENTITIES} of this job needs a tag above "
                f"{limit}, the largest: free communicators do not give theirs back; "
                f"make few and keep them"
            )
        return chosen, [*theirs]


def check_alike(members: Sequence[int], wishes: Sequence[str]) -> None:
    """Raise MismatchError where ``members`` of the job want different communicators."""
    if len({*wishes}) > 1:
        lines = [
            f"  rank {rank} of the job: {wish}"
            for rank, wish in zip(members, wishes, strict=True)
        ]
        raise MismatchError(
            "the ranks of a new communicator disagree; pass equal arguments:\n"
            + "\n".join(lines)
        )


def connect_world(
    bootstrap: Bootstrap,
    launch: LaunchInfo,
    known: Catalog,
    *,
    in_process: bool = False,
    engine: Any = None,
    timeout_s: float | None = None,
    parts: Sequence[int] | None = None,
) -> World:
    """Agree on nodes, variables and table with the other ranks; collective.

    Args:
        bootstrap: exchanges small blobs among the ranks.
        launch: who started the ranks.
        known: names that a table may use.
        in_process: the ranks are threads of this process.
        engine: the engine of this process's other worlds: a rank that waits in one of
            them makes progress in all.
        timeout_s: default limit of all that follows; None: COMMRT_TIMEOUT_S.
        parts: the number of each rank's pretended node; None: as COMMRT_NODES says.
    """
    if timeout_s is None:
        timeout_s = env.read_float("COMMRT_TIMEOUT_S")
    arrivals = None
    if isinstance(bootstrap, StoreBootstrap) and bootstrap.gone is None:
        arrivals = Arrivals(bootstrap)
        bootstrap.gone = arrivals.gone
    located = _agree(bootstrap, timeout_s)
    everybody = list(range(bootstrap.size))
    # A process group of one is not what COMMRT_NODES speaks of.
    if in_process or (launch.kind == "torch" and bootstrap.size == 1):
        nodes = [everybody]
    else:
        nodes = discover_nodes(bootstrap, timeout_s, env.read_nodes(), parts)
    mpi = getattr(bootstrap, "comm", None)
    world = World(
        bootstrap=bootstrap,
        launch=launch,
        nodes=nodes,
        engine=_native.Engine() if engine is None else engine,
        cores=0,
        table=located.parse(known),
        located=located,
        wishes=parse_wishes(env.read_str(VARIABLE)),
        timeout_s=timeout_s,
        identities=getattr(bootstrap, "identities", None) or Identities(),
        mpi=mpi,
        mpi_ranks=getattr(bootstrap, "places", ()),
        mpi_of_all=getattr(bootstrap, "comm_of_all", None),
        mpi_comm=getattr(bootstrap, "mpi_comm", None),
        in_process=in_process,
    )
    bootstrap.idle = with_heed(world.engine.step, world.heeds)
    _agree_cores_and_bells(world)
    if len(nodes) > 1:
        _connect(world, pretended=parts is not None or env.read_nodes() is not None)
    if mpi is not None:
        world.native_comms = NativeComms(
            mpi,
            bootstrap,
            library.load().Exception,
            places=world.mpi_ranks,
            why_none=getattr(bootstrap, "why_none", None),
            by_thread=_threads_may_call_mpi(world),
        )
        _load_mpi(world)
        if len(nodes) > 1 and world.relay is None:
            world.inquiries = _inquiries(world)
    if world.liveness is not None:
        bootstrap.gone = world.liveness.gone
        world.holders.at_end.append(world.liveness.native.let_go)
    if arrivals is not None:
        arrivals.close()
    return world


def _connect(world: World, *, pretended: bool) -> None:
    """Find who carries messages between the nodes, and connect them; collective."""
    assert world.liveness is not None
    side = Side(world.bootstrap, world.nodes, world.liveness.native, world.timeout_s)
    if world.mpi is None:
        carrier = connect_nodes(side)
    else:
        carrier = carrier_beside_mpi(side, pretended)
    world.relay, world.why_carried = carrier.relay, carrier.why
    if world.relay is None:
        return
    if carrier.gloo_address is not None:
        world.gloo_groups = GlooGroups(world.bootstrap, carrier.gloo_address)
        world.relay.at_end.append(world.gloo_groups.close)
    # A world that another one has replaced leaves no threads or connections behind.
    world.holders.at_end.append(world.relay.part)
    weakref.finalize(world, world.relay.part).atexit = False


def _inquiries(world: World) -> Inquiries:
    """Let ranks of several nodes ask each other what they do; collective."""
    liveness = None if world.liveness is None else world.liveness.native
    made = Inquiries(world.rank, world.size, liveness)
    world.holders.at_end.append(made.close)
    weakref.finalize(world, made.close).atexit = False
    try:
        everybody, mine = range(world.size), made.place.text.encode()
        limit_s = world.timeout_s
        said = world.bootstrap.exchange(everybody, "inquiries", mine, limit_s)
        made.connect([Place.parse(text.decode()) for text in said])
    except BaseException:
        made.close()
        raise
    return made


def _agree_cores_and_bells(world: World) -> None:
    """Set how many cores the poorest node's ranks have together, and their bells.

    Ranks may be bound to different cores: their affinities are united, and the
    container's quota (seen as fewer available cores than the affinity) still holds.
    Nodes on one machine share its cores, and pretended ones their container's quota.
    """
    affinity = sorted(os.sched_getaffinity(0))
    bells = own_bells(world.engine)
    job = secrets.token_hex(4)
    process = own_process()
    facts = [affinity, available_cores(), machine_identity(), job, bells, process]
    mine = json.dumps(facts).encode()
    everybody = range(world.size)
    blobs = world.bootstrap.exchange(everybody, "cores", mine, world.timeout_s)
    said = [json.loads(blob) for blob in blobs]
    world.job = said[0][3]
    pretended = env.read_nodes() is not None
    poorest: list[float] = []
    fewest_each = 1.0
    for ranks in world.nodes:
        beside = [r for r in everybody if said[r][2] == said[ranks[0]][2]]
        share = len(ranks) / len(beside)
        quotas = [n for cores, n, *_ in (said[r] for r in ranks) if n < len(cores)]
        of_node = [n * share if pretended else n for n in quotas]
        of_node.append(len({core for r in ranks for core in said[r][0]}))
        of_node.append(len({core for r in beside for core in said[r][0]}) * share)
        poorest += of_node
        fewest_each = min(fewest_each, min(of_node) / len(ranks))
    world.cores = int(min(poorest))
    if min(poorest) < 1:  # a rank's part, for as many as the fullest node has
        of_fullest = max(map(len, world.nodes)) * fewest_each
        world.cores = int(of_fullest) if of_fullest >= 1 else of_fullest
    world.shares_cores = fewest_each < 1
    here = world.nodes[world.node_of(world.rank)]
    if len(here) > 1:
        world.bells = hang_bells(world, {rank: said[rank][4] for rank in here})
    if world.size > 1 and not world.in_process:
        processes, limit_s = [each[5] for each in said], world.timeout_s
        world.liveness = watch_processes(world.bootstrap, here, processes, limit_s)
        # Nobody tells of ranks of other nodes before the relay is there.
        world.bootstrap.gone = first_word(world.liveness.gone, world.bootstrap.gone)


def _agree(bootstrap: Bootstrap, timeout_s: float) -> LocatedTable:
    """Compare what must be equal on all ranks; return rank 0's table."""
    from commrt.version import __version__

    mine = {
        "version": __version__,
        "variables": env.agreement(),
        "table": locate().encode().decode() if bootstrap.rank == 0 else "",
    }
    blob = json.dumps(mine).encode()
    everybody = range(bootstrap.size)
    said = [
        json.loads(text)
        for text in bootstrap.exchange(everybody, "agree", blob, timeout_s)
    ]
    for rank, theirs in enumerate(said):
        if theirs["version"] != said[0]["version"]:
            raise BackendError(
                f"rank {rank} runs commrt {theirs['version']}, rank 0 "
                f"{said[0]['version']}: install one version everywhere"
            )
        if theirs["variables"] != said[0]["variables"]:
            raise UsageError(
                _difference(rank, theirs["variables"], said[0]["variables"])
            )
    return LocatedTable.decode(said[0]["table"].encode())


def _difference(rank: int, theirs: str, first: str) -> str:
    pairs = zip(theirs.splitlines(), first.splitlines(), strict=False)
    differing = [f"{a} on rank {rank}, {b} on rank 0" for a, b in pairs if a != b]
    return (
        f"environment variables that select must be equal on all ranks: "
        f"{'; '.join(differing)}. Set them on every host: Open MPI's mpiexec passes a "
        f"variable on to other hosts by -x NAME only"
    )


def _load_mpi(world: World) -> None:
    addresses, constants = library.mpi_table(), library.mpi_constants()
    _native.load_mpi(
        addresses, constants["BYTE"], constants["IN_PLACE"], constants["ERR_TRUNCATE"]
    )
    world.mpi_tag_ub = constants["TAG_UB"]
    if survival().can and world.liveness is not None:
        finalize_without_fence()
        _native.load_mpi_failures(failure_table())
        world.liveness.native.ask_mpi(library.handle(world.mpi), [*world.mpi_ranks])


def progress_mode(world: World) -> bool:
    """Return whether a progress thread is to run (COMMRT_PROGRESS)."""
    mode = env.read_str("COMMRT_PROGRESS")
    if mode == "auto":
        ranks_here = max(len(ranks) for ranks in world.nodes)
        # Ranks may be bound to unequal shares of the node's cores.
        mine = len(os.sched_getaffinity(0))
        enough = world.size > 1 and world.cores >= 2 * ranks_here and mine >= 2
        return enough and not world.in_process and _threads_may_call_mpi(world)
    if mode == "on" and not _threads_may_call_mpi(world):
        raise UsageError(
            "COMMRT_PROGRESS=on needs MPI initialised with THREAD_MULTIPLE: do not "
            "lower mpi4py.rc.thread_level, or use COMMRT_PROGRESS=off"
        )
    return mode == "on"


def start_progress(world: World) -> None:
    """See that operations go on while the program computes, if it asked for that.

    By a progress thread, where a rank has a core for it. Where it has none, the thread
    that receives from other nodes goes on with what their messages are for: it sleeps
    until they come.
    """
    if progress_mode(world):
        if not world.engine.has_thread:
            world.engine.start_thread()
    elif env.read_str("COMMRT_PROGRESS") == "auto" and _threads_may_call_mpi(world):
        world.engine.go_on_by_arrivals()


def _threads_may_call_mpi(world: World) -> bool:
    if world.mpi is None:
        return True
    mpi = library.load()
    return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


def end_of_process(engine: Any, grace_s: float = 5.0) -> None:
    """Drain what still moves, stop the progress thread, and leave; runs at exit."""
    deadline = time.monotonic() + grace_s
    while engine.step() and time.monotonic() < deadline:
        os.sched_yield()
    engine.end_stand_ins()
    if engine.idle:
        engine.leave()
    # A driver that closes would wait for streams that wait for this process.
    engine.release_streams("the process ends")
    engine.stop_thread()
