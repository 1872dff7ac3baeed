# SPDX-License-Identifier: Apache-2.0
"""Exceptions for the results of NCCL's calls."""

from __future__ import annotations

from commrt import _native
from commrt.errors import (
    BackendError,
    ClosedError,
    CommError,
    PeerFailedError,
    RevokedError,
    TimeoutError_,
)

__all__ = ["ABORTED", "CLOSED", "FAILED", "IN_PROGRESS", "LIVE", "SUCCESS", "error_for"]

# NcclComm::State
LIVE, FAILED, ABORTED, CLOSED = range(4)
# ncclResult_t, and NcclOutcome below zero
SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7
_TIMED_OUT, _INTERRUPTED, _UNUSABLE, _BUSY, _MISSING = -1, -2, -3, -4, -5


def error_for(
    native: _native.NcclComm, code: int, what: str, where: str, timeout_s: float
) -> CommError:
    """Return the error for ``code`` of the call ``what`` on communicator ``where``."""
    start = f"{what} on {where}, rank {native.rank} of {native.size}"
    if code == _TIMED_OUT:
        if native.state == LIVE:
            rest = (
                "it stays in progress: wait() goes on waiting, abort() gives the "
                "communicator up"
            )
        else:
            rest = "it is half done, so the communicator is lost: abort() it"
        return TimeoutError_(
            f"{start}: NCCL had not taken it up after {timeout_s:g} s. A peer may be "
            f"missing; {rest}"
        )
    if code == _BUSY:
        return TimeoutError_(
            f"{start}: another thread was using the communicator for {timeout_s:g} s; "
            f"call it from one thread"
        )
    if code == _INTERRUPTED:
        return RevokedError(
            f"{start}: another thread aborts the communicator; make a new one"
        )
    if code == _MISSING:
        return BackendError(
            f"{start}: this NCCL has no such function; install a newer one"
        )
    if code == _UNUSABLE:
        return _unusable(native, start)
    said = native.describe(code)
    if code == REMOTE_ERROR:
        return PeerFailedError(
            f"{start}: {said}. A peer or the network failed: abort() on all ranks, "
            f"then make a new communicator"
        )
    return BackendError(
        f"{start}: NCCL failed: {said}. The communicator is lost: abort() it and make "
        f"a new one; NCCL_DEBUG=WARN tells more"
    )


def _unusable(native: _native.NcclComm, start: str) -> CommError:
    if native.state == FAILED:
        first = native.error
        why = native.describe(first) if first else "a deadline passed half-way"
        return RevokedError(
            f"{start}: the communicator failed earlier ({why}): abort() it and make a "
            f"new one"
        )
    how = "aborted" if native.state == ABORTED else "closed"
    return ClosedError(f"{start}: the communicator was {how}; make a new one")
