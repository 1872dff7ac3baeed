# SPDX-License-Identifier: Apache-2.0
"""This job: its processes, the memory they share, their links, and its end."""
