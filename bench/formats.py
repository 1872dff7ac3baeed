# SPDX-License-Identifier: Apache-2.0
"""Results as text: OSU micro-benchmarks 7.4, nccl-tests, JSON.

Pure functions of the rows that the timing loop returns. The layouts are those of the
original programs to the character, so that existing parsers and plots work; what the
numbers mean differs where docs/reference/benchmarks.md says so (time is the median over
repetitions of the maximum over ranks, not a mean of means).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from commrt.bench.bench_operations import bench_operation
from commrt.vocabulary.dtypes import dtype_by_name
from commrt.vocabulary.operations import OpSpec

__all__ = [
    "alg_bandwidth",
    "bus_factor",
    "fit_float",
    "json_text",
    "nccl_text",
    "osu_text",
    "submit_line",
]

Row = Mapping[str, Any]
_OSU_VERSION = "v7.4"
_FIELD = 18

_MPI_NAMES = {
    "int8": "MPI_CHAR",
    "uint8": "MPI_UNSIGNED_CHAR",
    "int16": "MPI_SHORT",
    "int32": "MPI_INT",
    "int64": "MPI_LONG",
    "float32": "MPI_FLOAT",
    "float64": "MPI_DOUBLE",
}
_NCCL_NAMES = {"float16": "half", "float32": "float", "float64": "double"}
_POINT_TO_POINT = {
    "latency": ("Latency", "Avg Latency(us)"),
    "bw": ("Bandwidth", "Bandwidth (MB/s)"),
    "bibw": ("Bi-Directional Bandwidth", "Bandwidth (MB/s)"),
}


def osu_text(
    rows: Sequence[Row],
    *,
    coll: str,
    mode: str = "blocking",
    dtype: str = "float32",
    device: str = "cpu",
    full: bool = False,
    validation: bool = False,
) -> str:
    """Return the rows in the layout of OSU micro-benchmarks 7.4.

    OSU names CUDA in the title where ``device`` is ``cuda``.
    ``coll`` is an operation, or unused for the modes latency, bw and bibw.
    """
    suffix = "-CUDA" if device == "cuda" else ""
    header = [
        line.replace("# OSU MPI ", f"# OSU MPI{suffix} ", 1)
        for line in _osu_header(coll, mode, dtype)
    ]
    lines = ["", *header]
    sized = mode in _POINT_TO_POINT or not bench_operation(coll).is_empty
    columns = _osu_columns(mode, full)
    names = [name for name, _ in columns]
    if sized:
        head = f"{'# Size':<10}" + "".join(f"{name:>{_FIELD}}" for name in names)
    else:
        head = f"# {names[0]}" + "".join(f"{name:>{_FIELD}}" for name in names[1:])
    if full and mode == "blocking":
        head += f"{'Iterations':>12}"
    if validation:
        head += f"{'Validation':>{_FIELD}}"
    lines.append(head)
    for row in rows:
        lines.append(_osu_row(row, columns, sized, full, mode, validation))
    return "\n".join(lines) + "\n"


_SHORT_TITLES = {"alltoall": "All-to-All", "alltoallv": "All-to-Allv"}
"""OSU's titles of the nonblocking operations."""


def _osu_header(coll: str, mode: str, dtype: str) -> list[str]:
    datatype = f"# Datatype: {_MPI_NAMES.get(dtype, dtype)}."
    if mode in _POINT_TO_POINT:
        title = f"# OSU MPI {_POINT_TO_POINT[mode][0]} Test {_OSU_VERSION}"
        return [title, datatype]
    spec = bench_operation(coll)
    typed = [datatype] if spec.x_count != "none" else []
    if mode == "nonblocking":
        name = _SHORT_TITLES.get(spec.name, spec.title)
        return [
            f"# OSU MPI Non-blocking {name} Latency Test {_OSU_VERSION}",
            "# Overall = Coll. Init + Compute + MPI_Test + MPI_Wait",
            "",
            *typed,
        ]
    return [f"# OSU MPI {spec.title} Latency Test {_OSU_VERSION}", *typed]


