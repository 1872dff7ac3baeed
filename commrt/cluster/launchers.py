# SPDX-License-Identifier: Apache-2.0
"""Programs and variables that start ranks on hosts, one way for each launcher."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from commrt.cluster.host import AGENT, TEMPORARY
from commrt.cluster.runner import Program
from commrt.cluster.wiring import INTERFACE, Wiring
from commrt.errors import UsageError
from commrt.launch.mpiexec import Launcher, find_launcher

__all__ = ["LAUNCHERS", "of_mpiexec", "of_torchrun", "on_hosts", "parse_ranks"]

LAUNCHERS = ("mpiexec", "torchrun")
_PORT = "29500"
_MOST_RANKS = 1024

_OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": INTERFACE,
}
# UCX and libfabric would find the devices of this machine, which hosts do not have.
_MPICH = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": INTERFACE,
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": INTERFACE,
}
_GLOO = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}


def parse_ranks(text: str, hosts: Sequence[str]) -> dict[str, int]:
    """Return how many ranks each host has, from ``2`` or ``2,1,1``; none for 0."""
    words = text.split(",")
    if not all(word.isdecimal() and len(word) < 5 for word in words):
        raise UsageError(f"--ranks {text!r}: expected numbers, as 2 or 2,1,1")
    counts = [int(word) for word in words]
    if len(counts) == 1:
        counts *= len(hosts)
    if len(counts) != len(hosts):
        raise UsageError(
            f"--ranks {text!r} has {len(counts)} numbers, and the cluster has "
            f"{len(hosts)} hosts; give one number for each, or one for all"
        )
    if not 1 <= sum(counts) <= _MOST_RANKS:
        raise UsageError(
            f"--ranks {text!r}: expected 1 to {_MOST_RANKS} ranks in all, not "
            f"{sum(counts)}"
        )
    return {host: count for host, count in zip(hosts, counts, strict=True) if count}


def on_hosts(
    hosts: Sequence[str], argv: Sequence[str], environ: Mapping[str, str]
) -> list[Program]:
    """Return one program for each of some hosts."""
    own = {**environ, "TMPDIR": TEMPORARY}
    return [Program(host, tuple(argv), own) for host in hosts]


def of_mpiexec(
    ranks: Mapping[str, int],
    argv: Sequence[str],
    environ: Mapping[str, str],
    launcher: Launcher | None = None,
    own_options: Sequence[str] = (),
) -> list[Program]:
    """Return the program that starts ranks by MPI's own launcher, on the first host.

    Args:
        ranks: how many ranks each host has.
        argv: the program of a rank.
        environ: its variables; those that steer the network may be set here already.
        launcher: the launcher; by default the first ``mpiexec`` on PATH.
        own_options: options of the launcher, in front of those given here.
    """
    if launcher is None:
        found = shutil.which("mpiexec", path=environ.get("PATH"))
        launcher = find_launcher(found) if found else find_launcher()
    total = str(sum(ranks.values()))
    first = next(iter(ranks))
    if launcher.flavour == "openmpi":
        slots = ",".join(f"{host}:{count}" for host, count in ranks.items())
        options = [
            *("--prtemca", "plm_ssh_agent", AGENT),
            *("--host", slots, "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"),
        ]
        settings = _OPENMPI
    elif launcher.flavour == "mpich":
        slots = ",".join(f"{host}:{count}" for host, count in ranks.items())
        options = ["-launcher", "rsh", "-launcher-exec", AGENT, "-hosts", slots]
        options += ["-iface", INTERFACE]
        settings = _MPICH
    else:
        raise UsageError(
            f"{launcher.mpiexec} is the launcher of {launcher.version!r}; the cluster "
            f"starts ranks by Open MPI's and by MPICH's. Put one of them first on PATH"
        )
    command = [launcher.mpiexec, *own_options, *options, "-n", total, *argv]
    return on_hosts([first], command, {**settings, **environ})


def of_torchrun(
    wiring: Wiring,
    ranks: Mapping[str, int],
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> list[Program]:
    """Return a program for each rank, with the variables that torchrun sets."""
    total = sum(ranks.values())
    programs: list[Program] = []
    for node, (host, count) in enumerate(ranks.items()):
        for local in range(count):
            own = {
                "RANK": str(len(programs)),
                "WORLD_SIZE": str(total),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(count),
                "GROUP_RANK": str(node),
                "MASTER_ADDR": wiring.address(next(iter(ranks))),
                "MASTER_PORT": environ.get("MASTER_PORT", _PORT),
            }
            programs += on_hosts([host], argv, {**_GLOO, **environ, **own})
    return programs
