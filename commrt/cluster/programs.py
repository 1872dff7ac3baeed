# SPDX-License-Identifier: Apache-2.0
"""Programs of iproute2 that build networks, run on many commands at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from commrt.cluster.failures import ClusterError

__all__ = ["NEEDED", "check_programs", "check_root", "run_batch"]

NEEDED = ("ip", "tc", "bridge")
_SYSTEM = ("/usr/sbin", "/sbin", "/usr/local/sbin")
"""Where they are, which is not on everybody's PATH."""
_LIMIT_S = 240


def check_root() -> None:
    """Raise ClusterError where this user cannot make namespaces."""
    if os.geteuid() != 0:
        raise ClusterError(
            f"hosts are network namespaces, which only root can make; this is user "
            f"{os.geteuid()}: run it as root"
        )


def check_programs() -> None:
    """Raise ClusterError where a program is missing."""
    missing = [name for name in NEEDED if _found(name) is None]
    if missing:
        raise ClusterError(
            f"the programs {', '.join(missing)} build the network and are not here: "
            f"install iproute2"
        )


def run_batch(program: str, lines: Iterable[str], first: Sequence[str] = ()) -> None:
    """Run commands of one program in this process's network namespace, in order.

    Raises:
        ClusterError: one of them failed, with what the program said.
    """
    commands = [*lines]
    found = _found(program)
    if found is None:
        check_programs()
    if not commands or found is None:
        return
    try:
        done = subprocess.run(
            [found, *first, "-batch", "-"],
            input="\n".join(commands) + "\n",
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{program} does not run: {error}") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        raise ClusterError(
            f"{program} could not build the network: {said}; the kernel needs bridge, "
            f"veth and tbf"
        )


def _found(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(_SYSTEM))
