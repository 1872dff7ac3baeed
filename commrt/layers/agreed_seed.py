# SPDX-License-Identifier: Apache-2.0
"""A random number that all ranks get."""

from __future__ import annotations

import numpy as np
import torch

from commrt.comm import Communicator

__all__ = ["agreed_seed"]


def agreed_seed(comm: Communicator | None, *, only_first_draws: bool = False) -> int:
    """Return a number that the first rank draws from torch's generator; collective.

    Args:
        comm: the ranks; None: one rank.
        only_first_draws: True: the generators of other ranks stay as they are. False:
            each rank draws, so that generators which began alike stay alike.

    It lies in 0 to 2^48 - 1. torch's default device does not matter: the generator is
    that of the host. Bytes: a ``bcast`` of 8; one rank sends nothing.
    """
    seed = np.zeros(1, np.int64)
    if comm is None or comm.rank == 0 or not only_first_draws:
        seed[0] = int(torch.randint(2**48, (), device="cpu"))
    if comm is not None and comm.size > 1:
        comm.bcast(seed, root=0)
    return int(seed[0])
