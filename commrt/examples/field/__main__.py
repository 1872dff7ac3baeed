# SPDX-License-Identifier: Apache-2.0
"""The command: trains by one rung, and prints its losses beside one process's."""

from __future__ import annotations

import sys

from commrt.examples.field.report import main

if __name__ == "__main__":
    sys.exit(main())
