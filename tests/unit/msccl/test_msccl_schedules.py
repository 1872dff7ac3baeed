# SPDX-License-Identifier: Apache-2.0
"""Files of MSCCL become schedules that are right, and wrong ones are found by line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msccl_files import FILES, MscclText, changed_line, without_step
from schedule_cases import assert_equal, expected, inputs

from commrt.algorithms import schedule
from commrt.errors import CommError, ScheduleError, UsageError
from commrt.msccl.document import read_msccl
from commrt.msccl.schedules import FromFile, forms_of, from_msccl, verify_msccl
from commrt.schedule.interpret import run
from commrt.schedule.ir import Schedule
from commrt.schedule.verify_lowered import verify_lowered
from commrt.sim.network_files import load_network
from commrt.sim.simulate import simulate
from commrt.vocabulary.operations import operation

SIZES = (1, 2, 3, 5, 8)


def read(folder: Path, text: str) -> list[FromFile]:
    """Return the schedules of a file, one for each way in which it is called."""
    path = folder / "algorithm.xml"
    path.write_text(text)
    algorithm = read_msccl(path)
    return [from_msccl(algorithm, in_place=form) for form in forms_of(algorithm)]


def prove(folder: Path, text: str) -> None:
    for made in read(folder, text):
        verify_msccl(made)


def steps(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each step."""
    for number, line in enumerate(text.splitlines(), 1):
        if "<step" in line:
            yield number, line


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FILES)
def test_a_right_file_is_proved_and_computes_what_numpy_says(
    name: str, size: int, tmp_path: Path
) -> None:
    for made in read(tmp_path, FILES[name](size)):
        verify_msccl(made)
        verify_lowered(made.schedule)
        one = made.schedule
        assert one.length_unit % one.divisor == 0
        for count in (0, 1, 3):
            length = count * one.length_unit
            if operation(one.coll).out_count == "times_size":
                length //= size
            xs = [x[:length] for x in inputs(one.coll, size, max(length, 1))]
            xs = [np.asarray(x, np.float64) for x in xs]
            assert_equal(run(one, xs), expected(one.coll, 0, xs))


@pytest.mark.parametrize("name", FILES)
def test_each_step_that_is_missing_is_found_with_a_line(
    name: str, tmp_path: Path
) -> None:
    text = FILES[name](3)
    for line, _ in steps(text):
        broken = without_step(text, line)
        with pytest.raises(CommError, match=r"algorithm\.xml, lines? \d+"):
            prove(tmp_path, broken)


READS = {"srcoff": ("s", "rrs", "rrc", "rrcs", "cpy", "re")}
READS["dstoff"] = ("r", "rcs", "rrc", "rrcs", "cpy", "re")


@pytest.mark.parametrize("key", READS)
@pytest.mark.parametrize("name", FILES)
def test_each_wrong_offset_is_found_with_a_line(
    name: str, key: str, tmp_path: Path
) -> None:
    text = FILES[name](4)
    tried = 0
    for line, step in steps(text):
        kind = re.search(r'type="(\w+)"', step)
        if kind is None or kind[1] not in READS[key]:
            continue
        tried += 1
        broken = changed_line(
            text,
            line,
            lambda one: re.sub(
                rf'{key}="(\d+)"', lambda found: f'{key}="{int(found[1]) ^ 1}"', one
            ),
        )
        with pytest.raises(CommError, match=r"algorithm\.xml, lines? \d+"):
            prove(tmp_path, broken)
    assert tried > 0


def test_the_line_of_a_send_from_a_wrong_chunk_is_among_those_named(
    tmp_path: Path,
) -> None:
    text = FILES["direct_alltoall"](3)
    sends = [at for at, step in steps(text) if 'type="s"' in step]
    assert len(sends) == 3 * 2 * 2
    for line in sends:
        broken = changed_line(
            text,
            line,
            lambda one: re.sub(
                r'srcoff="(\d)"', lambda old: f'srcoff="{int(old[1]) ^ 1}"', one
            ),
        )
        with pytest.raises(ScheduleError) as caught:
            prove(tmp_path, broken)
        named = re.match(r".*?, lines? ([\d, and]+):", str(caught.value))
        assert named is not None
        assert str(line) in re.findall(r"\d+", named[1])


def test_each_wait_that_is_missing_is_found_with_both_lines(tmp_path: Path) -> None:
    text = FILES["all_pairs_allreduce"](4)
    waiting = [line for line, step in steps(text) if 'depid="-1"' not in step]
    assert len(waiting) == 4 * (3 + 3)
    for line in waiting:
        broken = changed_line(
            text,
            line,
            lambda one: re.sub(r'depid="\d+" deps="\d+"', 'depid="-1" deps="-1"', one),
        )
        with pytest.raises(ScheduleError, match=r"lines \d+ and \d+: .*race"):
            prove(tmp_path, broken)


