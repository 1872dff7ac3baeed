# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.bench compare``: peers in alternating launches of one run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from commrt import nccl
from commrt.bench.aggregate import aggregate, markdown
from commrt.bench.bench_operations import (
    MEASURED,
    MULTI,
    THERE_AND_BACK,
    bench_operation,
)
from commrt.bench.device_memory import number_of_devices
from commrt.bench.launch import (
    DEVICE_KINDS,
    HOST_KINDS,
    PeerSpec,
    launch,
    make_job,
    parse_peer,
    torch_is_installed,
)
from commrt.bench.machine import describe_machine
from commrt.bench.options import check_dtype
from commrt.bench.raw_data import check_output, damage_told, read_data, write_output
from commrt.devices.packages import torch_cuda
from commrt.errors import BackendError, UsageError
from commrt.files.visible import visible_lines
from commrt.files.write import is_replaceable
from commrt.launch.detect import detect
from commrt.vocabulary.operations import OpSpec

__all__ = [
    "SCHEMA",
    "alternate",
    "choose_device_peers",
    "choose_peers",
    "load",
    "main",
    "report",
]

SCHEMA = "commrt-compare/1"


def _torch_is_in_place(spec: OpSpec) -> bool:
    """Return whether torch has it in place only: peers run their own best form."""
    return spec.reduces and spec.in_place


def _torch_has(spec: OpSpec) -> bool:
    """Return whether torch calls NCCL for it, and this is compared."""
    return spec.nccl == "native" or (spec.nccl == "pairs" and not spec.has_root)


def _gloo_has(spec: OpSpec) -> bool:
    """Return whether torch calls gloo for it, blocks of different lengths included."""
    is_reduced_unevenly = spec.vector_of is not None and spec.reduces
    return spec is not MULTI and not spec.combines_some and not is_reduced_unevenly


def _nccl_has(spec: OpSpec) -> bool:
    """Return whether NCCL itself has a function of it."""
    return spec.nccl in ("native", "pairs")


_HAS: dict[str, Callable[[OpSpec], bool]] = {
    "mpi4py": lambda spec: bool(spec.mpi),
    "gloo": _gloo_has,
    "torch_nccl": _torch_has,
    "cupyx": _nccl_has,
    "nccl": _nccl_has,
}
"""Operations of a kind of peer; kinds that are not listed have all."""
_LACKS: dict[str, Collection[str]] = {
    kind: {each.name for each in MEASURED if not has(each)}
    for kind, has in _HAS.items()
}


def main(args: argparse.Namespace) -> int:
    """Run a comparison, or print an earlier one; return the exit status."""
    if args.load:
        with damage_told(Path(args.load)):
            text = report(load(args.load))
        print(visible_lines(text), end="")
        return 0
    if detect().kind != "single":
        raise UsageError(
            "compare starts its own launches, one library after the other: "
            "run it outside mpiexec"
        )
    colls = [bench_operation(name).name for name in args.op.split(",")]
    if THERE_AND_BACK.name in colls:
        raise UsageError(
            f"--op {THERE_AND_BACK.name}: messages between two ranks of a host are "
            f"measured by: python -m commrt.bench latency"
        )
    if args.outstanding and MULTI.name in colls:
        raise UsageError(
            f"--outstanding {args.outstanding}: {MULTI.name} has several messages in "
            f"flight by itself; leave it out"
        )
    check_dtype(args.dtype)
    skipped: dict[str, str] = {}
    if args.device == "cpu":
        peers = choose_peers(args.peer)
    else:
        number_of_devices(args.device)
        peers, skipped = choose_device_peers(args.peer, args.device)
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "command": ["python", "-m", "commrt.bench", *sys.argv[1:]],
        "machine": describe_machine(),
        "fresh": args.fresh,
        "in_place": args.in_place,
        "outstanding": args.outstanding,
        "dtype": args.dtype,
        "device": args.device,
        "timing": args.timing,
        "skipped": skipped,
        "launches": [],
        "failures": [],
    }
    out = Path(args.out) if args.out else None
    if out is not None:
        check_output(out)  # what cannot be written shows now, not after hours
    for coll, ranks, round_index, peer in alternate(
        colls, args.ranks, peers, args.launches
    ):
        if coll in _LACKS.get(peer.kind, ()):
            continue
        _one(args, data, coll, ranks, round_index, peer)
        if out is not None and is_replaceable(out):
            # After every launch: an interrupted comparison keeps what it has.
            write_output(out, json.dumps(data))
    if out is not None:
        write_output(out, json.dumps(data))
    print(report(data), end="")
    if not data["launches"]:
        return 2
    return 1 if _wrong(data) else 0


def _wrong(data: Mapping[str, Any]) -> list[str]:
    """Return the peers and calls with a wrong result, one line each."""
    return [
        f"{one['coll']}, {one['ranks']} ranks, {one['peer']}, {row['nbytes']} bytes"
        for one in data["launches"]
        for row in one["rows"]
        if not row.get("valid", True)
    ]


def choose_peers(texts: Sequence[str]) -> list[PeerSpec]:
    """Return commrt, mpi4py with the same MPI, and what ``--peer`` adds.

    gloo is added where torch is installed and no gloo peer is named.
    """
    peers = [parse_peer("commrt"), parse_peer("mpi4py"), *map(parse_peer, texts)]
    if torch_is_installed() and all(peer.kind != "gloo" for peer in peers):
        peers.append(parse_peer("gloo"))
    names = [peer.name for peer in peers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"--peer: the name {twice[0]!r} is used twice; give each peer its own"
        )
    return peers


