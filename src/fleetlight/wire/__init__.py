# SPDX-License-Identifier: Apache-2.0
"""Connections with deadlines, plain or inside TLS; tunnels; the sockets of a process."""
