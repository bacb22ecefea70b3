# SPDX-License-Identifier: Apache-2.0
"""How workers all-reduce gradients, and the form of gradients between hosts."""
