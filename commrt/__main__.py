# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt COMMAND``: info, verify, draw, trace, analyze and oracle."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from commrt.commands.console import until_reader_leaves
from commrt.errors import CommError, suggest

__all__ = ["main"]

COMMANDS = ("analyze", "draw", "info", "oracle", "trace", "verify")
USAGE = """\
usage: python -m commrt COMMAND [OPTIONS]

commands:
  analyze  name the operation at which ranks diverged: analyze FOLDER, of COMMRT_DUMP
  info     show backends, algorithms, the table in force, ranks and the environment
  draw     make a picture of an algorithm: draw ring --ranks 8 --out ring.svg
  oracle   project time and memory of training strategies: oracle project TABLE
  trace    show what ranks have called: trace summarize FOLDER; also plot, perfetto
  verify   check an algorithm for many rank counts: verify ring --ranks 1..64

Other programs: python -m commrt.bench (benchmarks), commrt-tune (selection tables),
python -m commrt.run (ranks without MPI), python -m commrt.cluster (hosts to try on).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *options = arguments
    if command not in COMMANDS:
        hint = suggest(command, COMMANDS)
        print(f"commrt: unknown command {command!r}{hint}", file=sys.stderr)
        return 2
    try:
        return until_reader_leaves(lambda: _run(command, options))
    except CommError as error:
        print(f"commrt {command}: {error}", file=sys.stderr)
        return 1


def _run(command: str, options: list[str]) -> int:
    # Each command loads only what it needs: `info` must work where much is missing.
    if command == "info":
        from commrt.commands import info

        return info.main(options)
    if command == "draw":
        from commrt.commands import draw

        return draw.main(options)
    if command == "trace":
        from commrt.commands import trace as trace_cli

        return trace_cli.main(options)
    if command == "analyze":
        from commrt.commands import analyze

        return analyze.main(options)
    if command == "oracle":
        from commrt.oracle import cli as oracle

        return oracle.main(options)
    from commrt.commands import verify

    return verify.main(options)


if __name__ == "__main__":
    sys.exit(main())
