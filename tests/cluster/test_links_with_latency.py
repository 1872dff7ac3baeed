# SPDX-License-Identifier: Apache-2.0
"""Links with a latency: packets arrive, all of them, and not before their time."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from cluster_commands import ClusterCommands, machine

from commrt.bootstrap.base import poll_until

LIMIT_S = 300
SENDS = """\
import hashlib, random, socket, sys
host, all_hosts = socket.gethostname(), sys.argv[1:]
data = random.Random(7).randbytes(3_000_001)
if host == all_hosts[0]:
    with socket.create_server((host, 5000)) as server:
        for _ in all_hosts[1:]:
            peer, _ = server.accept()
            with peer, peer.makefile("rb") as file:
                print(file.read() == data, flush=True)
else:
    while True:
        try:
            peer = socket.create_connection((all_hosts[0], 5000))
        except ConnectionRefusedError:
            continue
        break
    with peer:
        for size in (1, 0, 999, 70_000):
            peer.sendall(data[:size])
            data = data[size:]
        peer.sendall(data)
"""
HOLDS = "echo ready; while :; do sleep 1; done"


@pytest.mark.whole
def test_no_packet_comes_before_its_time(cluster: ClusterCommands) -> None:
    before = machine()
    done = cluster("measure --hosts 2 --rate 100mbit --latency 20ms --seconds 0.5")
    assert done.returncode in (0, 1), done.describe_failure()
    words = done.stdout.splitlines()[1].split()
    # Two links there, and two back.
    assert words[4] == "80000"
    assert float(words[5]) >= 80_000
    assert cluster.all_ended()
    assert machine() == before


@pytest.mark.parametrize(
    ("num_hosts", "network"),
    [
        (2, "--rate 1gbit --latency 50us"),
        (3, "--rate 500mbit --latency 1ms"),
        (3, "--topology loop --per-switch 1 --rate 500mbit --latency 200us --mtu 1500"),
    ],
)
def test_what_is_sent_over_such_links_comes_whole(
    cluster: ClusterCommands, tmp_path: Path, num_hosts: int, network: str
) -> None:
    program = tmp_path / "sends.py"
    program.write_text(SENDS)
    hosts = [f"h{number + 1}" for number in range(num_hosts)]
    done = cluster(
        f"run --hosts {num_hosts} {network} --all",
        *(sys.executable, str(program), *hosts),
    )
    assert done.ok, done.describe_failure()
    assert done.stdout.split() == ["True"] * (num_hosts - 1)


def test_a_relay_that_is_killed_ends_the_cluster(cluster: ClusterCommands) -> None:
    running = cluster.start(
        "run --hosts 2 --rate 1gbit --latency 1ms", "sh", "-c", HOLDS
    )
    assert running.stdout is not None
    with running, running.stdout:
        assert running.stdout.readline() == "ready\n"
        [relay] = [pid for pid in cluster.processes() if _has_packet_sockets(pid)]
        os.kill(relay, signal.SIGKILL)
        assert running.wait(LIMIT_S) == 1
    assert poll_until(cluster.all_ended, LIMIT_S)


def _has_packet_sockets(pid: int) -> bool:
    """Return whether a process has opened a socket for packets of an interface."""
    sockets = Path(f"/proc/{pid}/net/packet").read_text().splitlines()[1:]
    inodes = {line.split()[-1] for line in sockets}
    links = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()]
    return any(link == f"socket:[{inode}]" for link in links for inode in inodes)
