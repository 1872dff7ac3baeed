# SPDX-License-Identifier: Apache-2.0
"""The version of commrt, as ``pyproject.toml`` has it."""

__version__ = "0.1.0"
