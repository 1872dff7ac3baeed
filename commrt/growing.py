# SPDX-License-Identifier: Apache-2.0
"""Ranks of a communicator take in processes that were started later: grow, and join."""

from __future__ import annotations

import importlib
import json
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from commrt import env
from commrt.bootstrap.base import Bootstrap, first_word, poll_until
from commrt.bootstrap.connect import ask_for_place
from commrt.bootstrap.mpi import MpiBootstrap
from commrt.bootstrap.newcomers import Invitation, Newcomer, Reception
from commrt.bootstrap.store import StoreBootstrap
from commrt.calls.channel import Channel
from commrt.calls.settings import Settings
from commrt.errors import TimeoutError_, UsageError, shown
from commrt.founding import Founder
from commrt.growing_by_mpi import grown_by_mpi
from commrt.job.arena import pretended_nodes
from commrt.job.liveness import findable, why_ended
from commrt.launch.detect import LaunchInfo
from commrt.launch.python_program import program_of
from commrt.membership import check_all_came, gone_of, newcomers_among, words_of
from commrt.recovery import Recovery, name_after
from commrt.vocabulary.checks import as_integer, check_name
from commrt.vocabulary.limits import deadline_after

__all__ = ["Growth", "join"]

Plain = TypeVar("Plain", bound=Channel)


