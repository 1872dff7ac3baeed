# SPDX-License-Identifier: Apache-2.0
"""commrt-tune: measures this machine with real ranks and writes a selection table."""
