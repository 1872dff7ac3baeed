# SPDX-License-Identifier: Apache-2.0
"""Networks to simulate on: regular ones by their numbers, any by nodes and links."""
