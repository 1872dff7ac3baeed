# SPDX-License-Identifier: Apache-2.0
"""Words for the end of a rank, and the exit status of a job."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from commrt.launch.mpiexec import last_words

__all__ = ["KEPT_NBYTES", "describe_end", "status_of_job"]

KEPT_NBYTES = 8192
"""So much of what a rank prints last as errors is looked at for the reason."""


def describe_end(
    rank: int, size: int, process: str, code: int, tail: bytes, forwarded: int
) -> str:
    """Return which rank failed, how and why.

    Args:
        rank: the rank.
        size: ranks in all.
        process: which process it was, and on which host.
        code: its exit status, or minus the signal that has killed it.
        tail: what it has printed last as errors.
        forwarded: the signal that told the job to end, or 0.
    """
    if forwarded:
        how = f"ended after {signal.Signals(forwarded).name} was forwarded to it"
    elif code < 0:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    else:
        how = f"ended with exit status {code}"
    why = "" if code < 0 or forwarded else last_words(tail.decode(errors="replace"))
    return f"rank {rank} of {size} ({process}) {how}{f': {why}' if why else ''}"


def status_of_job(codes: Sequence[int], size: int, *, forgives_kills: bool) -> int:
    """Return the exit status of a job.

    Args:
        codes: those of ranks that failed, in order; minus a signal's number for one
            that was killed.
        size: ranks in all.
        forgives_kills: True if ranks that were killed do not count where another one
            ended well.
    """
    if forgives_kills:
        own = [code for code in codes if code > 0]
        codes = own if own or len(codes) < size else codes
    first = codes[0] if codes else 0
    return 128 - first if first < 0 else first
