# SPDX-License-Identifier: Apache-2.0
"""No deadline reads the time of day, which somebody may set to another one."""

from __future__ import annotations

import re

from parsed_sources import ROOT

TIME_OF_DAY = re.compile(
    r"\btime\.time\(|\btime\.time_ns\(|\bdatetime\.(?:now|utcnow)\("
    r"|\bsystem_clock\b|\bCLOCK_REALTIME\b|\bgettimeofday\(|\bstd::time\("
)
ALLOWED = {
    # The age of a folder that another launcher has left.
    ("commrt/running/folders.py", "time.time("),
    # When an operation began, for readers of logs and dumps.
    ("commrt/native/engine/records.cpp", "CLOCK_REALTIME"),
    ("commrt/trace/log.py", "time.time_ns("),
    ("commrt/trace/dumps.py", "time.time_ns("),
}


def test_the_time_of_day_is_read_for_people_alone() -> None:
    found = {
        (str(path.relative_to(ROOT)), match)
        for path in sorted((ROOT / "commrt").rglob("*"))
        if path.suffix in (".py", ".cpp", ".hpp", ".cu")
        for line in path.read_text().splitlines()
        for match in TIME_OF_DAY.findall(line.partition("//")[0])
    }
    assert found == ALLOWED
