# SPDX-License-Identifier: Apache-2.0
"""Programs for commrt.hvd on ranks as threads, and what they send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

import commrt.hvd as hvd
from commrt.comm import Communicator
from commrt.local import run

T = TypeVar("T")
NEAR = 1e-12
CONTROL = ".hvd.negotiation"
"""End of the name of communicators for rounds."""


def on_ranks(
    size: int, main: Callable[[], T], *, limit_s: float | None = None, **options: Any
) -> list[T]:
    """Return what a program returns on each rank, between ``init`` and ``shutdown``.

    Args:
        size: number of ranks.
        main: the program.
        limit_s: the communicator's deadline.
        options: of ``init``.
    """
    options = {"fusion_nbytes": 1 << 16, **options}

    def program(comm: Communicator) -> T:
        if limit_s is not None:
            comm.timeout_s = limit_s
        hvd.init(comm, **options)
        try:
            return main()
        finally:
            hvd.shutdown()

    return run(size, program)


def drawn(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Any:
    """Return a rank's tensor: small whole numbers, so that sums are exact."""
    draws = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(-9, 10, shape, generator=draws).to(dtype)


def drawn_of_all(size: int, *shape: int, dtype: torch.dtype = torch.float64) -> Any:
    """Return the tensors of all ranks, stacked."""
    return torch.stack([drawn(rank, *shape, dtype=dtype) for rank in range(size)])


def raised_by(call: Callable[[], Any]) -> BaseException | None:
    """Return what a call raises; None: nothing."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - returned
        return error
    return None


def calls_of(log: Any, *, of_rounds: bool) -> list[Any]:
    """Return the logged collectives of rounds, or of transfers, between marks.

    The marks are barriers of the communicator that the program was given.
    """
    found, marks = [], 0
    for call in log.operations:
        name = call.group.name
        if call.op == "barrier" and ".hvd" not in name:
            marks += 1
        elif marks == 1 and ".hvd" in name and (CONTROL in name) == of_rounds:
            found.append(call)
    assert marks == 2
    return found
