# SPDX-License-Identifier: Apache-2.0
"""Commands on mutated files end with a status and a line, whatever is in the files.

Any exception that leaves a command is a failure, and so is an escape that reaches the
terminal. A full run tries 10,200 mutations of each kind, an ordinary one 300.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dump_cases import call as dumped_call
from dump_cases import dump_of, message, seen, write_dumps
from mutated_files import (
    Mutate,
    bytes_changed,
    fields_changed,
    lines_changed,
)
from trace_cases import call, group_of, log_of
from tuning_recordings import DIRECT, NATIVE, TRUTH, record

from commrt.__main__ import main as commrt_main
from commrt.select.fingerprint import this_machine
from commrt.sim.cli import main as sim_main
from commrt.trace.log import write_log
from commrt.tuning.cli import main as tune_main
from commrt.tuning.samples import Recording

Command = tuple[Callable[[list[str]], int], list[str]]
MUTATIONS, BLOCKS = 300, 34
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


Capture = pytest.CaptureFixture[str]


def logs_in(folder: Path) -> list[Path]:
    """Write the logs of a job of two ranks on two machines."""
    paths = []
    for rank in (0, 1):
        group = group_of(rank, 2)
        operations = [
            call(group, "allreduce", 4096, 0, 100, 300),
            call(group, "bcast", 65536, 1, 400 + rank, 500, root=0),
            call(group, "allgather", 64, 2, 600, 700, stream=0),
            call(group, "scan", 8, 3, 710, 800, failed=rank == 1),
            call(group, "send" if rank == 0 else "recv", 8, 0, 810, 900, peer=1 - rank),
            call(group, "barrier", 0, 4, 910, None),
        ]
        log = log_of(rank, 2, operations, boot=f"b{rank}")
        paths.append(folder / f"trace-job1-rank{rank}.jsonl")
        write_log(log, paths[-1])
    return paths


def small_recording() -> Recording:
    """Return a recording of few samples with all that recordings have."""
    truth = {one: TRUTH[one] for one in (NATIVE, DIRECT)}
    found = record(seed=1, truth=truth, launches=3, held_out=1)
    found.samples = [
        one for one in found.samples if one.nbytes < 2000 or one.nbytes > 2**24
    ]
    for sample in found.samples:
        object.__setattr__(sample, "us", sample.us[:2])
    found.machine = this_machine()
    found.date = "2026-11-20"
    found.software = {"commrt": "0.1", "env": {"A": "b"}}
    one = found.samples[0]
    found.fail(2, {"op": "bcast", "nbytes": 8, "candidate": "shm/ring"}, "wrong")
    assert one.nbytes == 8
    return found


def check(command: Command, mutated: bytes, capsys: Capture) -> None:
    """Run a command; fail where it does not end well."""
    main, argv = command
    try:
        status = main(argv)
    except Exception as error:
        raise AssertionError(f"{argv}: {mutated[:4000]!r}") from error
    said = capsys.readouterr()
    about = f"{argv}: {said.err[:2000]}: {mutated[:4000]!r}"
    assert status in (0, 1, 2), about
    assert CONTROLS.search(said.out + said.err) is None, about
    if status:
        # Notes go before, and lists of details are indented.
        lines = [
            line
            for line in said.err.splitlines()
            if not line.startswith(("note: ", "  "))
        ]
        assert len(lines) == 1, about
        assert "Traceback" not in said.err, about


def drawn(seed: int, block: int) -> random.Random:
    return random.Random(f"{seed} {block}")


def mutate_logs(
    mutate: Mutate, folder: Path, draw: random.Random, capsys: Capture
) -> None:
    paths = logs_in(folder)
    texts = [path.read_text() for path in paths]
    out = str(folder / "out")
    commands: list[Command] = [
        (commrt_main, ["trace", "summarize", str(folder)]),
        (commrt_main, ["trace", "plot", "--out", out, str(folder)]),
        (commrt_main, ["trace", "perfetto", "--out", out, str(folder)]),
        (sim_main, ["goal", "--out", out, "--leave-out", str(folder)]),
        (sim_main, ["chakra", "--out", out, "--native-as", "ring", str(folder)]),
    ]
    for _ in range(MUTATIONS):
        at = draw.randrange(2)
        mutated = mutate(texts[at], draw)
        paths[at].write_bytes(mutated)
        check(draw.choice(commands), mutated, capsys)
        paths[at].write_text(texts[at])


def mutate_recordings(
    mutate: Mutate, folder: Path, draw: random.Random, capsys: Capture
) -> None:
    text = small_recording().to_json()
    whole, path, out = (str(folder / name) for name in ("a.json", "b.json", "out"))
    Path(whole).write_text(text)
    commands: list[Command] = [
        (tune_main, ["compare", whole, path]),
        (tune_main, ["merge", whole, path, "--out", out]),
        (tune_main, ["report", "--raw", path, "--out", out]),
    ]
    for _ in range(MUTATIONS):
        mutated = mutate(text, draw)
        Path(path).write_bytes(mutated)
        check(draw.choice(commands), mutated, capsys)


def mutate_tables(
    mutate: Mutate, folder: Path, draw: random.Random, capsys: Capture
) -> None:
    raw, whole, path, out = (
        str(folder / name) for name in ("a.json", "a.yaml", "b.yaml", "out")
    )
    Path(raw).write_text(small_recording().to_json())
    assert tune_main(["merge", raw, raw, "--out", whole]) == 0
    text = Path(whole).read_text()
    capsys.readouterr()
    commands: list[Command] = [
        (tune_main, ["show", "--table", path]),
        (tune_main, ["explain", "allreduce", "8", "--table", path]),
        (tune_main, ["lint", "--table", path]),
        (tune_main, ["export", path, "--to", "openmpi"]),
        (tune_main, ["report", path, "--out", out]),
        (tune_main, ["merge", whole, path, "--out", out]),
    ]
    for _ in range(MUTATIONS):
        mutated = mutate(text, draw)
        Path(path).write_bytes(mutated)
        check(draw.choice(commands), mutated, capsys)


def mutate_dumps(
    mutate: Mutate, folder: Path, draw: random.Random, capsys: Capture
) -> None:
    states = [seen(0, "waiting", 3, "bcast"), seen(1, "dead", 0)]
    entries = [
        dumped_call("allreduce", 0),
        dumped_call("bcast", 1, root=1, state="started"),
        message("send", 0, 1, state="started"),
        message("recv", 1, -1, duration_ms=0.25),
    ]
    dumps = [dump_of(rank, 3, entries[rank:], states) for rank in range(2)]
    paths = write_dumps(folder, dumps)
    texts = [json.dumps(one, indent=1) for one in dumps]
    commands: list[Command] = [
        (commrt_main, ["analyze", str(folder)]),
        (commrt_main, ["analyze", "--json", str(folder)]),
        (commrt_main, ["analyze", "--flight", str(folder / "out"), str(folder)]),
    ]
    for _ in range(MUTATIONS):
        at = draw.randrange(2)
        mutated = mutate(texts[at], draw)
        paths[at].write_bytes(mutated)
        check(draw.choice(commands), mutated, capsys)
        paths[at].write_text(texts[at])


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_logs_with_changed_bytes(
    block: int, tmp_path: Path, seed: int, capsys: Capture
) -> None:
    mutate_logs(bytes_changed, tmp_path, drawn(seed, block), capsys)


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_logs_with_changed_lines(
    block: int, tmp_path: Path, seed: int, capsys: Capture
) -> None:
    mutate_logs(lines_changed, tmp_path, drawn(seed, block), capsys)


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_logs_with_changed_fields(
    block: int, tmp_path: Path, seed: int, capsys: Capture
) -> None:
    mutate_logs(fields_changed, tmp_path, drawn(seed, block), capsys)


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_recordings_with_changed_bytes(
    block: int, tmp_path: Path, seed: int, capsys: Capture
) -> None:
    mutate_recordings(bytes_changed, tmp_path, drawn(seed, block), capsys)


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_recordings_with_changed_fields(
    block: int, tmp_path: Path, seed: int, capsys: Capture
) -> None:
    mutate_recordings(fields_changed, tmp_path, drawn(seed, block), capsys)


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_tables_with_changed_bytes(
    block: int, tmp_path: Path, seed: int, capsys: Capture
) -> None:
    mutate_tables(bytes_changed, tmp_path, drawn(seed, block), capsys)


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_tables_with_changed_lines(
    block: int, tmp_path: Path, seed: int, capsys: Capture
) -> None:
    mutate_tables(lines_changed, tmp_path, drawn(seed, block), capsys)


@pytest.mark.full(sample=1)
@pytest.mark.parametrize("mutate", [bytes_changed, lines_changed, fields_changed])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_dumps_with_changes(
    block: int, mutate: Mutate, tmp_path: Path, seed: int, capsys: Capture
) -> None:
    mutate_dumps(mutate, tmp_path, drawn(seed, block), capsys)
