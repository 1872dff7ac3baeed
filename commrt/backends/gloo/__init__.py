# SPDX-License-Identifier: Apache-2.0
"""gloo's own collectives as a backend."""
