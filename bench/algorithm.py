# SPDX-License-Identifier: Apache-2.0
"""``--algorithm``: which candidate a command line means, settled before ranks start."""

from __future__ import annotations

from dataclasses import replace

from commrt import backends, env
from commrt.backends.catalog import check_candidate, offered
from commrt.errors import UsageError, suggest
from commrt.job.arena import pretended_nodes
from commrt.launch.detect import LaunchInfo
from commrt.planning.spec import serves
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
    having = [name for name in _serving(device) if algorithm in offered(name, coll)]
    if device != "cpu":  # of MPI, arrays on devices have its own collectives only
        return [name for name in having if name != "mpi" or algorithm == "native"]
    nodes = _nodes(ranks, launch)
    if nodes is None:  # MPI's ranks, wherever they are
        having = [name for name in having if name != "gloo"]
        return [name for name in having if (name == "local") == (ranks == 1)]
    facts = CommFacts(ranks, nodes, -(-ranks // nodes), 1, "near")
    between = "gloo" if launch.kind in _WITHOUT_MPI else "mpi"
    return [name for name in having if _may_run(name, algorithm, facts, between)]


def _serving(device: str) -> list[str]:
    """Return the backends for what the benchmarks' arrays are."""
    kind = "host" if device == "cpu" else "cuda"
    every = backends.all_backends()
    return [name for name, each in every.items() if kind in each.capabilities.devices]


def _may_run(backend: str, algorithm: str, facts: CommFacts, between: str) -> bool:
    """Whether a backend runs it, where ``between`` carries messages between nodes."""
    if backend not in ("shm", "mpi", "gloo", "local"):
        return True  # of another package: its own affair
    if algorithm == "native":
        by_gloo = facts.nodes > 1 and between == "gloo"
        return facts.size > 1 and by_gloo == (backend == "gloo")
    if facts.nodes > 1:
        return backend == between
    return serves(facts, backend)


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
