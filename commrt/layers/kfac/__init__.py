# SPDX-License-Identifier: Apache-2.0
"""K-FAC: an optimizer of second order whose matrices are inverted on different ranks.

docs/reference/kfac.md says how to use it.
"""

from commrt.layers.kfac.optimizer import KFAC
from commrt.layers.kfac.placement import Owners, Placement, Sides, place

__all__ = ["KFAC", "Owners", "Placement", "Sides", "place"]
