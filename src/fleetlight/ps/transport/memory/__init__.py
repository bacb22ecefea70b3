# SPDX-License-Identifier: Apache-2.0
"""Memory of connections: what they may use, and what both ends share."""
