# SPDX-License-Identifier: Apache-2.0
"""Which process is the rank, on processes that a folder pretends."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from commrt.errors import UsageError
from commrt.launch.detect import detect
from commrt.launch.rank_process import (
    VARIABLE,
    Process,
    inherited,
    is_running,
    mark_rank,
)

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-here-7@1",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9"}
RUN = {"COMMRT_MEETING": "/tmp/meeting", "RANK": "1", "WORLD_SIZE": "4"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "a",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM = {
    "SLURM_JOB_ID": "70",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
}
LAUNCHED = {
    "Open MPI": OPENMPI,
    "MPICH or Intel MPI": MPICH,
    "commrt.run": RUN,
    "torchrun": TORCHRUN,
    "Slurm": SLURM,
}
LIBMPI = "7f00 r-xp 00000000 08:01 5 /opt/mpi/lib/libmpi.so.40.40.11\n"
ENGINE = "7f00 r-xp 00000000 08:01 5 /x/commrt/_native.cpython-311-x86_64.so\n"
LAUNCHER, SHELL, PARENT, ME = 2, 3, 4, 5
Starts = Callable[..., Process]


@pytest.fixture
def starts(tmp_path: Path) -> Starts:
    """Return a way to pretend a process: ``starts(pid, parent, variables)``."""

    def start(
        pid: int,
        parent: int,
        variables: dict[str, str],
        maps: str = "",
        sockets: dict[str, int] | None = None,
        links: dict[str, str] | None = None,
        state: str = "S",
    ) -> Process:
        folder = tmp_path / str(pid)
        (folder / "fd").mkdir(parents=True)
        rest = " ".join(["0"] * 17)
        (folder / "stat").write_text(f"{pid} (a) b) {state} {parent} {rest} {pid}77 0")
        text = "".join(f"{name}={value}\0" for name, value in variables.items())
        (folder / "environ").write_text(text)
        (folder / "maps").write_text(maps)
        opened = {n: f"socket:[{inode}]" for n, inode in (sockets or {}).items()}
        for number, leads_to in {**opened, **(links or {})}.items():
            os.symlink(leads_to, folder / "fd" / number)
        return Process(pid, tmp_path)

    return start


def job(starts: Starts, variables: dict[str, str], maps: str = "") -> Process:
    """Pretend launcher, shell, a program and its child; return the child."""
    starts(LAUNCHER, 1, {"HOME": "/"})
    for pid, loaded in ((SHELL, ""), (PARENT, maps)):
        starts(pid, pid - 1, variables, loaded, {"9": 100})
    return starts(ME, PARENT, variables, "", {"9": 100})


@pytest.mark.parametrize("source", LAUNCHED)
def test_ranks_that_shells_and_programs_start_are_ranks(
    starts: Starts, source: str
) -> None:
    environ = LAUNCHED[source]
    me = job(starts, environ)
    assert inherited(source, environ, me) is None
    found = detect(environ, me)
    assert (found.rank, found.size, found.is_child) == (1, 4, False)


@pytest.mark.parametrize("source", LAUNCHED)
def test_a_child_of_a_marked_rank_is_a_world_of_one(
    starts: Starts, source: str
) -> None:
    names = LAUNCHED[source]
    if "PMI_FD" in names:
        own, theirs = socket.socketpair()
        names = {**names, "PMI_FD": str(own.fileno())}
    environ = dict(names)
    mark_rank(environ)
    here = Process(os.getpid())
    assert not detect(environ, here).is_child
    number = names.get("PMI_FD", "")
    opened = {number: here.descriptor(number)} if number else {}
    found = detect(environ, starts(ME, PARENT, environ, links=opened))
    assert (found.kind, found.rank, found.size, found.is_child) == (
        "single",
        0,
        1,
        True,
    )
    assert "rank 1 of " in found.source
    if number:
        assert detect(environ, starts(PARENT, 1, environ)).is_child, "closed there"
        own.close()
        theirs.close()


def changed(variables: dict[str, str], name: str) -> dict[str, str]:
    return {**variables, name: variables[name] + "0"}


@pytest.mark.parametrize(
    ("source", "other"),
    [
        ("Open MPI", changed(OPENMPI, "PMIX_NAMESPACE")),
        ("commrt.run", changed(RUN, "COMMRT_MEETING")),
        ("torchrun", changed(TORCHRUN, "MASTER_PORT")),
        ("torchrun", changed(TORCHRUN, "TORCHELASTIC_RUN_ID")),
        ("torchrun", changed(TORCHRUN, "TORCHELASTIC_RESTART_COUNT")),
        ("Slurm", changed(SLURM, "SLURM_STEP_ID")),
    ],
)
def test_a_launch_of_the_same_kind_within_a_rank_has_ranks(
    starts: Starts, source: str, other: dict[str, str]
) -> None:
    marked = dict(LAUNCHED[source])
    mark_rank(marked)
    inner = {**marked, **other}
    starts(PARENT, 1, LAUNCHED[source], LIBMPI + ENGINE)
    found = detect(inner, starts(ME, PARENT, inner))
    assert (found.rank, found.is_child) == (1, False)


def test_a_launcher_of_another_kind_within_a_rank_has_ranks(starts: Starts) -> None:
    marked = dict(OPENMPI)
    mark_rank(marked)
    inner = {**marked, **TORCHRUN}
    agent = starts(PARENT, 1, marked)
    assert detect(inner, starts(ME, agent.pid, inner)).kind == "torchrun"


def test_torchrun_within_commrt_run_has_ranks(starts: Starts, tmp_path: Path) -> None:
    """torchrun passes the folder on, and only some of its workers get other names."""
    for marked in (dict(RUN), RUN | {"MASTER_ADDR": "here", "MASTER_PORT": "1"}):
        outer = dict(marked)
        mark_rank(marked)
        for before in (outer, marked):
            inner = {**before, **TORCHRUN}
            me = starts(ME, starts(PARENT, 1, before).pid, inner)
            assert detect(inner, me).kind == "torchrun"
            by_hand = {n: v for n, v in inner.items() if "ELASTIC" not in n}
            if before is marked:
                assert detect(by_hand, me).kind == "torchrun"
            shutil.rmtree(tmp_path)


def test_the_same_names_in_another_launch_of_mpich_are_another_rank(
    starts: Starts,
) -> None:
    """Numbers of descriptors repeat; what they lead to does not."""
    starts(PARENT, 1, MPICH, LIBMPI, {"9": 100})
    starts(LAUNCHER, PARENT, MPICH, "", {"9": 300})
    assert (
        inherited(
            *("MPICH or Intel MPI", MPICH), starts(ME, LAUNCHER, MPICH, "", {"9": 200})
        )
        is None
    )


def test_a_child_without_the_pipe_to_its_launcher_is_no_rank(starts: Starts) -> None:
    starts(PARENT, 1, MPICH, "", {"9": 100})
    found = detect(MPICH, starts(ME, PARENT, MPICH))
    assert (found.kind, found.is_child) == ("single", True)
    assert "PMI_FD=9" in found.source


@pytest.mark.parametrize("source", ["Open MPI", "MPICH or Intel MPI"])
def test_a_child_of_what_uses_mpi_is_no_rank(starts: Starts, source: str) -> None:
    environ = LAUNCHED[source]
    found = detect(environ, job(starts, environ, LIBMPI))
    assert (found.kind, found.is_child) == ("single", True)
    assert f"process {PARENT} has the same rank, and uses MPI" in found.source


@pytest.mark.parametrize("source", LAUNCHED)
def test_nobody_guesses_who_is_the_rank(starts: Starts, source: str) -> None:
    environ = LAUNCHED[source]
    me = job(starts, environ, ENGINE)
    with pytest.raises(UsageError, match="COMMRT_LAUNCH=single for this process") as no:
        detect(environ, me)
    kind = str(no.value).rpartition("COMMRT_LAUNCH=")[2].split()[0]
    for said, rank in ((kind, 1), ("single", 0)):
        found = detect({**environ, "COMMRT_LAUNCH": said}, me)
        assert (found.rank, found.is_child) == (rank, False)


@pytest.mark.parametrize("maps", [LIBMPI, ENGINE])
def test_a_wish_that_the_rank_had_already_says_nothing(
    starts: Starts, maps: str
) -> None:
    environ = {**OPENMPI, "COMMRT_LAUNCH": "mpi"}
    marked = dict(environ)
    mark_rank(marked)
    me = job(starts, environ, maps)
    assert detect(marked, me).is_child
    assert not detect({**marked, "COMMRT_LAUNCH": ""}, me).is_child


def test_nothing_is_marked_without_a_launcher() -> None:
    environ = {"HOME": "/"}
    mark_rank(environ)
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize("text", ["x", "[]", "3", "{", "[" * 100_000])
def test_a_mark_of_another_form_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=VARIABLE):
        detect({**RUN, VARIABLE: text})


def test_one_may_end_while_it_is_looked_at(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, read_bytes = starts(ME, 1, {}), Path.read_bytes

    def read_once(self: Path) -> bytes:
        content = read_bytes(self)
        self.unlink()
        return content

    monkeypatch.setattr(Path, "read_bytes", read_once)
    assert process.name == f"{ME}-{ME}77"
    assert (process.name, process.runs, process.parent) == ("", False, None)


def test_who_runs(starts: Starts) -> None:
    me = Process(os.getpid())
    assert me.name.startswith(f"{os.getpid()}-")
    assert is_running(me.name)
    assert not is_running(f"{os.getpid()}-1")
    assert not starts(ME, 1, {}, state="Z").runs
    assert starts(PARENT, 1, {}).name == f"{PARENT}-{PARENT}77"
    assert Process(ME + 100, Path("/nowhere")).name == ""
    assert os.getppid() in [each.pid for each in me.ancestors()]
