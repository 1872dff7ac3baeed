# SPDX-License-Identifier: Apache-2.0
"""Hosts of a cluster, what runs on them, and that nothing of them is left.

Every ordinary run has the ``whole`` ones: a small cluster, where the user is root.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_commands import ClusterCommands, machine

from commrt.bootstrap.base import poll_until

LIMIT_S = 300
ABOUT = """\
import os, socket
print(
    socket.gethostname(),
    open("/etc/hostname").read().strip(),
    socket.gethostbyname(socket.gethostname()),
    sorted(os.listdir("/dev/shm")),
    sorted(os.listdir("/sys/class/net")),
    os.environ["TMPDIR"],
    os.path.exists(f"/proc/{os.getpid()}"),
    os.environ["MINE"],
)
open("/dev/shm/of-" + socket.gethostname(), "w").close()
"""
TERMINAL = """\
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""
SUM = """\
import os, socket
import numpy as np
import commrt
comm = commrt.init()
x = np.full(1001, comm.rank + 1.0)
comm.allreduce(x)
line = f"{socket.gethostname()} {comm.rank} {comm.size} {x.min()} {x.max()}\\n"
os.write(1, line.encode())
"""
ECHO = """\
import socket, sys
host, all_hosts = socket.gethostname(), sys.argv[1:]
if host == all_hosts[0]:
    with socket.create_server((host, 5000)) as server:
        for _ in all_hosts[1:]:
            peer, (address, _) = server.accept()
            with peer:
                peer.sendall(peer.recv(100))
else:
    while True:
        try:
            peer = socket.create_connection((all_hosts[0], 5000))
        except ConnectionRefusedError:
            continue
        break
    with peer:
        peer.sendall(host.encode())
        print(peer.recv(100).decode(), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a program into a file and returns its name."""

    def written(text: str) -> str:
        path = tmp_path / f"program{len(text)}.py"
        path.write_text(text)
        return str(path)

    return written


@pytest.mark.whole
def test_hosts_have_names_memory_and_networks_of_their_own(
    cluster: ClusterCommands, program: Callable[[str], str]
) -> None:
    before = machine()
    done = cluster(
        "run --hosts 3 --all", sys.executable, program(ABOUT), MINE="passed on"
    )
    assert done.ok, done.describe_failure()
    assert sorted(done.stdout.splitlines()) == [
        f"h{i} h{i} 10.77.0.{i} [] ['eth0', 'lo'] /var/tmp True passed on"
        for i in (1, 2, 3)
    ]
    assert not [*Path("/dev/shm").glob("of-h*")]
    assert machine() == before
    assert cluster.all_ended()


@pytest.mark.parametrize(
    ("shape", "num_hosts"),
    [
        ("star", 3),
        ("fat-tree --per-switch 2 --spines 2 --oversubscription 2", 5),
        ("loop --per-switch 1", 6),
    ],
)
def test_every_host_reaches_every_other_one(
    cluster: ClusterCommands,
    program: Callable[[str], str],
    shape: str,
    num_hosts: int,
) -> None:
    hosts = [f"h{number + 1}" for number in range(num_hosts)]
    for first in (hosts[0], hosts[-1]):
        order = [first, *(host for host in hosts if host != first)]
        done = cluster(
            f"run --hosts {num_hosts} --topology {shape} --rate 1gbit --all",
            *(sys.executable, program(ECHO), *order),
        )
        assert done.ok, done.describe_failure()
        assert sorted(done.stdout.split()) == sorted(order[1:])


def test_a_file_makes_a_network_with_names_of_its_own(
    cluster: ClusterCommands, program: Callable[[str], str], tmp_path: Path
) -> None:
    network = tmp_path / "network.yaml"
    network.write_text(
        "hosts: [north, south]\nswitches: [a, b, c]\nlinks:\n"
        "  - {ends: [north, a], rate: 1gbit}\n  - {ends: [b, south]}\n"
        "  - {ends: [a, b]}\n  - {ends: [b, c]}\n  - {ends: [c, a]}\n"
    )
    done = cluster(
        f"run --topology {network} --all",
        *(sys.executable, program(ECHO), "south", "north"),
    )
    assert done.ok, done.describe_failure()
    assert done.stdout.split() == ["north"]


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)]
)
def test_the_status_is_that_of_the_program(
    cluster: ClusterCommands, script: str, status: int
) -> None:
    done = cluster("run --hosts 2 --on h2", "sh", "-c", script)
    assert done.returncode == status
    assert cluster.all_ended()


def test_a_program_that_is_none_is_named(cluster: ClusterCommands) -> None:
    done = cluster("run --hosts 1", "no-such-program")
    assert done.returncode == 127
    assert "no-such-program: there is no such program on host h1" in done.stderr


def test_a_program_that_fails_ends_the_others(cluster: ClusterCommands) -> None:
    script = '[ $(hostname) = h2 ] && exit 9; (trap "" TERM; sleep 1000) & sleep 1000'
    done = cluster("run --hosts 3 --all", "sh", "-c", script)
    assert done.returncode == 9
    assert cluster.all_ended()


