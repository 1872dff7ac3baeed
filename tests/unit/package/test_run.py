# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.run``: variables, output, signals, and how a job ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import freed_communicators
import pytest
from ended_processes import ended

from commrt.launch.mpiexec import child_environment
from commrt.run import main

DEADLINE_S = 300.0
SAYS_ITS_VARIABLES = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
met = os.path.isdir(os.environ["COMMRT_MEETING"])
print(json.dumps([[os.environ[name] for name in names], sys.argv[1:],
                  os.environ["MASTER_PORT"], met, sorted(os.sched_getaffinity(0))]))
"""
# Once all the others have said that they wait.
RANK_1_ENDS = """
import os, signal, sys
rank, ends = int(os.environ["RANK"]), sys.argv[1]
fifo = os.path.join(os.environ["COMMRT_MEETING"], "ready")
if rank == 1:
    os.mkfifo(fifo + "1")
    os.rename(fifo + "1", fifo)
    with open(fifo, "rb") as ready:
        while len(ready.read1(1) or b"") == 0: pass
    exec(ends)
else:
    while not os.path.exists(fifo): os.sched_yield()
    if rank == 0:
        with open(fifo, "wb") as ready: ready.write(b"x")
    signal.pause()
"""
WAITS_WITH_A_CHILD = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getpid(), child.pid, flush=True)
signal.pause()
"""
COUNTS_SIGNALS = """
import os, signal
seen = []
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM])
print("ready", flush=True)
while len(seen) < 2:
    number = signal.sigwait([signal.SIGUSR1, signal.SIGTERM])
    seen.append(number)
    print(signal.Signals(number).name, flush=True)
"""
MEETS = """
import sys
import numpy as np, commrt
comm = commrt.init()
x = np.full(5, comm.rank + 1.0)
comm.allreduce(x)
part = comm.split(comm.rank % 2)
print(comm.size, x.tolist(), part.size, sorted({"mpi4py", "torch"} & {*sys.modules}))
"""


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "commrt.run", *options]


