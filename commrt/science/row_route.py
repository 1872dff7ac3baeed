# SPDX-License-Identifier: Apache-2.0
"""The way of rows to other ranks, and of answers back to where the rows came from."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

import numpy as np

from commrt.comm import Communicator
from commrt.request import Request
from commrt.science.rows import Floats, Ints

__all__ = ["Coming", "RowRoute", "exchanged"]

Rows = TypeVar("Rows", Floats, Ints)


class RowRoute:
    """The way of a rank's rows to the ranks that it chooses; for any number of trips.

    Args:
        comm: the ranks; one alone sends nothing.
        ranks: (rows,), int64: where each row goes.

    Collective. Bytes: an ``alltoall`` of 8 for each rank; then each trip is an
    ``alltoallv`` of the rows' bytes, those that stay included.
    """

    def __init__(self, comm: Communicator, ranks: Ints) -> None:
        self._comm = comm
        self._order = np.argsort(ranks, kind="stable")
        sends = np.bincount(ranks, minlength=comm.size).astype(np.int64)
        recvs = sends
        if comm.size > 1:
            recvs = np.empty_like(sends)
            comm.alltoall(sends, out=recvs)
        self._sends, self._recvs = sends, recvs

    @property
    def sources(self) -> Ints:
        """The rank that each arriving row comes from."""
        return np.repeat(np.arange(self._comm.size), self._recvs)

    def there(self, rows: Rows) -> Rows:
        """Return the rows that arrive: by their source's rank, then as they were."""
        return exchanged(self._comm, rows[self._order], self._sends, self._recvs)

    def back(self, answers: Rows) -> Rows:
        """Return an answer for each of this rank's rows, in the order of these.

        Args:
            answers: one for each row that has arrived, in that order.
        """
        return self.start_back(answers).wait()

    def start_back(self, answers: Rows) -> Coming[Rows]:
        """Start ``back``, and return what waits for it."""
        came: Rows = np.empty((len(self._order), *answers.shape[1:]), answers.dtype)
        request = None
        if self._comm.size > 1:
            request = _started(self._comm, answers, self._recvs, self._sends, came)
        else:
            came[:] = answers
        return Coming(came, self._order, request)


class Coming(Generic[Rows]):
    """Answers that are on their way."""

    def __init__(self, came: Rows, order: Ints, request: Request | None) -> None:
        self._came: Rows = came
        self._order, self._request = order, request

    def wait(self) -> Rows:
        """Return the answers, in the order of the rows that they are for."""
        if self._request is not None:
            self._request.wait()
        found: Rows = np.empty_like(self._came)
        found[self._order] = self._came
        return found


def exchanged(comm: Communicator, rows: Rows, sends: Ints, recvs: Ints) -> Rows:
    """Return the rows that come for those that leave; collective, an ``alltoallv``.

    Args:
        rows: sorted by the rank that they go to.
        sends, recvs: rows for each rank, and from each.
    """
    if comm.size == 1:
        return rows
    out: Rows = np.empty((int(recvs.sum()), *rows.shape[1:]), rows.dtype)
    _started(comm, rows, sends, recvs, out).wait()
    return out


def _started(
    comm: Communicator, rows: Rows, sends: Ints, recvs: Ints, out: Rows
) -> Request:
    each = math.prod(rows.shape[1:])
    request: Request = comm.alltoallv(
        np.ascontiguousarray(rows).reshape(-1),
        send_counts=tuple((sends * each).tolist()),
        recv_counts=tuple((recvs * each).tolist()),
        out=out.reshape(-1),
        nonblocking=True,
    )
    return request
