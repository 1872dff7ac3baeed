# SPDX-License-Identifier: Apache-2.0
"""What users pass: arrays of any kind, on the host and on devices."""
