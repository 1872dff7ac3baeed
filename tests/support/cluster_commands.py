# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.cluster`` for tests, and what a cluster leaves on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pytest

from commrt.cluster.failures import ClusterError
from commrt.cluster.programs import check_programs, check_root
from commrt.launch.mpiexec import Completed, child_environment, run_process

__all__ = ["ClusterCommands", "clusters_in", "machine", "why_no_cluster"]

LIMIT_S = 300
_MARK = "CLUSTER_TEST_MARK"
_TRY = """
from commrt.cluster import kernel
kernel.unshare(kernel.NEW_PID | kernel.NEW_NETWORK | kernel.NEW_MOUNT)
"""


@lru_cache(maxsize=1)
def why_no_cluster() -> str | None:
    """Return why this user cannot make a cluster here; None if he can."""
    try:
        check_root()
        check_programs()
    except ClusterError as error:
        return str(error)
    tried = subprocess.run(
        [sys.executable, "-c", _TRY],
        env=child_environment(sys.executable),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else None


def clusters_in(folder: Path) -> ClusterCommands:
    """Return the command line; skip the test where there can be no cluster."""
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    return ClusterCommands(folder)


@dataclass(frozen=True)
class ClusterCommands:
    """The command line, with a folder of its own for clusters with a name."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A variable of every process that these commands start."""

    def argv(self, line: str, *program: str) -> list[str]:
        """Return the words of a command."""
        command, *options = line.split()
        place = ["--folder", str(self.folder / "clusters")]
        words = [sys.executable, "-m", "commrt.cluster", command, *place, *options]
        return [*words, *(["--", *program] if program else [])]

    def environ(self, **variables: str) -> dict[str, str]:
        """Return the variables for a command."""
        # By -m, Python looks into the current folder first: a clone has the sources
        # there, and no engine.
        safe = {"PYTHONSAFEPATH": "1", _MARK: self.mark}
        return {**child_environment(sys.executable), **safe, **variables}

    def __call__(self, line: str, *program: str, **variables: str) -> Completed:
        """Run a command to its end."""
        return run_process(
            self.argv(line, *program), self.environ(**variables), timeout_s=LIMIT_S
        )

    def start(self, line: str, *program: str) -> subprocess.Popen[str]:
        """Start a command, in a session of its own."""
        return subprocess.Popen(
            self.argv(line, *program),
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> set[int]:
        """Return the processes that these commands have started and that still run."""
        wanted = f"{_MARK}={self.mark}".encode()
        found = set()
        for place in Path("/proc").iterdir():
            if place.name.isdecimal():
                try:
                    if wanted in (place / "environ").read_bytes():
                        found.add(int(place.name))
                except OSError:
                    continue
        return found

    def all_ended(self) -> bool:
        """Return whether no process is left, and so no namespace of one."""
        return not self.processes()


def machine() -> list[str]:
    """Return the mounts and the network interfaces of this machine."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return sorted([*mounts, *os.listdir("/sys/class/net")])
