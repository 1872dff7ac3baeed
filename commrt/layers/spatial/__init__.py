# SPDX-License-Identifier: Apache-2.0
"""Convolution and its companions on tensors that are cut in space over ranks.

These are functions of this rank's piece and of the cuts. They need torch; so they are
imported from their modules: ``from commrt.layers.spatial.convolution import conv``.
"""

from commrt.layers.spatial.cut import Cut

__all__ = ["Cut"]
