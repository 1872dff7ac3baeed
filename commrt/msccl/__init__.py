# SPDX-License-Identifier: Apache-2.0
"""Algorithms of MSCCL in XML: read, and turned into schedules."""
