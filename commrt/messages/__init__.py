# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks, and lists of them."""
