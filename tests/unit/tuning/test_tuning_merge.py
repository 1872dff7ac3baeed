# SPDX-License-Identifier: Apache-2.0
"""Tables and recordings of one machine become one table; nothing is lost silently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tuning_recordings import DIRECT, DOUBLING, NATIVE, NEAR, RING, TRUTH, record

from commrt.errors import TableError
from commrt.select.facts import Candidate
from commrt.select.fingerprint import Cpu, Machine
from commrt.select.rules import Evidence, Match, Point, Rule
from commrt.select.schema import Catalog
from commrt.select.table import Table, load, load_file
from commrt.select.write import dump
from commrt.tuning import merge as merging
from commrt.tuning.cli import main
from commrt.tuning.merge import Input, Merged, merge
from commrt.tuning.recording_reader import load_recording
from commrt.tuning.samples import Recording
from commrt.tuning.table_writer import write_table

HERE = Machine(Cpu("some", 1, 8))
THERE = Machine(Cpu("other", 1, 8))
KNOWN = Catalog({"mpi": ("native",), "shm": ("direct", "recursive_doubling", "ring")})


def renamed(op: str) -> Recording:
    """Return a recording of an operation that does not exist."""
    recording = record(seed=1)
    recording.samples = [replace(one, op=op) for one in recording.samples]
    recording.orders = {op: recording.orders["allreduce"]}
    return recording


def rule(
    use: Candidate,
    lo: int = 0,
    hi: int | None = None,
    *,
    op: str = "allreduce",
    launches: int = 3,
    date: str = "2026-11-20",
    ranks: int = 2,
) -> Rule:
    match = Match(
        lo, hi, ranks=ranks, nodes=1, ppn=ranks, link_class="near", device="host"
    )
    point = Point(max(lo, 8), 1.0, (0.9, 1.1), 9, launches)
    return Rule(op, match, use, Evidence("win", (point,), date=date))


def table(*rules: Rule, name: str = "a", machine: Machine = HERE) -> Input:
    return Input(name, table=Table(machine, rules))


def recorded(
    recording: Recording, name: str = "raw", machine: Machine | None = HERE
) -> Input:
    recording.machine = machine
    return Input(name, recording=recording)


def merged(*inputs: Input, same_machine: bool = False) -> Merged:
    return merge(inputs, KNOWN, same_machine=same_machine, date="2026-11-22")


def uses(result: Merged, op: str = "allreduce") -> list[tuple[int, Candidate]]:
    return [(one.match.lo, one.use) for one in result.table.rules if one.op == op]


def test_cells_that_only_one_has_are_taken_over() -> None:
    first = table(rule(DIRECT), name="a")
    second = table(rule(RING, op="bcast"), rule(NATIVE, ranks=4), name="b")
    result = merged(first, second)
    assert len(result.table.rules) == 3
    assert uses(result, "bcast") == [(0, RING)]
    assert not any("conflict" in line for line in result.lines)
    assert load(dump(result.table), "t", KNOWN) == result.table


@pytest.mark.parametrize("swap", [False, True])
def test_the_newer_of_two_well_founded_tables_wins_and_the_conflict_is_said(
    swap: bool,
) -> None:
    old = table(rule(DIRECT, 0, 4096), rule(RING, 4096), name="old.yaml")
    new = table(
        rule(DIRECT, 0, 8192, date="2026-11-21"),
        rule(RING, 8192, date="2026-11-21"),
        name="new.yaml",
    )
    result = merged(*((new, old) if swap else (old, new)))
    assert uses(result) == [(0, DIRECT), (8192, RING)]
    text = "\n".join(result.lines)
    assert "taken from new.yaml (3 launches, 2026-11-21)" in text
    assert (
        "conflict with old.yaml (3 launches, 2026-11-20) from 4K to 8K: shm/direct, "
        "not shm/ring{store=stream}" in text
    )


def test_a_table_of_too_few_launches_does_not_win_by_being_newer() -> None:
    sound = table(rule(DIRECT, launches=9), name="sound")
    hasty = table(rule(RING, launches=1, date="2026-11-22"), name="hasty")
    assert uses(merged(sound, hasty)) == [(0, DIRECT)]
    by_hand = Input("hand", table=Table(HERE, (replace(rule(NATIVE), evidence=None),)))
    assert uses(merged(by_hand, sound)) == [(0, DIRECT)]


def test_of_equals_the_one_named_last_wins() -> None:
    first, second = table(rule(DIRECT), name="a"), table(rule(RING), name="b")
    assert uses(merged(first, second)) == [(0, RING)]
    assert uses(merged(second, first)) == [(0, DIRECT)]


def test_raw_data_decide_again_over_all_launches() -> None:
    """Neither recording alone has enough launches; the table says something else."""
    first = recorded(record(seed=1, launches=2), "one.json")
    second = recorded(record(seed=2, launches=2), "two.json")
    said = table(rule(NATIVE, launches=50, date="2027-01-01"), name="t.yaml")
    result = merged(first, said, second)
    assert [use for _, use in uses(result)] == [DOUBLING, DIRECT, RING]
    evidence = result.table.rules[0].evidence
    assert evidence is not None
    assert {point.launches for point in evidence.points} == {4}
    text = "\n".join(result.lines)
    assert "decided from raw data (4 launches, 2026-11-22)" in text
    assert "conflict with t.yaml" in text
    held_out = result.table.method["held_out"]
    assert isinstance(held_out, dict)
    assert held_out["cells"] > 10
    assert load(dump(result.table), "t", KNOWN) == result.table


def test_a_recording_given_twice_counts_once() -> None:
    one = record(seed=1)
    result = merged(recorded(one, "a.json"), recorded(record(seed=1), "b.json"))
    evidence = result.table.rules[0].evidence
    assert evidence is not None
    assert {point.launches for point in evidence.points} == {3}
    assert "b.json holds the same measurements as a.json" in result.lines[0]


def test_a_failure_in_one_recording_counts_in_all() -> None:
    fine, failed = record(seed=1), record(seed=2)
    item = {"op": "allreduce", "nbytes": 8, "candidate": str(RING)}
    failed.fail(NEAR.size, item, "wrong result")
    result = merged(recorded(fine, "a"), recorded(failed, "b"))
    assert RING not in [use for _, use in uses(result)]


def test_what_this_commrt_no_longer_has_is_left_out_and_said() -> None:
    gone = Candidate("shm", "gone")
    truth = {**TRUTH, gone: lambda n: 0.001}
    result = merged(recorded(record(seed=1, truth=truth)), table(rule(DIRECT)))
    assert gone not in [use for _, use in uses(result)]
    assert any("shm/gone for allreduce is left out" in line for line in result.lines)


def test_different_versions_and_margins_are_said() -> None:
    first = Table(HERE, (rule(DIRECT),), {"mpi": "A", "commrt": "1"}, {"seed": 1}, 0.05)
    second = Table(HERE, (rule(RING),), {"mpi": "B", "commrt": "1"}, {"seed": 2}, 0.1)
    result = merged(Input("a", table=first), Input("b", table=second))
    assert result.table.software == {"mpi": "A | B", "commrt": "1"}
    assert "seed" not in result.table.method
    text = "\n".join(result.lines)
    assert "different versions of mpi: A | B" in text
    assert "different tie margins (0.05, 0.1)" in text


PAIR = (("mpi", "nccl"),)
TESTED = {"mpi": "A", "nccl": "2.28.9"}


def with_pair(
    name: str = "a", software: dict[str, object] | None = None, *rules: Rule
) -> Input:
    """Return a table that says that NCCL and MPI were tested together."""
    versions = TESTED if software is None else software
    made = Table(HERE, rules or (rule(DIRECT),), versions, tested_together=PAIR)
    return Input(name, table=made)


@pytest.mark.parametrize(
    "measured",
    [{}, {"commrt": "0"}, {"mpi": "A"}, TESTED],
    ids=["nothing", "neither", "one", "both"],
)
def test_engines_tested_together_stay_beside_what_was_measured_so(
    measured: dict[str, object],
) -> None:
    raw = record(seed=1)
    raw.software = measured
    result = merged(with_pair(), recorded(raw))
    assert result.table.tested_together == PAIR
    assert {key: result.table.software[key] for key in TESTED} == TESTED
    assert load(dump(result.table), "t", KNOWN) == result.table
    again = merged(Input("again", table=result.table), recorded(raw))
    assert again.table.tested_together == PAIR


@pytest.mark.parametrize(
    ("software", "measured"),
    [
        (TESTED, {"mpi": "B"}),
        (TESTED, {**TESTED, "nccl": "2.29.0"}),
        ({}, {"mpi": "A"}),
        ({"mpi": "A"}, TESTED),
    ],
    ids=["other MPI", "other NCCL", "unnamed", "one unnamed"],
)
def test_engines_are_kept_apart_where_something_was_measured_with_other_versions(
    software: dict[str, object], measured: dict[str, object]
) -> None:
    raw = record(seed=1)
    raw.software = measured
    result = merged(with_pair("hand.yaml", software), recorded(raw))
    assert result.table.tested_together == ()
    assert any(
        line.startswith("mpi and nccl are kept apart") and "raw was measured" in line
        for line in result.lines
    )


def test_every_table_has_to_say_that_engines_were_tested_together() -> None:
    both = merged(with_pair(), with_pair("b", {"mpi": "B", "nccl": "2.29.0"}))
    assert both.table.tested_together == PAIR
    one = merged(with_pair(), table(rule(RING, op="bcast"), name="b"))
    assert one.table.tested_together == ()
    assert any("b does not say that they were" in line for line in one.lines)
    # Of two that were tested, each with its own, no mixture was.
    raw = record(seed=1)
    raw.software = {"mpi": "A", "nccl": "2.29.0"}
    tables = with_pair(), with_pair("b", {"mpi": "B", "nccl": "2.29.0"})
    assert merged(*tables, recorded(raw)).table.tested_together == ()


def test_different_machines_are_an_error_that_names_both() -> None:
    with pytest.raises(TableError, match=r"of different ones \(a: some.*b: other"):
        merged(table(rule(DIRECT)), table(rule(RING), name="b", machine=THERE))
    with pytest.raises(TableError, match="of different ones"):
        merged(
            table(rule(DIRECT)),
            recorded(record(seed=1), machine=THERE),
            same_machine=True,
        )


def test_a_recording_without_a_machine_is_taken_on_request_only() -> None:
    inputs = table(rule(RING, op="bcast")), recorded(record(seed=1), machine=None)
    with pytest.raises(TableError, match="raw does not say on which machine"):
        merged(*inputs)
    assert merged(*inputs, same_machine=True).table.machine == HERE


@pytest.mark.parametrize(
    "strange",
    [
        record(seed=1, facts=replace(NEAR, link_class="telepathic")),  # type: ignore[arg-type]
        renamed("allreduce_twice"),
    ],
)
def test_what_no_table_can_hold_is_a_typed_error(strange: Recording) -> None:
    with pytest.raises(TableError, match=r"merged table.*(telepathic|twice)"):
        merged(recorded(strange), table(rule(DIRECT)))


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(TableError, match="nothing to merge"):
        merged(table(), table(name="b"))


def test_a_recording_keeps_its_machine_and_date(tmp_path: Path) -> None:
    recording = record(seed=1)
    recording.machine, recording.date = HERE, "2026-11-01"
    recording.save(tmp_path / "raw.json")
    again = load_recording(tmp_path / "raw.json")
    assert (again.machine, again.date) == (HERE, "2026-11-01")
    result = merged(Input("raw", recording=again), table(rule(RING, op="bcast")))
    evidence = result.table.rules[0].evidence
    assert evidence is not None
    assert evidence.date == "2026-11-01"


@pytest.mark.parametrize("cores", [1, 2, 0.5])
def test_a_recording_keeps_parts_of_cores(cores: float, tmp_path: Path) -> None:
    recording = record(seed=1, facts=replace(NEAR, cores=cores))
    recording.machine = HERE
    recording.save(tmp_path / "raw.json")
    again = load_recording(tmp_path / "raw.json")
    assert {launch.facts.cores for launch in again.launches.values()} == {cores}


def test_the_command_writes_a_table_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = record(seed=4)
    recording.machine = HERE
    raw, old, out = (tmp_path / name for name in ("r.json.gz", "old.yaml", "new.yaml"))
    recording.save(raw)
    write_table(Table(HERE, (rule(DIRECT, op="bcast"),)), old)
    assert main(["merge", str(raw), str(old), "--out", str(out)]) == 0
    assert "decided from raw data" in capsys.readouterr().out
    assert {one.op for one in load_file(out, KNOWN).rules} == {"allreduce", "bcast"}
    assert main(["merge", str(raw), "--out", str(out)]) == 2
    assert "two files or more" in capsys.readouterr().err


def _many(first: int, count: int) -> tuple[Rule, ...]:
    """Return rules for so many numbers of ranks, as short as rules can be."""
    return tuple(
        Rule("allreduce", Match(0, None, ranks=ranks), NATIVE)
        for ranks in range(first, first + count)
    )


def test_as_many_rules_as_a_table_may_have_can_be_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rules say what they ask for and nothing else: a large table stays readable."""
    monkeypatch.setattr(merging, "MAX_NBYTES", 100_000)  # a tenth, for a quick test
    large, other, out = (tmp_path / name for name in ("a.yaml", "b.yaml", "c.yaml"))
    write_table(Table(HERE, _many(2, 800)), large)
    write_table(Table(HERE, _many(20_000, 3)), other)
    assert main(["merge", str(large), str(other), "--out", str(out)]) == 0
    assert len(load_file(out, KNOWN).rules) == 803
    write_table(Table(HERE, _many(20_000, 500)), other)
    assert main(["merge", str(large), str(other), "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert "1300 rules in" in said
    assert "merge fewer files" in said
    assert len(load_file(out, KNOWN).rules) == 803
