# SPDX-License-Identifier: Apache-2.0
"""Reports the end of a process to its launcher."""
