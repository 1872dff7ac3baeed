# SPDX-License-Identifier: Apache-2.0
"""Settings of one communicator that replace those of the job."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    def inherited(self) -> Settings:
        """Return what communicators of some of its ranks begin with.

        A wish for one operation stays behind: some of the ranks may be unable to keep
        it, as on one node, and it would be an error there.
        """
        wishes = self.wishes
        if wishes is not None:
            wishes = replace(wishes, named={})
        return replace(self, wishes=wishes)

    def all_wishes(self, of_job: Wishes) -> list[Wishes]:
        """Return what is asked for beforehand; what comes first holds."""
        return [each for each in (self.wishes, of_job) if each]
