# SPDX-License-Identifier: Apache-2.0
"""The file of NCCL's example tuner plugin: lines of comma-separated values.

Traps of that plugin, which decide what is written here: unknown words silently become
``allreduce``, ``ring`` and ``simple``; without channels, or where no line matches, it
forces one channel; the default upper end is below 4 GiB; a line is cut after 255
characters, and the first one that matches counts.
"""

from __future__ import annotations

from commrt.errors import TableError
from commrt.select.facts import Candidate
from commrt.select.rules import Cell, Rule
from commrt.select.table import Table
from commrt.tuning.export import Exported, cells_to_say, comment, rule_words

__all__ = ["export_nccl"]

_COLLECTIVES = {
    "allreduce": "allreduce",
    "bcast": "broadcast",
    "reduce": "reduce",
    "allgather": "allgather",
    "reduce_scatter": "reducescatter",
}
_TOTAL = ("allgather",)
"""NCCL counts the larger buffer; ours is one rank's block."""
_ALGORITHMS = (
    "tree",
    "ring",
    "collnet_direct",
    "collnet_chain",
    "nvls",
    "nvls_tree",
    "pat",
)
_PROTOCOLS = ("ll", "ll128", "simple")
_NO_END = 2**63 - 1
_ANY = -1
_HEADER = (
    "For NCCL's example tuner plugin, from a selection table of commrt.",
    "To use it: NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=FILE",
    "The plugin forces one channel for every size and operation that no line here "
    "matches: compare before you rely on it.",
    "colltype,minbytes,maxbytes,algorithm,protocol,channels,nNodes,nRanks",
)


def export_nccl(table: Table) -> Exported:
    """Return the plugin's file; TableError if it would say nothing."""
    cells, left_out = cells_to_say(
        table, "cuda", lambda cell: (cell.op, cell.ranks, cell.nodes)
    )
    # The first line that matches counts, so what is said about all comes last.
    cells.sort(key=lambda one: (one[0].ranks is None, one[0].nodes is None))
    lines = []
    for cell, rules in cells:
        for rule in rules:
            why = _why_not(cell, rule.use)
            if why:
                left_out.append(f"{rule_words(rule)}: {why}")
            else:
                lines.append(_line(cell, rule))
    if not lines:
        raise TableError(
            "no file was written: nothing in the table can be said to NCCL, and with "
            "an empty file its plugin forces one channel on everything:\n  "
            + "\n  ".join(left_out)
        )
    missing = ["", "Not in this file:", *left_out] if left_out else []
    text = comment([*_HEADER, *missing]) + "".join(f"{line}\n" for line in lines)
    return Exported(text, len(lines), tuple(left_out))


def _why_not(cell: Cell, use: Candidate) -> str:
    """Return why a choice cannot be said; empty if it can."""
    if cell.op not in _COLLECTIVES:
        return "the plugin is not asked about it"
    if use.backend != "nccl":
        return "NCCL does not run it"
    if use.algorithm not in _ALGORITHMS:
        return "is no algorithm of NCCL"
    if set(use.params) != {"proto", "channels"}:
        return "needs the parameters proto and channels, and no others"
    if use.params["proto"] not in _PROTOCOLS:
        return f"proto is none of {', '.join(_PROTOCOLS)}"
    channels = use.params["channels"]
    if not isinstance(channels, int) or channels < 1:
        return "channels is no number above 0"
    if cell.op in _TOTAL and cell.ranks is None:
        return "NCCL counts the bytes of all ranks, whose number is not said"
    return ""


def _line(cell: Cell, rule: Rule) -> str:
    scale = cell.ranks if cell.op in _TOTAL and cell.ranks else 1
    hi = rule.match.hi
    last = _NO_END if hi is None else hi * scale - 1  # both ends belong to a line
    fields = (
        _COLLECTIVES[cell.op],
        rule.match.lo * scale,
        last,
        rule.use.algorithm,
        rule.use.params["proto"],
        rule.use.params["channels"],
        _ANY if cell.nodes is None else cell.nodes,
        _ANY if cell.ranks is None else cell.ranks,
    )
    return ",".join(map(str, fields))
