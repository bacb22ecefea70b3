# SPDX-License-Identifier: Apache-2.0
"""What the commands show: the launcher's lines, tables, logs that grow, and words to complete."""