def _osu_columns(mode: str, full: bool) -> list[tuple[str, str]]:
    """Return heading and key of the row, column by column."""
    if mode in ("bw", "bibw"):
        return [("Bandwidth (MB/s)", "MBps")]
    if mode == "nonblocking" and full:
        return [
            ("Overall(us)", "overall_us"),
            ("Compute(us)", "compute_only_us"),
            ("Coll. Init(us)", "init_us"),
            ("MPI_Test(us)", "test_us"),
            ("MPI_Wait(us)", "wait_us"),
            ("Pure Comm.(us)", "pure_us"),
            ("Min Comm.(us)", "pure_min_us"),
            ("Max Comm.(us)", "pure_max_us"),
            ("Overlap(%)", "overlap_percent"),
        ]
    if mode == "nonblocking":
        return [
            ("Overall(us)", "overall_us"),
            ("Compute(us)", "compute_only_us"),
            ("Pure Comm.(us)", "pure_us"),
            ("Overlap(%)", "overlap_percent"),
        ]
    columns = [("Avg Latency(us)", "median_us")]
    if full and mode != "latency":
        columns += [
            ("Min Latency(us)", "min_us"),
            ("Max Latency(us)", "max_us"),
        ]
    return columns


def _osu_row(
    row: Row,
    columns: Sequence[tuple[str, str]],
    sized: bool,
    full: bool,
    mode: str,
    validation: bool,
) -> str:
    values = [_value(row, key) for _, key in columns]
    if sized:
        text = f"{row['nbytes']:<10d}" + "".join(f"{v:{_FIELD}.2f}" for v in values)
    else:
        # As wide as the heading: OSU's "# Avg Latency(us)" or "# Overall(us)".
        text = f"{values[0]:{len(columns[0][0]) + 2}.2f}"
        text += "".join(f"{v:{_FIELD}.2f}" for v in values[1:])
    if full and mode == "blocking":
        text += f"{_iterations(row):12d}"
    if validation:
        text += f"{'Pass' if row.get('valid') else 'Fail':>{_FIELD}}"
    return text


def _iterations(row: Row) -> int:
    return len(row.get("samples_us", ())) * int(row.get("calls", 1))


def _value(row: Row, key: str) -> float:
    """Return a figure of a row; nan where it was not measured."""
    samples = row.get("samples_us") or [float("nan")]
    if key == "min_us":
        return float(min(samples))
    if key == "max_us":
        return float(max(samples))
    if key == "compute_only_us":
        return _value(row, "compute_us") - _value(row, "test_us")
    return float(row.get(key, float("nan")))


def submit_line(row: Row) -> str:
    """Return one size of ``submit``: the median, its interval and the 99th percent."""
    if "median_us" not in row:
        return f"{row['nbytes']:<10d} wrong: {row.get('error', 'not measured')}"
    ordered = sorted(row["samples_us"])
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return (
        f"{row['nbytes']:<10d} {row['median_us']:8.2f} us  "
        f"[{row['low_us']:.2f}, {row['high_us']:.2f}]  p99 {p99:.2f} us"
    )


