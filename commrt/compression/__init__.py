# SPDX-License-Identifier: Apache-2.0
"""Collectives whose floats go over the wire in fewer bytes."""
