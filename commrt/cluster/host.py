# SPDX-License-Identifier: Apache-2.0
"""One host: a process with namespaces of its own, which holds them until it is ended.

A host shares programs and files with this machine. Its own are: name, /etc/hosts,
/etc/hostname and /etc/resolv.conf, network, System V memory, /dev/shm, /var/tmp, /proc
and /sys.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from commrt.cluster import kernel
from commrt.cluster.programs import run_batch
from commrt.cluster.wiring import INTERFACE, Wiring, hosts_file
from commrt.files.write import write_file

__all__ = ["AGENT", "TEMPORARY", "furnish", "separate", "write_agent"]

TEMPORARY = "/var/tmp"
"""The folder that programs on a host find in TMPDIR."""
AGENT = f"{TEMPORARY}/commrt-cluster-agent"
"""The program on each host that starts what a launcher wants on another host."""
_SHARED_MEMORY = "/dev/shm"
_CGROUPS = "/sys/fs/cgroup"
_NO_NAMESERVER = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
"""The network's own servers are out of reach: programs would wait for their answer."""


def separate() -> None:
    """Give this process the namespaces of a host."""
    kinds = 0
    for kind in kernel.KINDS_OF_HOST.values():
        kinds |= kind
    kernel.unshare(kinds)
    kernel.make_mounts_private()


def furnish(wiring: Wiring, host: str) -> None:
    """Make this process's namespaces those of one host, whose cable has been laid."""
    kernel.set_hostname(host)
    _mount_files(wiring, host)
    with suppress(OSError):  # of a kernel without IPv6
        write_file(f"/proc/sys/net/ipv6/conf/{INTERFACE}/disable_ipv6", "1")
    run_batch("ip", wiring.host_addresses(host))
    run_batch("tc", wiring.host_rates(host))


def write_agent(processes: Mapping[str, int]) -> None:
    """Write the program that launchers take for a remote shell.

    Args:
        processes: the process that holds each host.
    """
    known = ",".join(f"{host}={pid}" for host, pid in processes.items())
    command = shlex.join([sys.executable, "-m", "commrt.cluster.agent", known])
    write_file(AGENT, f'#!/bin/sh\nexec {command} "$@"\n', mode=0o755)
    os.chmod(AGENT, 0o755)  # whatever the umask


def _mount_files(wiring: Wiring, host: str) -> None:
    # A file system for a moment: what is bound of it stays.
    kernel.mount("tmpfs", TEMPORARY)
    own = {
        "hosts": hosts_file(wiring),
        "hostname": f"{host}\n",
        "resolv.conf": _NO_NAMESERVER,
    }
    for name, text in own.items():
        write_file(f"{TEMPORARY}/{name}", text)
        if Path("/etc", name).is_file():
            kernel.bind(f"{TEMPORARY}/{name}", f"/etc/{name}")
    # The new /sys shows this host's network. Limits of memory and cores stay visible.
    kept = f"{TEMPORARY}/cgroup"
    os.mkdir(kept)
    has_cgroups = os.path.isdir(_CGROUPS)
    if has_cgroups:
        kernel.bind(_CGROUPS, kept)
    kernel.mount("sysfs", "/sys")
    if has_cgroups and os.path.isdir(_CGROUPS):
        kernel.move_mount(kept, _CGROUPS)
    kernel.unmount(TEMPORARY)
    for folder in (TEMPORARY, _SHARED_MEMORY):
        kernel.mount("tmpfs", folder, "mode=1777", can_run=True)
