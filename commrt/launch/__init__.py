# SPDX-License-Identifier: Apache-2.0
"""This process's place among the ranks of its job, and starts of local ranks."""
