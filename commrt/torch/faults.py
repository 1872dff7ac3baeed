# SPDX-License-Identifier: Apache-2.0
"""What a group has run into, and the program's abort hooks that are told of it.

torch's abort hooks are called as a group ends by a timeout, an error or ``abort()``, so
that a program can write down what it knows: its calls fail by then, and nothing has
been released. Somebody has to see a timeout that nobody waits for: while there are
hooks, the thread of the group's futures looks at every call under way, too.
"""

from __future__ import annotations

import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import ErrorType

from commrt.errors import (
    CommError,
    MismatchError,
    PeerFailedError,
    RevokedError,
    TimeoutError_,
)

if TYPE_CHECKING:
    from commrt.core import Core

__all__ = ["AbortHooks", "GroupFaults"]

Hook = Callable[[], object]
_KINDS: dict[type[CommError], ErrorType] = {
    TimeoutError_: ErrorType.TIMEOUT,
    PeerFailedError: ErrorType.REMOTE_ERROR,
    RevokedError: ErrorType.COMM_ERROR,
    MismatchError: ErrorType.COMM_ERROR,
}


class AbortHooks(dict[int, Hook]):
    """What a program wants to be called when a group ends, by the program's numbers.

    A dict, as every call that is not waited for asks whether there are any.
    """

    def register(self, hook_id: int, hook: Hook) -> None:
        """Take a hook; it replaces one of the same number."""
        self[hook_id] = hook

    def unregister(self, hook_id: int) -> None:
        """Forget a hook, if there is one of this number."""
        self.pop(hook_id, None)

    def call(self) -> None:
        """Call all; one that raises is warned of."""
        for hook in list(self.values()):  # one may unregister itself
            try:
                hook()
            except Exception:  # noqa: BLE001  of the program; the others are called
                warnings.warn(
                    f"an abort hook of a process group raised, and is passed over:\n"
                    f"{traceback.format_exc()}",
                    RuntimeWarning,
                    stacklevel=2,
                )


class GroupFaults:
    """Faults of one communicator of a group.

    Args:
        hooks: the group's.
        ends_late: an operation that runs out of time ends the group, as torch has it
            of groups that can be reconfigured. Else it stays in flight.
    """

    def __init__(
        self, hooks: AbortHooks | None = None, *, ends_late: bool = False
    ) -> None:
        self.hooks = AbortHooks() if hooks is None else hooks
        self._ends_late = ends_late
        self._lock = threading.Lock()
        self._comm: weakref.ref[Core] | None = None
        self._first: ErrorType | None = None
        self._told: set[ErrorType] = set()

    def follow(self, comm: Core) -> None:
        """Take the communicator."""
        self._comm = weakref.ref(comm)  # it owns this, by its requests

    @property
    def error_type(self) -> ErrorType:
        """The kind of what has ended the group, as ``get_error`` returns it."""
        if self._first is not None:
            return self._first
        comm = self._followed()
        if comm is None or not comm.failure:
            return ErrorType.SUCCESS
        return _KINDS[PeerFailedError if comm.failed_by_death else RevokedError]

    def notice(self, error: CommError) -> None:
        """Hear of an error that a call of the group has raised."""
        kind = next((k for of, k in _KINDS.items() if isinstance(error, of)), None)
        if kind is None:
            return
        comm = self._followed()
        is_late = kind is ErrorType.TIMEOUT
        if comm is None or not (is_late or comm.failure) or not self._is_first(kind):
            return
        if is_late and self._ends_late:
            comm.recovery.end(
                f"rank {comm.rank}: an operation timed out, which ends a group that "
                f"can be reconfigured: {str(error).partition('; it stays')[0]}"
            )
        self.hooks.call()

    def notice_abort(self) -> None:
        """Hear that the program has aborted the group."""
        if self._is_first(ErrorType.COMM_ERROR):
            self.hooks.call()

    def _is_first(self, kind: ErrorType) -> bool:
        """Return whether the hooks are to hear of it.

        What ends the group is the last that they hear of. A timeout need not end it.
        """
        with self._lock:
            if self._first is not None or kind in self._told:
                return False
            self._told.add(kind)
            if self._ends_late or kind is not ErrorType.TIMEOUT:
                self._first = kind
        return True

    def _followed(self) -> Core | None:
        return None if self._comm is None else self._comm()
