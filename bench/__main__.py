# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.bench``."""

import sys

from commrt.bench.cli import main

sys.exit(main())
