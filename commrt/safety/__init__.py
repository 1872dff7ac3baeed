# SPDX-License-Identifier: Apache-2.0
"""What guards: check mode, and ending a job that one rank has left."""