def test_a_step_that_never_says_it_is_done_lets_its_waiter_hang(
    tmp_path: Path,
) -> None:
    text = FILES["all_pairs_allreduce"](2)
    line = next(at for at, step in steps(text) if 'type="nop"' in step)
    for at, step in steps(text):
        if 'hasdep="1"' in step and 'type="r"' in step:
            text = changed_line(text, at, lambda one: one.replace('hasdep="1"', ""))
            break
    with pytest.raises(ScheduleError, match=f"lines {line} and {at}: the step waits"):
        prove(tmp_path, text)


def test_receiving_first_on_all_ranks_is_a_deadlock_with_its_lines(
    tmp_path: Path,
) -> None:
    made = MscclText("allgather", 2, 2, in_place=True)
    for rank in (0, 1):
        block = made.block(rank, 1 - rank, 1 - rank)
        block.step("r", ("o", 0), ("o", 1 - rank))
        block.step("s", ("o", rank), ("o", rank))
    with pytest.raises(ScheduleError, match="lines 4, 5, 10 and 11: deadlock: the"):
        prove(tmp_path, made.text())


def test_sending_first_on_all_ranks_is_no_deadlock(tmp_path: Path) -> None:
    made = MscclText("allgather", 2, 2, in_place=True)
    for rank in (0, 1):
        block = made.block(rank, 1 - rank, 1 - rank)
        block.step("s", ("o", rank), ("o", rank))
        block.step("r", ("o", 0), ("o", 1 - rank))
    prove(tmp_path, made.text())


def test_thread_blocks_that_wait_for_each_other_are_found(tmp_path: Path) -> None:
    made = MscclText("allgather", 1, 2, in_place=False)
    for own in (0, 1):
        made.block(0).step("cpy", ("i", own), ("o", own), wait=(1 - own, 0))
    with pytest.raises(ScheduleError, match=r"gpu 0 wait for each other for ever: tb"):
        prove(tmp_path, made.text())


def test_messages_of_two_channels_meet_by_channel(tmp_path: Path) -> None:
    made = MscclText("allgather", 2, 4, in_place=False)
    for rank in (0, 1):
        made.block(rank).step("cpy", ("i", 0), ("o", 2 * rank), 2)
        # One rank has the channels the other way round.
        for channel in (0, 1) if rank else (1, 0):
            block = made.block(rank, 1 - rank, 1 - rank, channel)
            block.step("s", ("i", channel), ("o", 2 * rank + channel))
            block.step("r", ("i", channel), ("o", 2 * (1 - rank) + channel))
    prove(tmp_path, made.text())


def test_messages_of_different_lengths_are_found_with_both_lines(
    tmp_path: Path,
) -> None:
    text = FILES["direct_allgather"](2)
    line = next(at for at, step in steps(text) if 'type="r"' in step)
    text = changed_line(text, line, lambda one: one.replace('cnt="3"', 'cnt="2"'))
    with pytest.raises(ScheduleError, match=r"lines \d+ and \d+: gpu 1 sends 3 chunks"):
        prove(tmp_path, text)


def test_input_of_an_algorithm_out_of_place_is_not_written(tmp_path: Path) -> None:
    text = FILES["ring_allreduce"](3).replace(
        'inplace="1" outofplace="0"', 'inplace="0" outofplace="1"'
    )
    with pytest.raises(ScheduleError, match=r"it writes .*the caller's input"):
        prove(tmp_path, text)


def test_broadcast_from_another_root_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "algorithm.xml"
    path.write_text(FILES["chain_broadcast"](3))
    made = from_msccl(read_msccl(path), in_place=False, root=2)
    with pytest.raises(ScheduleError, match="root 2: rank 0 step 0"):
        verify_msccl(made)
    algorithm = read_msccl(path)
    with pytest.raises(UsageError, match="root 3 of 3 ranks"):
        from_msccl(algorithm, in_place=False, root=3)


def test_a_ring_takes_the_time_of_the_ring_that_commrt_has(tmp_path: Path) -> None:
    network = load_network("star:hosts=6,rate=100gbit,latency=2us").network
    made = read(tmp_path, FILES["ring_allgather"](6))[0].schedule
    nbytes = 6 * 4 * 1000
    found = simulate(made, network, nbytes)
    own = simulate(schedule("allgather", "ring", 6), network, nbytes)
    assert found.time_us == own.time_us
    assert found.messages.nbytes.sum() == own.messages.nbytes.sum()


def test_lengths_that_chunks_do_not_divide_are_refused(tmp_path: Path) -> None:
    network = load_network("star:hosts=3").network
    made = read(tmp_path, FILES["ring_allreduce"](3))[0].schedule
    with pytest.raises(UsageError, match="expected a multiple of 24"):
        simulate(made, network, 28)


def test_the_divisor_is_in_the_serial_form(tmp_path: Path) -> None:
    made = read(tmp_path, FILES["ring_allreduce"](3))[0].schedule
    back = Schedule.from_json(made.to_json())
    assert (back.divisor, back.digest()) == (6, made.digest())
    assert "divisor" not in schedule("allreduce", "ring", 3).to_json()
