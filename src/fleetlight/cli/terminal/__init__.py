# SPDX-License-Identifier: Apache-2.0
"""What the commands show: the launcher's lines, tables, and logs that grow."""
