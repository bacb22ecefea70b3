# SPDX-License-Identifier: Apache-2.0
"""What a program is: its graph, state and feeds, the operations of our own that stand in it."""
