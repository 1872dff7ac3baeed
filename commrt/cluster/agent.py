# SPDX-License-Identifier: Apache-2.0
"""Runs a command on another host, where launchers would take a remote shell.

``python -m commrt.cluster.agent h1=2,h2=3 h2 COMMAND...``: the first argument has the
process that holds each host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from commrt.cluster.entering import enter_host
from commrt.errors import CommError, suggest

__all__ = ["main"]

_FAILED = 255
"""The status of a remote shell that could not start a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Become the command; return only where that fails."""
    known, *words = sys.argv[1:] if argv is None else argv
    pairs = (entry.split("=") for entry in known.split(","))
    processes = {host: int(pid) for host, pid in pairs}
    # Remote shells get options of their own first.
    while words and words[0].startswith("-"):
        words.pop(0)
    host, command = (words or [""])[0], words[1:]
    try:
        if host not in processes or not command:
            hint = suggest(host, processes)
            print(f"commrt cluster: no host {host!r}{hint}", file=sys.stderr)
            return _FAILED
        enter_host(processes[host])
        shell = ("/bin/sh", "-c", " ".join(command))
        os.execv(shell[0], shell)
    except (OSError, CommError) as error:
        print(f"commrt cluster: host {host}: {error}", file=sys.stderr)
        return _FAILED


if __name__ == "__main__":
    sys.exit(main())
