# SPDX-License-Identifier: Apache-2.0
"""Short allreduces sent together in buckets."""
