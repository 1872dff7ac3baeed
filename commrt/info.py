# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt info``: what works here, why not, and what would be chosen.

Works in plain python, without MPI, and under a launcher, where it also joins the ranks
and rank 0 alone prints. A part that fails is reported in its place.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version

from commrt import env
from commrt.errors import CommError
from commrt.operations import COLLECTIVES

__all__ = ["main", "report"]


def main(argv: Sequence[str]) -> int:
    """Print the report on rank 0; return 1 where a part of it failed."""
    argparse.ArgumentParser(
        prog="python -m commrt info", description=__doc__.partition("\n")[0]
    ).parse_args(list(argv))
    text, failed, rank = report()
    if rank == 0:
        print(text)
    return int(failed)


def report() -> tuple[str, bool, int]:
    """Return the report, whether a part failed, and this process's rank.

    Collective over the ranks of the launcher: communicators are made to measure the
    link class.
    """
    lines = [
        f"commrt {version('commrt')}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}"
    ]
    failed = False
    rank = 0

    def launched() -> Iterator[str]:
        nonlocal rank
        from commrt.launch import detect

        launch = detect()
        rank = launch.rank
        yield f"launcher   {launch.kind}: {launch.source}"
        yield from _ranks()

    sections: list[tuple[str, Callable[[], Iterator[str]]]] = [
        ("Ranks", launched),
        ("Backends", _backends),
        ("Algorithms", _algorithms),
        ("Selection table", _table),
        ("Environment", _environment),
    ]
    for title, section in sections:
        lines += ["", title]
        try:
            for line in section():
                lines.append(f"  {line}")
        except CommError as error:
            failed = True
            lines.append(f"  error: {error}")
    return "\n".join(lines), failed, rank


def _ranks() -> Iterator[str]:
    """Join the ranks, and describe them."""
    import commrt

    with commrt.init() as comm:
        facts = comm.facts
        yield (
            f"ranks      {facts.size} on {facts.nodes} node{'s' * (facts.nodes > 1)}, "
            f"at most {facts.ppn} per node"
        )
        yield f"cores      {facts.cores} available on the poorest node"
        yield f"link class {facts.link_class}"
        if comm.mpi is not None:
            from commrt import _libmpi

            yield f"MPI        {_libmpi.library_name(_libmpi.load())}"
            yield f"           {_libmpi.library_path()}"


def _backends() -> Iterator[str]:
    from commrt import backends

    for found in backends.available():
        state = "yes" if found.available else "no"
        yield f"{found.name:<8} {state:<4} {found.reason}"
        can = found.capabilities
        runs = ["schedules"] * can.schedules + ["native"] * can.native
        yield f"{'':<13} runs {' and '.join(runs)} in {', '.join(can.devices)} memory"
        if can.limits:
            yield f"{'':<13} limits: {can.limits}"


def _algorithms() -> Iterator[str]:
    from commrt import algorithms

    yield "L: few steps, for short messages; B: few bytes, for long ones"
    for coll in COLLECTIVES:
        marked = []
        for name in algorithms.names(coll):
            one = algorithms.get(coll, name)
            marks = "L" * one.latency + "B" * one.bandwidth
            marked.append(f"{name} ({marks})" if marks else name)
        yield f"{coll:<15} {', '.join(marked)}"


def _table() -> Iterator[str]:
    from commrt.select.locate import locate

    table = locate()
    yield f"{table.path or 'none'} ({table.why})"
    if table.error is not None:
        yield f"error: {table.error}"
    yield f"this machine's fingerprint: {table.fingerprint[:12]}"


def _environment() -> Iterator[str]:
    for variable in env.VARIABLES:
        text = env.given(variable.name)
        default = variable.default or "not set"
        state = f"{default} (default)" if text is None else text
        yield f"{variable.name:<26} {state:<20} {variable.doc}"
    unknown = [
        name
        for name in sorted(os.environ)
        if name.startswith("COMMRT_") and name not in {v.name for v in env.VARIABLES}
    ]
    for name in unknown:
        yield f"{name:<26} unknown: it is not read"
    env.check_names()
