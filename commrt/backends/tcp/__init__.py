# SPDX-License-Identifier: Apache-2.0
"""Schedules over connections of commrt's own as a backend."""
