# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.run --hosts``: hosts of a stand-in for ssh, which are this one."""

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

import pytest
import remote_shell
from ended_processes import ended

from commrt.bootstrap.base import poll_until
from commrt.launch.mpiexec import child_environment
from commrt.run import main
from commrt.running.frames import HELLO, Frames, Kind, frame

DEADLINE_S = 300.0
SHELL = f"{sys.executable} {remote_shell.__file__}"
SAYS_ITS_PLACE = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
         "MASTER_ADDR"]
port = int(os.environ["MASTER_PORT"])
print(json.dumps([[os.environ[name] for name in names], sys.argv[1:], port,
                  os.environ["COMMRT_MEETING"], os.getcwd(), open(0).read(),
                  os.environ.get("OF_MINE"), os.environ.get("COMMRT_LOG")]))
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
WAITS = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(os.getppid(), os.getpid(), child.pid, flush=True)
signal.pause()
"""
ONE_ENDS = """
import os, signal, sys, time
rank, ends = int(os.environ["RANK"]), sys.argv[1]
print("of rank", rank, flush=True)
if rank == 2:
    exec(ends)
signal.pause()
"""
COUNTS_SIGNALS = """
import os, signal
signals = [signal.SIGUSR1, signal.SIGTERM]
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", flush=True)
for _ in signals:
    print(signal.Signals(signal.sigwait(signals)).name, flush=True)
"""


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "commrt.run", "--ssh", SHELL, *options]


def environment(**variables: str) -> dict[str, str]:
    return {**child_environment(sys.executable), **variables}


def run(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a launch to its end. Not from the root, whose sources hide a wheel."""
    return subprocess.run(
        command(*options),
        env=environment(**variables),
        cwd=os.sep,
        input="typed",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@contextmanager
def launched(*options: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a launch, which ends with the context or after the deadline."""
    process = subprocess.Popen(
        command(*options),
        env=environment(**variables),
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
def program(tmp_path: Path):
    """Return a way to write a program."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def test_ranks_know_their_hosts_and_get_variables(program) -> None:
    done = run(
        *("--hosts", "u@h1:2,loud2", "-x", "OF_MINE", program(SAYS_ITS_PLACE), "-n"),
        OF_MINE="a b",
        COMMRT_LOG="x",
    )
    assert done.returncode == 0, done.stderr
    said = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert [each[0] for each in said] == [
        ["0", "3", "0", "2", "0", "h1"],
        ["1", "3", "1", "2", "0", "h1"],
        ["2", "3", "0", "1", "1", "h1"],
    ]
    assert all(each[1] == ["-n"] for each in said)
    assert len({each[2] for each in said}) == 1
    assert len({each[3] for each in said}) == 2
    assert not any(Path(each[3]).exists() for each in said)
    assert {tuple(each[4:]) for each in said} == {(os.sep, "", "a b", "x")}
    assert done.stderr == "Welcome to this host\n"


def test_ranks_of_hosts_meet(program) -> None:
    done = run("--hosts", "h1:2,h2", program(MEETS), COMMRT_NODES="2,1")
    lines = sorted(done.stdout.splitlines())
    total = [6.0] * 5
    assert lines == [f"3 {total} 1 []", f"3 {total} 2 []", f"3 {total} 2 []"], done


def test_no_command_line_says_what_is_secret(program, tmp_path: Path) -> None:
    """Variables go through the shell's input, and so do all values of the store."""
    log = tmp_path / "log"
    done = run(
        *("--hosts", "h1,h2", "-x", "TOKEN=hunter2", program("print(1)")),
        REMOTE_SHELL_LOG=str(log),
    )
    assert (done.returncode, done.stdout) == (0, "1\n1\n"), done.stderr
    words = [line.split()[1:] for line in log.read_text().splitlines()]
    agent = ["-m", "commrt.running.agent", "--silence", "60"]
    assert sorted(words) == [
        [host, "exec", sys.executable, *agent] for host in ("h1", "h2")
    ]


def test_lines_begin_with_the_rank_on_hosts(program) -> None:
    text = "import sys; sys.stdout.write('a\\nb'); print('c', file=sys.stderr)"
    done = run("--hosts", "h1,h2", "--prefix", program(text))
    assert sorted(done.stdout.splitlines()) == ["[0] a", "[0] b", "[1] a", "[1] b"]
    assert sorted(done.stderr.splitlines()) == ["[0] c", "[1] c"]


def test_ranks_that_print_and_end_at_once_are_all_heard(program) -> None:
    code = "import os; os.write(1, os.environ['RANK'].encode() + b'\\n')"
    done = run("--hosts", "h1:8,h2:4", program(code))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(map(int, done.stdout.split())) == [*range(12)]


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        ("sys.exit(7)", 7, "on h2) ended with exit status 7; the others were ended"),
        ("{}['key']", 1, "on h2) ended with exit status 1: KeyError: 'key'; the"),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "on h2) was killed by signal 9 (SIGKILL); the others were ended",
        ),
    ],
)
def test_who_failed_first_on_hosts(program, ends: str, status: int, says: str) -> None:
    done = run("--hosts", "h1:2,h2", program(ONE_ENDS), ends)
    assert done.returncode == status, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("commrt.run: rank 2 of 3 (process ")
    assert says in last
    assert "of rank 2" in done.stdout


