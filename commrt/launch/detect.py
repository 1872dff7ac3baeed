# SPDX-License-Identifier: Apache-2.0
"""The rank and the launcher of this process, from the environment alone.

Nothing here imports or starts MPI. The order is: MPI's variables where their size is
above 1, then those of ``commrt.run``, then torchrun's, then Slurm's, then a world of
one. Slurm's come last because inside an allocation every process inherits them,
whoever started it. Variables that a process has only inherited from a rank count for
nothing (``rank_process``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from commrt import env
from commrt.errors import UsageError
from commrt.launch.rank_process import Inherited, Process, inherited

__all__ = [
    "Kind",
    "LaunchInfo",
    "check_mpi_library",
    "check_mpi_size",
    "detect",
    "slurm_step",
    "started_alone",
]

Kind = Literal["mpi", "run", "torchrun", "slurm", "torch", "single"]


@dataclass(frozen=True)
class LaunchInfo:
    """The launcher of this process, as far as its environment tells."""

    kind: Kind
    """The launcher; ``run`` is ``python -m commrt.run``, ``slurm`` srun, with or
    without MPI; ``torch`` means that the ranks are those of a process group of torch,
    whoever started them."""
    rank: int
    """This process's rank."""
    size: int
    """Processes in the job; 0: only MPI itself can tell (PMIx gives no size)."""
    source: str
    """The variables that said so, for messages."""
    is_child: bool = False
    """True if a rank started this process, which is none; ``source`` says which."""


# Each MPI flavour's names for rank and size. Intel MPI and MPICH share PMI_*.
_MPI_VARIABLES = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)

_SRUN_SAYS = "PMI_SIZE"
_BY_HAND = "COMMRT_LAUNCH=mpi"

# Those that Open MPI's launcher cannot start; other names may be its descendants.
_NOT_OPEN_MPI = ("MPICH", "Intel", "MVAPICH")

_FOREIGN = (
    "the launcher belongs to another MPI than the one mpi4py uses. Start the program "
    "with that library's own mpiexec (for MPI from PyPI: the one in the bin folder of "
    "this virtual environment, beside python), or reinstall mpi4py for the MPI of the "
    "launcher. If MPI is not wanted here, set COMMRT_LAUNCH=single."
)

_WITHOUT_MPI = (
    "this MPI does not know of srun's ranks. Tell srun how to start it (srun "
    "--mpi=pmix or --mpi=pmi2; srun --mpi=list says which there are), or install torch "
    "(pip install 'commrt[torch]'), in whose store they meet without MPI."
)


def detect(
    environ: Mapping[str, str] | None = None, process: Process | None = None
) -> LaunchInfo:
    """Return the launcher of this process; ``COMMRT_LAUNCH`` overrides the order.

    A process that a rank has started, without a launcher, is a world of one.

    Args:
        environ: the variables; those of this process unless given.
        process: the process that has them; this one unless given.

    Raises UsageError if COMMRT_LAUNCH names a launcher whose variables are absent, if
    a launcher's variables are not numbers or contradict each other, or if nobody can
    tell whether this process or the one that started it is the rank.
    """
    environ = os.environ if environ is None else environ
    forced = env.read_str("COMMRT_LAUNCH", environ)
    others: list[tuple[LaunchInfo, Inherited]] = []
    found = _in_order(environ) if forced is None else _forced(forced, environ)
    for whose, launch in found:
        if launch.kind == "single":
            return launch
        why = inherited(whose, environ, process) if whose else None
        if why is None:
            return launch
        others.append((launch, why))
    if others:
        return _child(*others[0])
    return _single("no launcher's variables with a size above 1")


def _in_order(environ: Mapping[str, str]) -> Iterator[tuple[str, LaunchInfo]]:
    """Yield every launcher whose variables are set, and whose variables they are."""
    yield from _from_mpi(environ)
    for whose, find in (
        ("commrt.run", _from_run),
        ("torchrun", _from_torchrun),
        ("Slurm", _from_slurm),
    ):
        launch = find(environ)
        if launch is not None:
            yield whose, launch


