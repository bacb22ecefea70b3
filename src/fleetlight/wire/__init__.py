# SPDX-License-Identifier: Apache-2.0
"""Connections whose every wait has a deadline, plain or inside TLS; tunnels; open sockets."""
