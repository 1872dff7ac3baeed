# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun started (or that share any torch Store): keys in the store.

Rank r writes its blob under ``key/r`` and polls with ``check``, which does not
block, until everybody's is there. The last reader deletes the keys.

A rank that finds all blobs and one that gives up may do so at the same moment. The
first of them to count itself in the store decides, and writes its verdict. After
``withdrawn`` those who still wait, or come only now, meet in the next attempt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from commrt.bootstrap.base import (
    ByExchange,
    Keys,
    check_alive,
    poll_until,
    timed_out,
    with_heed,
)
from commrt.bootstrap.directory import DirectoryStore
from commrt.bootstrap.launcher_store import LauncherStore
from commrt.bootstrap.launcher_words import ended_ranks
from commrt.bootstrap.newcomers import Reception
from commrt.bootstrap.survivors import (
    Decision,
    agree_on_survivors,
    met_by_survivors,
)
from commrt.bootstrap.torch_store import tcp_store
from commrt.errors import BackendError, CommError, PeerFailedError
from commrt.launch import slurm
from commrt.vocabulary.limits import deadline_after

__all__ = ["StoreBootstrap", "slurm_store", "torchrun_store"]

_HOST_S = 0.5
"""Seconds in which it is heard that the rank has ended that hosts the store."""
_DONE = "done"
"""Verdict of an exchange whose blobs count."""


