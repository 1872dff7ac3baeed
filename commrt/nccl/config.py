# SPDX-License-Identifier: Apache-2.0
"""Configuration of an NCCL communicator, and the shape of its groups of messages."""

from __future__ import annotations

from dataclasses import dataclass

from commrt import _native
from commrt.nccl.features import require

__all__ = ["GroupShape", "NcclConfig"]


@dataclass(frozen=True)
class NcclConfig:
    """Values for ``ncclConfig_t``. None: NCCL's own default."""

    blocking: bool = False
    """True if NCCL's calls may block: it then starts no thread for each call, which
    costs 80 us. But a call that first connects waits for its peers, without a limit.
    Those of the backend are given up at their deadlines where commrt's progress thread
    runs, by an abort from another thread; NCCL promises only for calls that do not
    block that this ends them."""
    cga_cluster_size: int | None = None
    """Thread blocks of a cluster."""
    min_ctas: int | None = None
    """Least number of thread blocks."""
    max_ctas: int | None = None
    """Largest number of thread blocks; 1 or 2 where ranks share a GPU."""
    split_share: bool | None = None
    """True if communicators that are split off share resources with this one."""
    traffic_class: int | None = None
    """Traffic class of the network; from 2.26 on."""
    cta_policy: int | None = None
    """0 default, 1 efficiency, 2 none (copy engines); from 2.27 on."""
    nvls_ctas: int | None = None
    """Thread blocks for NVLink SHARP; from 2.27 on."""
    max_p2p_peers: int | None = None
    """Number of peers that messages go to at a time; from 2.30 on."""
    net_name: str = ""
    """The network to use."""
    comm_name: str = ""
    """A name for NCCL's own messages; from 2.27 on."""

    def options(self, version: int) -> _native.NcclOptions:
        """Return the engine's form; BackendError: ``version`` lacks a field."""
        share = None if self.split_share is None else int(self.split_share)
        options = _native.NcclOptions(
            blocking=self.blocking,
            cga_cluster_size=self.cga_cluster_size,
            min_ctas=self.min_ctas,
            max_ctas=self.max_ctas,
            split_share=share,
            traffic_class=self.traffic_class,
            cta_policy=self.cta_policy,
            nvls_ctas=self.nvls_ctas,
            max_p2p_peers=self.max_p2p_peers,
            net_name=self.net_name,
            comm_name=self.comm_name,
        )
        unknown = options.unknown_to(version)
        if unknown:
            require(unknown, version, f"NcclConfig({unknown}=...)")
        return options


@dataclass(frozen=True)
class GroupShape:
    """Most messages in one group of NCCL calls; equal on all ranks.

    NCCL's documentation allows 2048 calls per group, but fewer are safe. NCCL launches
    a group as one kernel only while its batches fit into 4 KiB of kernel arguments,
    which is 252 batches of 16 bytes. The rest goes into a second kernel, by each rank's
    own order, and then ranks can wait for each other's second kernels.

    One message to each of 8 peers takes up to one batch on each of the (at most 32)
    channels of a peer. The next message between the same two ranks takes others. So 6
    times 8 messages each way fit, with room for the one more that NCCL wants.
    """

    distances: int
    """Distances from sender to receiver, (receiver - sender) modulo the ranks."""
    messages: int
    """Messages from one rank to another one."""

    @classmethod
    def of(cls, size: int) -> GroupShape:
        """Return the shape for ``size`` ranks."""
        distances = min(size, _ROUNDS * _PEERS_PER_BATCH)
        rounds = -(-distances // _PEERS_PER_BATCH)
        return cls(distances, max(1, _ROUNDS // rounds))

    @property
    def most_calls(self) -> int:
        """The largest number of sends and receives in a group."""
        return 2 * self.distances * self.messages


_ROUNDS = 6
_PEERS_PER_BATCH = 8
