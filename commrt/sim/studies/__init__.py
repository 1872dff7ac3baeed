# SPDX-License-Identifier: Apache-2.0
"""Published studies, repeated: ``commrt-sim study NAME``. All but one simulate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from commrt.sim.studies.bine import study_bine
from commrt.sim.studies.dln import study_dln
from commrt.sim.studies.hybrid_switch import study_hybrid_switch
from commrt.sim.studies.mcrdl import study_mcrdl
from commrt.sim.studies.sparse import study_sparse

__all__ = ["STUDIES"]

STUDIES: dict[str, Callable[[bool], Iterator[str]]] = {
    "bine": study_bine,
    "dln": study_dln,
    "hybrid-switch": study_hybrid_switch,
    "mcrdl": study_mcrdl,
    "sparse": study_sparse,
}
"""Each study by its name; it yields its lines as they are found."""
