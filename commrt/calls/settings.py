# SPDX-License-Identifier: Apache-2.0
"""Settings of one communicator that replace those of the job."""

from __future__ import annotations

from dataclasses import dataclass

from commrt.select.table import Table
from commrt.select.wishes import Wishes

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """A communicator's own choices; equal on all of its ranks."""

    wishes: Wishes | None = None
    """Defaults of its calls; they come before COMMRT_ALGORITHM."""
    table: Table | None = None
    """Selection table; None: that of the job."""
    checks: bool | None = None
    """True to compare calls across ranks; None: as COMMRT_DEBUG says."""

    def all_wishes(self, of_job: Wishes) -> list[Wishes]:
        """Return what is asked for beforehand; what comes first holds."""
        return [each for each in (self.wishes, of_job) if each]
