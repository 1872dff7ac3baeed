# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of the pages: ``python docs/reference_tables.py``.

Each stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from commrt import algorithms, env
from commrt.errors import UsageError
from commrt.nccl import abilities, features
from commrt.planning.host_plans import TransportParams
from commrt.vocabulary.dtypes import DTYPES, ReduceOp, check_reduction
from commrt.vocabulary.names_elsewhere import OF_MPI4PY, OF_TORCH
from commrt.vocabulary.operations import OPERATIONS, OTHERS, SCHEDULED, OpSpec

DOCS = Path(__file__).parent

_ERRORS_TIMEOUT_S = 100.0

_RANKS = 8
"""Parameters may depend on the number of ranks; these are shown."""
_NODES = (0, 0, 0, 0, 1, 1, 1, 1)
"""Or on the nodes."""
_SIZES = range(1, 33)
_OUTPUTS = {
    "none": "none",
    "same": "like `x`",
    "times_size": "`(size, *x.shape)`",
    "div_size": "`x.size / size` elements",
}
_OUTPUTS_OF_COUNTS = {
    "times_size": "`sum(counts)` elements",
    "same": "`sum(recv_counts)` elements",
    "div_size": "`counts[rank]` elements",
}
_RULE_BYTES = {
    "whole": "of the whole buffer",
    "block": "of one rank's block",
    "pair": "of one pair's block",
    "any": "none: one rule for all",
    "none": "",
}