class StoreBootstrap:
    """Exchanges blobs through a ``torch.distributed.Store`` of any kind.

    Or through a store of ``commrt.run``, which has the same methods.
    """

    def __init__(
        self, store: Any, rank: int, size: int, prefix: str | None = None
    ) -> None:
        """Local. Every rank must make the same number of bootstraps on a store.

        ``prefix``: begins the keys; nobody else uses it. None: one of a new number.
        """
        self.rank = rank
        self.size = size
        self._store = store
        self.idle: Callable[[], object] | None = None
        self.gone: Callable[[int], str] | None = None
        self._keys = Keys(rank, size)
        self._attempts: ByExchange[_Attempts] = ByExchange(_Attempts)
        if prefix is None:
            # Each rank counts its bootstraps in the store itself: a second one on the
            # same store must not meet keys that the first one is still deleting.
            generation = store.add(f"commrt/generation/{rank}", 1)
            prefix = f"commrt/{generation}"
        self.prefix = prefix
        """Begins its keys."""
        self.reception = Reception(store)
        """Where processes ask to join the job."""
        self._host: int | None = 0
        """Which rank may host the store; None: one that is not among these."""
        self._why_no_other_host: Callable[[], str] = lambda: ""
        """Why that one is gone; empty where it lives, or may."""

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Raise PeerFailedError or BackendError where the store cannot be reached."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, CommError):
                raise
            poll_until(lambda: bool(self._why_no_host()), _HOST_S)
            why = self._why_no_host()
            text = (
                f"rank {self.rank} does not reach the store in which the ranks meet "
                f"({str(error).partition(chr(10))[0]})"
            )
            if why:
                raise PeerFailedError(
                    f"{text}: rank 0 may have hosted it, and {why}. No rank can make a "
                    f"communicator any more; a launcher that hosts the store, such as "
                    f"torchrun, keeps it when a rank dies"
                ) from error
            raise BackendError(
                f"{text}: look whether the process that hosts it runs, the launcher "
                f"or rank 0, and restart the job if it does not"
            ) from error

    def _why_no_host(self) -> str:
        """Return why rank 0 of the job, which may host the store, is gone."""
        if self._host is None:
            return self._why_no_other_host()
        return self.gone(self._host) if self.gone else ""

    def exchange(
        self,
        members: Sequence[int],
        key: str,
        blob: bytes,
        timeout_s: float,
        heed: Callable[[], object] | None = None,
    ) -> list[bytes]:
        """Give ``blob`` to all members; return everybody's, in members' order."""
        deadline = deadline_after(timeout_s)
        came: set[int] = set()
        with self._reaching(), self._keys.turn(members, key, timeout_s) as (name, _):
            while True:
                attempts = self._attempts.of(name)
                base = f"{self.prefix}/{name}#{attempts.ended}"
                attempt = _Attempt(self._store, base, members, self.rank)
                heeds = with_heed(
                    heed, check_alive(self.gone, key, members, attempt.has_come)
                )
                try:
                    said = attempt.run(blob, deadline, with_heed(self.idle, heeds))
                finally:
                    attempts.ended += attempt.is_over
                came |= attempt.came
                if said is not None:
                    return said
                if time.monotonic() >= deadline:
                    absent = [r for r in members if r not in attempt.came]
                    never = [r for r in absent if r not in came]
                    raise timed_out(self.rank, members, key, never or absent, timeout_s)

    def regroup(
        self, members: Sequence[int], key: str, blob: bytes, timeout_s: float
    ) -> tuple[StoreBootstrap, dict[int, bytes]]:
        """Return the bootstrap of the members that live, and what they said."""

        def agree(number: int, left_s: float) -> Decision:
            turn = self._keys.turn(members, key, timeout_s)
            with self._reaching(), turn as (name, _):
                return agree_on_survivors(
                    self._store,
                    f"{self.prefix}/{name}/{number}",
                    members,
                    self.rank,
                    blob,
                    left_s,
                    self.gone,
                    self.idle,
                )

        def part(decision: Decision) -> StoreBootstrap:
            return self.part(list(decision.said), f"commrt/{decision.token}")

        return met_by_survivors(agree, part, timeout_s)

    def part(self, ranks: Sequence[int], prefix: str) -> StoreBootstrap:
        """Return a bootstrap of some ranks, this one among them; local."""
        mine = ranks.index(self.rank)
        made = StoreBootstrap(self._store, mine, len(ranks), prefix)
        made.idle = self.idle
        made._host = ranks.index(self._host) if self._host in ranks else None
        if made._host is None:
            # A host that has ended stays so. For another one, this is asked again.
            why = self._why_no_host()
            made._why_no_other_host = (lambda: why) if why else self._why_no_host
        gone = self.gone
        if gone is not None:
            made.gone = lambda rank: gone(ranks[rank])
        return made

    def enlarged(self, size: int) -> StoreBootstrap:
        """Return a bootstrap of these ranks and of others that follow them; local."""
        made = StoreBootstrap(self._store, self.rank, size, f"{self.prefix}/grown")
        made.idle = self.idle
        made._host, made._why_no_other_host = self._host, self._why_no_other_host
        return made

    def leave_word(self, key: str, blob: bytes) -> None:
        """Let the other ranks read ``blob`` under a key; local."""
        self.post(f"{key}/word/{self.rank}", blob)
        self.post(f"{key}/word", b"1")

    def words(self, key: str, ranks: Sequence[int]) -> dict[int, bytes]:
        """Return the last words that ranks have left under a key; local."""
        if self.posted(f"{key}/word") is None:  # one question, as a rule
            return {}
        found = {rank: self.posted(f"{key}/word/{rank}") for rank in ranks}
        return {rank: word for rank, word in found.items() if word is not None}

    def forget(self, key: str) -> None:
        """Drop the count of attempts; the store keeps words, and nothing else."""
        self._attempts.forget(key)

    def post(self, key: str, blob: bytes) -> None:
        """Say something to whoever asks; local."""
        with self._reaching():
            self._store.set(f"{self.prefix}/{key}", bytes(blob))

    def posted(self, key: str) -> bytes | None:
        """Return what a rank has said under a key; None: nothing."""
        name = f"{self.prefix}/{key}"
        with self._reaching():
            return bytes(self._store.get(name)) if self._store.check([name]) else None

    def ended(self) -> dict[int, str]:
        """Return which ranks have ended, and how, as their launcher says."""
        with self._reaching():
            return ended_ranks(self._store)

    def retire(self, key: str) -> None:
        """Let go of what the ranks have posted under ``key/rank``; local.

        The last rank deletes it all: a store waits for a key that is deleted between
        the question whether it is there and the one for what it holds.
        """
        base = f"{self.prefix}/{key}"
        names = [f"{base}/{rank}" for rank in range(self.size)]
        with self._reaching():
            if self._store.add(f"{base}/over", 1) == self.size:
                for name in (*names, f"{base}/over"):
                    self._store.delete_key(name)

    def private_store(self, purpose: str) -> Any:
        """Return a part of the store of torch for one use; the same on all ranks."""
        from torch.distributed import PrefixStore

        name = f"{self.prefix}/{purpose}"
        if isinstance(self._store, DirectoryStore | LauncherStore):
            return self._store.for_torch(name)
        return PrefixStore(name, self._store)

    def close(self) -> None:
        """Let go of the store; its server ends with the process that hosts it."""
        self._store = None


