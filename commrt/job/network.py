# SPDX-License-Identifier: Apache-2.0
"""The network between the nodes of a job, as its selection table may ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commrt.job.links import LONG_NBYTES, SendRecv, message_costs, worst_of
from commrt.mpi import library
from commrt.select.network import Network, library_of

if TYPE_CHECKING:
    from commrt.job.world import World

__all__ = ["measured_network"]


def measured_network(world: World, sendrecv: SendRecv) -> Network | None:
    """Return the network by a few messages; collective over all ranks of the job.

    Always by messages of the same lengths, so that values can be compared. None where
    the ranks are threads.
    """
    known = world.between_nodes
    if world.native_comms is None and known is not None:  # of the same messages
        return _network(world, known.alpha_us, known.beta_us)
    if world.relay is None and world.native_comms is None:
        return None
    # A rank that is still on its way here would be measured, too.
    world.meet(range(world.size), "network/start")
    mine = message_costs(world, sendrecv, LONG_NBYTES)
    worst = worst_of(world, "network/us", mine)
    return _network(world, worst["alpha"], worst["beta"])


def _network(world: World, alpha_us: float, beta_us: float) -> Network:
    name = "" if world.mpi is None else library.library_name(library.load())
    return Network.measured(library_of(name), alpha_us, beta_us)
