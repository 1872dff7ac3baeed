# SPDX-License-Identifier: Apache-2.0
"""Published studies, repeated by simulation: ``commrt-sim study NAME``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from commrt.sim.studies.dln import study_dln

__all__ = ["STUDIES"]

STUDIES: dict[str, Callable[[bool], Iterator[str]]] = {"dln": study_dln}
"""Each study by its name; it yields its lines as they are found."""
