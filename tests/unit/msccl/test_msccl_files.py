# SPDX-License-Identifier: Apache-2.0
"""Files that are none of MSCCL, or hostile, are refused with the line."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from msccl_files import FILES, changed_line
from mutated_files import Mutate, bytes_changed, lines_changed

from commrt.commands.verify import main as verify_main
from commrt.errors import UsageError
from commrt.msccl.document import read_msccl
from commrt.sim.cli import main as sim_main

RING = FILES["ring_allreduce"](3)
BOMB = """<?xml version="1.0"?>
<!DOCTYPE algo [
<!ENTITY a "aaaaaaaaaa">
<!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
]>
<algo name="&b;"/>
"""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def of(line: int, old: str, new: str) -> str:
    """Return the ring with a part of one line replaced."""
    assert old in RING.splitlines()[line - 1]
    return changed_line(RING, line, lambda one: one.replace(old, new))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 3: the document declares the entity 'a'"),
        ("", "line 1: not XML: no element found"),
        ("<algo", "line 1: not XML: unclosed token"),
        ("<platform/>", "line 1: <platform> begins the file: expected <algo>"),
        ("<algo" + " >" + "<a>" * 100, "line 1: name is missing in <algo>"),
        (of(2, "<gpu", "<gqu"), "line 2: <gqu> in <algo>: expected <gpu>"),
        (of(4, "/>", "><x/></step>"), "line 4: <x> in <step>: a step holds nothing"),
        (of(1, '"allreduce"', '"custom"'), "line 1: coll is 'custom', whose result"),
        (of(1, '"allreduce"', '"allredcue"'), "did you mean 'allreduce'"),
        (of(1, 'ngpus="3"', 'ngpus="0"'), "line 1: ngpus is '0'; expected a whole"),
        (of(1, 'ngpus="3"', 'ngpus="4"'), "line 1: ngpus is 4, but no <gpu> has the"),
        (of(1, 'ngpus="3"', 'ngpus="2"'), "line 3: recv is '2'; expected a whole"),
        (of(1, 'inplace="1"', 'inplace="2"'), "line 1: inplace is '2'; expected 0 or"),
        (of(1, 'inplace="1"', 'inplace="0"'), "line 1: inplace and outofplace are"),
        (of(1, 'loop="6"', 'loop="7"'), "line 2: i_chunks is 6; expected 7 (or 0, if"),
        (of(1, 'loop="6"', f'loop="{"9" * 5000}"'), "line 1: nchunksperloop is '999"),
        (of(2, 's_chunks="0"', 's_chunks="16777216"'), "more than 16,777,216 chunks"),
        (of(3, 'send="1"', 'send="0"'), "line 3: a thread block of gpu 0 sends to it"),
        (of(3, 'send="1"', 'send="3"'), "line 3: send is '3'; expected a whole number"),
        (of(3, 'send="1"', 'send="-1"'), "line 4: type s needs a peer, but tb 0 has"),
        (of(3, 'chan="0"', 'chan="1"'), "line 10: send=1 chan=1 is that of tb 0 on"),
        (of(10, 'tb id="1"', 'tb id="0"'), "line 10: tb 0 is given twice"),
        (of(18, 'gpu id="1"', 'gpu id="0"'), "line 18: gpu 0 is given twice"),
        (of(5, 's="1"', 's="2"'), "line 5: s is 2; expected 1, the next step of tb 0"),
        (of(4, 'type="s"', 'type="z"'), "line 4: type is 'z'; expected one of s, r"),
        (of(4, 'srcbuf="i"', 'srcbuf="q"'), "line 4: srcbuf is 'q'; expected i, o"),
        (of(4, 'cnt="1"', 'cnt="7"'), "line 4: srcbuf i, srcoff 0, cnt 7 is not"),
        (of(4, 'cnt="1"', 'cnt="0"'), "line 4: cnt is '0'; expected a whole number"),
        (of(4, 'srcoff="0"', 'srcoff="-1"'), "line 4: srcoff is '-1'; expected"),
        (of(4, 'srcoff="0"', ""), "line 4: srcoff is missing in <step>"),
        (of(4, 'depid="-1"', 'depid="0"'), "line 4: it waits for tb 0, but deps is -1"),
        (of(4, 'hasdep="0"', 'hasdep="x"'), "line 4: hasdep is 'x'; expected 0 or 1"),
        (
            of(4, 'depid="-1" deps="-1"', 'depid="9" deps="0"'),
            "line 4: depid=9 deps=0 names no step of this gpu",
        ),
        (FILES["direct_alltoall"](2).replace('loop="4"', 'loop="3"'),
         "line 1: nchunksperloop is 3; expected a multiple of the 2 GPUs"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_msccl_is_refused_with_the_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.xml"
    path.write_text(text)
    assert verify_main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"commrt verify: {path}, line ")
    assert message in said


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a regular file: name a file of MSCCL"):
        read_msccl(tmp_path)


def test_the_shell_proves_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ring.xml"
    path.write_text(RING)
    assert verify_main([str(path)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert re.match(r"allreduce +3 ranks +\d+ steps .* in place$", first)
    assert last == "test_allreduce is right for allreduce on 3 ranks"
    path.write_text(of(6, 'type="rrcs"', 'type="rcs"'))
    assert verify_main([str(path)]) == 1
    said = capsys.readouterr().out
    assert f"in place  WRONG: {path}, lines " in said
    assert "test_allreduce is WRONG for allreduce on 3 ranks" in said
    assert verify_main([str(path), "--ranks", "4", "--params", "k=2"]) == 2
    assert "--ranks, --params: " in capsys.readouterr().err
    assert verify_main([str(path), "--coll", "allgather"]) == 2
    assert f"--coll allgather: {path} is for allreduce" in capsys.readouterr().err


def test_the_shell_proves_each_way_of_calling_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "both.xml"
    path.write_text(RING.replace('outofplace="0"', 'outofplace="1"'))
    assert verify_main([str(path)]) == 1
    first, second, _ = capsys.readouterr().out.splitlines()
    assert re.search(r" N  in place$", first)
    assert re.search(r"out of place  WRONG: .*the caller's input", second)


def test_the_simulator_takes_a_file_beside_algorithms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ring.xml"
    path.write_text(RING)
    words = ["--topology", "star:hosts=4", "--bytes", "24KiB"]
    assert sim_main(["run", str(path), "ring", *words, "--ranks", "3"]) == 0
    assert "fastest, simulated: " in capsys.readouterr().out
    assert sim_main(["run", str(path), *words, "--ranks", "4"]) == 2
    assert (
        "allreduce of 3 ranks; asked for is allreduce of 4" in capsys.readouterr().err
    )
    path.write_text(of(6, 'type="rrcs"', 'type="rcs"'))
    assert sim_main(["run", str(path), *words, "--ranks", "3"]) == 1
    assert f"the schedule is wrong: {path}, lines " in capsys.readouterr().err


@pytest.mark.parametrize("mutate", [bytes_changed, lines_changed])
@pytest.mark.parametrize("name", FILES)
def test_mutated_files_of_msccl_end_with_a_status_and_no_escape(
    name: str,
    mutate: Mutate,
    seed: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = random.Random(f"{seed} {name}")
    path, text = tmp_path / "mutated.xml", FILES[name](3)
    for _ in range(40):
        mutated = mutate(text, draw)
        path.write_bytes(mutated)
        assert verify_main([str(path)]) in (0, 1, 2), mutated
        said = capsys.readouterr()
        assert CONTROLS.search(said.out + said.err) is None, mutated


def of_many(num_blocks: int, num_steps: int) -> str:
    """Return a file of one GPU with many thread blocks, and steps in the first."""
    step = '<step s="{}" type="nop" cnt="0" depid="-1" deps="-1"/>'
    steps = "\n".join(step.format(number) for number in range(num_steps))
    blocks = "\n".join(
        f'<tb id="{one}" send="-1" recv="-1" chan="0">\n{"" if one else steps}</tb>'
        for one in range(num_blocks)
    )
    return (
        '<algo name="many" nchunksperloop="1" ngpus="1" coll="allreduce" inplace="1">\n'
        f'<gpu id="0" i_chunks="1" o_chunks="0" s_chunks="0">\n{blocks}</gpu></algo>'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (of_many(1025, 0), "line 2051: gpu 0 has more than 1024 thread blocks"),
        (of_many(1024, 32_769), "line 2: gpu 0 has too many steps in too many thread"),
        (
            of_many(1, 2).replace('cnt="0"', 'cnt="16777216"'),
            "line 5: the steps touch more than 16,777,216 chunks",
        ),
    ],
    ids=["blocks", "steps", "chunks"],
)
def test_a_small_file_cannot_ask_for_much_memory(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "many.xml"
    path.write_text(text)
    assert verify_main([str(path)]) == 2
    assert f"{path}, {message}" in capsys.readouterr().err
