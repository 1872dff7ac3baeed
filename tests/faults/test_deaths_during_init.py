# SPDX-License-Identifier: Apache-2.0
"""A rank dies while the ranks still meet in ``init``: the others learn it, and which.

Nobody ends them (``commrt.run --keep-going``), and their deadline is far away.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deaths_in_init import begins, check_heard
from run_ranks import RunRanks


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("dies", [0, 2])
def test_the_others_hear_of_it(tmp_path: Path, dies: int, number: int) -> None:
    heard = RunRanks(tmp_path).survivors(3, begins, dies=dies, number=number)
    check_heard(heard, 3, dies)
