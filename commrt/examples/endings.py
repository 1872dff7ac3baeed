# SPDX-License-Identifier: Apache-2.0
"""The end of an example in which one rank alone has raised an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from commrt.comm import Communicator
from commrt.errors import ClosedError, RevokedError

__all__ = ["ending_together"]


@contextmanager
def ending_together(comm: Communicator | None) -> Iterator[None]:
    """End the calls of all ranks where the body raises on one of them.

    The other ranks may wait for this one in a collective, also of a communicator that
    was made from this one. They raise RevokedError at once, which says what this rank
    has raised. Without it they would wait until their deadline.

    Args:
        comm: the ranks; None where their calls are not commrt's, and nothing is done.
    """
    try:
        yield
    except RevokedError:  # another rank has told all of them
        raise
    except Exception as error:
        if comm is not None:
            with suppress(ClosedError):
                comm.revoke(f"rank {comm.rank}: {type(error).__name__}: {error}")
        raise
