# SPDX-License-Identifier: Apache-2.0
"""Memory of peers (CUDA IPC) as a backend."""
