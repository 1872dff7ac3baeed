# SPDX-License-Identifier: Apache-2.0
"""Arrays as users pass them, of any library, on the host and on devices."""
