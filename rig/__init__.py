# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network namespaces, a switch, links as slow as asked."""