def test_who_keeps_going_on_hosts(program) -> None:
    text = "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)"
    done = run("--hosts", "h1,h2", "--keep-going", program(text))
    assert done.returncode == 0, done.stderr
    assert "the others were ended" not in done.stderr


@pytest.mark.parametrize("ends", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_ranks_on_hosts_hear_of_one_that_never_came(program, ends: str) -> None:
    text = f"""
import os
if os.environ["RANK"] == "1":
    {ends}
import commrt
try:
    commrt.init()
except commrt.errors.PeerFailedError as error:
    print(error, flush=True)
"""
    done = run("--hosts", "a:2,b:1", "--keep-going", program(text))
    assert done.returncode == 0, done.stderr
    says = [line for line in done.stdout.splitlines() if "has ended" in line]
    assert len(says) == 2
    assert all("rank 1 does not arrive, because process" in line for line in says)


def test_signals_reach_ranks_of_hosts(program) -> None:
    with launched("--hosts", "h1,h2", program(COUNTS_SIGNALS)) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        for number in (signal.SIGUSR1, signal.SIGTERM):
            job.send_signal(number)
            said = [job.stdout.readline() for _ in range(2)]
            assert said == [f"{signal.Signals(number).name}\n"] * 2
        job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 0


IGNORES_ITS_END = f"import signal; signal.signal(15, signal.SIG_IGN)\n{WAITS}"


def test_ranks_of_hosts_that_ignore_their_end_are_killed(program) -> None:
    options = ("--hosts", "h1,h2", "--grace", "0", program(IGNORES_ITS_END))
    with launched(*options) as job:
        pids = of_ranks(job, 2)
        job.send_signal(signal.SIGTERM)
        _, said = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 137
        assert "ended after SIGTERM was forwarded to it" in said
    assert all(ended(pid) for pid in pids)


def of_ranks(job: subprocess.Popen[str], count: int) -> list[int]:
    """Return the processes that ranks have printed: host's, rank's, child's."""
    assert job.stdout is not None
    return [int(pid) for _ in range(count) for pid in job.stdout.readline().split()]


def test_nothing_outlives_a_launcher_of_hosts_that_is_killed(
    program, tmp_path: Path
) -> None:
    folder = tmp_path / "folders"
    folder.mkdir()
    options = ("--hosts", "h1:2,h2", program(WAITS))
    with launched(*options, TMPDIR=str(folder)) as job:
        pids = of_ranks(job, 3)
        assert len([*folder.iterdir()]) == 2
        job.kill()
        assert all(ended(pid) for pid in pids)
    assert poll_until(lambda: not [*folder.iterdir()], DEADLINE_S)


@pytest.mark.parametrize("victim", ["shell", "process"])
def test_a_host_that_is_lost_ends_the_job(program, tmp_path: Path, victim: str) -> None:
    """Its remote shell is killed, or the process that the shell has started."""
    log = tmp_path / "log"
    options = ("--hosts", "h1,h2", program(WAITS))
    with launched(*options, REMOTE_SHELL_LOG=str(log)) as job:
        pids = of_ranks(job, 2)
        lines = [line.split() for line in log.read_text().splitlines()]
        (shell,) = (int(pid) for pid, host, *_ in lines if host == "h2")
        if victim == "shell":
            os.kill(shell, signal.SIGKILL)
        else:
            os.kill(pids[0], signal.SIGKILL)
        _, said = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 1
        last = said.splitlines()[-1]
        assert "is lost: the remote shell has ended (" in last
        assert last.endswith("; the others were ended")
        assert ("host h2" in last) or victim == "process"
    of_others = pids if victim == "shell" else [pid for pid in pids if pid != pids[2]]
    assert all(ended(pid) for pid in of_others)
    if victim == "process":
        # Nobody is left who could end what a rank has started, as on one machine.
        os.kill(pids[2], signal.SIGKILL)


def test_a_host_that_is_not_reached(program) -> None:
    done = run("--hosts", "h1,gone2", program("print('ran')"))
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("ssh: could not resolve hostname gone2\n")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "commrt.run: host gone2 is lost: the remote shell has ended (exit status 255: "
        "ssh: could not resolve hostname gone2); no rank was started."
    )