def test_a_cluster_with_a_name_stays_until_down(cluster: ClusterCommands) -> None:
    before = machine()
    up = cluster("up demo --hosts 2 --rate 1gbit")
    assert (up.returncode, up.stdout) == (0, "demo: 2 hosts, h1 to h2\n")
    assert cluster("list").stdout == "demo\n"
    again = cluster("up demo --hosts 2")
    assert again.returncode == 1
    assert "cluster 'demo' exists; end it by down" in again.stderr
    # What one program leaves, the next one finds.
    assert cluster("run demo --on h2", "sh", "-c", "> /dev/shm/kept").ok
    assert cluster("run demo --on h2", "ls", "/dev/shm").stdout == "kept\n"
    assert cluster("run demo --on h1", "ls", "/dev/shm").stdout == ""
    twice = cluster("run demo --on h1,h1", "true")
    assert (twice.returncode, "h1 is asked for twice" in twice.stderr) == (2, True)
    waiting = cluster.start("run demo", "sh", "-c", "echo ready; sleep 1000")
    assert waiting.stdout is not None
    with waiting, waiting.stdout:
        assert waiting.stdout.readline() == "ready\n"
        assert cluster("down demo").ok
        assert waiting.wait(LIMIT_S) == 1
    assert poll_until(cluster.all_ended, LIMIT_S)
    assert machine() == before
    gone = cluster("run demo", "true")
    assert (gone.returncode, "no cluster 'demo'" in gone.stderr) == (1, True)


def test_a_supervisor_that_is_killed_leaves_a_name_that_can_be_used_again(
    cluster: ClusterCommands,
) -> None:
    assert cluster("up demo --hosts 2").ok
    for pid in cluster.processes():
        if os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid"):
            os.kill(pid, signal.SIGKILL)
    assert poll_until(cluster.all_ended, LIMIT_S)
    assert cluster("list").stdout == ""
    said = cluster("run demo", "true")
    assert "cluster 'demo' has ended: its process was killed" in said.stderr
    assert cluster("up demo --hosts 1").ok
    assert cluster("run demo", "hostname").stdout == "h1\n"
    assert cluster("down demo").ok
    assert cluster.all_ended()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(
    cluster: ClusterCommands, number: signal.Signals
) -> None:
    script = '(trap "" INT TERM; sleep 1000) & echo ready; wait'
    running = cluster.start("run --hosts 2 --all", "sh", "-c", script)
    assert running.stdout is not None
    with running, running.stdout:
        assert [running.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        running.send_signal(number)
        assert running.wait(LIMIT_S) == 128 + number
    assert cluster.all_ended()


def test_ctrl_c_in_a_terminal_comes_once_to_each_program(
    cluster: ClusterCommands,
) -> None:
    script = 'trap "echo got" INT; echo ready; while :; do sleep 1; done'
    words = cluster.argv("run --hosts 1", "sh", "-c", script)
    running = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, *words],
        env=cluster.environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdin is not None
    assert running.stdout is not None
    with running:
        assert running.stdout.readline().strip() == "ready"
        running.stdin.write("\x03")
        running.stdin.flush()
        printed = running.stdout.read()
        assert running.wait(LIMIT_S) == 128 + signal.SIGINT
    assert printed.count("got") == 1
    assert cluster.all_ended()


def test_a_run_that_is_killed_takes_its_programs_with_it(
    cluster: ClusterCommands,
) -> None:
    assert cluster("up demo --hosts 1").ok
    kept = cluster.processes()
    running = cluster.start("run demo", "sh", "-c", "sleep 1000 & echo ready; wait")
    assert running.stdout is not None
    with running, running.stdout:
        assert running.stdout.readline() == "ready\n"
        running.kill()
    assert poll_until(lambda: cluster.processes() == kept, LIMIT_S)
    assert cluster("down demo").ok


@pytest.mark.whole
@pytest.mark.full(sample=4)
@pytest.mark.parametrize("case", range(100))
def test_a_kill_at_any_moment_leaves_nothing(
    cluster: ClusterCommands, case: int, seed: int
) -> None:
    before = machine()
    drawn = random.Random(f"{seed}-{case}")
    running = cluster.start("run --hosts 4 --topology loop --rate 1gbit", "sleep", "99")
    assert running.stdout is not None
    with running, running.stdout:
        # A random moment, from Python's start to the program's own.
        threading.Event().wait(drawn.uniform(0, 1.0))
        running.kill()
    assert poll_until(cluster.all_ended, LIMIT_S)
    assert machine() == before


def test_rates_are_measured(cluster: ClusterCommands) -> None:
    done = cluster("measure --hosts 2 --rate 100mbit --seconds 0.5")
    assert done.returncode in (0, 1), done.describe_failure()
    [_, line] = done.stdout.splitlines()
    assert line.split()[:2] == ["h1-h2", "100mbit"]
    # A busy machine disturbs the figure; without a bucket it would be 100 times that.
    assert 0 < float(line.split()[2]) <= 500


@pytest.mark.whole
def test_ranks_of_mpiexec_sum_over_uneven_hosts(
    cluster: ClusterCommands, program: Callable[[str], str]
) -> None:
    done = cluster(
        "run --hosts 3 --rate 1gbit --launcher mpiexec --ranks 2,1,1",
        *(sys.executable, program(SUM)),
    )
    assert done.ok, done.describe_failure()
    assert sorted(done.stdout.splitlines()) == [
        "h1 0 4 10.0 10.0",
        "h1 1 4 10.0 10.0",
        "h2 2 4 10.0 10.0",
        "h3 3 4 10.0 10.0",
    ]
    assert cluster.all_ended()
