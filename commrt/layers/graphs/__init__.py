# SPDX-License-Identifier: Apache-2.0
"""Graph networks over grids of processes."""
