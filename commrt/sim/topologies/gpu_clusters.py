# SPDX-License-Identifier: Apache-2.0
"""Clusters of nodes with several GPUs: NVLink inside, network cards, a fat tree.

A GPU is a host of the network. Its node has a switch of NVLink, to which each GPU has a
cable, and network cards, which GPUs reach over PCIe. The cards are the ports of a fat
tree. *Rail-optimised* wiring puts the i-th cards of many nodes on one switch, so that
equal GPUs of different nodes are one switch apart; *node* wiring puts the cards of a
node side by side.

A message to a node's other GPU goes over NVLink. One to another node leaves by the card
of its GPU; with ``relays`` it first goes over NVLink to the GPU whose card is on the
rail of its destination, as NCCL's PXN does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from commrt.errors import UsageError
from commrt.sim.topologies.fat_trees import FatTree
from commrt.sim.topologies.network import (
    Cable,
    Ints,
    LinkBuilder,
    Network,
    Ways,
    check_count,
    check_links,
    every_way,
    ways_of_columns,
)

__all__ = ["GpuCluster"]


@dataclass(frozen=True)
class GpuCluster:
    """Nodes with GPUs and network cards, whose ports a fat tree joins."""

    gpus: int
    """GPUs of a node."""
    cards: int
    """Network cards of a node; GPUs share them in order."""
    fabric: FatTree
    """The network between cards: its hosts are the cards of all nodes."""
    unit: int
    """Nodes whose cards are wired together: a scalable unit, or a rack."""
    wiring: str = "rail"
    """``rail`` or ``node``."""
    relays: bool = True
    """True if a message goes over NVLink to the GPU on its destination's rail."""
    nvlink: Cable = field(default_factory=lambda: Cable(450.0, 1.0))
    """Between a GPU and the switch of its node."""
    pcie: Cable = field(default_factory=lambda: Cable(55.0, 0.5))
    """Between a GPU and a network card."""

    def network(self) -> Network:
        """Return the network."""
        nodes = self._num_nodes()
        gpus, cards = self.gpus, self.cards
        num_hosts, num_ports = nodes * gpus, nodes * cards
        per_card = gpus // cards
        first_switch, first_card = num_hosts, num_hosts + nodes
        build, hosts = LinkBuilder(), np.arange(num_hosts)
        check_links(4 * num_hosts)
        out, back = build.both(hosts, first_switch + hosts // gpus, self.nvlink)
        card = hosts // gpus * cards + hosts % gpus // per_card
        rise, fall = build.both(hosts, first_card + card, self.pcie)
        # Ports of the tree lie in the order in which its switches take them.
        node, rail = np.divmod(np.arange(num_ports), cards)
        port = np.arange(num_ports)
        if self.wiring == "rail":
            unit, place = np.divmod(node, self.unit)
            port = (unit * cards + rail) * self.unit + place
        card_at = np.empty(num_ports, np.int64)
        card_at[port] = np.arange(num_ports)
        tree = self.fabric.wire(build, first_card + card_at, first_card + num_ports)

        def ways(source: Ints, target: Ints) -> Ways:
            each = tree.num_ways
            source, target, turn = every_way(source, target, each)
            near = source // gpus == target // gpus
            far = ~near
            by = source
            if self.relays:
                same_rail = (
                    source - source % gpus + target % gpus // per_card * per_card
                )
                of_card = card[source] % cards == card[target] % cards
                by = np.where(far & ~of_card, same_rail, source)
            relayed = (near & (source != target)) | (by != source)
            onto = np.where(near, target, by)
            between = tree.columns(port[card[by]], port[card[target]], turn)
            columns = [
                np.where(relayed, out[source], -1),
                np.where(relayed, back[onto], -1),
                np.where(far, rise[by], -1),
                *(np.where(far, links, -1) for links in between),
                np.where(far, fall[target], -1),
            ]
            return ways_of_columns(columns, len(source) // each, each)

        def name(number: int) -> str:
            if number < num_hosts:
                return "n{}g{}".format(*divmod(number, gpus))
            if number < first_card:
                return f"n{number - first_switch}nvlink"
            if number < first_card + num_ports:
                return "n{}nic{}".format(*divmod(number - first_card, cards))
            return tree.switch_name(number)

        return Network(
            f"{nodes} nodes with {gpus} GPUs and {cards} cards, {self.wiring} wiring",
            *(num_hosts, tree.num_nodes, name, build.links(), ways),
            (0, first_switch, first_card, *tree.first[1:]),
            hosts_per_node=gpus,
        )

    def _num_nodes(self) -> int:
        for what in ("gpus", "cards", "unit"):
            check_count(what, getattr(self, what))
        ports = self.fabric.check()
        if self.gpus % self.cards or ports % self.cards:
            raise UsageError(
                f"{self.gpus} GPUs and {ports} ports of the fabric on {self.cards} "
                f"cards a node; expected multiples of the cards"
            )
        nodes = ports // self.cards
        if self.wiring not in ("rail", "node"):
            raise UsageError(f"wiring is {self.wiring!r}; expected rail or node")
        if nodes % self.unit:
            raise UsageError(
                f"{nodes} nodes in units of {self.unit}; expected a multiple of it"
            )
        return nodes
