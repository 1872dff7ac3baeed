# SPDX-License-Identifier: Apache-2.0
"""A collective call from its arguments to its plan, and the plans that are kept."""
