# SPDX-License-Identifier: Apache-2.0
"""Options of ``commrt.run`` for ranks on several hosts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from commrt.errors import UsageError
from commrt.launch.mpiexec import child_environment
from commrt.running.hosts import parse_hosts
from commrt.running.job_on_hosts import JobOnHosts, Launch
from commrt.running.remote import Shell

__all__ = [
    "add_options_of_hosts",
    "check_no_hosts",
    "run_on_hosts",
    "variables_for_hosts",
]

_PASSED_ON = ("COMMRT_", "GLOO_", "NCCL_", "OMP_", "PYTHONPATH")
"""Beginnings of variables that ranks get without a word."""
_NAMES = ("ssh", "python", "interface", "variables", "host_timeout")
_SSH = "ssh"
_TIMEOUT_S = 60.0
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 10.0, 86_400.0
"""A host says every 5 seconds that it is there."""


def add_options_of_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    hosts = parser.add_argument_group("ranks on several hosts")
    hosts.add_argument(
        "--hosts",
        metavar="H1,H2:SLOTS",
        help="start ranks on these hosts, one or SLOTS on each, through a remote shell",
    )
    hosts.add_argument(
        "--ssh",
        metavar="CMD",
        help="the remote shell, as 'ssh -p 2222'; it gets a host's name and a command "
        "(ssh)",
    )
    hosts.add_argument(
        "--python", metavar="PATH", help="the interpreter on each host (this one)"
    )
    hosts.add_argument(
        "--interface",
        metavar="NAME",
        help="the network interface of each host by which ranks reach each other; "
        "nothing listens at others",
    )
    hosts.add_argument(
        "-x",
        dest="variables",
        action="append",
        metavar="NAME[=VALUE]",
        help="pass this variable on to the ranks, as those of commrt, gloo, NCCL and "
        "OpenMP are",
    )
    hosts.add_argument(
        "--host-timeout",
        type=float,
        metavar="SECONDS",
        help="a host that has said nothing for so long is lost, and its job ends (60)",
    )


def check_no_hosts(said: argparse.Namespace) -> None:
    """Raise UsageError where there are options of hosts, and no hosts."""
    for name in _NAMES:
        if getattr(said, name) is not None:
            option = "-x" if name == "variables" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} says nothing without --hosts; leave it out")


def variables_for_hosts(asked: Sequence[str]) -> dict[str, str]:
    """Return the variables that ranks on hosts get from the launcher's own.

    Raises UsageError where one is asked for that is not set.
    """
    own = child_environment(sys.executable)
    found = {name: own[name] for name in own if name.startswith(_PASSED_ON)}
    for word in asked:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in own):
            raise UsageError(
                f"-x {word}: expected the name of a variable that is set here, or "
                f"NAME=VALUE"
            )
        found[name] = value if equals else own[name]
    return found


def run_on_hosts(said: argparse.Namespace, launch: Launch) -> int:
    """Run a job on the hosts that the options name; return its exit status.

    Raises UsageError where they are wrong, BackendError where a host does not answer.
    """
    if said.restarts:
        raise UsageError(
            "--restarts starts ranks of this machine again, not those of --hosts; "
            "leave one of them out, or start a process with COMMRT_JOIN=1 by hand"
        )
    timeout_s = _TIMEOUT_S if said.host_timeout is None else said.host_timeout
    if not _LEAST_TIMEOUT_S <= timeout_s <= _MOST_TIMEOUT_S:
        raise UsageError(
            f"--host-timeout {timeout_s:g}: expected {_LEAST_TIMEOUT_S:g} to "
            f"{_MOST_TIMEOUT_S:g} seconds"
        )
    hosts = parse_hosts(said.hosts, said.ranks)
    shell = Shell.of(
        _SSH if said.ssh is None else said.ssh,
        said.python or sys.executable,
        said.interface,
        timeout_s,
    )
    return JobOnHosts(hosts, shell, launch).run()