class Growth(Generic[Plain]):
    """Takes newcomers into a communicator that replaces one."""

    def __init__(self, comm: Plain, recovery: Recovery[Plain]) -> None:
        # The communicator owns this.
        self._ref = weakref.ref(comm)
        self._recovery = recovery

    @property
    def _comm(self) -> Plain:
        comm = self._ref()
        assert comm is not None
        return comm

    def num_waiting(self) -> int:
        """Return how many processes wait to join the job. Local; some 50 us.

            if comm.rank == 0 and comm.num_waiting():
                ...  # tell the others to call grow()

        Processes that have ended are not counted, as far as this machine can tell.
        """
        comm = self._comm
        comm.check_open()
        reception = _reception_of(comm.world.bootstrap)
        return 0 if reception is None else len(_living(reception.waiting()))

    def grow(
        self,
        count: int | None = None,
        *,
        program: Sequence[str] | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> Plain:
        """Return a communicator of these ranks and of processes that wait to join.

            comm = comm.grow()
            if comm.joined:  # the ranks that are new
                comm.bcast(weights, root=0)

        The ranks keep their numbers, and newcomers follow. A newcomer is a process with
        ``COMMRT_JOIN=1`` and the job's variables: ``commrt.init()`` returns there when
        ranks have called this. ``python -m commrt.run --restarts 1`` starts one for
        each rank that dies. Where nobody waits, this returns the communicator itself.

        Ranks that MPI started start newcomers themselves: ``comm.grow(2)`` starts two,
        and waits until they have called ``commrt.init()``. They run the program of rank
        0, with its ``COMMRT_`` variables, in its folder.

        The old communicator stays as it is; free it. Collective over all ranks.

        Args:
            count: how many newcomers to wait for, or to start under MPI; None: take
                those that wait now.
            program: under MPI, what newcomers run, as arguments of Python:
                ``["train.py", "--lr", "1"]``, ``["-m", "train"]``; None: what rank 0
                runs. Rank 0's counts.
            name: what messages call the new communicator.
            timeout_s: limit of the whole.

        Raises:
            PeerFailedError: a rank has died; call ``shrink()`` first.
            TimeoutError_: fewer than ``count`` came, or a rank did not; the
                communicator works as before.
            BackendError: MPI starts no processes here, or a newcomer has ended before
                it joined; the communicator works as before.
            MismatchError: under MPI, the ranks ask for different counts.
            UsageError: its ranks are threads, or only some of MPI's; no program is
                known; or one is given where others start newcomers.
        """
        comm = self._comm
        comm.check_usable()
        own_name = check_name("grow", name)
        limit_s = comm.limit("grow", timeout_s)
        wanted = 0 if count is None else as_integer(count)
        if wanted is None or wanted < 0:
            raise UsageError(f"grow: count={shown(count)} must be a number from 0 on")
        _check_program(program)
        if isinstance(comm.world.bootstrap, MpiBootstrap):
            new_name = own_name or name_after(comm.name)
            by_mpi = self._recovery, wanted, program, new_name, limit_s
            return grown_by_mpi(comm, *by_mpi)
        if program is not None:
            raise UsageError(
                f"grow: program={shown(program)} is for ranks that MPI started: here "
                f"whoever starts a newcomer says what it runs, with COMMRT_JOIN=1"
            )
        reception = _reception_of(comm.world.bootstrap)
        if reception is None:
            raise UsageError(
                f"grow: ranks that {comm.world.launch.source} started cannot take in "
                f"others: start them with python -m commrt.run, torchrun or mpiexec"
            )
        deadline = deadline_after(limit_s)
        self._wait_for(reception, wanted, limit_s)
        seen = reception.waiting()
        here = {each.ticket for each in _living(seen)}
        facts = {
            "tickets": {each.ticket: dict(each.process) for each in seen},
            "ended": [each.ticket for each in seen if each.ticket not in here],
            "process": findable(),
        }
        left_s = max(0.0, deadline - time.monotonic())
        blob = json.dumps(facts).encode()
        peers, blobs = self._recovery.regroup("grow", blob, left_s)
        check_all_came(comm, blobs)
        said = [json.loads(blob) for blob in blobs.values()]
        # All ranks go by what the first one has seen.
        newcomers = [
            Newcomer(int(ticket), process)
            for ticket, process in said[0]["tickets"].items()
            if not any(int(ticket) in each["ended"] for each in said)
        ]
        if not newcomers:
            peers.close()
            return comm
        assert isinstance(peers, StoreBootstrap)
        founder = self._recovery.founder(own_name or name_after(comm.name))
        grown = _with_newcomers(peers, newcomers, said, reception, words_of(founder))
        made, living = founder.found(grown, deadline)
        made.joined = newcomers_among(living, comm.size)
        return made

    def _wait_for(self, reception: Reception, count: int, limit_s: float) -> None:
        comm = self._comm

        def there() -> bool:
            # Where another rank calls shrink(), this one hears of it when they meet.
            found = len(_living(reception.waiting()))
            return found >= count or bool(comm.known_end()[0])

        if not poll_until(there, limit_s, comm.world.bootstrap.idle):
            found = len(_living(reception.waiting()))
            raise TimeoutError_(
                f"grow on {comm.name}, rank {comm.rank}: {found} of {count} processes "
                f"wait to join after {limit_s:g} s: start them with COMMRT_JOIN=1"
            )


def join(
    launch: LaunchInfo,
    engine: Any,
    make: Callable[..., Plain],
    deterministic: bool | None,
) -> Plain:
    """Return the communicator that takes this process in.

    Waits until the ranks of the job call ``grow``.

    Args:
        launch: the variables by which this process finds the job.
        engine: this process's engine.
        make: makes a communicator, as for ``Founder``.
        deterministic: what this process asks for; None: what the others have.
    """
    timeout_s = env.read_float("COMMRT_TIMEOUT_S")
    deadline = deadline_after(timeout_s)
    _import_what_torch_imports_late()
    facts = {"process": findable(), "deterministic": deterministic}
    peers, text = ask_for_place(launch, facts, timeout_s)
    words = json.loads(text)
    if deterministic not in (None, words["deterministic"]):
        raise UsageError(
            f"commrt.init: the job that this process joins has deterministic="
            f"{words['deterministic']}, and here it is {deterministic}"
        )
    peers.gone = gone_of(words["processes"], first_word(peers.gone))
    node = words.get("node")
    founder = Founder(
        make,
        words["name"],
        launch,
        engine,
        in_process=False,
        deterministic=words["deterministic"],
        settings=Settings(),
        timeout_s=words["timeout_s"],
        node=pretended_nodes(launch.size)[launch.rank] if node is None else node,
    )
    made, living = founder.found(peers, deadline)
    made.joined = newcomers_among(living, words["first"])
    return made


def _check_program(program: Sequence[str] | None) -> None:
    if program is None:
        return
    is_list = isinstance(program, Sequence) and not isinstance(program, str | bytes)
    if not is_list or not program or not all(isinstance(w, str) for w in program):
        raise UsageError(
            f"grow: program={shown(program)} must be a list of Python's arguments, "
            f'such as ["train.py", "--steps", "100"]'
        )
    program_of(program)


def _import_what_torch_imports_late() -> None:
    """Import what torch itself imports with a process's first optimizer.

    That takes more than a second of a core. The ranks that take this process in would
    wait for it, as it makes its model.
    """
    if "torch" in sys.modules:
        with suppress(ImportError):  # a torch without its compiler
            importlib.import_module("torch._dynamo")


def _with_newcomers(
    peers: StoreBootstrap,
    newcomers: Sequence[Newcomer],
    said: Sequence[Mapping[str, Any]],
    reception: Reception,
    words: Mapping[str, Any],
) -> StoreBootstrap:
    """Invite newcomers; return the bootstrap of all ranks.

    Each rank invites all of them with the same words: whoever dies, the others meet.
    """
    processes = [each["process"] for each in said]
    processes += [each.process for each in newcomers]
    size = len(processes)
    grown = peers.enlarged(size)
    text = json.dumps({**words, "processes": processes, "first": peers.size})
    for number, each in enumerate(newcomers):
        rank = peers.size + number
        invitation = Invitation(grown.prefix, rank, size, text)
        reception.invite(each.ticket, invitation)
    tickets = [each.ticket for each in newcomers]

    def left(rank: int) -> str:
        if rank >= peers.size and reception.has_left(tickets[rank - peers.size]):
            return "it gave up waiting"
        return ""

    known = peers.gone
    grown.gone = gone_of(
        processes,
        lambda rank: known(rank) if known and rank < peers.size else left(rank),
    )
    return grown


def _living(newcomers: Sequence[Newcomer]) -> list[Newcomer]:
    mine = findable()
    return [each for each in newcomers if not why_ended(each.process, mine)]


def _reception_of(bootstrap: Bootstrap) -> Reception | None:
    return bootstrap.reception if isinstance(bootstrap, StoreBootstrap) else None
