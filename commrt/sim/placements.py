# SPDX-License-Identifier: Apache-2.0
"""Placements: the host of each rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from commrt.errors import UsageError
from commrt.files.read import Kind, read_text
from commrt.sim.topologies.network import Ints, Network

__all__ = ["machines", "place"]

_FILE = Kind("placement", "a host for each rank, one a line", 4_000_000, UsageError)


def place(network: Network, ranks: int, how: str = "block") -> Ints:
    """Return the number of the host of each rank.

    Args:
        network: the hosts.
        ranks: number of ranks.
        how: ``block`` fills one machine after the other. ``cyclic`` deals ranks out to
            machines in turn. ``random`` or ``random:SEED`` draws hosts, each once.
            ``file:PATH`` reads the name or number of a host for each rank, one a line;
            several ranks may share a host there. Lines that begin with # are skipped.

    Raises:
        UsageError: there are more ranks than hosts, a host is unknown, or the text is
            none of these.
    """
    if ranks < 1:
        raise UsageError(f"{ranks} ranks; expected 1 or more")
    kind, _, rest = how.partition(":")
    if kind == "file":
        return _from_file(network, ranks, Path(rest))
    if ranks > network.num_hosts:
        raise UsageError(
            f"{ranks} ranks on {network.num_hosts} hosts of the {network.name}: "
            f"expected at most one rank a host; take fewer ranks or a larger network, "
            f"or name a host for each rank by file:PATH"
        )
    hosts = np.arange(network.num_hosts, dtype=np.int64)
    if kind == "block" and not rest:
        return hosts[:ranks]
    if kind == "cyclic" and not rest:
        return _in_turn(machines(network), hosts)[:ranks]
    if kind == "random" and (not rest or rest.isdecimal()):
        drawn = np.random.default_rng(int(rest or 0)).permutation(hosts)
        return drawn[:ranks]
    raise UsageError(
        f"placement {how!r}: expected block, cyclic, random, random:SEED or file:PATH"
    )


def machines(network: Network) -> Ints:
    """Return for each host the number of its machine, or of its switch.

    Hosts that are GPUs share a machine. Where every machine is one host, those of one
    switch count as near each other.
    """
    hosts = np.arange(network.num_hosts, dtype=np.int64)
    if network.hosts_per_node > 1:
        return hosts // network.hosts_per_node
    links = network.links
    switch = np.zeros(network.num_hosts, np.int64)
    out = (links.tails >= 0) & (links.tails < network.num_hosts)
    switch[links.tails[out]] = links.heads[out]
    return switch


def _in_turn(machine: Ints, hosts: Ints) -> Ints:
    """Return the hosts so that machines take turns."""
    order = np.argsort(machine, kind="stable")
    # The place of each host among those of its machine.
    starts = np.searchsorted(machine[order], machine[order])
    turn = np.empty_like(hosts)
    turn[order] = np.arange(len(hosts)) - starts
    return hosts[np.lexsort((machine, turn))]


def _from_file(network: Network, ranks: int, path: Path) -> Ints:
    numbers = {network.node_name(host): host for host in range(network.num_hosts)}
    found: list[int] = []
    for number, line in enumerate(read_text(path, _FILE).splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        host = numbers.get(text)
        if host is None and text.isdecimal() and int(text) < network.num_hosts:
            host = int(text)
        if host is None:
            raise UsageError(
                f"{path}, line {number}: no host of the {network.name} is called "
                f"{text[:40]!r}; expected a name such as {network.node_name(0)!r} or a "
                f"number below {network.num_hosts}"
            )
        found.append(host)
    if len(found) < ranks:
        raise UsageError(
            f"{path} names hosts for {len(found)} ranks; expected {ranks} lines"
        )
    return np.array(found[:ranks], np.int64)