def operations_table() -> str:
    """Return the table of collectives."""
    titles = ("operation", "arguments", "output", "without `out`", "bytes that select")
    rows = [f"| {' | '.join(titles)} | meaning |", "|---" * 6 + "|"]
    for spec in OPERATIONS:
        arguments = ["`x`", "`out`"] if spec.x_count != "none" else []
        arguments[1:1] = [f"`{argument}`" for argument in spec.count_arguments]
        arguments += ["`op`", "`factor`"] * spec.reduces + ["`root`"] * spec.has_root
        arguments += ["`compress`", "`residual`"] * spec.compresses
        outputs = _OUTPUTS_OF_COUNTS if spec.count_arguments else _OUTPUTS
        output = outputs[spec.out_count]
        if spec.output_on == "root":
            output += ", on the root"
        elif spec.output_on == "all but rank 0":
            output += ", on all ranks but 0"
        cells = [
            f"`{spec.name}`",
            ", ".join(arguments),
            output,
            _without_out(spec),
            _rule_bytes(spec),
            spec.doc,
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def names_table(library: str, names: Mapping[str, str]) -> str:
    """Return what to write instead of another library's names."""
    together: dict[str, list[str]] = {}
    for name, instead in names.items():
        if not is_variant(name, names):
            together.setdefault(instead, []).append(f"`{name}`")
    rows = [f"| {library} | commrt |", "|---|---|"]
    rows += [f"| {', '.join(each)} | {_as_code(to)} |" for to, each in together.items()]
    return "\n".join(rows) + "\n"


def is_variant(name: str, names: Mapping[str, str]) -> bool:
    """Return whether a name is a nonblocking or persistent form of another one."""
    plain = name.removesuffix("_init")
    return (name != plain and plain in names) or (
        name[:1] in "Ii" and name[1:].capitalize() in names
    )


_CODE = re.compile(
    r"with comm\.\w+\(\): \.\.\."
    r"|(?:len|range)\(comm\.\w+\)"
    r"|(?:\w+ = )?comm(?:rt)?(?:\.\w+(?:\([^()]*\))?)+"
    r"|name="
)


def _as_code(instead: str) -> str:
    """Return what to write, with the calls in it marked as code."""
    return _CODE.sub(lambda found: f"`{found[0]}`", instead)


_PAGES = {
    "message": "[messages](messages.md)",
    "object": "[objects](objects.md)",
    "sparse": "[sparse sums](sparse.md)",
    "boxes": "[redistribution](../how-to/redistribute-arrays.md)",
    "neighbors": "[grids](grids.md)",
}


def others_table() -> str:
    """Return the table of the calls beside the collectives."""
    rows = ["| call | meaning | bytes in a log | page |", "|---|---|---|---|"]
    for row in OTHERS:
        logged = row.logged_bytes or "of each message"
        rows.append(f"| `{row.name}` | {row.doc} | {logged} | {_PAGES[row.kind]} |")
    return "\n".join(rows) + "\n"


def _rule_bytes(spec: OpSpec) -> str:
    average = " on average" if spec.vector_of and spec.rule_bytes == "block" else ""
    return _RULE_BYTES[spec.rule_bytes] + average


def _without_out(spec: OpSpec) -> str:
    if spec.out_count == "none":
        return ""
    if not spec.in_place:
        return "allocates"
    return "in place on the root" if spec.output_on == "root" else "in place"


def reductions_table() -> str:
    """Return which reduction is defined for which element types."""
    rows = ["| `op` | defined for |", "|---|---|"]
    for op in ReduceOp:
        names = []
        for dtype in DTYPES:
            try:
                check_reduction(op, dtype)
            except UsageError:
                continue
            names.append(dtype.name)
        all_of_them = len(names) == len(DTYPES)
        what = "all" if all_of_them else ", ".join(f"`{name}`" for name in names)
        rows.append(f"| `{op.name.lower()}` | {what} |")
    return "\n".join(rows) + "\n"


def parameters_table() -> str:
    """Return the parameters of the built-in algorithms."""
    rows = ["| algorithm | parameter | values, the default first |", "|---|---|---|"]
    for coll in SCHEDULED:
        for name in algorithms.names(coll):
            found = algorithms.param_choices(coll, name, _RANKS, _NODES)
            for key, values in found.items():
                listed = ", ".join(map(str, values))
                rows.append(f"| {coll} `{name}` | `{key}` | {listed} |")
    return "\n".join(rows) + "\n"


def algorithms_table() -> str:
    """Return the built-in algorithms and the operations that have them."""
    rows = ["| algorithm | what it does | operations |", "|---|---|---|"]
    found: dict[str, list[str]] = {}
    for coll in SCHEDULED:
        for name in algorithms.names(coll):
            found.setdefault(name, []).append(coll + _ranks_of(coll, name))
    for name, colls in sorted(found.items()):
        author = algorithms.get(colls[0].partition(" ")[0], name).author
        prose = " ".join((inspect.getdoc(inspect.getmodule(author)) or "").split())
        sentence = prose.partition(". ")[0]
        rows.append(f"| `{name}` | {sentence} | {', '.join(colls)} |")
    return "\n".join(rows) + "\n"


def _ranks_of(coll: str, name: str) -> str:
    """Return on which numbers of ranks an algorithm exists, nothing if on all."""
    if algorithms.get(coll, name).spans_nodes:
        return ""
    sizes = [size for size in _SIZES if name in algorithms.names(coll, size)]
    if sizes == list(_SIZES):
        return ""
    if sizes == [size for size in _SIZES if size % 2 == 0]:
        return " (even numbers of ranks)"
    assert sizes == list(range(sizes[0], _SIZES.stop)), (coll, name)
    return f" (from {sizes[0]} ranks)"


def transport_table() -> str:
    """Return the parameters that every schedule takes."""
    rows = ["| parameter | default | meaning |", "|---|---|---|"]
    for field in fields(TransportParams):
        rows.append(f"| `{field.name}` | `{field.default}` | {_meaning(field.name)} |")
    return "\n".join(rows) + "\n"


def _meaning(name: str) -> str:
    """Return the docstring under a field, on one line."""
    source = inspect.getsource(TransportParams)
    found = re.search(rf'^    {name}: [^\n]*\n    """(.*?)"""', source, re.M | re.S)
    assert found is not None, name
    return re.sub(r"\s+", " ", found[1]).replace("``", "`")


def errors_entries() -> str:
    """Return an entry for each error class, with a message that it was made to say."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("COMMRT_")
    }
    done = subprocess.run(
        [sys.executable, str(DOCS / "error_examples.py")],
        env={**variables, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=_ERRORS_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"docs/error_examples.py failed:\n{done.stderr}")
    return done.stdout


Tables = dict[str, Callable[[], str]]
OPERATIONS_TABLES: Tables = {
    "operations": operations_table,
    "other-operations": others_table,
}
PAGES: dict[Path, Tables] = {
    DOCS / "reference" / "operations.md": OPERATIONS_TABLES,
    DOCS / "reference" / "reductions.md": {"reductions": reductions_table},
    DOCS / "how-to" / "coming-from-mpi4py.md": {
        "names": lambda: names_table("mpi4py", OF_MPI4PY)
    },
    DOCS / "how-to" / "coming-from-torch-distributed.md": {
        "names": lambda: names_table("torch.distributed", OF_TORCH)
    },
    DOCS / "reference" / "algorithms.md": {
        "algorithms": algorithms_table,
        "parameters": parameters_table,
        "transport": transport_table,
    },
    DOCS / "reference" / "environment.md": {"environment": env.markdown_table},
    DOCS / "reference" / "errors.md": {"errors": errors_entries},
    DOCS / "reference" / "nccl.md": {
        "nccl-features": features.features_table,
        "nccl-operations": abilities.operations_table,
        "nccl-reductions": abilities.reductions_table,
    },
}


def fill(page: str, tables: Tables = OPERATIONS_TABLES) -> str:
    """Return the page with every generated table renewed."""
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.S)
        if not pattern.search(page):
            raise SystemExit(f"the page has no place for the table {name!r}")
        page = pattern.sub(lambda found: found[1] + table() + found[2], page)  # noqa: B023
    return page


if __name__ == "__main__":
    for written, wanted in PAGES.items():
        written.write_text(fill(written.read_text(), wanted))
