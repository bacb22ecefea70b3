# SPDX-License-Identifier: Apache-2.0
"""How a process ends, told to its launcher."""
