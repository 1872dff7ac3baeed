# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.sim``: the same as ``commrt-sim``."""

from __future__ import annotations

import sys

from commrt.sim.cli import main

if __name__ == "__main__":
    sys.exit(main())
