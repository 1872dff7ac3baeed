# SPDX-License-Identifier: Apache-2.0
"""The link audit: how much slower groups are that send over a network at one time.

ParaDL multiplies the time of a byte by a penalty where several groups share links. Its
authors take it from the machine, such as 2 for two groups that share an adapter. Here
the bytes of every message of every group are laid on the links that it takes. A link
that carries three groups' bytes needs three times as long. The penalty of a group is
the time that its slowest link needs for all groups, over the time that its own slowest
link needs for its own bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commrt.sim.topologies.network import Floats, Ints, Network

__all__ = ["LinkAudit", "link_audit"]


@dataclass(frozen=True)
class LinkAudit:
    """The links of groups that send at one time."""

    penalty: float
    """The factor of the time of a byte: 1 where no group shares a link."""
    link: str
    """The link that holds the slowest group back; empty: there is none."""
    groups: int
    """Groups whose bytes pass it."""

    def __str__(self) -> str:
        if self.penalty == 1 or not self.link:
            return "no link holds a group back for another one"
        return (
            f"{self.groups} groups share the link {self.link}: a byte takes "
            f"{self.penalty:.4g} times as long"
        )


def link_audit(
    network: Network,
    hosts: Ints,
    groups: Sequence[Sequence[int]],
    sources: Ints,
    targets: Ints,
    nbytes: Floats,
) -> LinkAudit:
    """Return what groups of ranks cost each other that send alike at one time.

    Args:
        network: the links.
        hosts: the host of each rank.
        groups: the ranks of each group.
        sources: the sender of each message, numbered within a group.
        targets: its receiver, likewise.
        nbytes: its bytes.
    """
    loads = [
        _loads(network, hosts[np.asarray(group)], sources, targets, nbytes)
        for group in groups
    ]
    # No time where flows do not hinder each other.
    seconds = np.array(loads) / network.links.shared_rate
    together = seconds.sum(axis=0)
    worst = LinkAudit(1.0, "", 0)
    for own in seconds:
        alone = float(own.max(initial=0.0))
        if not alone:
            continue
        shared = np.where(own > 0, together, 0.0)
        slowest = int(shared.argmax())
        penalty = float(shared[slowest]) / alone
        if penalty > worst.penalty * (1 + 1e-9):
            users = int((seconds[:, slowest] > 0).sum())
            worst = LinkAudit(penalty, network.link_name(slowest), users)
    return worst


def _loads(
    network: Network, hosts: Ints, sources: Ints, targets: Ints, nbytes: Floats
) -> Floats:
    """Return the bytes on each link; a pair with several ways uses all alike."""
    load = np.zeros(len(network.links))
    if not len(sources):
        return load
    ways = network.find_ways(hosts[sources], hosts[targets])
    counts = np.diff(ways.of_pair)
    each = np.repeat(nbytes / counts, counts)
    lengths = np.diff(ways.starts)
    # Ways are numbered pair by pair, so each has its own bytes.
    links = ways.links[: int(lengths.sum())]
    np.add.at(load, links, np.repeat(each, lengths))
    return load
