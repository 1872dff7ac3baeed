# SPDX-License-Identifier: Apache-2.0
"""Predictions that were sealed before anybody measured, and how they came out.

``fit`` measures a few cells and fits numbers to them, ``predict`` writes down which
candidate will win in other cells, and in what time. That file is committed. Then
``measure`` times all candidates in clusters on this machine, and ``judge`` compares.
docs/internals/sealed-predictions.md has the outcome.
"""