def bus_factor(coll: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    return bench_operation(coll).wire_share(ranks)


def _total_bytes(spec: OpSpec, nbytes: int, ranks: int) -> int:
    """Return nccl-tests' S: the whole vector, of all ranks where each has a part."""
    return nbytes * ranks if spec.rule_bytes in ("block", "pair", "any") else nbytes


def alg_bandwidth(coll: str, nbytes: int, ranks: int, time_us: float) -> float:
    """Return S/t in 10⁹ B/s; ``nbytes`` is the size that the row prints."""
    return _total_bytes(bench_operation(coll), nbytes, ranks) / time_us / 1000.0


def fit_float(value: float, width: int) -> str:
    """Return a number in nccl-tests' way: fewer digits as it grows, then exponents."""
    power = 0
    limit = 1
    while value >= limit:
        limit *= 10
        power += 1
    if power < width - 2:
        return f"{value:{width}.2f}"
    if power < width - 1:
        return f"{value:{width}.1f}"
    if power < width + 1:
        return f"{value:{width}.0f}"
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def nccl_text(
    rows: Sequence[Row],
    in_place_rows: Sequence[Row],
    *,
    coll: str,
    ranks: int,
    dtype: str = "float32",
    root: int = -1,
    library: str = "",
) -> str:
    """Return the rows in the layout of nccl-tests, out of place and in place.

    A size that was not measured in one of the two modes has N/A there.
    """
    spec = bench_operation(coll)
    blank = " ".join(("# " + " " * 10, " " * 12, " " * 9, " " * 7, " " * 7))
    lines = [
        f"# {library}",
        f"# Collective test starting: {coll}_perf",
        f"# nRanks {ranks}",
        "#",
        f"{blank}          out-of-place                       in-place          ",
        _nccl_head(
            ("size", "count", "type", "redop", "root"),
            ("time", "algbw", "busbw", "#wrong"),
        ),
        _nccl_head(("(B)", "(elements)", "", "", ""), ("(us)", "(GB/s)", "(GB/s)", "")),
    ]
    out_of_place = {row["nbytes"]: row for row in rows}
    in_place = {row["nbytes"]: row for row in in_place_rows}
    itemsize = dtype_by_name(dtype).itemsize
    redop = "sum" if spec.reduces else "none"
    shown_root = root if spec.has_root else -1
    wrong, bandwidths = 0, []
    for nbytes in sorted({*out_of_place, *in_place}):
        total = _total_bytes(spec, nbytes, ranks)
        # Per rank, as in NCCL's calls.
        shares = ranks if spec.out_count == "div_size" and spec.reduces else 1
        count = nbytes // itemsize // shares
        text = (
            f"{total:12d}  {count:12d}  "
            f"{_NCCL_NAMES.get(dtype, dtype):>8}  {redop:>6}  {shown_root:>6}"
        )
        for mode in (out_of_place.get(nbytes), in_place.get(nbytes)):
            text += _nccl_part(mode, coll, ranks)
            if mode is not None:
                wrong += not mode.get("valid", True)
                if "median_us" in mode:
                    bandwidths.append(_bus_bandwidth(mode, coll, ranks))
        lines.append(text)
    mean = sum(bandwidths) / len(bandwidths) if bandwidths else 0.0
    lines += [
        f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# {'Avg bus bandwidth':<20} : {mean:g} ",
        "#",
        f"# Collective test concluded: {coll}_perf",
    ]
    return "\n".join(lines) + "\n"


def _nccl_head(left: Sequence[str], right: Sequence[str]) -> str:
    widths = (10, 12, 8, 6, 6)
    parts = [f"{word:>{width}}" for word, width in zip(left, widths, strict=True)]
    modes = [f"{right[0]:>7}", *(f"{word:>6}" for word in right[1:])] * 2
    return "# " + "  ".join([*parts, *modes]) + " "


def _bus_bandwidth(row: Row, coll: str, ranks: int) -> float:
    algbw = alg_bandwidth(coll, row["nbytes"], ranks, row["median_us"])
    return algbw * bus_factor(coll, ranks)


def _nccl_part(row: Row | None, coll: str, ranks: int) -> str:
    if row is None or "median_us" not in row:
        wrong = "N/A" if row is None or row.get("valid", True) else "1"
        return f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {wrong:>6}"
    algbw = alg_bandwidth(coll, row["nbytes"], ranks, row["median_us"])
    busbw = _bus_bandwidth(row, coll, ranks)
    return (
        f"  {fit_float(row['median_us'], 7)}  {fit_float(algbw, 6)}"
        f"  {fit_float(busbw, 6)}  {0 if row.get('valid', True) else 1:6g}"
    )


def json_text(
    result: Mapping[str, Any],
    *,
    command: Sequence[str],
    machine: Mapping[str, Any],
    job: Mapping[str, Any],
) -> str:
    """Return everything: rows with raw samples, machine, versions, link state, job."""
    settings = {
        key: value for key, value in job.items() if key not in ("flags", "result")
    }
    settings["coll"] = settings.pop("spec")["name"]
    return json.dumps(
        {
            "schema": "commrt-bench/1",
            "command": list(command),
            "machine": dict(machine),
            "job": settings,
            **result,
        }
    )