def test_a_host_without_an_interface_or_a_folder(program) -> None:
    done = run("--hosts", "h1", "--interface", "none7", program("print('ran')"))
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "host h1: --interface: the user names the network interface" in done.stderr
    start = {"ranks": [0, 1], "grace_s": 1, "folder": "/no/such/folder"}
    words = [sys.executable, "-m", "commrt.running.agent", "--silence", "60"]
    said = subprocess.run(
        words,
        env=environment(),
        input=frame(Kind.START, 0, json.dumps(start).encode()),
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    _, _, text = said.stdout.partition(HELLO)
    frames = [(kind, data) for kind, _, data in Frames().feed(text)]
    why = b"no folder /no/such/folder to run in: No such file or directory"
    assert frames[1:] == [(Kind.FAILED, why)]


def test_an_interface_is_where_ranks_listen(program) -> None:
    names = "MASTER_ADDR", "GLOO_SOCKET_IFNAME"
    text = f"import os\nprint([os.environ[name] for name in {names}])"
    done = run("--hosts", "h1", "--interface", "lo", program(text))
    assert done.stdout == "['127.0.0.1', 'lo']\n", done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--hosts", "h1,h1", "x.py"], "h1 is asked for twice"),
        (["-n", "2", "--ssh", "ssh", "x.py"], "--ssh says nothing without --hosts"),
        (["-n", "2", "-x", "A=1", "x.py"], "-x says nothing without --hosts"),
        (["--hosts", "h1", "--ssh", "no-such-shell", "x.py"], "there is no such prog"),
        (["--hosts", "h1", "--ssh", "'", "x.py"], "No closing quotation"),
        (["--hosts", "h1", "-x", "NOT_SET_HERE", "x.py"], "a variable that is set"),
        (["--hosts", "h1", "--restarts", "1", "x.py"], "--restarts starts ranks of"),
        (["--hosts", "h1", "--host-timeout", "1", "x.py"], "expected 10 to 86400"),
        (["-n", "0", "--hosts", "h1", "x.py"], "at least one rank is needed"),
    ],
)
def test_wrong_options_of_hosts(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(options)
    assert ending.value.code == 2
    assert says in capsys.readouterr().err


def test_hosts_that_say_nothing_are_lost(program, tmp_path: Path) -> None:
    """The process of a host is stopped, and so sends nothing any more."""
    options = ("--hosts", "h1,h2", "--host-timeout", "10", program(WAITS))
    with launched(*options) as job:
        pids = of_ranks(job, 2)
        os.kill(pids[0], signal.SIGSTOP)
        _, said = job.communicate(timeout=DEADLINE_S)
        assert "is lost: it has said nothing for 10 s" in said.splitlines()[-1]
        assert job.returncode == 1
    os.kill(pids[0], signal.SIGCONT)
    assert all(ended(pid) for pid in pids)
