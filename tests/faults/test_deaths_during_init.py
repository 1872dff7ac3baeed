# SPDX-License-Identifier: Apache-2.0
"""A rank dies while the ranks still meet in ``init``: the others learn it, and which.

Nobody ends them (``commrt.run --keep-going``), and their deadline is far away.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deaths_in_init import begins, check_heard, comes
from run_ranks import RunRanks


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("dies", [0, 2])
def test_the_others_hear_of_it(tmp_path: Path, dies: int, number: int) -> None:
    heard = RunRanks(tmp_path).survivors(3, begins, dies=dies, number=number)
    check_heard(heard, 3, dies)


@pytest.mark.parametrize("how", ["kill", "exit"])
@pytest.mark.parametrize("dies", [0, 2])
@pytest.mark.parametrize("size", [3, 5])
def test_the_others_hear_of_one_that_never_came(
    tmp_path: Path, size: int, dies: int, how: str
) -> None:
    """It said nothing to them: the launcher does."""
    heard = RunRanks(tmp_path).survivors(size, comes, dies=dies, how=how)
    check_heard(heard, size, dies)
