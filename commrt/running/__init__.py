# SPDX-License-Identifier: Apache-2.0
"""Ranks of ``commrt.run``: how they start and end, on one machine and on hosts."""
