# SPDX-License-Identifier: Apache-2.0
"""Layers of training programs over a communicator, with PyTorch and without it."""
