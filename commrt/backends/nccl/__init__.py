# SPDX-License-Identifier: Apache-2.0
"""NCCL as a backend."""
