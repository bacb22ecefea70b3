# SPDX-License-Identifier: Apache-2.0
"""What a process records: its metrics and events, and traces that are asked for."""
