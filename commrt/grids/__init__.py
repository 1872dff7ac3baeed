# SPDX-License-Identifier: Apache-2.0
"""Ranks in a grid or a graph: neighbours, meshes, halo exchange."""
