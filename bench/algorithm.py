# SPDX-License-Identifier: Apache-2.0
"""``--algorithm``: which candidate a command line means, settled before ranks start."""

from __future__ import annotations

from dataclasses import replace

from commrt import backends, env
from commrt.backends.catalog import check_candidate, may_run, offered
from commrt.errors import UsageError, suggest
from commrt.job.arena import pretended_nodes
from commrt.launch.detect import LaunchInfo
from commrt.select.facts import Candidate, CommFacts

__all__ = ["resolve"]

_WITHOUT_MPI = ("torchrun", "run")
"""Launchers whose ranks meet without MPI; those that a benchmark starts meet by it."""


def resolve(
    text: str, coll: str, ranks: int, launch: LaunchInfo, device: str = "cpu"
) -> Candidate:
    """Return the candidate that ``text`` means for ``coll`` on so many ranks.

    ``device`` is where the arrays lie, as in ``-d``.

    ``NAME`` alone is enough where one backend only can run it on these ranks. Raises
    UsageError with the choices for anything that does not exist or cannot run.
    """
    try:
        bare = "/" not in text.partition("{")[0]
        found = Candidate.parse(f"any/{text}" if bare else text)
        here = _backends(coll, found.algorithm, ranks, launch, device)
        if not bare:
            check_candidate(coll, found, ranks)
            if found.backend not in here:
                raise UsageError(
                    f"{found.backend} does not run {found.algorithm} on "
                    f"{_ranks(ranks)} here{_instead(here, found.algorithm)}"
                )
            return found
        if len(here) != 1:
            raise UsageError(_which(coll, found.algorithm, ranks, here, device))
        found = replace(found, backend=here[0])
        check_candidate(coll, found, ranks)
        return found
    except UsageError as error:
        raise UsageError(f"--algorithm {text}: {error}") from error


def _backends(
    coll: str, algorithm: str, ranks: int, launch: LaunchInfo, device: str
) -> list[str]:
    """Return the backends that may run ``algorithm`` on these ranks."""
    kind = _memory(device)
    having = [
        name
        for name in backends.all_backends()
        if algorithm in offered(name, coll, kind)
    ]
    if device != "cpu":
        return having
    nodes = _nodes(ranks, launch)
    # MPI's ranks may be anywhere.
    either = (1, ranks) if nodes is None else (nodes,)
    places = [CommFacts(ranks, n, -(-ranks // n), 1, "near") for n in either]
    by_mpi = launch.kind not in _WITHOUT_MPI
    return [
        name
        for name in having
        if any(may_run(name, algorithm, facts, by_mpi=by_mpi) for facts in places)
    ]


def _serving(device: str) -> list[str]:
    """Return the backends for what the benchmarks' arrays are."""
    kind, every = _memory(device), backends.all_backends()
    return [name for name, each in every.items() if kind in each.capabilities.devices]


def _memory(device: str) -> str:
    """Return the kind of memory that a benchmark's arrays are in."""
    return "host" if device == "cpu" else "cuda"


def _nodes(ranks: int, launch: LaunchInfo) -> int | None:
    """Return the nodes that the ranks will see; None: only they can find out."""
    if launch.kind in ("mpi", "slurm"):
        return 1 if ranks == 1 else None
    if env.read_str("COMMRT_SHM") == "off":
        return ranks
    return max(pretended_nodes(ranks)) + 1


def _which(coll: str, algorithm: str, ranks: int, here: list[str], device: str) -> str:
    if here:
        choices = ", ".join(f"{name}/{algorithm}" for name in here)
        what = "where the ranks are" if device == "cpu" else "what is wanted"
        return f"which backend depends on {what}: write one of {choices}"
    known = {name for each in _serving(device) for name in offered(each, coll)}
    if algorithm in known:
        return f"no backend runs it on {_ranks(ranks)} here"
    return f"{coll} has no algorithm {algorithm!r}{suggest(algorithm, known)}"


def _instead(here: list[str], algorithm: str) -> str:
    choices = " or ".join(f"{name}/{algorithm}" for name in here)
    return f"; {choices} does" if choices else ""


def _ranks(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"
