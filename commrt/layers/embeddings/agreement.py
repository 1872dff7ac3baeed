# SPDX-License-Identifier: Apache-2.0
"""A comparison of the arguments with which ranks make a layer."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from commrt.comm import Communicator
from commrt.errors import UsageError

__all__ = ["Arguments", "check_alike"]

_NBYTES = 8


class Arguments(NamedTuple):
    """Arguments that all ranks must give alike; equal ones have one ``repr``."""

    tables: object
    shards: object
    types: object
    """The rows' type, and whether gradients are sparse."""
    axes: object
    """Names and lengths of the grid's axes."""


def check_alike(comm: Communicator | None, own: Arguments | None) -> None:
    """Raise UsageError on all ranks where one has other arguments; collective.

    Args:
        comm: the ranks; None: one rank, and nothing is compared.
        own: of this rank; None: it has refused them.

    Bytes: an ``allgather`` of 40 for each rank.
    """
    if comm is None:
        return
    names = Arguments._fields
    mine = np.zeros(1 + len(names), np.int64)
    mine[0] = own is None
    if own is not None:
        mine[1:] = [_digest(each) for each in own]
    every = np.empty((comm.size, len(mine)), np.int64)
    comm.allgather(mine, out=every)
    refused = every[:, 0].nonzero()[0].tolist()
    if refused:
        raise UsageError(
            f"ShardedEmbeddingBags: rank {refused[0]} refuses its arguments, so no "
            f"rank makes the layer; that rank's own error says why"
        )
    for number, name in enumerate(names, 1):
        others = (every[:, number] != every[0, number]).nonzero()[0].tolist()
        if others:
            raise UsageError(
                f"ShardedEmbeddingBags: rank {others[0]} has other {name} than rank 0, "
                f"so no rank makes the layer; give the same tables, placement, "
                f"limit_nbytes, dtype and is_sparse on all ranks"
            )


def _digest(fact: object) -> int:
    """Return a number that differs for facts whose ``repr`` differs."""
    digest = blake2b(repr(fact).encode(), digest_size=_NBYTES).digest()
    return int.from_bytes(digest, "little", signed=True)