def choose_device_peers(
    texts: Sequence[str], device: str
) -> tuple[list[PeerSpec], dict[str, str]]:
    """Return commrt and the peers for GPUs, and of those that are not here, why.

    ``--peer`` names some of the latter; without, all are wanted.
    """
    named = [parse_peer(text) for text in texts]
    for peer in named:
        if peer.kind in HOST_KINDS:
            raise UsageError(
                f"--peer {peer.name}: takes arrays in host memory, and -d {device} is "
                f"for {', '.join(DEVICE_KINDS)}"
            )
    wanted = named or [parse_peer(kind) for kind in DEVICE_KINDS]
    missing = {peer.name: _why_missing(peer.kind, device) for peer in wanted}
    skipped = {name: why for name, why in missing.items() if why is not None}
    for name, why in skipped.items():
        print(f"# {name} is not compared: {why}", file=sys.stderr)
    return [
        parse_peer("commrt"),
        *(peer for peer in wanted if peer.name not in skipped),
    ], skipped


def _why_missing(kind: str, device: str) -> str | None:
    """Return why a peer for GPUs cannot run here; None where it can."""
    if kind == "commrt":
        return None
    if device != "cuda":
        return "it works on GPUs only (-d cuda)"
    if kind == "nccl":
        return nccl.why_missing()
    if kind == "cupyx":
        found = importlib.util.find_spec("cupyx")
        return None if found else "cupy is not installed: pip install 'commrt[cuda12]'"
    torch = torch_cuda()
    if torch is None:
        return "torch is not installed"
    return None if torch[1] else f"torch {torch[0]} is built without CUDA"


def alternate(
    colls: Sequence[str],
    ranks: Sequence[int],
    peers: Sequence[PeerSpec],
    launches: int,
) -> Iterator[tuple[str, int, int, PeerSpec]]:
    """Yield the launches in the order in which they run.

    Peers take turns, and each round starts with another one, so that no peer always
    runs first, or always after the same other.
    """
    for coll in colls:
        for count in ranks:
            for index in range(launches):
                turn = index % len(peers)
                for peer in [*peers[turn:], *peers[:turn]]:
                    yield coll, count, index, peer


def _one(
    args: argparse.Namespace,
    data: dict[str, Any],
    coll: str,
    ranks: int,
    round_index: int,
    peer: PeerSpec,
) -> None:
    """Run one launch; add it, or its failure, to the data."""
    of_torch = peer.kind in ("gloo", "torch_nccl")
    in_place = args.in_place or (of_torch and _torch_is_in_place(bench_operation(coll)))
    job = make_job(
        coll,
        args.sizes,
        dtype=args.dtype,
        device=args.device,
        timing=args.timing,
        fresh=args.fresh,
        check=peer.kind != "copy",  # whose result is nobody's
        in_place=in_place and bench_operation(coll).in_place,
        outstanding=args.outstanding,
        iterations=args.iterations,
        budget_s=args.budget_s,
        pin=args.pin,
    )
    label = {"coll": coll, "round": round_index, "in_place": job["in_place"]}
    try:
        result = launch(peer, ranks, job, timeout_s=args.timeout_s)
    except BackendError as error:
        # A peer that cannot run one job must not cost the others theirs.
        failure = {**label, "peer": peer.name, "ranks": ranks, "error": str(error)}
        data["failures"].append(failure)
        print(f"# {coll}, {ranks} ranks, {peer.name}: failed", file=sys.stderr)
        return
    data["launches"].append({**label, **result})
    classes = "/".join(sorted({row["link_class"] for row in result["rows"]}))
    print(
        f"# {coll}, {ranks} ranks, launch {round_index + 1}, {peer.name}: {classes}, "
        f"{result['elapsed_s']:.1f} s",
        file=sys.stderr,
    )


def load(path: str) -> dict[str, Any]:
    """Return the raw data of an earlier comparison; UsageError if it is not one."""
    return read_data(Path(path), SCHEMA)


def report(data: Mapping[str, Any]) -> str:
    """Return the comparison as markdown: who, which machine, tables, failures."""
    libraries = {one["peer"]: one["library"] for one in data["launches"]}
    forms = {one["peer"]: _form(one) for one in data["launches"]}
    machine = data["machine"]
    inputs = "rewritten between calls" if data["fresh"] else "unchanged between calls"
    lines = [
        f"`{' '.join(data['command'])}`",
        "",
        f"{machine['cpu']}, {len(machine['cpus_available'])} CPUs available, "
        f"{data['dtype']}, inputs {inputs}{_place(data)}.",
        "",
    ]
    if data.get("outstanding"):
        lines += [
            f"A call is {data['outstanding']} nonblocking operations, each with its "
            f"own arrays, and a wait for all; times are those of the whole call.",
            "",
        ]
    lines += [f"- {peer}: {name}{forms[peer]}" for peer, name in libraries.items()]
    lines += ["", *map(markdown, aggregate(data["launches"]))]
    lines += [
        f"Not compared: {name}: {why}" for name, why in data.get("skipped", {}).items()
    ]
    lines += [f"Wrong result: {what}" for what in dict.fromkeys(_wrong(data))]
    for failure in data["failures"]:
        what = f"{failure['coll']}, {failure['ranks']} ranks, {failure['peer']}"
        # The second line of a failed launch's error is the reason.
        reason = failure["error"].splitlines()[:2][-1]
        lines.append(f"Failed: {what}, launch {failure['round'] + 1}: {reason}")
    return "\n".join(lines) + "\n"


def _place(data: Mapping[str, Any]) -> str:
    device = data.get("device", "cpu")
    if device == "cpu":
        return ""
    where = "a GPU" if device == "cuda" else "a device of threads"
    return f", arrays on {where}, timed by {data['timing']}"


def _form(one: Mapping[str, Any]) -> str:
    return ", in place" if one["in_place"] else ""
