# SPDX-License-Identifier: Apache-2.0
"""Scenarios of process groups on torch's ``MultiProcContinuousTest``, beside gloo.

    python tests/pytorch/continuous_suite.py                  all, on two ranks
    python tests/pytorch/continuous_suite.py --ranks 4 -k sparse

The ranks are started once and run all scenarios, each with a group of commrt and with
one of gloo. What the two give is compared on every rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import unittest
from datetime import timedelta
from typing import Any

import collective_scenarios
import message_scenarios
import nccl_scenarios
import program_scenarios
import scenarios
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

RANKS = "SCENARIO_RANKS"
assert collective_scenarios
assert message_scenarios
assert nccl_scenarios
assert program_scenarios


class Scenarios(MultiProcContinuousTest):  # type: ignore[misc]
    """Each scenario is a test."""

    world_size = int(os.environ.get(RANKS, "2"))
    timeout = timedelta(seconds=300)
    gloo: Any = None

    @classmethod
    def backend_str(cls) -> str:
        """Return the backend of the default group."""
        return "commrt"

    @classmethod
    def device_type(cls) -> str:
        """Return where tensors are."""
        return "cpu"

    def compared(self, name: str) -> None:
        """Run a scenario with both groups, on every rank."""
        # One for all: to make it takes longer than most scenarios.
        if Scenarios.gloo is None:
            Scenarios.gloo = dist.new_group(backend="gloo", timeout=self.timeout)
        differ = scenarios.differences(name, dist.group.WORLD, Scenarios.gloo)
        assert not differ, differ


def _test_of(name: str) -> Any:
    def test(self: Scenarios) -> None:
        self.compared(name)

    test.__name__ = f"test_{name}"
    return test


for _name in scenarios.LEAST_RANKS:
    setattr(Scenarios, f"test_{_name}", _test_of(_name))


def run(which: list[str]) -> bool:
    """Run scenarios by their names; print what fails; whether none does."""
    suite = unittest.TestSuite(Scenarios(f"test_{name}") for name in which)
    found = unittest.TextTestRunner(
        stream=sys.stdout, failfast="SLOW" not in os.environ
    ).run(suite)
    skipped = len(found.skipped)
    print(f"{found.testsRun} scenarios ran, {skipped} of them were skipped", flush=True)
    return found.wasSuccessful() and found.testsRun == len(which) and not skipped


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="how many processes")
    parser.add_argument("-k", dest="pattern", default="", help="part of the name")
    asked = parser.parse_args()
    Scenarios.world_size = asked.ranks
    os.environ[RANKS] = str(asked.ranks)
    names = scenarios.names(asked.ranks)
    return 0 if run([name for name in names if asked.pattern in name]) else 1


if __name__ == "__main__":
    sys.exit(main())
