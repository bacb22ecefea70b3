# SPDX-License-Identifier: Apache-2.0
"""The connected workers, waits for workers, and barriers."""