def run(*options: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a launch to its end. Not from the root, whose sources hide a wheel."""
    return subprocess.run(
        command(*options),
        env=child_environment(sys.executable),
        cwd=os.sep,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@contextmanager
def launched(*options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a launch, which ends with the context or after the deadline."""
    process = subprocess.Popen(
        command(*options),
        env=child_environment(sys.executable),
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = threading.Timer(DEADLINE_S, process.kill)
    watch.start()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        watch.cancel()


@pytest.fixture
def script(tmp_path: Path):
    """Return a way to write a program."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def test_each_rank_finds_torchruns_variables_and_its_arguments(script) -> None:
    done = run("-n", "3", script(SAYS_ITS_VARIABLES), "-n", "--bind", "a b")
    said = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert [each[0] for each in said] == [
        [str(rank), "3", str(rank), "3", "127.0.0.1"] for rank in range(3)
    ]
    assert all(each[1] == ["-n", "--bind", "a b"] for each in said)
    assert len({each[2] for each in said}) == 1
    assert all(each[3] for each in said)


def test_bound_ranks_have_cores_of_their_own(script) -> None:
    cores = sorted(os.sched_getaffinity(0))
    done = run("-n", str(len(cores)), "--bind", script(SAYS_ITS_VARIABLES))
    said = [json.loads(line)[4] for line in done.stdout.splitlines()]
    assert sorted(said) == [[core] for core in cores], done.stderr
    more = run("-n", str(len(cores) + 1), "--bind", script(SAYS_ITS_VARIABLES))
    said = [json.loads(line)[4] for line in more.stdout.splitlines()]
    assert sorted({core for each in said for core in each}) == cores
    assert f"{len(cores) + 1} ranks on {len(cores)} cores: some share" in more.stderr


def test_ranks_meet_without_mpi_and_torch(script) -> None:
    done = run("-n", "3", script(MEETS))
    lines = sorted(done.stdout.splitlines())
    total = [6.0] * 5
    assert lines == [f"3 {total} 1 []", f"3 {total} 2 []", f"3 {total} 2 []"], done


def test_lines_begin_with_the_rank_and_modules_run(script) -> None:
    done = run("-n", "2", "--prefix", "-m", "timeit", "-n", "1", "-r", "1", "pass")
    heads = sorted(line[:4] for line in done.stdout.splitlines())
    assert (done.returncode, heads) == (0, ["[0] ", "[1] "]), done.stderr


def test_rank_0_reads_what_is_typed(script) -> None:
    done = run("-n", "2", script("print(repr(open(0).read()))"), stdin="typed")
    assert sorted(done.stdout.split()) == ["''", "'typed'"], done.stderr


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        ("sys.exit(7)", 7, r"rank 1 of 3 (process N) ended with exit status 7; the"),
        (
            "{}['key']",
            1,
            "rank 1 of 3 (process N) ended with exit status 1: KeyError: ",
        ),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "rank 1 of 3 (process N) was killed by signal 9 (SIGKILL); the others",
        ),
    ],
)
def test_who_failed_first_and_why(script, ends: str, status: int, says: str) -> None:
    done = run("-n", "3", script(RANK_1_ENDS), ends)
    assert done.returncode == status, done.stderr
    last = done.stderr.splitlines()[-1]
    number = last.partition("process ")[2].partition(")")[0]
    assert says.replace("N", number) in last
    assert last.startswith("commrt.run: ")


def test_a_rank_that_ignores_its_end_and_its_children_are_killed(script) -> None:
    program = script(WAITS_WITH_A_CHILD)
    with launched("-n", "2", "--grace", "0", program) as job:
        pids = [int(pid) for _ in range(2) for pid in job.stdout.readline().split()]
        assert len(pids) == 4
        job.send_signal(signal.SIGTERM)
        _, said = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 137
        assert "ended after SIGTERM was forwarded to it" in said
    assert all(ended(pid) for pid in pids)


def test_no_rank_outlives_a_launcher_that_is_killed(script) -> None:
    with launched(
        "-n",
        "2",
        script("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()"),
    ) as job:
        pids = [int(job.stdout.readline()) for _ in range(2)]
        job.kill()
        assert all(ended(pid) for pid in pids)


def test_signals_are_forwarded(script) -> None:
    with launched("-n", "2", script(COUNTS_SIGNALS)) as job:
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        for number in (signal.SIGUSR1, signal.SIGTERM):
            job.send_signal(number)
            said = [job.stdout.readline() for _ in range(2)]
            assert said == [f"{signal.Signals(number).name}\n"] * 2
        job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 0


@pytest.mark.parametrize(
    "options", [["-n", "0", "x.py"], ["x.py"], ["-n", "2"], ["-n", "x", "y.py"]]
)
def test_wrong_options(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(options)
    assert ending.value.code == 2


def test_communicators_that_were_freed_leave_nothing() -> None:
    """The folder in which ranks meet, and what they keep of that, do not grow."""
    kinds = ["dup", "split", "calls and plans"]
    done = run("-n", "2", freed_communicators.__file__, *kinds)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {kind: {} for kind in kinds}


def test_folders_of_killed_launchers_are_removed_by_the_next_one(
    script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that lives keeps its folder; one that is new may have to lock it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    waits = script("import signal; print('up', flush=True); signal.pause()")

    def folders() -> set[str]:
        return {folder.name for folder in tmp_path.glob("commrt-run-*")}

    def age() -> None:
        for folder in tmp_path.glob("commrt-run-*"):
            os.utime(folder, (0, 0))

    with launched("-n", "1", waits) as living, launched("-n", "1", waits) as killed:
        assert living.stdout is not None
        assert killed.stdout is not None
        assert living.stdout.readline() == killed.stdout.readline() == "up\n"
        both = folders()
        killed.kill()
        killed.wait()
        assert run("-n", "1", script("pass")).returncode == 0
        assert folders() == both
        age()
        assert run("-n", "1", script("pass")).returncode == 0
        assert len(folders()) == 1
        assert folders() < both


ENDS = """
import os, signal, sys
ends = sys.argv[1:][int(os.environ["RANK"])]
if ends == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(ends))
"""


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        (["0", "killed"], 0),
        (["0", "7"], 7),
        (["killed", "7"], 7),
        (["killed", "killed"], 137),
    ],
)
def test_the_status_of_a_job_that_keeps_going(
    script, ends: list[str], status: int
) -> None:
    """A rank that was killed is forgiven where another one ends well."""
    done = run("-n", "2", "--keep-going", script(ENDS), *ends)
    assert done.returncode == status, done.stderr
    assert "the others were ended" not in done.stderr


DIES_ALWAYS = """
import os, signal, sys
with open(sys.argv[1], "a") as file:
    file.write(f"{os.environ['RANK']}:{os.environ.get('COMMRT_JOIN', '0')} ")
comes = sys.argv[2] == "comes"
if os.environ["RANK"] == "1" and (not comes or "COMMRT_JOIN" in os.environ):
    os.kill(os.getpid(), signal.SIGKILL)
if comes:
    import commrt
    commrt.init()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
while len(open(sys.argv[1]).read().split()) < 5:
    os.sched_yield()
"""


@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_that_dies_is_started_again_so_many_times(
    script, tmp_path: Path, comes: bool
) -> None:
    """One that has not come to ``init`` yet is no newcomer as it starts again."""
    said = str(tmp_path / "said")
    when = "comes" if comes else "before"
    done = run("-n", "2", "--restarts", "3", script(DIES_ALWAYS), said, when)
    again = ["1:1"] * 3 if comes else ["1:0"] * 3
    assert sorted(Path(said).read_text().split()) == ["0:0", "1:0", *again]
    why = "to join the others" if comes else "before the others met"
    assert done.stderr.count(f"it is started again, {why}") == 3
    assert done.returncode == 0, done.stderr


LOSES_ITS_FOLDER = """
import os, shutil, sys
if os.environ["RANK"] == "1":
    if "COMMRT_JOIN" in os.environ:
        os._exit(0)
    shutil.rmtree(os.environ["COMMRT_MEETING"])
    os._exit(5)
while os.path.exists(os.environ["COMMRT_MEETING"]):
    os.sched_yield()
print("goes on")
"""


@pytest.mark.parametrize(
    ("option", "status"), [("--keep-going", 5), ("--restarts=1", 0)]
)
def test_a_launcher_without_its_folder_goes_on(
    script, option: str, status: int
) -> None:
    done = run("-n", "2", option, script(LOSES_ITS_FOLDER))
    assert (done.returncode, done.stdout) == (status, "goes on\n"), done.stderr
    assert "Traceback" not in done.stderr


DIES_ONCE = """
import os, sys
if os.environ["RANK"] == "1" and not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os._exit(3)
import commrt
print(commrt.init().allgather_object(os.environ.get("COMMRT_JOIN")))
"""


def test_ranks_wait_in_init_for_one_that_is_started_again(
    script, tmp_path: Path
) -> None:
    done = run("-n", "3", "--restarts", "1", script(DIES_ONCE), str(tmp_path / "died"))
    assert done.stdout.split("\n")[:3] == ["[None, None, None]"] * 3
    assert done.returncode == 0, done.stderr


WAITS_IN_VAIN = """
import os, signal
import commrt
comm = commrt.init()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.barrier()
except commrt.errors.PeerFailedError:
    while not comm.num_waiting():  # then there is nobody left who could ask it
        pass
"""


def test_who_waits_to_join_ends_when_nobody_is_left(script) -> None:
    done = run("-n", "2", "--restarts", "1", script(WAITS_IN_VAIN))
    assert done.stderr.count("waits to join, and no other rank is left") == 1
    assert done.returncode == 0, done.stderr


def test_a_wrong_number_of_restarts_is_refused(script) -> None:
    done = run("-n", "2", "--restarts", "-1", script(ENDS))
    assert done.returncode == 2
    assert "--restarts -1: a number from 0 on is needed" in done.stderr
