# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt info``: what works here, why not, and what would be chosen.

Works in plain python, without MPI, and under a launcher, where it also joins the ranks
and rank 0 alone prints. A part that fails is reported in its place.
"""

from __future__ import annotations

import argparse
import os
import platform
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import zip_longest

from commrt import env
from commrt.backends.base import Availability, Capabilities
from commrt.errors import CommError
from commrt.vocabulary.operations import COLLECTIVES

__all__ = ["main", "report"]

_COLUMNS = 100
_LONGEST_LABEL = 60


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
        from commrt.launch.detect import detect

        launch = detect()
        rank = launch.rank
        yield f"launcher   {launch.kind}: {launch.source}"
        yield from _ranks()

    sections: list[tuple[str, Callable[[], Iterator[str]]]] = [
        ("Ranks", launched),
        ("Backends", _backends),
        ("CUDA", _cuda),
        ("NCCL", _nccl),
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
            from commrt.mpi import library

            yield f"MPI        {library.library_name(library.load())}"
            yield f"           {library.library_path()}"
            from commrt.mpi.ulfm import survival

            survives = survival()
            answer = "survived" if survives.can else "not survived"
            yield from _row(
                "          ", f"the death of a rank: {answer} ({survives.why})"
            )
            from commrt.mpi.cuda_aware import mpi_takes_cuda

            found = mpi_takes_cuda()
            answer = "proved" if found.proved else "not proved"
            yield f"           CUDA memory: {answer} ({found.why})"


_HEADS = {
    "backend": 0,
    "here": 0,
    "memory": 6,
    "operations": 15,
    "types": 11,
    "reductions": 14,
    "runs": 10,
    "recover": 0,
    "cancel": 0,
}
"""Columns of the table of backends, and how wide the wrapped ones may become."""


def _backends() -> Iterator[str]:
    from commrt import backends

    found = backends.available()
    rows = [_cells(one) for one in found]
    widths = [
        max(
            len(line) for row in (*rows, [[head] for head in _HEADS]) for line in row[i]
        )
        for i in range(len(_HEADS))
    ]
    yield _line(_HEADS, widths)
    for one, cells in zip(found, rows, strict=True):
        for line in zip_longest(*cells, fillvalue=""):
            yield _line(line, widths)
        limits = one.capabilities.limits
        label = " " * widths[0]
        yield from _row(label, one.reason)
        yield from _row(label, f"limits: {limits}" if limits else "")


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(padded).rstrip()


def _cells(one: Availability) -> list[list[str]]:
    """Return a backend's cells, each as its lines."""
    can, every = one.capabilities, Capabilities()
    texts = (
        one.name,
        _yes(one.available),
        ", ".join(can.devices),
        _among(can.operations, every.operations),
        _among(can.dtypes, every.dtypes),
        _among(can.reductions, every.reductions),
        ", ".join(
            [*["schedules"] * can.schedules, *["native"] * can.native, *can.algorithms]
        ),
        _yes(can.can_recover),
        _yes(can.can_cancel),
    )
    return [
        textwrap.wrap(text, width, break_long_words=False) if width else [text]
        for text, width in zip(texts, _HEADS.values(), strict=True)
    ]


def _yes(can: bool) -> str:
    return "yes" if can else "no"


def _among(have: Sequence[str], every: Sequence[str]) -> str:
    """Return which of ``every`` a backend has, in the fewest words."""
    missing = [name for name in every if name not in have]
    if not missing:
        return f"all {len(every)}"
    if len(missing) < len(have):
        return f"all but {', '.join(missing)}"
    return ", ".join(have) or "none"


def _row(label: str, text: str) -> Iterator[str]:
    """Yield a label and its text, which wraps beside the label, or below a long one."""
    first = f"{label}  "
    if len(first) > _LONGEST_LABEL:
        yield label.rstrip()
        first = " " * 8
    width = _COLUMNS - len(first) - 2
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        yield f"{' ' * len(first) if number else first}{line}"


def _cuda() -> Iterator[str]:
    from commrt.devices.report import describe

    for label, text in describe():
        yield from _row(f"{label:<10}", text)


def _nccl() -> Iterator[str]:
    from commrt.nccl import describe

    for line in describe():
        yield from textwrap.wrap(line, _COLUMNS - 2, break_long_words=False)


def _algorithms() -> Iterator[str]:
    from commrt import algorithms

    yield "L: few steps, for short messages; B: few bytes, for long ones"
    for coll in COLLECTIVES:
        marked = []
        for name in algorithms.names(coll):
            one = algorithms.get(coll, name)
            marks = "L" * one.latency + "B" * one.bandwidth
            marked.append(f"{name} ({marks})" if marks else name)
        yield from _row(f"{coll:<15}", ", ".join(marked))


def _table() -> Iterator[str]:
    from commrt.backends.catalog import catalog
    from commrt.select.locate import locate

    located = locate()
    yield f"{located.path or 'none'} ({located.why})"
    yield f"this machine's fingerprint: {located.fingerprint[:12]}"
    table = located.parse(catalog())
    if table is not None:
        yield f"rules: {len(table.rules)}, digest {table.digest[:12]}"


def _environment() -> Iterator[str]:
    for variable in env.VARIABLES:
        text = env.value(variable.name)
        default = variable.default or "not set"
        state = f"{default} (default)" if text is None else text
        label = f"{variable.name:<26} {state:<18}"
        yield from _row(label, variable.doc)
    unknown = [
        name
        for name in sorted(os.environ)
        if name.startswith("COMMRT_") and name not in {v.name for v in env.VARIABLES}
    ]
    for name in unknown:
        yield f"{name:<26} unknown: it is not read"
    env.check_names()
