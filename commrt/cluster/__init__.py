# SPDX-License-Identifier: Apache-2.0
"""``python -m commrt.cluster``: hosts and switches of network namespaces.

All hosts are processes of this machine. Nothing outside of commrt's own namespaces is
changed, and no namespace has a name: they all end with the process that made them.
"""
