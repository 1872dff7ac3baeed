# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.bench.cluster``: libraries beside each other between hosts.

The hosts are those of ``python -m commrt.cluster``: all on this machine, which needs
root. Each launch runs in the cluster of its placement.
"""
