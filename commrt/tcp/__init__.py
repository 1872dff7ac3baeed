# SPDX-License-Identifier: Apache-2.0
"""Connections of commrt's own between nodes."""
