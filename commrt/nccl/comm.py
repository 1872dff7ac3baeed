# SPDX-License-Identifier: Apache-2.0
"""An NCCL communicator: made, split, adopted, called, closed or given up.

Streams and memory are integers here; who owns them is the caller's affair.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from commrt import _native, env
from commrt.bootstrap.base import Bootstrap
from commrt.errors import ClosedError, UsageError
from commrt.nccl.adoption import pointer_of
from commrt.nccl.config import GroupShape, NcclConfig
from commrt.nccl.features import require, version_text
from commrt.nccl.joining import Joining
from commrt.nccl.libnccl import Library, library
from commrt.nccl.operations import NcclOperations
from commrt.nccl.outcomes import ABORTED, CLOSED, FAILED, IN_PROGRESS, LIVE, SUCCESS
from commrt.vocabulary.limits import check_timeout

__all__ = ["NcclComm", "NcclConfig"]

_STATES = {LIVE: "live", FAILED: "failed", ABORTED: "aborted", CLOSED: "closed"}


class NcclComm(NcclOperations):
    """One rank of an NCCL communicator.

    Not blocking (unless configured so): every call returns once NCCL has put its work
    into the stream, and gives up at a deadline. NCCL's work of one device must be
    issued in one order, so the calls of one communicator are serialised; those of
    several communicators on one device must not come from several threads at once.
    """

    def __init__(
        self,
        native: _native.NcclComm,
        taken: Library,
        config: NcclConfig,
        name: str,
        source: Any = None,
    ) -> None:
        """Use ``create``, ``adopt`` or ``split`` instead."""
        super().__init__(native, taken.version, name)
        self.library = taken
        self.config = config
        self._source = source
        self._is_handed_over = False
        self.shape_groups(GroupShape.of(native.size))

    @classmethod
    def create(
        cls,
        bootstrap: Bootstrap,
        members: Sequence[int] | None = None,
        *,
        config: NcclConfig | None = None,
        taken: Library | None = None,
        timeout_s: float | None = None,
        name: str = "nccl",
        device: Any = None,
    ) -> NcclComm:
        """Return a communicator of ``members``, made over ``bootstrap``.

        Collective over the members. ``device``, or the current CUDA device of this
        thread, becomes the communicator's. Either all members get one, or all raise:
        also those on which nothing went wrong.
        """
        config = config or NcclConfig()
        taken = taken or library()
        if timeout_s is None:
            limit = env.read_float("COMMRT_TIMEOUT_S")
        else:
            limit = check_timeout(name, timeout_s)
        ranks = range(bootstrap.size) if members is None else members
        joining = Joining(bootstrap, list(ranks), config, taken, limit, name, device)
        return cls(joining.join(), taken, config, name)

    @classmethod
    def adopt(
        cls, source: Any, *, taken: Library | None = None, name: str = "adopted"
    ) -> NcclComm:
        """Return a face of somebody else's communicator, which stays theirs.

        ``source`` is a pointer or an object of cupy, nccl4py or torch. It is never
        finalised, destroyed or aborted here, and must not be used elsewhere at the same
        time. Its library must be the one that commrt uses, which is the case where it
        was loaded first.
        """
        taken = taken or library()
        native, code = _native.nccl_adopt(taken.native, pointer_of(source))
        made = cls(native, taken, NcclConfig(), name, source)
        made.check_code(code, "adopt", 0.0)
        return made

    def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        config: NcclConfig | None = None,
        timeout_s: float | None = None,
        name: str | None = None,
    ) -> NcclComm | None:
        """Return a communicator of the ranks with the same ``color``, by ``key``.

        Collective over all ranks of this one. With ``color=None`` a rank takes part and
        gets None.
        """
        require("split", self.version, "split")
        if color is not None and color < 0:
            raise UsageError(f"split: color={color} must be 0 or more, or None")
        config = config or self.config
        options = config.options(self.version)
        limit = self._limit(timeout_s)
        colored = -1 if color is None else color
        child, code = self._native.split(colored, key, options, limit)
        self.check_code(code, "split", limit)
        if child is None:
            return None
        made = type(self)(
            child, self.library, config, name or f"{self.name}.split[{color}]"
        )
        made.wait(timeout_s)
        return made

    def hand_over(self) -> _native.NcclComm:
        """Return NCCL's communicator: the caller must end it, not this object."""
        self._is_handed_over = True
        return self._native

    @property
    def state(self) -> str:
        """``live``, ``failed``, ``aborted`` or ``closed``."""
        return _STATES[self._native.state]

    @property
    def pointer(self) -> int:
        """The ``ncclComm_t``, for other libraries."""
        if self._native.state in (ABORTED, CLOSED):
            raise ClosedError(
                f"{self.name}: the communicator was {self.state}, and has no pointer "
                f"any more; make a new one"
            )
        return self._native.pointer

    @property
    def owned(self) -> bool:
        """True if it was made here: an adopted one is its owner's to destroy."""
        return self._native.owned

    @property
    def device(self) -> int:
        """The number of its CUDA device."""
        return self._native.device

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all calls so far are in their streams, not until they are done."""
        limit = self._limit(timeout_s)
        self.check_code(self._native.wait(limit), "wait", limit)

    def poll(self) -> bool:
        """Return whether all calls so far are in their streams; raise what failed."""
        code = self._native.poll()
        if code != IN_PROGRESS:
            self.check_code(code, "poll", 0.0)
        return bool(code == SUCCESS)

    def close(self, timeout_s: float | None = None) -> None:
        """Finalise and destroy it, with all other ranks; a failed one is aborted.

        An adopted one is only forgotten. Idempotent. After a TimeoutError_ it is still
        there, and ``abort`` gives it up.
        """
        if self._native.state in (ABORTED, CLOSED) or self._is_forked():
            return
        if not self.owned:
            self._native.forget()
            self._source = None
            return
        if self._native.state == FAILED:
            self.abort(timeout_s)
            return
        limit = self._limit(timeout_s)
        self.check_code(self._native.finalize(limit), "close", limit)
        code = self._native.destroy(limit)
        if code != IN_PROGRESS:
            self.check_code(code, "close", limit)

    def abort(self, timeout_s: float | None = None) -> bool:
        """Give it up, with what it has in its streams; return whether NCCL is done.

        NCCL aborts in a thread of its own, which is left behind where it sticks. Every
        other rank must abort as well. May be called while another thread waits in a
        call, which then raises RevokedError.
        """
        if not self.owned:
            raise UsageError(
                f"{self.name}: an adopted communicator is its owner's to abort; abort "
                f"it there"
            )
        if self._native.state in (ABORTED, CLOSED) or self._is_forked():
            return True
        code = self._native.abort(self._limit(timeout_s))
        return bool(code != IN_PROGRESS)

    def _is_forked(self) -> bool:
        """Return whether this is a child process, in which NCCL must not be touched."""
        return os.getpid() != self._pid

    def __enter__(self) -> NcclComm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Peers of a rank that failed may never finalise.
        if kind is not None and self.owned:
            self.abort()
        else:
            self.close()

    def __del__(self) -> None:
        # Destroying here would communicate wherever the garbage collector runs.
        native = getattr(self, "_native", None)
        if native is None or not native.owned or native.state in (ABORTED, CLOSED):
            return
        if self._is_handed_over or self._is_forked():
            return
        warnings.warn(
            f"{self.name}: the NCCL communicator was dropped without close() or "
            f"abort(); its memory stays until the process ends",
            ResourceWarning,
            stacklevel=2,
        )

    def __repr__(self) -> str:
        return (
            f"<NcclComm {self.name}: rank {self.rank} of {self.size}, {self.state}, "
            f"NCCL {version_text(self.version)}>"
        )