def _child(launch: LaunchInfo, why: Inherited) -> LaunchInfo:
    """Return the launch of a process that a rank has started."""
    rank = f"rank {launch.rank} of {launch.source}"
    if why.is_certain:
        return LaunchInfo("single", 0, 1, f"{rank} started it: {why.words}", True)
    raise UsageError(
        f"this process has the variables of {rank}, and so has a process that started "
        f"it: {why.words}, but has not called commrt.init() yet. Say which one is the "
        f"rank: set COMMRT_LAUNCH=single for this process if it is none (or call "
        f"commrt.init() in the other one first), or COMMRT_LAUNCH={launch.kind} if it "
        f"is"
    )


def slurm_step(
    launch: LaunchInfo, environ: Mapping[str, str] | None = None
) -> LaunchInfo | None:
    """Return these ranks as Slurm's variables have them, if srun itself started them.

    srun tells MPI libraries the same ranks (``PMI_RANK``, with ``srun --mpi=pmi2``).
    The result is None if an mpiexec started them, even within an allocation of Slurm's.
    """
    if launch.kind == "slurm":
        return launch
    if launch.kind != "mpi" or _SRUN_SAYS not in launch.source:
        return None
    step = _from_slurm(os.environ if environ is None else environ)
    same = step is not None and (step.rank, step.size) == (launch.rank, launch.size)
    return step if same else None


