# SPDX-License-Identifier: Apache-2.0
"""Every command that writes a file hands it to a FIFO, and leaves links and devices."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trace_cases import call, group_of, log_of
from tuning_recordings import record

from commrt.__main__ import main as commrt_main
from commrt.kernels import cache
from commrt.select.fingerprint import this_machine
from commrt.trace.flight_recorder import write_flight
from commrt.trace.log import write_log
from commrt.tuning.cli import main as tune_main

Write = Callable[[Path, Path], None]


def _tuned(*argv: object) -> None:
    assert tune_main([str(each) for each in argv]) == 0


def _run(*argv: object) -> None:
    assert commrt_main([str(each) for each in argv]) == 0


def _raw(folder: Path) -> Path:
    recording = record(seed=1)
    recording.machine = this_machine()
    recording.save(folder / "raw.json")
    return folder / "raw.json"


def _merge(out: Path, folder: Path) -> None:
    _tuned("merge", _raw(folder), _raw(folder), "--out", out)


def _report(out: Path, folder: Path) -> None:
    _tuned("report", "--raw", _raw(folder), "--out", out)


def _export(out: Path, folder: Path) -> None:
    table = folder / "table.yaml"
    if not table.exists():
        _merge(table, folder)
    _tuned("export", table, "--to", "openmpi", "--out", out)


def _record(out: Path, folder: Path) -> None:
    record(seed=1, launches=1).save(out)


def _draw(out: Path, folder: Path) -> None:
    _run("draw", "ring", "--ranks", 3, "--out", out)


def _log(folder: Path) -> Path:
    path = folder / "trace-job1-rank0.jsonl"
    write_log(log_of(0, 1, [call(group_of(0, 1), "allreduce", 8, 0, 10, 20)]), path)
    return path


def _plot(out: Path, folder: Path) -> None:
    _run("trace", "plot", "--out", out, _log(folder))


def _perfetto(out: Path, folder: Path) -> None:
    _run("trace", "perfetto", "--out", out, _log(folder))


def _trace_log(out: Path, folder: Path) -> None:
    write_log(log_of(0, 1, [call(group_of(0, 1), "allreduce", 8, 0, 10, 20)]), out)


def _flight(out: Path, folder: Path) -> None:
    log = log_of(0, 1, [call(group_of(0, 1), "allreduce", 8, 0, 10, 20)])
    where = out.with_name("flight")
    where.mkdir(exist_ok=True)
    if not os.path.lexists(where / "rank_0"):
        out.rename(where / "rank_0")
        out.symlink_to(where / "rank_0")
    write_flight(replace(log, operations=list(log.operations)), where)


def _kernels(out: Path, folder: Path) -> None:
    cache.save(out.parent, out.name, b"image")


WRITERS: list[Write] = [
    *(_merge, _report, _export, _record, _draw, _plot, _perfetto, _trace_log),
    *(_flight, _kernels),
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__[1:])
def test_a_fifo_gets_the_content(write: Write, tmp_path: Path) -> None:
    out = tmp_path / "out"
    os.mkfifo(out)
    found: list[bytes] = []
    opened = os.open(out, os.O_RDONLY | os.O_NONBLOCK)  # so that no writer waits
    os.set_blocking(opened, True)

    def drain() -> None:
        with open(opened, "rb") as file:
            found.append(file.read())

    keep_open = os.open(out, os.O_WRONLY)
    reader = threading.Thread(target=drain)
    reader.start()
    try:
        write(out, tmp_path)
    finally:
        os.close(keep_open)
        reader.join()
    assert len(found[0]) > 10
    assert stat.S_ISFIFO(out.stat().st_mode)


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__[1:])
def test_a_link_stays_and_its_file_is_written(write: Write, tmp_path: Path) -> None:
    place, out = tmp_path / "place", tmp_path / "out"
    place.write_bytes(b"")
    if write is _flight:
        place.rename(out)
        write(out, tmp_path)
        assert out.read_bytes()
        return
    out.symlink_to(place)
    write(out, tmp_path)
    assert out.is_symlink()
    assert place.read_bytes()


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__[1:])
def test_a_device_stays_a_device(write: Write, tmp_path: Path) -> None:
    out = tmp_path / "out"
    device = os.makedev(1, 3)
    try:
        os.mknod(out, 0o666 | stat.S_IFCHR, device)
        os.close(os.open(out, os.O_WRONLY))
    except OSError as error:
        pytest.skip(f"no node of a device can be made and used here: {error}")
    write(out, tmp_path)
    assert out.stat().st_rdev == device
