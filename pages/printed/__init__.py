# SPDX-License-Identifier: Apache-2.0
"""What the pages print: their programs and commands, and the outputs that these give."""
