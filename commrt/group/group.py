# SPDX-License-Identifier: Apache-2.0
"""What a communicator says when something goes wrong, and when it refuses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from commrt import _native
from commrt.errors import (
    BackendError,
    ClosedError,
    MismatchError,
    ReductionError,
    RevokedError,
    TimeoutError_,
    TruncationError,
    UsageError,
)
from commrt.job.arena import Arena
from commrt.job.world import FIRST_TAG
from commrt.vocabulary.checks import as_integer, check_timeout

if TYPE_CHECKING:
    from commrt.gloo.relay import GlooRelay
    from commrt.job.world import World

__all__ = ["Guarded", "watch_forks"]


_KINDS: dict[str, type[Exception]] = {
    "backend": BackendError,
    "mismatch": MismatchError,
    "reduction": ReductionError,
    "revoked": RevokedError,
    "truncation": TruncationError,
}


@lru_cache(maxsize=1)
def watch_forks() -> None:
    """Mark the engine as dead in every process that forks from this one."""
    os.register_at_fork(after_in_child=_native.mark_forked)


class Guarded(_native.Group):
    """The part of a communicator that checks its own state and explains failures.

    The native side calls the methods whose names begin with an underscore.
    """

    world: World
    world_ranks: tuple[int, ...]
    identity: int
    node_members: frozenset[int]
    arena: Arena | None
    closed: str | None
    pid: int

    @property
    def timeout_s(self) -> float:
        """Default limit of a wait, in seconds."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = check_timeout(self.name, timeout_s)

    @property
    def is_relayed(self) -> bool:
        """Whether gloo carries messages to ranks on other nodes."""
        return self.world.relay is not None and len(self.node_members) < self.size

    def who_is_missing(self, seq: int) -> str:
        """Return who keeps operation ``seq`` waiting, as far as this node can tell."""
        missing = self.not_started(seq) if self.arena is not None else []
        said = [_have(missing, "on this node", "not started it")] if missing else []
        if self.world.relay is not None and len(self.node_members) < self.size:
            said += self._missing_elsewhere(self.world.relay, seq)
            started = "all ranks have started it and one does not make progress"
            return "; ".join(said) or started
        if said:
            return said[0]
        if len(self.node_members) < self.size:
            return "all ranks of this node have started it; look at the other nodes"
        return "all ranks have started it and one does not make progress"

    def _missing_elsewhere(self, relay: GlooRelay, seq: int) -> list[str]:
        """Return who of other nodes keeps operation ``seq`` waiting; asks them."""
        away = {
            self.world_ranks[r]: r
            for r in range(self.size)
            if r not in self.node_members
        }
        told = relay.started(list(away), FIRST_TAG + 2 * self.identity)
        late, ended, silent = [], [], []
        for at, rank in away.items():
            count = told[at]
            if relay.has_ended(at):
                ended.append(rank)
            elif count is None:
                silent.append(rank)
            elif count <= seq:
                late.append(rank)
        where = "on another node" if len(late + ended + silent) == 1 else "elsewhere"
        said = []
        if late:
            said.append(_have(late, where, "not started it"))
        if ended:
            said.append(_have(ended, where, "ended, or cannot be reached"))
        if silent:
            said.append(_have(silent, where, "not answered when asked"))
        return said

    def check_process(self) -> None:
        if os.getpid() != self.pid:
            raise ClosedError(
                f"{self.name} belongs to process {self.pid}, from which this one was "
                f"forked: memory and messages cannot be shared with it. Use the "
                f"communicator in the parent only, or start workers by 'spawn'"
            )

    def check_usable(self) -> None:
        self.check_process()
        if self.closed is not None:
            raise ClosedError(f"{self.name} was {self.closed}: make a new communicator")
        if self.failure:
            raise RevokedError(
                f"{self.name} failed in an earlier operation ({self.failure}): its "
                f"ranks no longer agree; make a new communicator"
            )

    def check_rank(self, what: str, argument: str, rank: Any) -> int:
        found = as_integer(rank)
        if found is None or not 0 <= found < self.size:
            raise UsageError(
                f"{what}: {argument}={rank!r} is not a rank of {self.name}; expected "
                f"0..{self.size - 1}"
            )
        return found

    def _check_timeout(self, what: str, timeout_s: Any) -> float:
        return check_timeout(what, timeout_s)

    def operation_error(self, what: str, error: str, kind: str) -> Exception:
        return _KINDS[kind](f"{what}, rank {self.rank}: {error}")

    def _stream_on_host(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what}: wait(stream=...) is for device arrays; this operation is on host "
            f"memory, call wait() without a stream"
        )

    def timed_out(
        self, what: str, seq: int, seconds: float, waits_for: str, request: Any = None
    ) -> NoReturn:
        who = waits_for or self.who_is_missing(seq)
        error = TimeoutError_(
            f"{what}, rank {self.rank}: not complete within {seconds:g} s: {who}; it "
            f"stays in flight and its buffers stay alive: wait() for it again (the "
            f"request is in the error's .request), or abort()"
        )
        error.request = request  # type: ignore[attr-defined]
        raise error


def _have(ranks: Sequence[int], where: str, what: str) -> str:
    plural, have = ("s", "have") if len(ranks) > 1 else ("", "has")
    return f"rank{plural} {', '.join(map(str, ranks))} {where} {have} {what}"