def started_alone(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether MPI's launcher or Slurm started this process as its only rank."""
    environ = os.environ if environ is None else environ
    of_mpi = next(_from_mpi(environ, smallest=1), None)
    found = _from_slurm(environ, smallest=1) if of_mpi is None else of_mpi[1]
    return found is not None and found.size == 1


def check_mpi_library(launch: LaunchInfo, library: str) -> None:
    """Raise UsageError where Open MPI's launcher started another library's ranks.

    To be called before MPI is initialised: MPICH ends such a process in MPI_Init. (The
    reverse is legal, as Open MPI may be started through PMI-2; check_mpi_size tells.)
    """
    if "OMPI_COMM_WORLD_SIZE" in launch.source and library.startswith(_NOT_OPEN_MPI):
        raise UsageError(
            f"{launch.source} started {launch.size} ranks, and mpi4py uses {library}: "
            f"{_FOREIGN}"
        )


def check_mpi_size(
    launch: LaunchInfo,
    mpi_size: int,
    library: str,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Raise UsageError where MPI sees another number of ranks than the launcher.

    MPICH's mpiexec in front of an mpi4py that is linked to Open MPI starts N worlds of
    one rank each: every rank would be 0 and nothing would talk. So do launchers that
    are none of MPI's, where COMMRT_LAUNCH asks for MPI.
    """
    if launch.source == _BY_HAND and mpi_size == 1:
        environ = os.environ if environ is None else environ
        for find in (_from_run, _from_torchrun, _from_slurm):
            started = find(environ, 2)
            if started is not None:
                raise UsageError(
                    f"{_BY_HAND}, but {started.source} started {started.size} ranks, "
                    f"and each would be an MPI world of its own: unset COMMRT_LAUNCH, "
                    f"or start the program with mpiexec (COMMRT_LAUNCH=single asks "
                    f"for worlds of one)"
                )
    if launch.kind in ("run", "torchrun") or launch.size in (0, mpi_size):
        return
    if slurm_step(launch) is not None:
        raise UsageError(
            f"srun started {launch.size} ranks, but MPI ({library}) was started with "
            f"{mpi_size}: {_WITHOUT_MPI}"
        )
    raise UsageError(
        f"{launch.source} says {launch.size} ranks, but MPI ({library}) was started "
        f"with {mpi_size}: {_FOREIGN}"
    )


def _single(source: str) -> LaunchInfo:
    return LaunchInfo("single", 0, 1, source)


def _forced(kind: str, environ: Mapping[str, str]) -> Iterator[tuple[str, LaunchInfo]]:
    """Yield the launcher that COMMRT_LAUNCH names, and whose variables name it."""
    if kind == "single":
        yield "", _single("COMMRT_LAUNCH=single")
        return
    if kind == "mpi":
        unnamed = "", LaunchInfo("mpi", 0, 0, _BY_HAND)
        yield next(_from_mpi(environ, smallest=1), unnamed)
        return
    find, needs, program = {
        "run": (_from_run, "COMMRT_MEETING, RANK and WORLD_SIZE", "commrt.run"),
        "torchrun": (
            _from_torchrun,
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            "torchrun",
        ),
        "slurm": (
            _from_slurm,
            "SLURM_PROCID, SLURM_NTASKS and SLURM_STEP_ID",
            "Slurm",
        ),
    }[kind]
    wanted = find(environ, 1)
    if wanted is None:
        raise UsageError(
            f"COMMRT_LAUNCH={kind}, but {needs} are not set: start the program with "
            f"{'srun' if kind == 'slurm' else program}, or unset COMMRT_LAUNCH"
        )
    yield program, wanted


def _from_mpi(
    environ: Mapping[str, str], smallest: int = 2
) -> Iterator[tuple[str, LaunchInfo]]:
    """Yield what MPI's launchers say, and which one does, in the order of belief."""
    for flavour, rank_name, size_name in _MPI_VARIABLES:
        if size_name not in environ:
            continue
        size = _number(environ, size_name)
        if size >= smallest:
            rank = _number(environ, rank_name)
            source = f"{flavour}'s launcher ({size_name})"
            yield flavour, _checked("mpi", rank, size, source)
    # A plain PMIx launcher (prun, srun --mpi=pmix) tells the rank, never the size.
    # Slurm's own variables are better where they exist.
    if "PMIX_RANK" in environ and not _has_size(environ):
        rank = _number(environ, "PMIX_RANK")
        yield "PMIx", LaunchInfo("mpi", rank, 0, "a PMIx launcher (PMIX_RANK)")


def _has_size(environ: Mapping[str, str]) -> bool:
    """Return whether another variable tells the size, so PMIx need not be believed."""
    sizes = [size_name for _, _, size_name in _MPI_VARIABLES]
    return any(name in environ for name in (*sizes, "WORLD_SIZE", "SLURM_STEP_ID"))


def _from_run(environ: Mapping[str, str], smallest: int = 1) -> LaunchInfo | None:
    names = ("COMMRT_MEETING", "RANK", "WORLD_SIZE")
    if any(not environ.get(name) for name in names):
        return None
    if "TORCHELASTIC_RUN_ID" in environ:
        return None  # commrt.run leaves it out, so a rank of it has started torchrun
    size = _number(environ, "WORLD_SIZE")
    if size < smallest:
        return None
    return _checked("run", _number(environ, "RANK"), size, "python -m commrt.run")


def _from_torchrun(environ: Mapping[str, str], smallest: int = 1) -> LaunchInfo | None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in environ for name in names):
        return None
    size = _number(environ, "WORLD_SIZE")
    if size < smallest:
        return None
    source = "torchrun (WORLD_SIZE)"
    return _checked("torchrun", _number(environ, "RANK"), size, source)


def _from_slurm(environ: Mapping[str, str], smallest: int = 2) -> LaunchInfo | None:
    # Only inside a step (srun); a batch script sees NTASKS, but it is one process.
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID")
    if any(name not in environ for name in names):
        return None
    if environ["SLURM_STEP_ID"] in ("4294967291", "4294967294", "batch"):
        return None  # the batch step and the extern step
    size = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size < smallest:
        return None
    rank = _number(environ, "SLURM_PROCID")
    return _checked("slurm", rank, size, "Slurm (SLURM_NTASKS)")


def _number(environ: Mapping[str, str], *names: str) -> int:
    """Return the first of ``names`` that is set, as a number."""
    name = next((name for name in names if name in environ), names[-1])
    text = environ.get(name)
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(
            f"the launcher's variable {name} is {text!r}, not a number: start the "
            f"program with mpiexec, torchrun, srun or plain python, or unset it"
        ) from None


def _checked(kind: Kind, rank: int, size: int, source: str) -> LaunchInfo:
    if not 0 <= rank < size:
        raise UsageError(
            f"{source}: rank {rank} does not exist among {size} ranks; "
            f"the launcher's variables are inconsistent"
        )
    return LaunchInfo(kind, rank, size, source)
