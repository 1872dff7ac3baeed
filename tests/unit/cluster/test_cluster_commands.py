# SPDX-License-Identifier: Apache-2.0
"""Command lines of the cluster, and what they start, without a cluster."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import pytest

from commrt.cluster import programs
from commrt.cluster.__main__ import main
from commrt.cluster.agent import main as agent
from commrt.cluster.building import Cluster
from commrt.cluster.failures import ClusterError
from commrt.cluster.launchers import of_mpiexec, of_torchrun, parse_ranks
from commrt.cluster.measure import Found, verdict
from commrt.cluster.state import claimed_name, cluster_names, find_cluster, write_entry
from commrt.cluster.topology import star
from commrt.cluster.wiring import Wiring
from commrt.errors import UsageError
from commrt.launch.mpiexec import Launcher

HOSTS = ("h1", "h2", "h3")


def test_ranks_per_host_may_be_uneven() -> None:
    assert parse_ranks("2,1,1", HOSTS) == {"h1": 2, "h2": 1, "h3": 1}
    assert parse_ranks("2", HOSTS) == dict.fromkeys(HOSTS, 2)
    assert parse_ranks("0,3,0", HOSTS) == {"h2": 3}


@pytest.mark.parametrize("text", ["", "1,2", "0", "-1", "1,x,1", "99999"])
def test_wrong_numbers_of_ranks_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        parse_ranks(text, HOSTS)


@pytest.mark.parametrize(
    ("flavour", "words"),
    [
        ("openmpi", ["--host", "h1:2,h3:1"]),
        ("mpich", ["-hosts", "h1:2,h3:1"]),
    ],
)
def test_mpiexec_starts_on_the_first_host_that_has_ranks(
    flavour: str, words: list[str]
) -> None:
    launcher = Launcher(flavour, "/opt/mpiexec", "")  # type: ignore[arg-type]
    environ = {"MINE": "1", "UCX_TLS": "all"}
    [one] = of_mpiexec({"h1": 2, "h3": 1}, ["train"], environ, launcher)
    assert one.host == "h1"
    assert one.argv[0] == "/opt/mpiexec"
    assert one.argv[-3:] == ("-n", "3", "train")
    assert " ".join(words) in " ".join(one.argv)
    # What the user has set stays.
    assert (one.environ["MINE"], one.environ["UCX_TLS"]) == ("1", "all")


def test_options_of_mpiexec_come_first() -> None:
    launcher = Launcher("openmpi", "/opt/mpiexec", "")
    own = ["-x", "MINE", "--tag-output"]
    [one] = of_mpiexec({"h1": 1}, ["train"], {}, launcher, own)
    assert one.argv[:4] == ("/opt/mpiexec", *own)
    assert one.argv[-3:] == ("-n", "1", "train")


def test_another_mpis_launcher_is_refused() -> None:
    launcher = Launcher("intel", "/opt/mpiexec", "Intel(R) MPI")
    with pytest.raises(UsageError, match="Open MPI's and by MPICH's"):
        of_mpiexec({"h1": 1}, ["train"], {}, launcher)


def test_each_rank_gets_torchruns_variables() -> None:
    wiring = Wiring(star(3), 9000)
    found = of_torchrun(wiring, {"h1": 2, "h3": 1}, ["train"], {})
    assert [one.host for one in found] == ["h1", "h1", "h3"]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR")
    assert [[one.environ[name] for name in names] for one in found] == [
        ["0", "0", "2", "3", "10.77.0.1"],
        ["1", "1", "2", "3", "10.77.0.1"],
        ["2", "0", "1", "3", "10.77.0.1"],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run -- true", "name a cluster that up has made, or say by --hosts"),
        ("run a --hosts 2 -- true", "one of the two"),
        ("run --hosts 2", "no program: write it after --"),
        ("run --hosts 0 -- true", "0 hosts: expected a number from 1"),
        ("run --hosts 2 --ranks 2 -- true", "--ranks needs a --launcher"),
        ("up a", "say how many hosts, by --hosts N"),
        ("up a --hosts 2 -- true", "-- and a program are for run"),
        ("up a --hosts 2 --rate 5zbit", "rate '5zbit': expected a number"),
        ("run --hosts 2 --mpiexec-args=-v -- true", "needs --launcher mpiexec"),
        ("run --hosts 2 --launcher torchrun --mpiexec-args=-v -- x", "mpiexec-args"),
        (
            "run --hosts 2 --launcher mpiexec --mpiexec-args=' -- x",
            '--mpiexec-args "\'": No closing quotation',
        ),
        ("up a --hosts 2 --rate 1gbit --latency fast", "latency 'fast': expected"),
        ("up a --hosts 2 --latency 1ms", "link h1-s1 has a latency and the rate"),
        ("up a --hosts 2 --mtu 100", "--mtu 100: expected 1280 to 9000"),
        ("up a --hosts 2 --burst 5000", "--burst 5000: expected 9014"),
        ("up a --hosts 2 --burst 2000 --mtu 2000", "expected 2014"),
        ("up a --hosts 2 --burst 9014", "--burst is for links with a rate"),
        ("up a --hosts 2 --topology tree", "--topology 'tree'"),
        ("up a --hosts 2 --topology x.yaml", "leave --hosts, --rate and"),
        ("up a --hosts 2 --spines 3", "--spines says nothing about star"),
        ("up a --hosts 4 --topology loop --chords x", "--chords 'x': expected"),
        ("up a --hosts 4 --topology fat-tree --spines 0", "--spines 0: expected"),
        ("measure --hosts 2 --seconds 0", "--seconds 0.0: expected 0.1 to 50"),
    ],
)
def test_a_wrong_command_line_is_refused_and_makes_nothing(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_without_root_it_is_said_that_root_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["up", "a", "--hosts", "2"]) == 1
    assert "only root can make; this is user 1000" in capsys.readouterr().err


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "NEEDED", ("ip", "no-such-program"))
    with pytest.raises(ClusterError, match=r"programs .*no-such-program .*iproute2"):
        programs.check_programs()


def test_a_name_is_taken_while_its_cluster_runs(tmp_path: Path) -> None:
    with claimed_name("a", tmp_path):
        assert cluster_names(tmp_path) == ["a"]
    assert cluster_names(tmp_path) == []
    assert [*tmp_path.iterdir()] == []


def test_a_name_that_another_process_holds_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "a"
    place.mkdir()
    lock = os.open(place, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ClusterError, match="'a' exists; end it by down"):
        claimed_name("a", tmp_path).__enter__()
    os.close(lock)


def test_a_folder_that_is_no_clusters_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("mine")
    with pytest.raises(ClusterError, match=r"thesis\.txt, which no cluster left there"):
        claimed_name("a", tmp_path).__enter__()
    assert (tmp_path / "a" / "thesis.txt").read_text() == "mine"
    (tmp_path / "b").write_text("mine")
    with pytest.raises(ClusterError, match="is no folder of a cluster"):
        claimed_name("b", tmp_path).__enter__()


def test_a_cluster_that_was_killed_is_said_to_have_ended(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ClusterError, match="'a' has ended: its process was killed"):
        find_cluster("a", tmp_path)
    with pytest.raises(ClusterError, match="no cluster 'b'; start one by up"):
        find_cluster("b", tmp_path)
    with pytest.raises(UsageError, match="expected at most 64 letters"):
        find_cluster("../a", tmp_path)


def test_a_process_that_another_cluster_was_made_with_is_not_entered(
    tmp_path: Path,
) -> None:
    with claimed_name("a", tmp_path) as place:
        write_entry(place, Cluster(Wiring(star(1), 9000), os.getpid(), {"h1": 2}))
        assert find_cluster("a", tmp_path).cluster.processes == {"h1": 2}
        # Its number is another process's by now.
        state = place / "state.json"
        state.write_text(
            re.sub(r'"namespace": \d+', '"namespace": 1', state.read_text())
        )
        with pytest.raises(ClusterError, match="the namespace is somebody else's"):
            find_cluster("a", tmp_path)


@pytest.mark.parametrize("burst", [None, 3200])
def test_a_cluster_keeps_its_packets_and_buckets(
    tmp_path: Path, burst: int | None
) -> None:
    with claimed_name("a", tmp_path) as place:
        write_entry(
            place, Cluster(Wiring(star(1), 1500, burst), os.getpid(), {"h1": 2})
        )
        wiring = find_cluster("a", tmp_path).cluster.wiring
    assert (wiring.mtu, wiring.burst_nbytes) == (1500, burst)


@pytest.mark.parametrize("said", ["", "{}", "[1]", '{"first": 1}'])
def test_a_state_that_is_none_is_refused(tmp_path: Path, said: str) -> None:
    with claimed_name("a", tmp_path) as place:
        (place / "state.json").write_text(said)
        with pytest.raises(ClusterError, match="is no state of a cluster"):
            find_cluster("a", tmp_path)


def test_the_agent_refuses_a_host_that_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert agent(["h1=2,h2=3", "-x", "h9", "true"]) == 255
    assert "no host 'h9'. Known: h1, h2." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rate", "idle", "status"),
    [(497e6, 0.5, 0), (400e6, 0.5, 1), (560e6, 0.5, 1), (400e6, 0.1, 0)],
)
def test_a_rate_is_judged_where_cores_had_time_to_spare(
    rate: float, idle: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Found(("h1", "h2"), 500_000_000, 1.0, rate, 0, 20.0, idle)
    assert verdict([found]) == status
    said = capsys.readouterr().err
    assert ("h1-h2: the rate is more than 3% off" in said) == bool(status)
    assert ("not judged" in found.line()) == (idle < 0.2)


@pytest.mark.parametrize(("share", "good"), [(0.956, True), (1.0, False)])
def test_a_rate_is_judged_by_what_it_leaves_for_data(share: float, good: bool) -> None:
    assert Found(("h1", "h2"), 200_000_000, share, 191.2e6, 0, 24, 0.9).good == good


def test_unlimited_links_are_not_judged() -> None:
    found = Found(("h1", "h2"), None, 1.0, 9e9, 0, 20.0, 0.9)
    assert found.good
    assert "unlimited" in found.line()
