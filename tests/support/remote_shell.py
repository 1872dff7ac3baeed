# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ssh: it runs the command here, in the name of a host.

``python remote_shell.py HOST COMMAND``: a host whose name begins with ``gone`` is not
reached. ``REMOTE_SHELL_LOG`` names a file for its words; hosts whose name begins with
``loud`` print a line before all else.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    """Run the command in a shell, which is a child; return its exit status."""
    host, *command = sys.argv[1:]
    if log := os.environ.get("REMOTE_SHELL_LOG"):
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {host} {' '.join(command)}\n")
    if host.startswith("gone"):
        print(f"ssh: could not resolve hostname {host}", file=sys.stderr)
        return 255
    if host.startswith("loud"):
        print("Welcome to this host", flush=True)
    words = ["/bin/sh", "-c", " ".join(command)]
    # As on another host: who ends this process does not end the command.
    return subprocess.run(words, start_new_session=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
