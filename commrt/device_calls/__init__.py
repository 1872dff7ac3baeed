# SPDX-License-Identifier: Apache-2.0
"""Calls on device arrays, ordered with the streams of their callers."""
