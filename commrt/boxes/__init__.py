# SPDX-License-Identifier: Apache-2.0
"""Strided boxes of arrays, copied between ranks; arrays moved to new layouts."""
