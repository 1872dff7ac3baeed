# SPDX-License-Identifier: Apache-2.0
"""Files that others may have prepared or may read: one way to write them."""
