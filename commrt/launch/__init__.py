# SPDX-License-Identifier: Apache-2.0
"""Who this process is among the ranks of its job, and how local ranks are started."""
