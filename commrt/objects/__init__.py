# SPDX-License-Identifier: Apache-2.0
"""Python objects between ranks, pickled: only by calls that have it in their name."""
