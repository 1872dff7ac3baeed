# SPDX-License-Identifier: Apache-2.0
"""Schedules: what every rank does in one collective operation."""

from __future__ import annotations
