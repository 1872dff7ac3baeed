# SPDX-License-Identifier: Apache-2.0
"""Names and codes of operations, element types, reductions and wire formats."""
