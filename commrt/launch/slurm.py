# SPDX-License-Identifier: Apache-2.0
"""The meeting point of a Slurm step's ranks, from the variables of srun alone."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping

from commrt.errors import UsageError

__all__ = ["check_host", "hosts", "rendezvous", "tasks_on_node"]

_FIRST_PORT, _PORTS = 20000, 12000
"""First port and number of ports, below those that Linux gives to whoever asks for
any."""
_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def hosts(nodelist: str) -> Iterator[str]:
    """Yield the names of a list such as ``gpu[01-03,7],login``, in order."""
    parts = _PART.findall(nodelist.replace(" ", ""))
    if ",".join(parts) != nodelist.replace(" ", "") or not parts:
        raise UsageError(
            f"Slurm's list of nodes is {nodelist!r}, which cannot be read: set "
            f"MASTER_ADDR to the host of rank 0, and MASTER_PORT"
        )
    for part in parts:
        yield from _expanded(part, nodelist)


def _expanded(part: str, whole: str) -> Iterator[str]:
    """Yield the names that one entry with any number of brackets stands for."""
    found = _BRACKETS.search(part)
    if found is None:
        yield part
        return
    for piece in found[1].split(","):
        numbers = _RANGE.fullmatch(piece)
        first, last = (numbers[1], numbers[2] or numbers[1]) if numbers else ("1", "0")
        if int(last) < int(first):
            raise UsageError(
                f"Slurm's list of nodes is {whole!r}, in which {piece!r} is neither a "
                f"number nor a range: set MASTER_ADDR to the host of rank 0, and "
                f"MASTER_PORT"
            )
        for number in range(int(first), int(last) + 1):
            middle = str(number).zfill(len(first))
            yield from _expanded(
                part[: found.start()] + middle + part[found.end() :], whole
            )


def rendezvous(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of rank 0, the same on all ranks of the step.

    MASTER_ADDR and MASTER_PORT count where they are set. Otherwise rank 0 lies on the
    first node of the step's list, and the port follows from the numbers of job and
    step, as nothing can be said before the ranks have met. A step of one node needs no
    name of it, which only Slurm may know.
    """
    host = environ.get("MASTER_ADDR")
    if not host and environ.get("SLURM_STEP_NUM_NODES") == "1":
        host = "127.0.0.1"
    if not host:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST")
        if not nodes:
            raise UsageError(
                "srun has set neither SLURM_STEP_NODELIST nor SLURM_NODELIST, so "
                "nobody knows where rank 0 is: set MASTER_ADDR and MASTER_PORT"
            )
        host = next(hosts(nodes))
    given = environ.get("MASTER_PORT")
    return host, _number("MASTER_PORT", given) if given else _port(environ)


def check_host(host: str, port: int) -> None:
    """Raise UsageError where nobody knows the name of rank 0's host.

    A store would go on asking for it until the ranks' limit has passed.
    """
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise UsageError(
                f"Slurm says that rank 0 is on {host!r}, and no host of that name is "
                f"known here ({error}): set MASTER_ADDR to its address, for all ranks"
            ) from error


def tasks_on_node(environ: Mapping[str, str]) -> str | None:
    """Return the number of the step's tasks on this node; None if Slurm does not say.

    ``SLURM_STEP_TASKS_PER_NODE`` is a list such as ``2(x3),1``, in order of the nodes.
    """
    node = environ.get("SLURM_NODEID", "")
    counts: list[str] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = _COUNT.fullmatch(part)
        if found is None:
            return None
        counts += [found[1]] * int(found[2] or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def _port(environ: Mapping[str, str]) -> int:
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "")
    found = _RANGE.match(reserved)
    if found is not None:
        return int(found[1])
    job = _number("SLURM_JOB_ID", environ.get("SLURM_JOB_ID", "0"))
    step = _number("SLURM_STEP_ID", environ.get("SLURM_STEP_ID", "0"))
    return _FIRST_PORT + (31 * job + step) % _PORTS


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name} is {text!r}, not a number: start the program with srun, or unset "
            f"it"
        ) from None
