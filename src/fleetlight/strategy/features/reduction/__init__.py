# SPDX-License-Identifier: Apache-2.0
"""How workers all-reduce their gradients, and in which form these cross between hosts."""