@dataclass
class _Attempts:
    """Attempts of the exchanges of one name."""

    ended: int = 0
    """How many are over on this rank: the number of the next one."""


class _Attempt:
    """One attempt of an exchange, which all members make or one of them withdraws."""

    def __init__(
        self, store: Any, base: str, members: Sequence[int], rank: int
    ) -> None:
        self._store = store
        self._names = {member: f"{base}/{member}" for member in members}
        self._rank = rank
        self._verdict, self._readers = f"{base}/verdict", f"{base}/readers"
        self.is_over = False
        """True if this rank knows its verdict."""
        self.came: set[int] = set()
        """Ranks whose blobs were in the store."""

    def run(
        self, blob: bytes, deadline: float, idle: Callable[[], object] | None
    ) -> list[bytes] | None:
        """Return everybody's blobs; None if it was withdrawn, or time is up."""
        store, everybody = self._store, list(self._names.values())
        if store.check([self._verdict]):  # a late rank: the others have given up
            return self._end(store.get(self._verdict))
        store.set(self._names[self._rank], bytes(blob))

        def met() -> bool:
            return bool(store.check(everybody)) or bool(store.check([self._verdict]))

        vote = "withdrawn"
        try:
            if poll_until(met, deadline - time.monotonic(), idle):
                vote = _DONE
        finally:
            # In one step: a rank may die between two, and others would wait for it.
            verdict = store.compare_set(self._verdict, "", vote)
            said = self._end(verdict)
        return said

    def has_come(self, rank: int) -> bool:
        """Return whether a rank's blob is in the store, or the attempt is decided."""
        store = self._store
        return bool(store.check([self._names[rank]]) or store.check([self._verdict]))

    def _end(self, verdict: bytes) -> list[bytes] | None:
        """Return the blobs, if they count; forget them if nobody else will look."""
        store, said = self._store, None
        self.is_over = True
        if bytes(verdict) == _DONE.encode():
            said = _texts(store, [*self._names.values()])
            self.came = {*self._names}
        else:
            self.came = {r for r, name in self._names.items() if store.check([name])}
        if store.add(self._readers, 1) == len(self._names):
            for name in (*self._names.values(), self._verdict, self._readers):
                store.delete_key(name)
        return said


def _texts(store: Any, names: list[str]) -> list[bytes]:
    """Return what is under keys that are there: by one question where the store can."""
    can = getattr(store, "has_extended_api", None)
    if can is not None and can():
        return [bytes(text) for text in store.multi_get(names)]
    return [bytes(store.get(name)) for name in names]


def torchrun_store(
    rank: int,
    size: int,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Connect to the store that torchrun's variables name.

    torchrun's agent hosts the store for its workers (TORCHELASTIC_USE_AGENT_STORE);
    under other launchers that set the same variables rank 0 hosts it.
    """
    environ = os.environ if environ is None else environ
    try:
        from torch.distributed import PrefixStore
    except ImportError as error:
        raise BackendError(
            "torchrun's variables are set, but torch cannot be imported: "
            "pip install 'commrt[torch]', or set COMMRT_LAUNCH=mpi or single"
        ) from error
    agent_hosts = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    hosts = rank == 0 and not agent_hosts
    store = tcp_store(where, rank, size, hosts, timeout_s, "MASTER_ADDR:MASTER_PORT")
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"commrt/attempt_{attempt}", store)


def slurm_store(
    rank: int, size: int, timeout_s: float, environ: Mapping[str, str] | None = None
) -> Any:
    """Return the store of a Slurm step, which rank 0 hosts (commrt/launch/slurm.py)."""
    where = slurm.rendezvous(os.environ if environ is None else environ)
    slurm.check_host(*where)
    said = "from Slurm's variables; MASTER_ADDR and MASTER_PORT override it"
    return tcp_store(where, rank, size, rank == 0, timeout_s, said)
