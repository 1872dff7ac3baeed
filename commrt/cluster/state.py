# SPDX-License-Identifier: Apache-2.0
"""Clusters with a name: a folder each, which the process that holds one has locked.

The kernel releases the lock when that process ends, however it ends. So a folder that
nobody has locked is left of a cluster that is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commrt.cluster.building import Cluster
from commrt.cluster.entering import namespace_of
from commrt.cluster.failures import ClusterError
from commrt.cluster.topology import Link, Topology
from commrt.cluster.wiring import Wiring
from commrt.errors import UsageError, shown, suggest
from commrt.files.read import Kind, read_text
from commrt.files.write import write_file

__all__ = [
    "FOLDER",
    "Entry",
    "claimed_name",
    "cluster_names",
    "find_cluster",
    "write_entry",
]

FOLDER = Path("/run/commrt-cluster")
"""Where clusters have their folders."""
_FILE = "state.json"
_KIND = Kind("state of a cluster", "made by commrt.cluster up", 1 << 20, ClusterError)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PATIENCE_S = 2.0
"""Somebody who only looks holds a lock for less."""


@dataclass(frozen=True)
class Entry:
    """A cluster with a name."""

    supervisor: int
    """The process that holds the cluster, and the lock."""
    namespace: int
    """The number of its PID namespace."""
    cluster: Cluster


@contextmanager
def claimed_name(name: str, folder: Path = FOLDER) -> Iterator[Path]:
    """Take a name for a cluster of this process; yield its folder; give it back.

    Raises:
        ClusterError: a cluster has that name, or a folder that is no cluster's.
    """
    place = _place(name, folder)
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    lock = _locked(place)
    try:
        strange = [one.name for one in place.iterdir() if one.name != _FILE]
        if strange:
            raise ClusterError(
                f"{place} has {', '.join(sorted(strange))}, which no cluster left "
                f"there; take another name, or remove the folder"
            )
        try:
            yield place
        finally:
            with suppress(FileNotFoundError):
                place.joinpath(_FILE).unlink()
            place.rmdir()
    finally:
        os.close(lock)


def write_entry(place: Path, cluster: Cluster) -> None:
    """Write down what others need in order to enter a cluster of this process."""
    said = {
        "supervisor": os.getpid(),
        "namespace": namespace_of(cluster.first, "pid"),
        "first": cluster.first,
        "processes": cluster.processes,
        "mtu": cluster.wiring.mtu,
        "burst_nbytes": cluster.wiring.burst_nbytes,
        "topology": asdict(cluster.wiring.topology),
    }
    write_file(place / _FILE, json.dumps(said), mode=0o644)


def find_cluster(name: str, folder: Path = FOLDER) -> Entry:
    """Return the cluster of a name.

    Raises:
        ClusterError: there is none, or it has ended, or what is there is no cluster's.
    """
    place = _place(name, folder)
    if not place.is_dir():
        known = cluster_names(folder)
        hint = suggest(name, known) if known else "; start one by up"
        raise ClusterError(f"no cluster {name!r}{hint}")
    if not _is_held(place):
        raise ClusterError(
            f"cluster {name!r} has ended: its process was killed; start it anew by up"
        )
    entry = _read_entry(place)
    if namespace_of(entry.cluster.first, "pid") != entry.namespace:
        raise ClusterError(
            f"process {entry.cluster.first} is not the one that cluster {name!r} was "
            f"made with: the namespace is somebody else's; end the cluster by down"
        )
    return entry


def cluster_names(folder: Path = FOLDER) -> list[str]:
    """Return the names of all clusters that run."""
    if not folder.is_dir():
        return []
    return sorted(one.name for one in folder.iterdir() if _is_held(one))


def _place(name: str, folder: Path) -> Path:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"name {shown(name)}: expected at most 64 letters, digits, and . _ - inside"
        )
    return folder / name


def _locked(place: Path) -> int:
    """Return a descriptor that holds the lock of a cluster's folder."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        with suppress(FileExistsError):
            place.mkdir(mode=0o755)
        try:
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # the one before has just removed it
        except OSError as error:
            raise ClusterError(
                f"{place} is no folder of a cluster: {error.strerror}; take another "
                f"name"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(place).st_ino == os.fstat(lock).st_ino:
                return lock
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK or time.monotonic() > until:
                os.close(lock)
                raise ClusterError(
                    f"cluster {place.name!r} exists; end it by down, or take another "
                    f"name"
                ) from error
        os.close(lock)


def _is_held(place: Path) -> bool:
    """Return whether a process holds the lock of a folder."""
    try:
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _read_entry(place: Path) -> Entry:
    text = read_text(place / _FILE, _KIND)
    try:
        said: dict[str, Any] = json.loads(text)
        drawn = said["topology"]
        topology = Topology(
            tuple(drawn["hosts"]),
            tuple(drawn["switches"]),
            tuple(
                Link(tuple(one["ends"]), one["rate"], int(one["latency_us"]))
                for one in drawn["links"]
            ),
        )
        burst = said["burst_nbytes"]
        cluster = Cluster(
            Wiring(topology, int(said["mtu"]), None if burst is None else int(burst)),
            int(said["first"]),
            {str(host): int(pid) for host, pid in said["processes"].items()},
        )
        return Entry(int(said["supervisor"]), int(said["namespace"]), cluster)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _KIND.refused(
            place / _FILE, f"{type(error).__name__}: {error}"
        ) from error
