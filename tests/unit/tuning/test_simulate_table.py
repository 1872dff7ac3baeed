# SPDX-License-Identifier: Apache-2.0
"""Tables for networks that are only described: ``commrt-tune simulate``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from commrt import algorithms
from commrt.backends.catalog import catalog
from commrt.select.facts import Candidate, CommFacts, Query
from commrt.select.rules import Match
from commrt.select.table import load_file
from commrt.sim.costs import Costs
from commrt.sim.fragments import CONNECTIONS, as_sent_by_tcp
from commrt.sim.network_files import load_network
from commrt.sim.placements import place
from commrt.sim.simulate import simulate
from commrt.tuning.cli import main
from commrt.tuning.simulate import Setting, rules_of, simulated_times

NETWORK = "star:hosts=8,rate=1GB/s,latency=10us"


def setting(topology: str = NETWORK, ranks: int = 8, backend: str = "mpi") -> Setting:
    described = load_network(topology)
    return Setting(described, place(described.network, ranks), backend)


def test_the_fastest_is_chosen_at_every_size() -> None:
    here, sizes = setting(), [64, 4096, 1 << 20]
    times = simulated_times(here, "allreduce", sizes)
    for size in sizes:
        every = []
        for candidate, one in here.candidates("allreduce"):
            run = simulate(one, here.described.network, size, here.hosts)
            every.append(run.time_us)
            if size in times[candidate]:
                assert times[candidate][size] == run.time_us
        known = [mine[size] for mine in times.values() if size in mine]
        assert min(known) == min(every)


def test_what_was_left_out_could_not_have_been_the_best() -> None:
    times = simulated_times(setting(), "allreduce", [64, 1024, 1 << 16, 1 << 22])
    left_out = [mine for mine in times.values() if len(mine) < 4]
    assert left_out
    for mine in left_out:
        assert 64 in mine


@pytest.mark.parametrize("op", ["allreduce", "allgather", "bcast", "alltoall"])
def test_rules_tile_all_sizes_and_say_that_they_are_simulated(op: str) -> None:
    sizes = [64, 1024, 1 << 14, 1 << 18, 1 << 22]
    times = simulated_times(setting(), op, sizes)
    rules = rules_of(op, times, sizes, Match(0, None, ranks=8), "2026-11-30")
    ends = [(rule.match.lo, rule.match.hi) for rule in rules]
    assert ends[0][0] == 0
    assert ends[-1][1] is None
    assert [hi for _, hi in ends[:-1]] == [lo for lo, _ in ends[1:]]
    points = [point.nbytes for rule in rules for point in rule.evidence.points]
    assert points == sizes
    assert {rule.evidence.verdict for rule in rules} == {"simulated"}
    assert len({*map(str, (rule.use for rule in rules))}) > 1 or op == "alltoall"


def test_a_boundary_lies_where_the_lines_cross() -> None:
    a, b = Candidate("mpi", "direct"), Candidate("mpi", "ring")
    times = {a: {100: 10.0, 1100: 110.0}, b: {100: 50.0, 1100: 60.0}}
    first, second = rules_of("allreduce", times, [100, 1100], Match(0, None), "")
    # 10 + 0.1 n and 50 + 0.01 n meet at n = 444.4.
    assert (first.use, second.use) == (a, b)
    assert first.match.hi == second.match.lo == 100 + 444


def test_connections_of_ones_own_carry_a_long_broadcast_in_pieces() -> None:
    here, size = setting(backend="tcp"), 1 << 24
    times = simulated_times(here, "bcast", [size])
    chain, one = next(
        each for each in here.candidates("bcast") if each[0].algorithm == "chain"
    )
    cut = as_sent_by_tcp(one, size // 4, 4)
    costs = Costs(**CONNECTIONS)
    run = simulate(cut, here.described.network, size, here.hosts, costs=costs)
    assert times[chain][size] == run.time_us
    assert min(times, key=lambda each: times[each].get(size, math.inf)) == chain
    whole = simulated_times(setting(), "bcast", [size])
    assert whole[Candidate("mpi", "chain")][size] > 5 * run.time_us


def test_many_messages_are_cut_into_fewer_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("commrt.tuning.simulate._MOST_MESSAGES", 4 * 56)
    here = setting(backend="tcp")
    (chain,) = [
        one for each, one in here.candidates("bcast") if each.algorithm == "chain"
    ]
    sent = here.as_sent(chain, 1 << 24)
    assert len(sent.program(7).steps) == 4 * len(chain.program(7).steps)
    assert here.as_sent(chain, 64) is chain


def test_the_table_is_used_like_a_measured_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.yaml"
    asked = ["simulate", "--topology", NETWORK, "--ranks", "8", "--out", str(out)]
    assert main([*asked, "--ops", "allreduce,bcast", "--bytes", "64:1MiB"]) == 0
    assert "every time in it is simulated" in capsys.readouterr().out
    table = load_file(out, catalog())
    assert "star" in str(table.method["simulated"])
    facts = CommFacts(8, 8, 1, 8, "network")
    hit = table.lookup(facts, Query("allreduce", 4096, "float32", op="sum"))
    assert hit is not None
    assert hit.rule.use.algorithm in algorithms.names("allreduce", 8)
    shown = ["explain", "allreduce", "4096", "--table", str(out), "--ranks", "8"]
    assert main([*shown, "--nodes", "8", "--link-class", "network"]) == 0
    assert "simulated" in capsys.readouterr().out
    assert main(["lint", "--table", str(out)]) == 0
    assert "was simulated, not measured" in capsys.readouterr().out


def test_several_ranks_of_a_node_are_told_to_two_level_schedules() -> None:
    here = setting("abci", 8)
    assert here.nodes == (0, 0, 0, 0, 1, 1, 1, 1)
    assert "two_level" in {one.algorithm for one, _ in here.candidates("allreduce")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--ops", "alltoallv"], "--ops alltoallv"),
        (["--ops", "sum"], "--ops sum"),
        (["--bytes", "1MiB:64"], "--bytes 1MiB:64"),
        (["--ranks", "9"], "9 ranks on 8 hosts"),
        (["--ranks", "1"], "--ranks 1"),
        (["--backend", "shm"], "--backend shm: these ranks are on 8 nodes"),
        (["--topology", "mobius"], "mobius"),
    ],
)
def test_wrong_arguments_write_no_table(
    change: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "table.yaml"
    asked = ["simulate", "--topology", NETWORK, "--ranks", "8", "--out", str(out)]
    assert main([*asked, *change]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
