# SPDX-License-Identifier: Apache-2.0
"""Sums of sparse vectors over all ranks; see docs/explanation/sparse-sums.md."""
