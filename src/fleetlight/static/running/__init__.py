# SPDX-License-Identifier: Apache-2.0
"""Who runs programs, on what, and with whom."""
