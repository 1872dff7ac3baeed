# SPDX-License-Identifier: Apache-2.0
"""A group of ranks: its state, its errors, and how its ranks compare calls."""
