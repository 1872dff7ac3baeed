# SPDX-License-Identifier: Apache-2.0
"""For tests of dumps: files as the engine writes them, that no rank had to write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["call", "dump_of", "message", "seen", "write_dumps"]

_BEGIN_NS = 1_700_000_000_000_000_000


def call(op: str, seq: int, **more: Any) -> dict[str, Any]:
    """Return the entry of a collective on "world"."""
    count, dtype = more.pop("count", 8), more.pop("dtype", "float32")
    began = _BEGIN_NS + more.pop("after_ms", 10 * seq) * 1_000_000
    state = more.pop("state", "completed")
    entry = {
        "record_id": seq,
        "pg_id": 0,
        "process_group": ["world (0)", ""],
        "collective_seq_id": seq + 1,
        "p2p_seq_id": 0,
        "op_id": seq + 1,
        "profiling_name": f"commrt:{op}",
        "time_created_ns": began,
        "input_sizes": [[count]],
        "output_sizes": [[count]],
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
        "state": state,
        "time_discovered_started_ns": began,
        "time_discovered_completed_ns": None,
        "duration_ms": None,
        "retired": state != "started",
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [],
        "reduction": "sum" if op in ("allreduce", "reduce") else "",
        "root": -1,
        "peer": -1,
        "tag": -1,
    }
    return {**entry, **more}


def message(op: str, seq: int, peer: int, **more: Any) -> dict[str, Any]:
    """Return the entry of a send or a receive."""
    one = call(op, seq, dtype="uint8", is_p2p=True, peer=peer, tag=5, **more)
    return {**one, "p2p_seq_id": seq + 1}


def seen(rank: int, state: str, started: int, last: str = "") -> dict[str, Any]:
    """Return what a dump tells of a rank of its node."""
    return {
        "pg_id": 0,
        "process_group": ["world (0)", ""],
        "rank": rank,
        "state": state,
        "started": started,
        "last": last,
        "age_ms": 2500.125,
    }


def dump_of(
    rank: int,
    size: int,
    entries: Sequence[dict[str, Any]],
    states: Sequence[dict[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return a rank's dump."""
    ranks = [*range(size)]
    whole = {
        "format": "commrt-flight/1",
        "version": "2.10",
        "job": "ab12",
        "rank": rank,
        "size": size,
        "host": "here",
        "pid": 100 + rank,
        "events": [],
        "written_ns": _BEGIN_NS + 5_000_000_000,
        "reason": "timeout",
        "message": f"allreduce #3 on world, rank {rank}: not complete within 2 s",
        "pg_config": {
            "world (0)": {
                "name": "world",
                "desc": "",
                "ranks": str(ranks),
                "rank": rank,
            }
        },
        "pg_status": {},
        "rank_states": [*states],
        "entries": [*entries],
    }
    return {**whole, **more}


def write_dumps(folder: Path, dumps: Sequence[dict[str, Any]]) -> list[Path]:
    """Write dumps into a folder; return their paths."""
    folder.mkdir(exist_ok=True)
    paths = []
    for one in dumps:
        paths.append(folder / f"dump-{one['job']}-rank{one['rank']}.json")
        paths[-1].write_text(json.dumps(one))
    return paths
