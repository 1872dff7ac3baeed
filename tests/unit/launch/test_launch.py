# SPDX-License-Identifier: Apache-2.0
"""Who am I: every launcher's variables, their order, and mixed launchers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from commrt.errors import UsageError
from commrt.launch.detect import (
    LaunchInfo,
    check_mpi_size,
    detect,
    slurm_step,
    started_alone,
)

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("single", 0, 1)),
        (OPENMPI, ("mpi", 2, 4)),
        (MPICH, ("mpi", 1, 3)),
        ({"PMIX_RANK": "1"}, ("mpi", 1, 0)),
        (TORCHRUN, ("torchrun", 3, 8)),
        (SLURM, ("slurm", 5, 6)),
        ({**SLURM, "PMIX_RANK": "5"}, ("slurm", 5, 6)),
        ({**OPENMPI, **TORCHRUN, **SLURM}, ("mpi", 2, 4)),
        ({**TORCHRUN, **SLURM}, ("torchrun", 3, 8)),
    ],
)
def test_detect_follows_the_order_mpi_torchrun_slurm_single(
    environ: dict[str, str], expected: tuple[str, int, int]
) -> None:
    found = detect(environ)
    assert (found.kind, found.rank, found.size) == expected


@pytest.mark.parametrize(
    "inherited",
    [
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_RANK": "0"},
    ],
)
def test_an_mpi_world_of_one_does_not_hide_torchrun(inherited: dict[str, str]) -> None:
    assert detect({**inherited, **TORCHRUN}).kind == "torchrun"
    assert detect(inherited).kind == "single"


@pytest.mark.parametrize(
    "outside_a_step",
    [
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"},
        {**SLURM, "SLURM_STEP_ID": "batch"},
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_a_slurm_allocation_without_a_step_is_a_world_of_one(
    outside_a_step: dict[str, str],
) -> None:
    assert detect(outside_a_step).kind == "single"


STARTED_BY_PMI2 = {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6"}


@pytest.mark.parametrize(
    ("environ", "is_srun"),
    [
        (SLURM, True),
        (STARTED_BY_PMI2, True),
        (MPICH, False),
        ({**SLURM, **MPICH}, False),
        ({**STARTED_BY_PMI2, "PMI_RANK": "4"}, False),
        ({**SLURM, "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, False),
        ({**SLURM, **TORCHRUN}, False),
    ],
)
def test_who_is_a_task_of_a_step(environ: dict[str, str], is_srun: bool) -> None:
    """An mpiexec within an allocation inherits Slurm's variables."""
    step = slurm_step(detect(environ), environ)
    assert (step is not None) == is_srun
    assert step is None or (step.kind, step.rank, step.size) == ("slurm", 5, 6)


def test_worlds_of_one_that_a_launcher_has_started() -> None:
    assert started_alone({"PMI_RANK": "0", "PMI_SIZE": "1"})
    assert started_alone({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert not started_alone({})
    assert not started_alone(SLURM)
    assert not started_alone({"PMIX_RANK": "0"})


def test_an_mpi_that_does_not_know_srun_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in STARTED_BY_PMI2.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"srun started 6 ranks.*srun --mpi=list"):
        check_mpi_size(detect(STARTED_BY_PMI2), 1, "Open MPI v5.0.11")


def test_commrt_launch_overrides_the_order() -> None:
    both = {**OPENMPI, **TORCHRUN}
    assert detect({**both, "COMMRT_LAUNCH": "torchrun"}).kind == "torchrun"
    assert detect({**both, "COMMRT_LAUNCH": "single"}) == LaunchInfo(
        "single", 0, 1, "COMMRT_LAUNCH=single"
    )
    assert detect({"COMMRT_LAUNCH": "mpi"}).size == 0


@pytest.mark.parametrize("kind", ["torchrun", "slurm"])
def test_forcing_an_absent_launcher_names_its_variables(kind: str) -> None:
    with pytest.raises(UsageError, match=r"RANK|SLURM_PROCID"):
        detect({"COMMRT_LAUNCH": kind})


@pytest.mark.parametrize(
    "broken",
    [
        {**TORCHRUN, "RANK": "8"},
        {**TORCHRUN, "WORLD_SIZE": "many"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {**MPICH, "PMI_RANK": "-1"},
    ],
)
def test_contradicting_variables_are_an_error(broken: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        detect(broken)


def test_mixed_launchers_are_an_error_with_the_cure() -> None:
    launch = detect(MPICH)
    with pytest.raises(UsageError) as caught:
        check_mpi_size(launch, 1, "Open MPI v5.0.11")
    message = str(caught.value)
    for part in ("PMI_SIZE", "3 ranks", "Open MPI v5.0.11", "mpiexec", "mpi4py"):
        assert part in message


def test_mpi_asked_for_under_a_launcher_that_is_none_of_mpis_is_an_error() -> None:
    """Each rank would be a world of one, and nobody would be told."""
    for started in (TORCHRUN, SLURM, {**TORCHRUN, "COMMRT_MEETING": "/tmp/x"}):
        environ = {**started, "COMMRT_LAUNCH": "mpi"}
        launch = detect(environ)
        with pytest.raises(UsageError, match="an MPI world of its own: unset COMMRT_"):
            check_mpi_size(launch, 1, "MPICH", environ)
        check_mpi_size(launch, 6, "MPICH", environ)
    check_mpi_size(detect({"COMMRT_LAUNCH": "mpi"}), 1, "MPICH", {})
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "COMMRT_LAUNCH": "mpi"}
    check_mpi_size(detect(alone), 1, "MPICH", alone)


def test_agreeing_or_unknown_sizes_pass() -> None:
    check_mpi_size(detect(MPICH), 3, "MPICH")
    check_mpi_size(detect({"PMIX_RANK": "0"}), 5, "Open MPI")
    check_mpi_size(detect(TORCHRUN), 1, "Open MPI")


def test_detect_imports_neither_mpi_nor_torch() -> None:
    code = (
        "import sys, commrt.launch.detect; commrt.launch.detect.detect();"
        "sys.exit('mpi4py' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
